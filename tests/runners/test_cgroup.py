"""Memory cgroups of both versions: from files as the kernel writes them, and a real one where allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llm_bisect.model import EnvironmentProblem
from llm_bisect.runners import cgroup
from llm_bisect.runners.cgroup import MIB, MemoryGroup


def write(folder: Path, **files: str) -> Path:
    """Files named as in the kernel, `__` for a dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_1_files(tmp_path: Path) -> None:
    """Free is the limit minus usage, without the file pages that can be dropped."""
    write(
        tmp_path,
        memory__usage_in_bytes=f"{200 * MIB}\n",
        memory__limit_in_bytes=f"{256 * MIB}\n",
        memory__max_usage_in_bytes=f"{256 * MIB}\n",
        memory__stat=f"cache 1\ninactive_file 5\ntotal_inactive_file {20 * MIB}\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    )
    group = MemoryGroup(tmp_path, 1)
    sample = group.sample()
    assert sample is not None
    assert (sample.free_mib, sample.total_mib, sample.source) == (76, 256, "cgroup")
    assert group.oom_kills() == 2


def test_version_2_files(tmp_path: Path) -> None:
    """The same from the names of version 2."""
    write(
        tmp_path,
        memory__current=f"{100 * MIB}\n",
        memory__max=f"{128 * MIB}\n",
        memory__stat=f"anon 1\ninactive_file {8 * MIB}\n",
        memory__events="low 0\nmax 9\noom 1\noom_kill 1\n",
    )
    group = MemoryGroup(tmp_path, 2)
    sample = group.sample()
    assert sample is not None
    assert (sample.free_mib, sample.total_mib) == (36, 128)
    assert group.oom_kills() == 1


def test_a_kill_below_the_limit_is_not_its_limits(tmp_path: Path) -> None:
    """Where the whole machine ran out, the group never met its own limit."""
    one = write(
        tmp_path,
        memory__limit_in_bytes=f"{256 * MIB}",
        memory__max_usage_in_bytes=f"{90 * MIB}",
        memory__oom_control="oom_kill 1\n",
        memory__events="oom 0\noom_kill 1\n",
    )
    assert MemoryGroup(one, 1).oom_kills() == 0
    assert MemoryGroup(one, 2).oom_kills() == 0


def test_no_limit_no_sample(tmp_path: Path) -> None:
    """An unlimited group, and one that is gone, have no free memory to tell."""
    write(tmp_path, memory__current="1\n", memory__max="max\n")
    assert MemoryGroup(tmp_path, 2).sample() is None
    assert MemoryGroup(tmp_path / "gone", 2).sample() is None
    assert MemoryGroup(tmp_path / "gone", 2).oom_kills() == 0


def test_without_a_controller_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the controller is an environment problem with a way out."""
    monkeypatch.setattr(cgroup, "_mount", lambda version: None)
    assert not cgroup.available()
    with pytest.raises(EnvironmentProblem, match="no memory cgroup") as caught:
        cgroup.create(cgroup.planned("x"), 64)
    assert "--runner docker" in str(caught.value.hint)


def test_version_2_takes_the_lowest_delegated_ancestor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with processes may have no group below it: ours becomes its sibling."""
    slice_folder = tmp_path / "user.slice" / "app.slice"
    (slice_folder / "ours.scope").mkdir(parents=True)
    (slice_folder / "cgroup.subtree_control").write_text("memory pids\n")
    (slice_folder / "cgroup.procs").write_text("")
    monkeypatch.setattr(cgroup, "_mount", lambda version: tmp_path if version == 2 else None)
    monkeypatch.setattr(cgroup, "_path_of", lambda pid, version: "/user.slice/app.slice/ours.scope")
    assert cgroup._parent_or_problem() == (slice_folder, 2)
    (slice_folder / "cgroup.subtree_control").write_text("pids\n")
    with pytest.raises(EnvironmentProblem, match="delegated"):
        cgroup._parent_or_problem()


@pytest.mark.skipif(
    not cgroup.available(), reason="no memory cgroup can be made here (root, or a delegated one)"
)
def test_a_real_group_kills_at_its_limit() -> None:
    """A process that takes 64 MiB in a group of 32 is killed, and the group can be removed."""
    group = cgroup.create(cgroup.planned("test-real"), 32)
    try:
        enter = "import os,sys; open(sys.argv[1],'w').write(str(os.getpid())); x=b'1'*(64<<20)"
        done = subprocess.run([sys.executable, "-c", enter, str(group.procs_file)], check=False)
        assert done.returncode == -9
        assert group.oom_kills() == 1
        assert group.limit_bytes() == 32 * MIB
    finally:
        assert group.kill_and_remove()
    assert not group.folder.exists()
    assert not cgroup.is_ours(group.folder)
