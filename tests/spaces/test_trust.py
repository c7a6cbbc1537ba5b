"""Downloaded profiles are shown and accepted once; local and packaged ones need no question."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from llm_bisect.model import EnvironmentProblem
from llm_bisect.spaces import trust
from llm_bisect.spaces.compose import compose_command
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.profile import Profile
from llm_bisect.spaces.trust import accept, needs_trust, summary

PROFILE = "profile: p\nengine: vllm\nlaunch: {compose: c.yml, service: s}\n"
COMPOSE = """\
services:
  s:
    image: vllm/vllm-openai:x
    privileged: true
    network_mode: host
    ipc: host
    pid: host
    gpus: all
    entrypoint: [vllm, serve]
    command: [/m, --api-key, sk-abcdefghijklmnopqrstuvwxyz]
    environment: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwx}
    volumes: ['./w:/m:ro', '/var/run/docker.sock:/var/run/docker.sock']
    depends_on: [db]
  db: {image: 'db:1', network_mode: 'service:net'}
  net: {build: .}
  other: {image: never}
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and downloads lie in the folder of the test."""
    monkeypatch.setattr(platformdirs, "user_state_dir", lambda name: str(tmp_path / "state" / name))
    monkeypatch.setattr(platformdirs, "user_downloads_dir", lambda: str(tmp_path / "Downloads"))


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., Profile]:
    """The profile, its two files written in this folder."""

    def make(folder: str = "mine", compose: str = COMPOSE) -> Profile:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "p.yml").write_text(PROFILE, encoding="utf-8")
        (place / "c.yml").write_text(compose, encoding="utf-8")
        return load_profile(str(place / "p.yml"))

    return make


Make = Callable[..., Profile]


def test_local_and_packaged_profiles(profile: Make) -> None:
    """Nobody is asked about files of one's own, nor about what came with the program."""
    assert needs_trust(profile()) is None
    for name in ("long-text", "tiny-llama"):
        assert needs_trust(load_profile(name)) is None


def test_packaged_profiles_may_lie_in_the_download_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout there is as trusted as the program that it is."""
    package = Path(trust.__file__).parents[3]
    monkeypatch.setattr(platformdirs, "user_downloads_dir", lambda: str(package.parent))
    assert needs_trust(load_profile("tiny-llama")) is None


def test_a_profile_without_a_file(profile: Make) -> None:
    """Made on the fly: there is nothing that could have been downloaded."""
    assert needs_trust(replace(profile(), path=None, launches={})) is None


def test_the_download_folder(profile: Make) -> None:
    """Either file there is enough, and no folder is meant where it is the home folder itself."""
    assert needs_trust(profile("Downloads")) == "p.yml lies in the download folder"


def test_no_download_folder(profile: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system names the home folder as the download folder, files in it are one's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(platformdirs, "user_downloads_dir", lambda: str(tmp_path))
    assert needs_trust(profile()) is None


def test_a_download_mark(profile: Make, tmp_path: Path) -> None:
    """The mark that browsers set counts, on the compose file too; any other attribute does not."""
    made = profile()
    file = tmp_path / "mine" / "c.yml"
    try:
        os.setxattr(file, "user.colour", b"red")
    except OSError as error:
        pytest.skip(f"this file system keeps no attributes ({error.strerror})")
    assert needs_trust(made) is None
    os.setxattr(file, "user.xdg.origin.url", b"https://example.invalid/c.yml")
    assert needs_trust(made) == "c.yml was downloaded (it carries the mark user.xdg.origin.url)"


def test_marks_as_the_system_lists_them(profile: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above where the tests' file system keeps none; a system without them is no obstacle."""
    made = profile()
    monkeypatch.setattr(os, "listxattr", lambda path: ["user.x", "user.xdg.referrer.url"])
    assert "user.xdg.referrer.url" in str(needs_trust(made))
    monkeypatch.delattr(os, "listxattr")
    assert needs_trust(made) is None


