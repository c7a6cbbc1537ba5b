"""Writable binds: none of them changes the user's checkout or model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.model import Launch, Mount
from llm_bisect.runners import binds
from llm_bisect.runners.binds import BindUse


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test alone."""
    monkeypatch.setenv("LLM_BISECT_CACHE", str(tmp_path / "ours"))
    return tmp_path / "ours"


def use(mount: Mount, launch: Launch | None = None, **more: object) -> BindUse | None:
    """How one mount is used."""
    launch = launch or Launch("docker", "vllm", ("--model", "Qwen/x"))
    environment = more.pop("environment", {})
    assert isinstance(environment, dict)
    found = binds.plan(
        [mount], launch, "key", environment=environment, allow_pull=bool(more.get("allow_pull"))
    )
    return found.get(mount.target)


def test_cache_folder_starts_empty_and_stays(tmp_path: Path, own_cache: Path) -> None:
    """A compile cache goes to a folder of ours, cold at first and warm once something is in it."""
    source = tmp_path / "torch_compile_cache"
    source.mkdir()
    (source / "old").write_text("x")
    first = use(Mount(str(source), "/root/.cache/vllm"))
    assert first is not None and first.source is not None
    folder = Path(first.source)
    assert own_cache in folder.parents
    assert (list(folder.iterdir()), first.warm) == ([], False)
    (folder / "compiled").write_text("y")
    second = use(Mount(str(source), "/root/.cache/vllm"))
    assert second == BindUse(source=str(folder), warm=True)
    assert [one.name for one in source.iterdir()] == ["old"]


def test_missing_source_is_not_made(tmp_path: Path) -> None:
    """A cache folder that the user never made is not made for them."""
    found = use(Mount(str(tmp_path / "later"), "/cache"))
    assert found is not None and found.source is not None
    assert not (tmp_path / "later").exists()


def test_small_folder_is_copied(tmp_path: Path) -> None:
    """Scripts mounted writable are there for the engine, as a copy."""
    source = tmp_path / "scripts"
    source.mkdir()
    (source / "run.sh").write_text("exec")
    found = use(Mount(str(source), "/scripts"))
    assert found is not None and found.source is not None
    assert (Path(found.source) / "run.sh").read_text() == "exec"


def test_large_folder_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large to copy is mounted as it is, read-only."""
    monkeypatch.setattr(binds, "_COPY_AT_MOST_BYTES", 10)
    source = tmp_path / "data"
    source.mkdir()
    (source / "big").write_bytes(b"x" * 11)
    assert use(Mount(str(source), "/data")) == BindUse(read_only=True)


def test_single_file_is_read_only(tmp_path: Path) -> None:
    """A patch mounted without `:ro` cannot be written through."""
    (tmp_path / "patch.py").write_text("")
    assert use(Mount(str(tmp_path / "patch.py"), "/x/patch.py")) == BindUse(read_only=True)


@pytest.mark.parametrize(
    ("target", "command", "environment"),
    [
        ("/models", ("serve", "/models/qwen"), {}),
        ("/data/weights", (), {}),
        ("/srv", ("--model=/srv/x.gguf",), {}),
        ("/root/.cache/huggingface", (), {}),
        ("/hub", (), {"HF_HOME": "/hub/home"}),
    ],
)
def test_weights_are_read_only(
    tmp_path: Path, target: str, command: tuple[str, ...], environment: dict[str, str]
) -> None:
    """Model folders, told by the command, the environment or their name, stay and become read-only."""
    launch = Launch("docker", "vllm", command)
    found = use(Mount(str(tmp_path), target), launch, environment=environment)
    assert found == BindUse(read_only=True)


def test_the_launchs_model_folder_is_read_only(tmp_path: Path) -> None:
    """The folder that holds the launch's model is weights, whatever its name."""
    launch = Launch("docker", "vllm", (), model_path=str(tmp_path / "m" / "x.gguf"))
    assert use(Mount(str(tmp_path), "/z"), launch) == BindUse(read_only=True)


def test_pulling_may_write_weights(tmp_path: Path) -> None:
    """With --allow-pull a download has to reach the user's model folder."""
    assert use(Mount(str(tmp_path), "/models"), allow_pull=True) is None


def test_volumes_read_only_and_shared_mounts_are_left(tmp_path: Path) -> None:
    """Volumes of caches, read-only binds and everything under share_mounts are used as they stand."""
    assert use(Mount("cache", "/root/.triton", kind="volume")) is None
    assert use(Mount("hf", "/root/.cache/huggingface", kind="volume")) == BindUse(read_only=True)
    assert use(Mount(str(tmp_path), "/cache", read_only=True)) is None
    assert use(Mount(str(tmp_path), "/cache"), Launch("docker", "vllm", (), share_mounts=True)) is None
    assert use(Mount("/dev/shm", "/dev/shm")) is None


def test_folders_are_kept_apart_by_image_and_patches(tmp_path: Path) -> None:
    """Another image or another patch has another cache; the same content at another path has the same."""
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.py").write_text(text)

    def key(image: str, name: str) -> str:
        return binds.folder_key(image, [Mount(str(tmp_path / name / "p.py"), "/p.py", read_only=True)])

    assert key("sha256:1", "a") == key("sha256:1", "b")
    assert len({key("sha256:1", "a"), key("sha256:1", "c"), key("sha256:2", "a")}) == 3
