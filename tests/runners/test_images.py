"""The image of our own: the same program gives the same bytes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from llm_bisect.model import EnvironmentProblem
from llm_bisect.runners import images


@pytest.mark.llama
def test_root_holds_the_server_and_its_libraries(llama_server: Path) -> None:
    """Server, its own libraries beside it, the system's in /usr/lib, the loader at its place; all times 0."""
    out = io.BytesIO()
    images.write_root(llama_server, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        members = {member.name: member for member in tar.getmembers()}
    assert {"opt/llama/llama-server", "opt/llama/libllama.so.0", "usr/lib/libc.so.6"} <= set(members)
    assert any("ld-linux" in name for name in members)
    assert {member.mtime for member in members.values()} == {0}
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}
    again = io.BytesIO()
    images.write_root(llama_server, again)
    assert again.getvalue() == out.getvalue()


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    """ldd's refusal is an environment problem."""
    (tmp_path / "x").write_text("no program")
    with pytest.raises(EnvironmentProblem, match="ldd"):
        images.libraries(tmp_path / "x")
