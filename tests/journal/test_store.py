"""The journal's file: whole events only, one writer, nothing lost, faults said with their line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_bisect.journal import events as kinds
from llm_bisect.journal import files, lock
from llm_bisect.journal.locate import check_writable
from llm_bisect.journal.state import fold
from llm_bisect.journal.store import BrokenJournal, Event, Journal, holder_pid, read_journal
from llm_bisect.model import EnvironmentProblem, UsageProblem

SOURCE = Path(__file__).resolve().parents[2] / "bisect"
WRITER = Path(__file__).with_name("journal_writer.py")
AT = datetime(2026, 3, 1, 6, 30, 15, 123456, tzinfo=timezone(timedelta(hours=1)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "a study.jsonl"


def fill(path: Path, count: int = 5) -> list[bytes]:
    """A journal with `count` events; its lines with their ends."""
    with Journal.open(path) as journal:
        for n in range(count):
            body = {
                "probe": f"p{n:04d}",
                "values": {"mem-util": 0.9 + n / 200},
                "reason": f'Größe {n} →\n\t"x"',
            }
            journal.append(kinds.PROBE_ASKED, body)
    return path.read_bytes().splitlines(keepends=True)


def note(text: str = "") -> tuple[str, dict[str, Any]]:
    return kinds.STUDY_RESUMED, {"found": [text]}


# What a line is


def test_a_line_has_its_fields_in_order_and_a_check_over_the_line_before(path: Path) -> None:
    """seq, at, kind, body as given, check; UTF-8 as it is, UTC with milliseconds, chained."""
    with Journal.open(path, now=lambda: AT) as journal:
        first = journal.append(kinds.FINGERPRINT, {"items": {"memory.gpu": "Größe", "a": None}})
        journal.append(kinds.FINGERPRINT, {"items": {}})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(
        '{"seq":1,"at":"2026-03-01T05:30:15.123Z","kind":"fingerprint",'
        '"body":{"items":{"memory.gpu":"Größe","a":null}},"check":"'
    )
    before = "0" * 16
    for line in lines:  # as anybody can verify it
        fields = json.loads(line)
        check = fields.pop("check")
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        assert check == hashlib.sha256((before + canonical).encode()).hexdigest()[:16]
        before = check
    assert first == Event(
        1, "2026-03-01T05:30:15.123Z", kinds.FINGERPRINT, {"items": {"a": None, "memory.gpu": "Größe"}}
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(kinds.KINDS)), st.dictionaries(st.text(), JSON)), max_size=6)
)
def test_what_is_appended_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, dict[str, Any]]]
) -> None:
    """Events in memory, read by a reader, and loaded by the next writer are the same, whatever the body."""
    path = tmp_path_factory.mktemp("any") / "j" / "s.jsonl"
    with Journal.open(path) as journal:
        told = [journal.append(kind, body) for kind, body in entries]
        assert journal.events == told == read_journal(path)
    if entries:
        with Journal.open(path) as journal:
            assert journal.events == told and journal.repaired is None


class Colour(StrEnum):
    RED = "red"


def test_what_json_would_change_is_changed_before_it_is_remembered(path: Path) -> None:
    """Tuples, read-only mappings and enumerations come back from `append` as a reader will see them."""
    with Journal.open(path) as journal:
        event = journal.append(kinds.FINGERPRINT, {"z": (1, 2), "a": MappingProxyType({"c": Colour.RED})})
        assert event.body == {"a": {"c": "red"}, "z": [1, 2]} == read_journal(path)[0].body
        assert list(event.body) == list(read_journal(path)[0].body) == ["z", "a"]
        assert type(event.body["a"]["c"]) is str


def test_half_characters_of_a_broken_log_are_replaced(path: Path) -> None:
    """A lone surrogate cannot be written as UTF-8; a pair of them is a character."""
    with Journal.open(path) as journal:
        event = journal.append(*note("bad \udcff, pair \ud83d\ude00"))
        assert event.body["found"] == ["bad \ufffd, pair \U0001f600"]
    assert read_journal(path) == [event]


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, ValueError, r"body\.a\.b\[1\] is nan"),
        ({"a": float("inf")}, ValueError, r"body\.a is inf"),
        ({"a": Path("x")}, TypeError, r"body\.a is a PosixPath"),
        ({"a": {1, 2}}, TypeError, r"body\.a is a set"),
        ({"a": {1: 2}}, TypeError, r"body\.a has the key 1"),
    ],
)
def test_what_no_journal_can_hold_is_a_fault_of_the_program(
    path: Path, body: dict[str, Any], error: type[Exception], said: str
) -> None:
    """NaN, infinities and objects are refused with their place, and nothing is written."""
    with Journal.open(path) as journal:
        journal.append(*note("before"))
        with pytest.raises(error, match=said):
            journal.append(kinds.FINGERPRINT, body)
        journal.append(*note("after"))
    assert [e.body["found"] for e in read_journal(path)] == [["before"], ["after"]]


def test_unknown_kinds_closed_journals_and_clocks_without_zone_are_faults_of_the_program(path: Path) -> None:
    """A kind that no reader knows, an append after close, and a naive clock are refused at once."""
    journal = Journal.open(path, now=lambda: datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="unknown kind of event: 'surprise'"):
        journal.append("surprise", {})
    with pytest.raises(ValueError, match="time zone"):
        journal.append(*note())
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="is closed"):
        journal.append(*note())


def test_planted_secrets_never_reach_the_file(path: Path) -> None:
    """Tokens, keys and passwords are masked in every place, also in the event that is returned."""
    secrets = ["hf_" + "Ab1" * 10, "sk-" + "c0ffee" * 5, "s3cr3t-key", "hunter2", "topsecretvalue"]
    body = {
        "launch": {
            "command": ["serve", "--api-key", secrets[2], "--port", "8000"],
            "env": {"HF_TOKEN": secrets[0], "MAX_TOKENS": "30"},
        },
        "evidence": {"lines": [f"login {secrets[0]}", f"Authorization: Bearer {secrets[1]}",
                               f"pull https://me:{secrets[3]}@registry/x", f"MY_SECRET={secrets[4]}"]},
    }  # fmt: skip
    with Journal.open(path) as journal:
        event = journal.append(kinds.STUDY_OPENED, body)
    text = path.read_text()
    assert [s for s in secrets if s in text or s in str(event)] == []
    assert event.body["launch"]["env"]["MAX_TOKENS"] == "30"


# Where it lies


def test_it_is_private_and_its_folder_is_kept_out_of_git(path: Path) -> None:
    """File 0600, folders 0700, logs beside it on demand; git sees nothing of it but a reference study."""
    old = os.umask(0)
    try:
        with Journal.open(path) as journal:
            journal.append(*note())
            assert not path.with_suffix("").exists()
            side = journal.side_dir
            assert journal.side_dir == side == path.parent / "a study"
            (side / "b001.log").touch()
            for made, mode in ((path, 0o600), (path.parent, 0o700), (side, 0o700)):
                assert stat.S_IMODE(made.stat().st_mode) == mode
    finally:
        os.umask(old)
    assert (path.parent / ".gitignore").read_text().splitlines() == [
        "*", "!.gitignore", "!reference/", "!reference/**",
    ]  # fmt: skip
    if shutil.which("git") is None:
        pytest.skip("no git: what it sees cannot be asked")
    (path.parent / "reference" / "r").mkdir(parents=True)
    (path.parent / "reference" / "r" / "boot.log").touch()
    root = path.parent.parent
    subprocess.run(["git", "init", "-q", root], check=True)
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-o", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == ["journals/.gitignore", "journals/reference/r/boot.log"]


def test_a_folder_with_other_files_in_it_gets_no_gitignore(tmp_path: Path) -> None:
    """A journal in a checkout must not hide the checkout from git; an own .gitignore is never replaced."""
    (tmp_path / "docker-compose.yml").touch()
    with Journal.open(tmp_path / "s.jsonl") as journal:
        journal.append(*note())
    assert not (tmp_path / ".gitignore").exists()
    (tmp_path / "docker-compose.yml").unlink()
    Journal.open(tmp_path / "s.jsonl").close()
    assert (tmp_path / ".gitignore").exists()
    (tmp_path / ".gitignore").write_text("mine")
    Journal.open(tmp_path / "s.jsonl").close()
    assert (tmp_path / ".gitignore").read_text() == "mine"


def test_a_journal_without_an_event_leaves_nothing_behind(tmp_path: Path) -> None:
    """What was made for it goes again; what was there, or has come into it, stays."""
    Journal.open(tmp_path / "a" / "b" / "s.jsonl").close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.jsonl").touch()
    Journal.open(tmp_path / "old.jsonl").close()
    assert (tmp_path / "old.jsonl").exists()
    journal = Journal.open(tmp_path / "c" / "s.jsonl")
    with Journal.open(tmp_path / "c" / "other.jsonl") as other:
        other.append(*note())
        journal.close()
        assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [".gitignore", "other.jsonl"]


@pytest.mark.parametrize("make", ["folder", "pipe", "link to a pipe"])
def test_what_is_no_ordinary_file_is_refused_without_waiting_for_it(path: Path, make: str) -> None:
    """A folder or a pipe of the journal's name is refused with a sentence, for writer and reader."""
    path.parent.mkdir()
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(path.parent / "pipe")
        path.symlink_to("pipe")
    for look in (Journal.open, read_journal):
        with pytest.raises(EnvironmentProblem, match=r"a study\.jsonl is (a folder|not an ordinary file)"):
            look(path)


