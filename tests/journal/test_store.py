"""The journal's file: whole lines or none, one writer, a chain that shows every change."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bisect.journal import events as kinds
from llm_bisect.journal.store import Journal, holder_pid, read_journal
from llm_bisect.model import EnvironmentProblem

BODIES = st.dictionaries(
    st.text(max_size=8),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    max_size=4,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "study.jsonl"


def written(path: Path, n: int = 6) -> bytes:
    """A journal with `n` events; its bytes."""
    with Journal.open(path) as journal:
        for i in range(n):
            journal.append(kinds.FINGERPRINT, {"items": {"memory.gpu": f"card {i}"}, "größe": i})
    return path.read_bytes()


def test_cut_at_every_byte_of_the_last_three_lines(path: Path) -> None:
    """Wherever the file is cut, all whole lines stay, the torn rest goes, and the journal goes on."""
    data = written(path)
    ends = [i + 1 for i, b in enumerate(data) if b == 0x0A]
    for cut in range(ends[-4], len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        with Journal.open(path) as journal:
            assert len(journal.events) == whole
            assert (journal.repaired is None) == (cut in ends)
            journal.append(kinds.STUDY_RESUMED, {"found": []})
        assert [e.seq for e in read_journal(path)] == list(range(1, whole + 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(kinds.KINDS)), BODIES), max_size=8))
def test_what_is_appended_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, dict[str, object]]]
) -> None:
    """Any plain JSON body comes back as it was written, also after opening again."""
    path = tmp_path_factory.mktemp("j") / "s.jsonl"
    with Journal.open(path) as journal:
        appended = [journal.append(kind, body) for kind, body in entries]
    assert read_journal(path) == appended
    with Journal.open(path) as journal:
        assert journal.events == appended and journal.repaired is None


def test_a_change_in_the_middle_is_refused_with_its_line(path: Path) -> None:
    """Every flipped byte before the last line is found, and nothing is changed by finding it."""
    data = written(path, 4)
    second = data.index(b"\n") + 1
    for at in range(second, data.index(b"\n", second), 7):
        broken = bytearray(data)
        broken[at] ^= 0x01
        path.write_bytes(bytes(broken))
        with pytest.raises(EnvironmentProblem, match=r"line [123]: .*nothing was changed"):
            Journal.open(path)
        assert path.read_bytes() == bytes(broken)


def test_a_line_taken_out_is_refused(path: Path) -> None:
    """Events can be neither removed nor moved."""
    lines = written(path, 4).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], lines[3]]))
    with pytest.raises(EnvironmentProblem, match="line 2: it says it is event 3"):
        Journal.open(path)


def test_an_unknown_kind_is_refused_with_its_line(path: Path) -> None:
    """A journal of a newer version is refused, not half understood."""
    lines = written(path, 3).splitlines(keepends=True)
    entry = json.loads(lines[1])
    lines[1] = (json.dumps({**entry, "kind": "telepathy"}) + "\n").encode()
    path.write_bytes(b"".join(lines))
    with pytest.raises(EnvironmentProblem, match="line 2: unknown kind of event 'telepathy'"):
        read_journal(path)


def test_a_block_of_zeros_at_the_end_is_cut(path: Path) -> None:
    """Power loss may leave the length without the bytes: zeros at the end are a torn tail."""
    data = written(path, 3)
    path.write_bytes(data + b"\0" * 700)
    with Journal.open(path) as journal:
        assert len(journal.events) == 3 and "700 bytes" in (journal.repaired or "")


def test_one_writer(path: Path) -> None:
    """A second writer is refused, told who holds it, and readers are not."""
    with Journal.open(path) as journal:
        journal.append(kinds.STUDY_RESUMED, {"found": []})
        assert holder_pid(path) == os.getpid()
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()} holds"):
            Journal.open(path)
        assert len(read_journal(path)) == 1
    assert holder_pid(path) is None
    Journal.open(path).close()


WRITER = """
import sys
from pathlib import Path
from llm_bisect.journal.store import Journal
with Journal.open(Path(sys.argv[1])) as journal:
    while True:
        print(journal.append("study_resumed", {"found": ["x" * 300]}).seq, flush=True)