def test_somebody_elses_file(profile: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user is shown first; root's and one's own are not."""
    made = profile()
    owner = Path(str(made.path)).stat().st_uid
    real = Path.stat

    def owned(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        uid = 12345 if self.suffix == ".yml" else owner
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(Path, "stat", owned)
    assert needs_trust(made) == "p.yml belongs to another user (uid 12345)"


def test_accepted_once_until_it_changes(profile: Make, tmp_path: Path) -> None:
    """The content is remembered, so that a copy is known and an edit is not."""
    made = profile("Downloads")
    assert needs_trust(made) is not None
    accept(made)
    assert needs_trust(made) is None
    (tmp_path / "Downloads" / "c.yml").write_text(COMPOSE + "# edited\n", encoding="utf-8")
    assert needs_trust(made) is not None
    accept(made)
    stored = tmp_path / "state" / "llm-bisect" / "trusted.json"
    assert len(json.loads(stored.read_text(encoding="utf-8"))["accepted"]) == 2
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600 and len(list(stored.parent.iterdir())) == 1
    (tmp_path / "Downloads" / "c.yml").write_text(COMPOSE, encoding="utf-8")
    assert needs_trust(made) is None


def test_what_a_compose_file_includes_is_a_part_of_it(profile: Make, tmp_path: Path) -> None:
    """An edit there asks again, and a part from the download folder makes the whole a downloaded one."""
    downloads = tmp_path / "Downloads"
    downloads.mkdir()
    part = downloads / "base.yml"
    part.write_text("services: {t: {image: 'vllm/vllm-openai:1'}}\n", encoding="utf-8")
    made = profile(compose=f"services: {{s: {{extends: {{file: {part}, service: t}}}}}}\n")
    assert needs_trust(made) == "base.yml lies in the download folder"
    accept(made)
    assert needs_trust(made) is None
    part.write_text("services: {t: {image: 'vllm/vllm-openai:1', privileged: true}}\n", encoding="utf-8")
    assert needs_trust(made) == "base.yml lies in the download folder"


@pytest.mark.parametrize("text", ["no json", "[]", '{"accepted": 1}'])
def test_a_broken_memory_accepts_nothing(profile: Make, tmp_path: Path, text: str) -> None:
    """Asked again, and written anew."""
    made = profile("Downloads")
    stored = tmp_path / "state" / "llm-bisect" / "trusted.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(text, encoding="utf-8")
    assert needs_trust(made) is not None
    accept(made)
    assert needs_trust(made) is None


def test_a_memory_that_cannot_be_written(
    profile: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and nothing is left behind."""
    made = profile()
    (tmp_path / "state").write_text("a file", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match=r"trusted\.json cannot be written"):
        accept(made)
    (tmp_path / "state").unlink()
    (tmp_path / "state" / "llm-bisect" / "trusted.json").mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match=r"trusted\.json cannot be written"):
        accept(made)
    assert [p.name for p in (tmp_path / "state" / "llm-bisect").iterdir()] == ["trusted.json"]


def test_what_is_shown(profile: Make, tmp_path: Path) -> None:
    """Everything that starts, with its powers; secrets are masked, services that do not start left out."""
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(problem.message)
    assert summary(profile()) == [
        "docker: service s, image vllm/vllm-openai:x",
        "  command: vllm serve /m --api-key ***",
        "  environment: HF_TOKEN",
        f"  mount: {tmp_path}/mine/w → /m (read-only)",
        "  mount: /var/run/docker.sock → /var/run/docker.sock (WRITABLE)",
        "  POWER: it may command the container daemon, and with it this machine",
        "  PRIVILEGED: the container may do anything to this machine",
        "  network: host",
        "  ipc: host",
        "  GPU: yes",
        "  POWER: pid: host",
        "docker: service db, image db:1",
        "  command: what the image says",
        "  network: service:net",
        "docker: service net, image built from the file",
        "  command: what the image says",
    ]


def test_what_is_shown_of_other_launches() -> None:
    """A process and an image are named for what they are; the simulated one starts nothing."""
    lines = summary(load_profile("tiny-llama"))
    assert "docker: llm-bisect/llama-server:tiny" in lines
    assert "process: a process of this user, no container" in lines
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(problem.message)
    assert not [line for line in summary(load_profile("long-text")) if line.startswith("simulated")]
