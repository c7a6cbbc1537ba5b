"""Running the real command line against real engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny_profile(tmp_path: Path) -> Callable[..., Path]:
    """Writes a variant of the shipped tiny-llama profile: flags replaced, another memory limit."""

    def make(name: str, flags: dict[str, str], *, memory_limit: str = "256m", **probe: Any) -> Path:
        data = yaml.safe_load((ROOT / "search_spaces" / "tiny-llama.yml").read_text(encoding="utf-8"))
        data["profile"] = name
        # YAML 1.1 reads the words on and off as booleans
        data["axes"].pop("flash-attn")
        for launch in data["launches"].values():
            launch["memory_limit"] = memory_limit
            launch["command"] = _with_flags([_word(w) for w in launch["command"]], flags)
        data["probe"].update(probe)
        path = tmp_path / f"{name}.yml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        return path

    return make


def _word(word: object) -> str:
    return {True: "on", False: "off"}.get(word, str(word)) if isinstance(word, bool) else str(word)


def _with_flags(command: Sequence[str], flags: dict[str, str]) -> list[str]:
    words = list(command)
    for flag, value in flags.items():
        words[words.index(flag) + 1] = value
    return words