"""


def test_kill_9_loses_nothing_that_was_acknowledged(path: Path) -> None:
    """Killed at random moments, over and over: every event whose append returned is still there."""
    acknowledged = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        acknowledged = max(acknowledged, int(writer.stdout.readline()))
        time.sleep(random.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        seen = [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        acknowledged = max([acknowledged, *seen])
        with Journal.open(path) as journal:
            assert len(journal.events) >= acknowledged


LIMITED = """
import resource, signal, sys
from pathlib import Path
from llm_bisect.journal.store import Journal
from llm_bisect.model import EnvironmentProblem
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.open(Path(sys.argv[1]))
journal.append("study_resumed", {"found": ["first"]})
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
try:
    for _ in range(100):
        journal.append("study_resumed", {"found": ["x" * 200]})
except EnvironmentProblem as problem:
    print(problem.message, "|", problem.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(journal.append("study_resumed", {"found": ["after"]}).seq)
"""


def test_a_write_that_fails_half_way_leaves_the_file_whole(path: Path) -> None:
    """No room for the whole line: a clear error, the file as before, and later appends work."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    problem, seq = done.stdout.splitlines()
    assert str(path) in problem and "File too large" in problem
    events = read_journal(path)
    assert len(events) == int(seq) and events[-1].body["found"] == ["after"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_the_system_refuses_is_one_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Disk full, read-only, broken disk: exit status 4, the file named, nothing lost."""
    journal = Journal.open(path)
    journal.append(kinds.STUDY_RESUMED, {"found": []})

    def refuse(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(EnvironmentProblem, match=os.strerror(number)) as caught:
            journal.append(kinds.STUDY_RESUMED, {"found": ["lost"]})
    assert caught.value.exit_status == 4 and caught.value.hint
    journal.append(kinds.STUDY_RESUMED, {"found": ["after"]})
    journal.close()
    assert [e.body["found"] for e in read_journal(path)] == [[], ["after"]]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The journals folder lies below a file: one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"file/journals/s\.jsonl: Not a directory"):
        Journal.open(tmp_path / "file" / "journals" / "s.jsonl")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_plain_file_is_refused(path: Path, make: object) -> None:
    """A folder or a pipe in the journal's place is refused at once; a pipe does not make it wait."""
    path.parent.mkdir(parents=True)
    make(path)  # type: ignore[operator]
    with pytest.raises(EnvironmentProblem):
        Journal.open(path)
    with pytest.raises(EnvironmentProblem):
        read_journal(path)


def test_not_a_number_and_unknown_kinds_are_faults_of_ours(path: Path) -> None:
    """What JSON or this version cannot hold is never written."""
    with Journal.open(path) as journal:
        with pytest.raises(ValueError, match="Out of range"):
            journal.append(kinds.STUDY_RESUMED, {"wall_s": float("nan")})
        with pytest.raises(ValueError, match="unknown kind"):
            journal.append("telepathy", {})
        assert journal.append(kinds.STUDY_RESUMED, {}).seq == 1


def test_it_is_private_and_ignored_by_git(path: Path) -> None:
    """Files only the owner reads, a .gitignore that keeps reference studies."""
    with Journal.open(path) as journal:
        assert path.stat().st_mode & 0o077 == 0
        assert journal.side_dir.stat().st_mode & 0o077 == 0
    assert "!reference/" in (path.parent / ".gitignore").read_text()


def test_secrets_never_reach_it(path: Path) -> None:
    """Planted tokens and passwords are masked, by name, by form, and behind their flag."""
    with Journal.open(path) as journal:
        event = journal.append(
            kinds.FINGERPRINT,
            {
                "env": {"HF_TOKEN": "abcdef", "MAX_TOKENS": "30"},
                "argv": ["vllm", "--api-key", "opensesame", "--max-tokens", "30"],
                "log": "Authorization: Bearer abcdefghijkl and hf_abcdefghijklmnopqrst",
                "url": "http://me:hunter2@rig/",
            },
        )
    text = path.read_text()
    for secret in ("abcdef", "opensesame", "hunter2", "hf_abc"):
        assert secret not in text
    assert event.body["env"]["MAX_TOKENS"] == "30" and event.body["argv"][-1] == "30"


def test_undecodable_bytes_in_a_log_line_are_written(path: Path) -> None:
    """A lone surrogate from a broken log neither stops the journal nor breaks its chain."""
    with Journal.open(path) as journal:
        journal.append(kinds.STUDY_RESUMED, {"found": ["bad \udcff byte", "line\u2028separator\n"]})
    assert len(read_journal(path)) == 1
    Journal.open(path).close()
