"""Reading a log that grows, by character marks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.runners import logfile
from llm_bisect.runners.logfile import LogFile


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    """Before the first line there is no text, and the mark is 0."""
    log = LogFile(tmp_path / "none.log")
    assert (log.text(), log.mark(), log.size_bytes(), log.tail()) == ("", 0, 0, "")


def test_marks_count_characters_not_bytes(tmp_path: Path) -> None:
    """A mark taken after multi-byte text gives exactly what came later."""
    path = tmp_path / "a.log"
    path.write_text("größe 🦙\n")
    log = LogFile(path)
    mark = log.mark()
    assert mark == 8
    with path.open("a") as out:
        out.write("später\n")
    assert log.text(mark) == "später\n"
    assert log.text() == "größe 🦙\nspäter\n"
    assert log.text(10_000) == ""


def test_a_torn_character_is_replaced(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 do not stop the reading."""
    path = tmp_path / "a.log"
    path.write_bytes(b"ok \xff\xfe\n\xf0\x9f")
    assert LogFile(path).text() == path.read_bytes().decode("utf-8", errors="replace")


@given(st.lists(st.binary(max_size=60), max_size=30), st.data())
def test_any_log_reads_as_a_whole_would(chunks: list[bytes], data: st.DataObject) -> None:
    """However it grows and is asked, the text equals the file's own decoding from the mark on."""
    before, logfile._STEP = logfile._STEP, 16
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "x.log"
            log = LogFile(path)
            for chunk in chunks:
                with path.open("ab") as out:
                    out.write(chunk)
                whole = path.read_bytes().decode("utf-8", errors="replace")
                since = data.draw(st.integers(0, len(whole) + 1))
                assert log.text(since) == whole[since:]
                assert log.mark() == len(whole)
    finally:
        logfile._STEP = before


@pytest.mark.parametrize("lines", [10, 50_000])
def test_a_long_log_is_not_read_from_its_start(tmp_path: Path, lines: int) -> None:
    """Marks stay right past the size at which reading begins further in."""
    path = tmp_path / "long.log"
    path.write_text("".join(f"line {number} ü\n" for number in range(lines)))
    log = LogFile(path)
    mark = log.mark()
    with path.open("a") as out:
        out.write("end\n")
    assert log.text(mark) == "end\n"
    assert log.text(mark - 2) == "ü\nend\n"