def test_a_link_to_a_journal_is_that_journal(tmp_path: Path) -> None:
    """Through a link one file is written, and held."""
    real, link = tmp_path / "real.jsonl", tmp_path / "j" / "link.jsonl"
    link.parent.mkdir()
    link.symlink_to(real)
    with Journal.open(link) as journal:
        journal.append(*note())
        with pytest.raises(EnvironmentProblem, match="is running already"):
            Journal.open(real)
    assert link.is_symlink() and read_journal(real) == read_journal(link) != []


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    """A file above, circular links, and names that are too long: exit status 4 and one sentence each."""
    (tmp_path / "file").touch()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for journal, said in [
        ("file/s.jsonl", "file is not a folder"),
        ("file/deeper/s.jsonl", "file is not a folder"),
        ("loop.jsonl", r"loop\.jsonl cannot be written: too many levels of symbolic links"),
        ("x" * 300 + ".jsonl", "cannot be written: file name too long"),
    ]:
        with pytest.raises(EnvironmentProblem, match=said) as caught:
            Journal.open(tmp_path / journal)
        assert caught.value.exit_status == 4 and caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop.jsonl"]


@pytest.mark.parametrize("number", ["EROFS", "EACCES"])
def test_a_folder_that_cannot_be_written_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """Read-only file systems and foreign folders give one sentence, and leave nothing behind."""
    path.parent.mkdir()
    opened = os.open

    def refuse(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            code = getattr(errno, number)
            raise OSError(code, os.strerror(code), str(name))
        return opened(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EnvironmentProblem, match=r"a study\.jsonl cannot be written: \w+") as caught:
        Journal.open(path)
    assert "--journals" in (caught.value.hint or "")
    assert list(path.parent.iterdir()) == []


def test_readers_say_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No journal is the user's mistake, a disk that does not answer is not."""
    with pytest.raises(UsageProblem, match=r"there is no journal .*a study\.jsonl"):
        read_journal(path)
    fill(path)

    def broken(_self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(EnvironmentProblem, match="cannot be read: input/output error"):
        read_journal(path)


def test_a_file_in_the_place_of_the_log_folder_is_named(path: Path) -> None:
    """The folder for logs cannot be made over a file."""
    with Journal.open(path) as journal:
        path.with_suffix("").touch()
        with pytest.raises(EnvironmentProblem, match="a study cannot be made: file exists"):
            _ = journal.side_dir


# Torn tails


def test_a_file_cut_at_any_byte_of_its_last_three_records_opens_with_all_whole_ones(path: Path) -> None:
    """Nothing whole is lost, the rest is cut, the study goes on, and the chain holds again."""
    lines = fill(path, 6)
    whole = b"".join(lines)
    events = read_journal(path)
    for cut in range(len(whole) - sum(map(len, lines[-3:])), len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        # A record that lacks nothing but its line end is whole as well.
        kept = complete + (whole[:cut] + b"\n" == b"".join(lines[: complete + 1]))
        assert read_journal(path) == events[:kept]
        assert path.read_bytes() == whole[:cut]
        with Journal.open(path) as journal:
            assert journal.events == events[:kept]
            assert (journal.repaired is None) == (cut == len(b"".join(lines[:complete])))
            added = journal.append(*note("goes on"))
        assert read_journal(path) == [*events[:kept], added]
        assert path.read_bytes().startswith(b"".join(lines[:kept]))


def test_what_was_repaired_is_told(path: Path) -> None:
    """How many bytes were cut, or that only the line end was missing."""
    lines = fill(path, 2)
    for damage, told in [
        (b"".join(lines)[:-119], f"{len(lines[1]) - 119} bytes of an unfinished last line"),
        (lines[0] + b"{", "1 byte of an unfinished last line"),
        (lines[0] + b"\n", "1 byte of an unfinished last line"),
        (lines[0] + b"\0" * 700, "700 bytes of an unfinished last line"),
        (
            lines[0] + lines[1][:9] + b"\0" * 20 + lines[1][29:],
            f"{len(lines[1])} bytes of an unfinished last line",
        ),
        (b"".join(lines)[:-1], "the missing end of the last line"),
        (b"".join(lines), None),
    ]:
        path.write_bytes(damage)
        with Journal.open(path) as journal:
            assert journal.repaired == told
        with Journal.open(path) as journal:
            assert journal.repaired is None
        if told == "the missing end of the last line":
            assert path.read_bytes() == b"".join(lines)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_changed_byte_before_the_last_line_is_refused_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is changed, wherever: the line is named, and the file stays as it is, also after a reader."""
    path = tmp_path_factory.mktemp("flip") / "s.jsonl"
    lines = fill(path, 4)
    number = data.draw(st.integers(1, 3))
    start = sum(map(len, lines[: number - 1]))
    at = start + data.draw(st.integers(0, len(lines[number - 1]) - 1))
    broken = bytearray(b"".join(lines))
    broken[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(broken)
    for look in (Journal.open, read_journal):
        with pytest.raises(BrokenJournal, match=f"line {number} ") as caught:
            look(path)
        assert caught.value.line == number and caught.value.exit_status == 2
        assert str(path) in caught.value.message and "nothing was changed" in caught.value.message
    assert path.read_bytes() == broken
    with path.open("rb"):  # the refused writer holds nothing
        assert holder_pid(path) is None


def test_each_fault_is_named(path: Path) -> None:
    """Lines that are missing, moved, foreign, converted, or of a newer version are told apart."""
    a, b, c, d = fill(path, 4)
    other = path.with_name("other.jsonl")
    with Journal.open(other, kinds=kinds.KINDS | {"newer"}) as journal:
        journal.append("newer", {})
    newer = other.read_bytes()
    for damage, said in [
        (a + c + d, "line 2 is event 3 where 2 belongs"),
        (a + c + b + d, "line 2 is event 3 where 2 belongs"),
        (a + b + c + c, "line 4 is event 3 where 4 belongs"),
        (a + b"{}\n" + c, "line 2 is not an event"),
        (a + b"[1]\n" + c, "line 2 is not an event"),
        (a + b"what?\n" + c, "line 2 is not JSON"),
        (a + b"\n" + c, "line 2 is empty"),
        (a + b.replace(b'0.905', b'NaN') + c, "line 2 is not JSON"),
        (a + b[:-1] + c + d, "line 2 holds more than one event"),
        (a + b + c[:-1] + d, "line 3 holds more than one event"),
        (a + b[:-1] + b"\r\n" + c, "line 2 has Windows line ends"),
        (a + b[:-1] + b"\r\n", "line 2 has Windows line ends"),
        (a + b.replace(b'":', b'": ', 1) + c, "line 2 was written again by another program"),
        (a + b + c.replace("ö".encode(), b"\\u00f6"), "line 3 was written again by another program"),
        (a + b.replace(b"Gr", b"gr") + c, "line 2 does not fit its check value"),
        (newer, "line 1 has the unknown kind 'newer'"),
        (b"[" * 100_000 + b"\n" + a, "line 1 is not JSON"),
    ]:  # fmt: skip
        path.write_bytes(damage)
        with pytest.raises(BrokenJournal, match=said) as caught:
            Journal.open(path)
        assert caught.value.hint and path.read_bytes() == damage


# Writers and readers


def start_writer(path: Path, seed: int, *count: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    argv = [sys.executable, str(WRITER), str(path), str(seed), *count]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_writer(path, 1)
    yield process
    process.kill()
    process.communicate()


def test_a_second_writer_is_refused_and_told_who_holds_it(path: Path, writer: subprocess.Popen[str]) -> None:
    """Another process that writes is named by its pid; readers are let in; with its end it is free."""
    assert writer.stdout is not None and writer.stdout.readline().startswith("open")
    with pytest.raises(
        EnvironmentProblem, match=f"'a study' is running already: process {writer.pid} "
    ) as caught:
        Journal.open(path)
    assert str(path) in caught.value.message and "bisect stop" in (caught.value.hint or "")
    assert holder_pid(path) == writer.pid
    writer.stdout.readline()
    assert read_journal(path)
    writer.kill()
    writer.wait()
    assert holder_pid(path) is None
    with Journal.open(path) as journal:
        assert holder_pid(path) == os.getpid()
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()} "):
            Journal.open(path)
        assert journal.events


def test_a_journal_that_is_dropped_gives_its_lock_back(path: Path) -> None:
    """A driver that ended with an error may never close it: the next one in this process is not refused."""
    journal = Journal.open(path)
    journal.append(*note())
    del journal
    gc.collect()
    with Journal.open(path) as again:
        assert len(again.events) == 1


def test_asking_who_writes_never_keeps_a_writer_out(path: Path) -> None:
    """However often status looks, a writer gets its lock."""
    fill(path)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            holder_pid(path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for one in lookers:
        one.start()
    try:
        for _ in range(20):
            Journal.open(path).close()
    finally:
        stop.set()
        for one in lookers:
            one.join()


def test_a_holder_that_cannot_be_seen_is_not_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system lists no process for the lock, it is an error and not `None`."""
    assert holder_pid(path) is None
    with Journal.open(path):
        monkeypatch.setattr(Path, "read_text", lambda _self: "1: FLOCK  ADVISORY  WRITE 1 00:00:1 0 EOF\n")
        with pytest.raises(EnvironmentProblem, match="cannot be seen from here"):
            holder_pid(path)
        with pytest.raises(EnvironmentProblem, match="another process"):
            Journal.open(path)


def test_kill_9_never_loses_an_event_that_was_acknowledged(path: Path) -> None:
    """A writer killed at 15 random moments: all that `append` returned for is there, in one chain."""
    rng = random.Random(20)
    acknowledged = 0
    torn = 0
    for n in range(15):
        process = start_writer(path, n)
        assert process.stdout is not None and process.stdout.readline().startswith("open")
        time.sleep(rng.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.communicate()[0].split("\n") if line.strip().isdigit()]
        acknowledged = max([acknowledged, *told])
        with Journal.open(path) as journal:
            torn += journal.repaired is not None
            seqs = [event.seq for event in journal.events]
            assert seqs == list(range(1, len(seqs) + 1)) and len(seqs) >= acknowledged
            # At most the one that was being written is there without having been acknowledged.
            assert len(seqs) <= acknowledged + 1
            acknowledged = max(acknowledged, len(seqs))
    assert acknowledged > 15


def test_readers_see_whole_events_only_while_another_writes(path: Path) -> None:
    """Every reading during a write is a beginning of the journal, and grows."""
    process = start_writer(path, 3, "150")
    assert process.stdout is not None and process.stdout.readline().startswith("open")
    seen: list[Event] = []
    readings = 0
    while process.poll() is None:
        now = read_journal(path)
        assert now[: len(seen)] == seen
        seen = now
        readings += 1
        process.stdout.readline()
    process.communicate()
    assert process.returncode == 0 and readings > 10
    assert len(read_journal(path)) == 150


def test_a_reader_that_meets_a_write_being_cut_back_looks_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of two lines, seen once, are not yet a broken journal."""
    lines = fill(path, 3)
    whole = b"".join(lines)
    torn = [lines[0] + lines[1][:20] + lines[2] + lines[2]]
    monkeypatch.setattr(Path, "read_bytes", lambda _self: torn.pop() if torn else whole)
    assert len(read_journal(path)) == 3


def test_threads_may_append_at_the_same_time(path: Path) -> None:
    """Every event has its own number, and the chain holds."""
    with Journal.open(path) as journal:
        threads = [
            threading.Thread(target=lambda: [journal.append(*note("x" * 3000)) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event.seq for event in read_journal(path)] == list(range(1, 81))


def test_a_writer_whose_new_file_was_removed_before_its_lock_makes_it_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that left without an event may remove the file in between: no event goes nowhere."""
    take = lock.take
    removals = [path]

    def late(fd: int, name: Path) -> None:
        if removals:
            removals.pop().unlink()
        take(fd, name)

    monkeypatch.setattr(lock, "take", late)
    with Journal.open(path) as journal:
        event = journal.append(*note())
    assert read_journal(path) == [event]
    path.unlink()
    removals.extend([path] * 9)
    with pytest.raises(EnvironmentProblem, match="made and removed again"):
        Journal.open(path)


# Writes that fail


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said_and_the_file_stays_whole(small_disk: Path) -> None:
    """The append that does not fit is refused and leaves no part of it; with some space it goes on."""
    path, filler = small_disk / "s.jsonl", small_disk / "filler"
    with Journal.open(path) as journal:
        filler.write_bytes(b"x" * 20_000)
        with pytest.raises(EnvironmentProblem, match="no space left on device") as caught:
            for _ in range(100):
                journal.append(*note("x" * 5000))
        assert str(path) in caught.value.message and "free some space" in (caught.value.hint or "")
        before = journal.events
        assert len(before) > 3 and read_journal(path) == before and path.read_bytes().endswith(b"\n")
        with pytest.raises(EnvironmentProblem):
            journal.append(*note("x" * 5000))
        filler.unlink()
        after = journal.append(*note("x" * 5000))
    with Journal.open(path) as journal:
        assert journal.repaired is None and journal.events == [*before, after]


def test_a_study_that_cannot_even_begin_leaves_nothing_behind(small_disk: Path) -> None:
    """On a full disk the first event is refused, and no journal, folder or .gitignore stays."""
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(b"x" * 100_000)
    journal = Journal.open(small_disk / "journals" / "s.jsonl")
    with pytest.raises(EnvironmentProblem, match="no space left"), journal:
        journal.append(*note("x"))
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def test_a_read_only_disk_is_said(small_disk: Path) -> None:
    """A journal on a read-only file system can be read; writing it exits 4, and doctor can tell before."""
    fill(small_disk / "journals" / "s.jsonl", 2)
    check_writable(small_disk / "journals")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert len(read_journal(small_disk / "journals" / "s.jsonl")) == 2
    for name in ("journals/s.jsonl", "journals/new.jsonl", "new/new.jsonl"):
        with pytest.raises(EnvironmentProblem, match="cannot be written: read-only file system") as caught:
            Journal.open(small_disk / name)
        assert caught.value.exit_status == 4 and "--journals" in (caught.value.hint or "")
    for folder in ("journals", "new"):
        with pytest.raises(EnvironmentProblem, match="cannot be written"):
            check_writable(small_disk / folder)


LIMITED = """
import json, resource, sys
from pathlib import Path
from llm_bisect.journal import events as kinds
from llm_bisect.journal.store import Journal, read_journal
from llm_bisect.model import EnvironmentProblem
path = Path(sys.argv[1])
with Journal.open(path) as journal:
    journal.append(kinds.STUDY_RESUMED, {"found": ["first"]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    try:
        journal.append(kinds.STUDY_RESUMED, {"found": ["x" * 8000]})
    except EnvironmentProblem as problem:
        print(json.dumps([problem.message, problem.hint, path.stat().st_size, len(read_journal(path))]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(kinds.STUDY_RESUMED, {"found": ["after"]})
"""


def test_a_write_that_ends_half_way_is_cut_back(path: Path) -> None:
    """A limit on file sizes lets 4,000 bytes through: none of them stays, and the next append works."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], env=env, capture_output=True, text=True, check=True
    )
    message, hint, size, count = json.loads(done.stdout)
    assert message == f"{path} cannot be written: file too large" and "ulimit" in hint
    assert size < 200 and count == 1
    assert [event.body["found"] for event in read_journal(path)] == [["first"], ["after"]]


def failing(number: int, calls: list[str], name: str) -> Any:
    """A function that fails with that errno as long as `calls` says so, else does what os.<name> does."""
    real = getattr(os, name)

    def call(fd: int, *args: Any) -> Any:
        if name in calls:
            raise OSError(number, os.strerror(number))
        return real(fd, *args)

    return call


def test_what_could_not_be_synced_is_not_in_the_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at the sync, and even at cutting back: no event is told, none is glued to another."""
    calls: list[str] = []
    for name in ("fsync", "ftruncate"):
        monkeypatch.setattr(os, name, failing(5, calls, name))
    with Journal.open(path) as journal:
        first = journal.append(*note("first"))
        calls.append("fsync")
        with pytest.raises(EnvironmentProblem, match="input/output error") as caught:
            journal.append(*note("lost"))
        assert "dmesg" in (caught.value.hint or "")
        assert journal.events == [first]
        calls.append("ftruncate")
        for _ in range(2):  # the second finds what the first could not cut off
            with pytest.raises(EnvironmentProblem, match="input/output error"):
                journal.append(*note("lost"))
        calls.clear()
        second = journal.append(*note("second"))
    assert read_journal(path) == [first, second]


def test_an_interruption_in_mid_write_leaves_no_part_of_a_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short writes are carried on with; Ctrl-C between two of them is passed on, and the part is cut."""
    write = os.write
    parts: list[int] = []

    def short(fd: int, data: bytes) -> int:
        if len(parts) == 3:
            raise KeyboardInterrupt
        parts.append(len(data))
        return write(fd, data[:40])

    with Journal.open(path) as journal:
        first = journal.append(*note("first"))
        monkeypatch.setattr(os, "write", short)
        with pytest.raises(KeyboardInterrupt):
            journal.append(*note("interrupted" * 20))
        parts[:] = [0] * 99
        second = journal.append(*note("second"))
    assert read_journal(path) == [first, second]
    assert parts[0] == 0


def test_a_missing_line_end_that_cannot_be_written_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at opening: exit status 4, and the file as it was."""
    data = b"".join(fill(path, 2))[:-1]
    path.write_bytes(data)
    monkeypatch.setattr(os, "write", failing(28, ["write"], "write"))
    with pytest.raises(EnvironmentProblem, match="no space left"):
        Journal.open(path)
    assert path.read_bytes() == data and holder_pid(path) is None


def test_a_journal_that_others_touch_is_not_written_any_more(path: Path) -> None:
    """Deleted, replaced or edited while the study runs: said, instead of events that nobody will find."""
    with Journal.open(path) as journal:
        journal.append(*note())
        with path.open("ab") as other:
            other.write(b"hand-written\n")
        with pytest.raises(EnvironmentProblem, match="was changed by another program"):
            journal.append(*note())
        os.truncate(path, path.stat().st_size - len(b"hand-written\n"))
        journal.append(*note())
        path.unlink()
        with pytest.raises(EnvironmentProblem, match="was deleted or replaced"):
            journal.append(*note())


def test_a_file_system_without_locks_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock two writers could meet: refused, and nothing is left behind."""

    def refuse(_fd: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(EnvironmentProblem, match="cannot be written: no locks available") as caught:
        Journal.open(path)
    assert "cannot lock files" in (caught.value.hint or "") and not path.parent.exists()


def test_a_gitignore_that_does_not_fit_is_no_reason_to_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal decides whether there is room; half a .gitignore is removed."""
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC, ["write"], "write"))
    with Journal.open(path):
        assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_folders_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    """Some file systems do not know it, which is no reason to fail; a broken disk is."""
    monkeypatch.setattr(os, "fsync", failing(number, ["fsync"], "fsync"))
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(OSError, match="Input/output"))
        files.sync_folder(tmp_path)


