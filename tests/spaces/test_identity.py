"""One candidate, one id: however it is spelled and wherever its files lie; another content, another id."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_bisect.model import ComposeRef, Launch, Mount, SimulatedRef
from llm_bisect.spaces import identity
from llm_bisect.spaces.identity import candidate_id, content_hash

BASE = Launch("docker", "llamacpp", ("-c", "4096", "--seed=7"), {"A": "1", "B": "2"}, image="i:1")


def test_the_form_of_an_id() -> None:
    """Sixteen hex digits, the same in every call."""
    assert candidate_id(BASE) == candidate_id(BASE)
    assert len(candidate_id(BASE)) == 16 and int(candidate_id(BASE), 16) >= 0


@pytest.mark.parametrize(
    "same",
    [
        replace(BASE, command=("--ctx-size=4096", "--seed", "7")),
        replace(BASE, command=("--seed", "7", "--ctx_size", "4096")),
        replace(BASE, env={"B": "2", "A": "1"}),
        replace(BASE, command=(*BASE.command, "--port", "8080"), container_port=9),
        replace(BASE, env={**BASE.env, "LLAMA_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}),
        replace(BASE, env={**BASE.env, "HF_TOKEN": "hf_secret"}),
        replace(BASE, compose=ComposeRef("/f.yml", "s", "p", {"CTX": "4096"})),
        replace(BASE, mounts=(Mount("/cache", "/root/.cache"),)),
        replace(BASE, share_mounts=True),
    ],
)
def test_one_candidate(same: Launch) -> None:
    """Spelling, order, ports, offline flags, secrets, the way it was set, writable mounts do not count."""
    assert candidate_id(same) == candidate_id(BASE)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, command=("-c", "8192", "--seed=7")),
        replace(BASE, command=("-c", "4096", "--seed=7", "--x")),
        replace(BASE, env={"A": "1"}),
        replace(BASE, env={"A": "1", "B": "3"}),
        replace(BASE, image="i:2"),
        replace(BASE, entrypoint=("e",)),
        replace(BASE, runner="process"),
        replace(BASE, engine="vllm"),
        replace(BASE, memory_limit_mib=256),
        replace(BASE, shm_size_mib=256),
        replace(BASE, simulated=SimulatedRef("card", "model")),
        replace(BASE, mounts=(Mount("volume", "/v", read_only=True, kind="volume"),)),
        replace(BASE, model_path="builtin:tiny-llama"),
        replace(BASE, model_path="/nowhere/m.gguf"),
    ],
)
def test_another_candidate(other: Launch) -> None:
    """What the engine gets counts."""
    assert candidate_id(other) != candidate_id(BASE)


def test_an_unknown_engine_has_an_id_too() -> None:
    """Its aliases are unknown, its port still does not count."""
    launch = replace(BASE, engine="no-such-engine")
    assert candidate_id(replace(launch, command=(*BASE.command, "--port=1"))) == candidate_id(launch)


def test_keys_in_the_argv_do_not_count() -> None:
    """A rotated key makes no other candidate."""
    a, b = (replace(BASE, command=("--api-key", key, "-c", "1")) for key in ("one", "two"))
    assert candidate_id(a) == candidate_id(b)


FLAGS = st.dictionaries(
    st.sampled_from(["--alpha", "--beta-gamma", "--delta"]),
    st.from_regex(r"[a-z0-9]{1,5}", fullmatch=True),
    min_size=1,
)


@given(FLAGS, st.randoms(use_true_random=False), st.lists(st.booleans(), min_size=3, max_size=3))
def test_two_spellings_one_id(flags: dict[str, str], random: object, joined: list[bool]) -> None:
    """Property: any order and either way to write a value give one id, and any other value another."""
    names = list(flags)
    random.shuffle(names)  # type: ignore[attr-defined]
    spelled = [
        word
        for name, equals in zip(names, joined, strict=False)
        for word in ([f"{name}={flags[name]}"] if equals else [name.replace("a-g", "a_g"), flags[name]])
    ]
    plain = [word for name in sorted(flags) for word in (name, flags[name])]
    one, two = (candidate_id(replace(BASE, command=tuple(words))) for words in (spelled, plain))
    assert one == two
    changed = (*plain[:-1], plain[-1] + "x")
    assert candidate_id(replace(BASE, command=changed)) != one


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, str], Path]:
    """A folder `name` with two patches; the second one's text is given."""

    def make(name: str, text: str) -> Path:
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True, exist_ok=True)
        (folder / "a.py").write_text("a", encoding="utf-8")
        (folder / "sub" / "b.py").write_text(text, encoding="utf-8")
        return folder

    return make


