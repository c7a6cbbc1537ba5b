"""Where names are looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.model import UsageProblem
from llm_bisect.spaces import resources


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A working directory and a user's configuration of the test's own."""
    here, config = tmp_path / "here", tmp_path / "config"
    for folder in (here / "search_spaces", config / "llm-bisect" / "search_spaces"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    return {"here": here / "search_spaces", "config": config / "llm-bisect" / "search_spaces"}


def test_the_order(places: dict[str, Path]) -> None:
    """The working directory's, then the user's, then ours."""
    ours = resources.find("search_spaces", "long-text")
    assert ours.name == "long-text.yml" and ours.parent not in places.values()
    for place in ("config", "here"):
        own = places[place] / "long-text.yml"
        own.write_text("profile: own\n")
        assert resources.find("search_spaces", "long-text") == own


def test_a_path_wins(places: dict[str, Path], tmp_path: Path) -> None:
    """A file that is given is taken, wherever it lies; ~ is the home folder."""
    given = tmp_path / "mine.yaml"
    given.write_text("x: 1\n")
    assert resources.find("search_spaces", str(given)) == given
    (places["here"].parent / "beside.yml").write_text("x: 1\n")
    assert resources.find("search_spaces", "beside.yml") == places["here"].parent / "beside.yml"


def test_names_of_both_spellings(places: dict[str, Path]) -> None:
    """`.yml` and `.yaml`, with or without the suffix; every name once."""
    (places["here"] / "own.yaml").write_text("x: 1\n")
    assert resources.find("search_spaces", "own") == places["here"] / "own.yaml"
    assert resources.find("search_spaces", "own.yml").name == "own.yaml"
    (places["config"] / "own.yml").write_text("x: 1\n")
    found = resources.names("search_spaces")
    assert found.count("own") == 1 and "long-text" in found and found == sorted(found)


def test_what_is_not_there(places: dict[str, Path]) -> None:
    """A name says what is close; a path says that there is no such file."""
    with pytest.raises(UsageProblem, match="there is no profile 'long-tex'") as told:
        resources.find("search_spaces", "long-tex")
    assert "did you mean 'long-text'?" in str(told.value.hint)
    with pytest.raises(UsageProblem, match="there is no engine 'nothing'"):
        resources.find("runners", "nothing")
    for path in ("./gone.yml", "/nowhere/gone.yml"):
        with pytest.raises(UsageProblem, match="there is no such file"):
            resources.find("search_spaces", path)
