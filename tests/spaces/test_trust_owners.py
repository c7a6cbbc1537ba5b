"""Whose files are trusted: one's own, root's, and under sudo those of the user who called it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.trust import needs_trust

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