def _mounting(source: Path, target: str = "/p") -> str:
    return candidate_id(replace(BASE, mounts=(Mount(str(source), target, read_only=True),)))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=20), st.text(max_size=20))
def test_a_changed_patch_file_is_another_candidate(
    tree: Callable[[str, str], Path], one: str, two: str
) -> None:
    """Property: read-only mounts count by content, wherever they lie."""
    first = _mounting(tree("here", one))
    assert first == _mounting(tree("there", one))
    assert (first == _mounting(tree("there", two))) == (one == two)


def test_what_counts_of_a_mount(tree: Callable[[str, str], Path]) -> None:
    """Names and places in the container do; byte-code caches and version control do not."""
    folder = tree("here", "x")
    before = _mounting(folder)
    assert _mounting(folder, "/q") != before and _mounting(folder / "a.py") != before
    for left_out in ("__pycache__", ".git"):
        (folder / left_out).mkdir()
        (folder / left_out / "x.pyc").write_bytes(b"1")
    assert _mounting(folder) == before
    (folder / "a.py").rename(folder / "c.py")
    assert _mounting(folder) != before


def test_weights_count_by_size_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file's first part and size count, not what lies behind, and not where it lies."""
    monkeypatch.setattr(identity, "SMALL_BYTES", 100)
    monkeypatch.setattr(identity, "_HEAD_BYTES", 10)
    files = {name: tmp_path / name for name in ("weights", "same-head", "other-head", "longer")}
    files["weights"].write_bytes(b"head......" + b"1" * 200)
    files["same-head"].write_bytes(b"head......" + b"2" * 200)
    files["other-head"].write_bytes(b"HEAD......" + b"1" * 200)
    files["longer"].write_bytes(b"head......" + b"1" * 201)
    ids = {name: candidate_id(replace(BASE, model_path=str(path))) for name, path in files.items()}
    assert ids["weights"] == ids["same-head"]
    assert len(set(ids.values())) == 3


def test_small_files_count_whole(tmp_path: Path) -> None:
    """The last byte of a patch counts."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x" * (2 << 20) + b"1")
    two.write_bytes(b"x" * (2 << 20) + b"2")
    assert content_hash(one) != content_hash(two)


def test_a_mount_that_cannot_be_read(tmp_path: Path) -> None:
    """It has an id all the same: the launch will say what is wrong."""
    missing = tmp_path / "missing"
    assert content_hash(missing) == f"{missing} (No such file or directory)"
    assert len(_mounting(missing)) == 16
    assert _mounting(missing) != _mounting(tmp_path / "other")


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    """Pipes and devices count by their place: reading one would wait, or go on, for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert content_hash(path) == f"{path} (no regular file)"
    before = content_hash(tmp_path)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert content_hash(tmp_path) != before


def test_large_trees_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files count by their names and sizes, a whole system's by their place alone."""
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(b"12345678")
    monkeypatch.setattr(identity, "SMALL_BYTES", 10)
    read = content_hash(tmp_path)
    monkeypatch.setattr(identity, "_MOST_HEADS", 4)
    sizes = content_hash(tmp_path)
    assert sizes != read
    (tmp_path / "0").write_bytes(b"87654321")
    assert content_hash(tmp_path) == sizes
    (tmp_path / "0").write_bytes(b"123456789")
    assert content_hash(tmp_path) != sizes
    monkeypatch.setattr(identity, "_MOST_FILES", 4)
    assert content_hash(tmp_path) == f"{tmp_path} (more than 4 files)"