def test_who_holds_a_journal_is_answered_with_what_may_be_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's process is known by device and inode; without a lock table nobody is named."""
    with Journal.open(path):
        mine = path.stat()
        iterdir = Path.iterdir

        def refuse(self: Path) -> Iterator[Path]:
            if str(self).startswith("/proc/"):
                raise PermissionError(errno.EACCES, "Permission denied")
            return iterdir(self)

        monkeypatch.setattr(Path, "iterdir", refuse)
        assert holder_pid(path) == os.getpid()
        row = f"FLOCK ADVISORY WRITE 1 ff:ff:{mine.st_ino} 0 EOF"
        monkeypatch.setattr(Path, "read_text", lambda _self: f"1: {row}\n1: -> {row}\n")
        with pytest.raises(EnvironmentProblem, match="cannot be seen"):  # another device's file
            holder_pid(path)

        def gone(self: Path) -> Iterator[Path]:
            raise FileNotFoundError(self)

        monkeypatch.setattr(Path, "iterdir", gone)
        with pytest.raises(EnvironmentProblem, match="cannot be seen"):  # it has just ended
            holder_pid(path)

        def unreadable(_self: Path) -> str:
            raise OSError(errno.ENOENT, "no such file")

        monkeypatch.setattr(Path, "read_text", unreadable)
        with pytest.raises(EnvironmentProblem, match="cannot be seen"):
            holder_pid(path)
    monkeypatch.setattr(os, "open", failing(errno.EACCES, ["open"], "open"))
    with pytest.raises(EnvironmentProblem, match="cannot be read: Permission denied"):
        holder_pid(path)


def test_the_fold_reads_a_journal(path: Path) -> None:
    """The state of a study is the fold of what a reader gets."""
    with Journal.open(path) as journal:
        journal.append(kinds.STUDY_OPENED, {"study": "s"})
        journal.append(kinds.FINGERPRINT, {"items": {"memory.gpu": "a card"}})
        journal.append(kinds.STUDY_PAUSED, {"status": "interrupted", "why": "stopped"})
        assert fold(journal.events) == fold(read_journal(path))
    state = fold(read_journal(path))
    assert (state.last_seq, state.status, state.fingerprint) == (3, "interrupted", {"memory.gpu": "a card"})


def test_the_clock_is_asked_once_an_event(path: Path) -> None:
    """`at` is the injected clock's time, also where it runs backwards."""
    moments = [datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]
    with Journal.open(path, now=lambda: moments.pop(0)) as journal:
        events = [journal.append(*note()) for _ in range(2)]
    assert [event.at for event in events] == ["2026-01-01T00:00:05.000Z", "2026-01-01T00:00:00.000Z"]
