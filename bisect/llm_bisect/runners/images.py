"""The image of our own: the prebuilt llama-server with its libraries, imported without a registry."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llm_bisect.model import EnvironmentProblem
from llm_bisect.runners import executables

if TYPE_CHECKING:
    import docker

TINY_IMAGE = "llm-bisect/llama-server:tiny"
_SERVER = "/opt/llama/llama-server"
# what ldd does not see: the loader's own name comes with it, and threads need nothing else
_CHANGES = [f'ENTRYPOINT ["{_SERVER}"]', "ENV LC_ALL=C", "LABEL llm-bisect.image=tiny"]


def ensure_tiny_image(client: docker.DockerClient) -> str:
    """Make sure that the daemon has `llm-bisect/llama-server:tiny`; its id (sha256:…).

    About 95 MB and a second, made from the prebuilt llama-server of the demo extra. Raises
    EnvironmentProblem where that is not installed or the daemon refuses it.
    """
    from docker import errors

    try:
        return str(client.images.get(TINY_IMAGE).id)
    except errors.ImageNotFound:
        pass
    server = executables.packaged_llama_server() or executables.resolve("llama-server")
    repository, _, tag = TINY_IMAGE.partition(":")
    try:
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            write_root(server, archive)
            archive.flush()
            client.api.import_image_from_file(archive.name, repository, tag, changes=_CHANGES)
        return str(client.images.get(TINY_IMAGE).id)
    except errors.DockerException as error:
        raise EnvironmentProblem(
            f"the image {TINY_IMAGE} cannot be imported: {error}",
            hint="see what the Docker daemon's log says",
        ) from error


def write_root(server: Path, out: IO[bytes]) -> None:
    """Write a root file system with `server` and the libraries that it needs, as a tar.

    Every time, owner and order is fixed: the same program gives the same bytes.
    """
    needed = libraries(server)
    own = server.resolve().parent
    files: dict[str, Path] = {_SERVER: server.resolve()}
    for name, path in needed.items():
        if name.startswith("/"):
            files[name] = path  # the loader: its path is written into every program
        elif path.resolve().parent == own:
            files[f"/opt/llama/{name}"] = path
        else:
            files[f"/usr/lib/{name}"] = path
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder in ("/tmp", "/models", "/etc"):  # noqa: S108 - folders of the image
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "/tmp" else 0o755))  # noqa: S108
        for name, text in {
            "/etc/passwd": "root:x:0:0:root:/:/bin/false\n",
            "/etc/group": "root:x:0:\n",
        }.items():
            entry = _entry(name, tarfile.REGTYPE, 0o644)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        for name, path in sorted(files.items()):
            entry = _entry(name, tarfile.REGTYPE, 0o755)
            entry.size = path.resolve().stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)


def libraries(program: Path) -> dict[str, Path]:
    """Name that the loader looks for → file, for all libraries of a program (by ldd)."""
    try:
        listing = subprocess.run(
            ["ldd", str(program.resolve())], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentProblem(
            f"the libraries of {program} cannot be listed with ldd: {error}",
            hint="install the C library's tools",
        ) from error
    found = {}
    for line in listing.splitlines():
        named = re.match(r"\s*(\S+) => (/\S+) \(", line)
        loader = re.match(r"\s*(/\S+) \(", line)
        if named:
            found[named[1]] = Path(named[2])
        elif loader:
            found[loader[1]] = Path(loader[1])
        elif "not found" in line:
            raise EnvironmentProblem(
                f"{program} lacks a library: {line.strip()}",
                hint="install it, or another build of llama-server",
            )
    return found


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.type = kind
    entry.mode = mode
    return entry
