"""Where journals lie, and what a study's name may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llm_bisect.journal.locate import check_writable, find_study, journals_dir, list_studies, study_path
from llm_bisect.model import EnvironmentProblem, UsageProblem


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_the_order_of_the_places(tmp_path: Path, home: Path) -> None:
    """Option, variable, ./journals where it exists, the user's state folder; nothing is made."""
    assert journals_dir(None, {}, tmp_path) == tmp_path / "state" / "llm-bisect" / "journals"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "journals").mkdir()
    assert journals_dir(None, {}, tmp_path) == tmp_path / "journals"
    assert journals_dir("", {"BISECT_JOURNALS": ""}, tmp_path) == tmp_path / "journals"
    assert journals_dir(None, {"BISECT_JOURNALS": "there"}, tmp_path) == tmp_path / "there"
    assert journals_dir("my own", {"BISECT_JOURNALS": "there"}, tmp_path) == tmp_path / "my own"
    assert journals_dir("/abs", {}, tmp_path) == Path("/abs")
    assert journals_dir("~/j", {}, tmp_path) == home / "j"
    assert journals_dir(None, {"BISECT_JOURNALS": "~/k"}, tmp_path) == home / "k"


def test_what_is_no_folder_is_refused(tmp_path: Path, home: Path) -> None:
    """A file of that name, or above it, exits 4; a `~name` that is nobody's exits 2; a file is no folder."""
    (tmp_path / "file").touch()
    for option in ("file", "file/deeper/still"):
        with pytest.raises(EnvironmentProblem, match=f"{tmp_path}/file is not a folder") as caught:
            journals_dir(option, {}, tmp_path)
        assert caught.value.exit_status == 4 and "--journals" in (caught.value.hint or "")
    with pytest.raises(UsageProblem, match="nobody's"):
        journals_dir("~no-such-user-here/j", {}, tmp_path)
    (tmp_path / "journals").touch()
    assert journals_dir(None, {}, tmp_path).is_relative_to(tmp_path / "state")


def test_a_folder_that_may_not_be_looked_into_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign folder above exits 4 with one sentence, wherever it is met."""

    def refuse(_self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(EnvironmentProblem, match="cannot be looked at: Permission denied"):
        journals_dir("x", {}, tmp_path)
    with pytest.raises(EnvironmentProblem, match="cannot be looked at: Permission denied"):
        study_path("s", tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, or the one above in which it would have to be made, is named."""
    check_writable(tmp_path / "new" / "journals")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(EnvironmentProblem, match=f"^{tmp_path} cannot be written$"):
        check_writable(tmp_path)
    with pytest.raises(EnvironmentProblem, match=f"^{tmp_path} cannot be written, so .*/new cannot be made$"):
        check_writable(tmp_path / "new")


def test_a_study_is_a_name_or_the_path_of_a_journal(tmp_path: Path, home: Path) -> None:
    """Names lie in the folder; paths are themselves; a bare file name is the one that exists."""
    folder = tmp_path / "my journals"
    assert study_path("long-text-ceiling_0.93", folder) == folder / "long-text-ceiling_0.93.jsonl"
    assert study_path("a.b", folder) == folder / "a.b.jsonl"
    assert study_path("sub dir/s.jsonl", folder) == tmp_path / "sub dir" / "s.jsonl"
    assert study_path("~/s.jsonl", folder) == home / "s.jsonl"
    assert study_path("/x/y/s.jsonl", folder) == Path("/x/y/s.jsonl")
    assert study_path("s.jsonl", folder) == folder / "s.jsonl"
    (tmp_path / "s.jsonl").touch()
    assert study_path("s.jsonl", folder) == tmp_path / "s.jsonl"


@pytest.mark.parametrize(
    "name",
    ["", ".hidden", "-x", "..", "a..b", "a b", "naïve", "a\nb", "x" * 122, "a*", ".jsonl", "d/.jsonl",
     "a;b.jsonl"],
)  # fmt: skip
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    """Anything that could leave the folder, or surprise a shell, is no name; the accepted form is told."""
    with pytest.raises(UsageProblem, match="is no name for a study") as caught:
        study_path(name, tmp_path)
    assert "letters" in (caught.value.hint or "") and caught.value.exit_status == 2


def test_a_path_without_its_ending_is_told_so(tmp_path: Path) -> None:
    """`journals/s` is refused; where that journal exists it is offered."""
    (tmp_path / "s.jsonl").touch()
    with pytest.raises(UsageProblem, match="neither a study's name nor the path") as caught:
        study_path(f"{tmp_path}/s", tmp_path)
    assert caught.value.hint == f"did you mean {tmp_path}/s.jsonl?"
    with pytest.raises(UsageProblem) as caught:
        study_path("../other", tmp_path)
    assert "no slash" in (caught.value.hint or "")


def test_a_study_that_must_exist_is_found_or_the_close_ones_are_told(tmp_path: Path) -> None:
    """Close names first, else what there is, else where to look."""
    with pytest.raises(UsageProblem, match=f"there is no study 'long-text' in {tmp_path}") as caught:
        find_study("long-text", tmp_path)
    assert "there are no studies there" in (caught.value.hint or "")
    for n in range(10):
        (tmp_path / f"night-{n}.jsonl").touch()
    (tmp_path / "long-text.jsonl").touch()
    assert find_study("long-text", tmp_path / "." / "") == tmp_path / "long-text.jsonl"
    assert find_study(f"{tmp_path}/night-1.jsonl", Path("/nowhere")) == tmp_path / "night-1.jsonl"
    with pytest.raises(UsageProblem) as caught:
        find_study("long-txt", tmp_path)
    assert caught.value.hint == "did you mean long-text?"
    with pytest.raises(UsageProblem) as caught:
        find_study(f"{tmp_path}/zzz.jsonl", Path("/nowhere"))
    hint = caught.value.hint or ""
    assert hint.startswith("studies there: long-text, night-0, night-1") and hint.endswith("and 3 more")


def test_studies_are_listed_by_name(tmp_path: Path) -> None:
    """Journals only: no folders, no other files; an absent folder has none, a file is an error."""
    assert list_studies(tmp_path / "absent") == []
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "folder.jsonl").mkdir()
    assert list_studies(tmp_path) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(EnvironmentProblem, match="cannot be read: Not a directory"):
        list_studies(tmp_path / "a.jsonl")
