"""Which folder and which file a study's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.journal.locate import find_study, journals_dir, list_studies, study_path
from llm_bisect.model import EnvironmentProblem, UsageProblem


def test_the_order_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Option, then variable, then an existing ./journals, then the user's state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert journals_dir(None, {}, tmp_path) == tmp_path / "state" / "llm-bisect" / "journals"
    (tmp_path / "journals").mkdir()
    assert journals_dir(None, {}, tmp_path) == tmp_path / "journals"
    assert journals_dir(None, {"BISECT_JOURNALS": "other"}, tmp_path) == tmp_path / "other"
    assert journals_dir("/a/b", {"BISECT_JOURNALS": "other"}, tmp_path) == Path("/a/b")


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    """A file where the folder should be is one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="file is not a folder"):
        journals_dir("file/deep", {}, tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 200, "a..b", "a b"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    """A study's name cannot leave its folder."""
    with pytest.raises(UsageProblem, match="no name for a study"):
        study_path(name, tmp_path)


def test_a_study_that_does_not_exist(tmp_path: Path) -> None:
    """The nearest name is offered, or what there is."""
    with pytest.raises(UsageProblem) as caught:
        find_study("night", tmp_path / "nowhere")
    assert "no studies" in (caught.value.hint or "")
    (tmp_path / "night-1.jsonl").write_text("")
    with pytest.raises(UsageProblem) as caught:
        find_study("night-2", tmp_path)
    assert "night-1?" in (caught.value.hint or "")
    with pytest.raises(UsageProblem) as caught:
        find_study("zzz", tmp_path)
    assert "studies here: night-1" in (caught.value.hint or "")
    assert find_study("night-1", tmp_path) == tmp_path / "night-1.jsonl"
    assert find_study(str(tmp_path / "night-1.jsonl"), Path("/")) == tmp_path / "night-1.jsonl"
    assert list_studies(tmp_path) == [tmp_path / "night-1.jsonl"]
