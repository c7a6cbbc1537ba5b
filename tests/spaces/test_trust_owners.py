"""Whose files are trusted: one's own, root's, and under sudo those of the user who called it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.trust import accept, needs_trust

SOMEBODY = 12345


def test_under_sudo_its_caller_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo bisect` on one's own profile asks nothing; SUDO_UID counts for root only."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path = tmp_path / "p.yml"
    path.write_text("profile: p\nengine: vllm\nlaunch: {image: x}\n")
    profile = load_profile(str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert needs_trust(profile) is None
    os.chown(path, SOMEBODY, SOMEBODY)
    assert needs_trust(profile) == f"p.yml belongs to another user (uid {SOMEBODY})"
    monkeypatch.setenv("SUDO_UID", "1")
    assert needs_trust(profile) is not None
    monkeypatch.setenv("SUDO_UID", str(SOMEBODY))
    assert needs_trust(profile) is None
    monkeypatch.setattr(os, "geteuid", lambda: 999)
    assert needs_trust(profile) is not None


def test_a_file_that_really_is_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given to another user by the system itself; needs root to be arranged."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    monkeypatch.setattr(platformdirs, "user_state_dir", lambda name: str(tmp_path / "state"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "c.yml").write_text("services: {s: {image: vllm/vllm-openai}}\n", encoding="utf-8")
    file = tmp_path / "p.yml"
    file.write_text("profile: p\nengine: vllm\nlaunch: {compose: c.yml}\n", encoding="utf-8")
    made = load_profile(str(file))
    assert needs_trust(made) is None
    os.chown(tmp_path / "c.yml", 54321, -1)
    assert needs_trust(made) == "c.yml belongs to another user (uid 54321)"
    accept(made)
    assert needs_trust(made) is None
