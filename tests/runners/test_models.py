"""The tiny models that bisect makes itself."""

from __future__ import annotations

import builtins
import threading
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.runners import models

gguf = pytest.importorskip("gguf", reason="gguf is not installed (pip install 'llm-bisect[demo]')")


def test_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Askers at the same time get one file, and a second asking does not write it again."""
    monkeypatch.setenv("LLM_BISECT_CACHE", str(tmp_path))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(models.builtin_model("tiny-llama"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [one.name for one in (tmp_path / "models").glob("*.gguf")] == [found[0].name]
    inode = found[0].stat().st_ino
    assert models.builtin_model("tiny-llama").stat().st_ino == inode


@pytest.mark.parametrize(("name", "layers"), [("tiny-llama", 2), ("recall", 4)])
def test_what_is_in_them(name: str, layers: int) -> None:
    """A Llama with one token a byte and 262,144 tokens of context, about 1.5 MB."""
    path = models.builtin_model(name)
    assert 1_400_000 < path.stat().st_size < 1_700_000
    reader = gguf.GGUFReader(path)
    assert (
        len({tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")})
        == layers
    )
    assert int(reader.fields["llama.context_length"].parts[-1][0]) == 262144
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 260


def test_bytes_do_not_depend_on_the_making(tmp_path: Path) -> None:
    """Two makings give the same bytes: the model is part of a fingerprint."""
    from llm_bisect.runners.models import tiny

    tiny.write(tmp_path / "a.gguf")
    tiny.write(tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_unknown_name_lists_the_known_ones() -> None:
    """A misspelt name is a usage problem."""
    with pytest.raises(UsageProblem) as caught:
        models.builtin_model("tiny")
    assert "tiny-llama" in str(caught.value.hint)


def test_without_gguf_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's packages are the demo extra's."""
    import sys

    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gguf":
            raise ImportError("No module named 'gguf'", name="gguf")
        return real(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("llm_bisect.runners.models.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(models, "tiny", raising=False)
    monkeypatch.delattr(models, "recall", raising=False)
    monkeypatch.setenv("LLM_BISECT_CACHE", str(tmp_path))
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(EnvironmentProblem, match="gguf") as caught:
        models.builtin_model("tiny-llama")
    assert "llm-bisect[demo]" in str(caught.value.hint)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder's place is an environment problem that names the variable to set."""
    (tmp_path / "models").write_text("")
    monkeypatch.setenv("LLM_BISECT_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentProblem) as caught:
        models.builtin_model("tiny-llama")
    assert "LLM_BISECT_CACHE" in str(caught.value.hint)
