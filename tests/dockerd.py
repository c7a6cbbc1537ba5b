"""A Docker daemon of our own, for tests: own socket, exec-root, data-root, pid file, bridge and addresses.

As a script (root only):  python tests/dockerd.py start DIR   prints  DOCKER_HOST=unix://DIR/d.sock
                          python tests/dockerd.py stop DIR
It never speaks to another daemon on the machine, and leaves the machine's packet filter alone: containers
get no way out, and published ports are served by Docker's userland proxy.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

NEEDED = ("dockerd", "containerd", "runc", "ip")


@dataclass(frozen=True)
class Daemon:
    """One running daemon; `host` is a value for DOCKER_HOST."""

    folder: str
    host: str
    pid: int
    start_ticks: int
    bridge: str
    octet: int


def why_not() -> str | None:
    """Why a daemon cannot be started here, or None."""
    if sys.platform != "linux":
        return "dockerd needs Linux"
    if os.geteuid() != 0:
        return "not root: a dockerd of our own needs it"
    missing = [name for name in NEEDED if _which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install docker.io containerd runc iproute2)"
    return None


def start(folder: Path, *, timeout_s: float = 60.0) -> Daemon:
    """Start a daemon that lives in `folder` (made; its path must be short: sockets allow 107 characters).

    Raises RuntimeError with the daemon's last words where it does not come up.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)
    bridge, octet = _make_bridge()
    sock = folder / "d.sock"
    argv = [
        str(_which("dockerd")),
        f"--host=unix://{sock}",
        f"--data-root={folder / 'data'}",
        f"--exec-root={folder / 'run'}",
        f"--pidfile={folder / 'd.pid'}",
        f"--bridge={bridge}",
        f"--default-address-pool=base=10.{octet}.128.0/17,size=26",
        "--iptables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        f"--config-file={folder / 'no-config.json'}",
        "--log-level=warn",
    ]
    (folder / "no-config.json").write_text("{}")
    env = {**os.environ, "PATH": _path()}
    env.pop("DOCKER_HOST", None)
    with (folder / "d.log").open("ab") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)
    daemon = Daemon(str(folder), f"unix://{sock}", process.pid, _start_ticks(process.pid) or 0, bridge, octet)
    (folder / "daemon.json").write_text(json.dumps(asdict(daemon)))
    deadline = time.monotonic() + timeout_s
    while not _answers(sock):
        if process.poll() is not None or time.monotonic() > deadline:
            words = (folder / "d.log").read_text(errors="replace")[-2000:]
            stop(folder)
            raise RuntimeError(f"dockerd did not come up: {words}")
        time.sleep(0.05)
    return daemon


def stop(folder: Path, *, timeout_s: float = 40.0) -> None:
    """Stop the daemon that `start` left in `folder`, and remove its bridges, mounts and files."""
    record = folder / "daemon.json"
    if not record.exists():
        return
    daemon = Daemon(**json.loads(record.read_text()))
    _remove_all(daemon)
    for sig in (signal.SIGTERM, signal.SIGKILL):
        if _start_ticks(daemon.pid) != daemon.start_ticks:
            break
        os.kill(daemon.pid, sig)
        deadline = time.monotonic() + timeout_s
        while _start_ticks(daemon.pid) == daemon.start_ticks and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(daemon.pid, os.WNOHANG)
            time.sleep(0.05)
    subprocess.run([str(_which("ip")), "link", "del", daemon.bridge], capture_output=True, check=False)
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        where = line.split()[1]
        if where.startswith(str(folder) + "/"):
            subprocess.run(["umount", "-l", where], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_all(daemon: Daemon) -> None:
    """Containers and networks of this daemon, so that no process and no bridge outlives it."""
    import docker

    with contextlib.suppress(Exception):
        client = docker.DockerClient(base_url=daemon.host, timeout=30)
        for container in client.containers.list(all=True, ignore_removed=True):
            container.remove(force=True)
        client.networks.prune()
        client.close()


def _make_bridge() -> tuple[str, int]:
    """A new bridge on a 10.x network that no route of this machine uses."""
    ip = str(_which("ip"))
    for _ in range(40):
        octet = 64 + secrets.randbelow(128)
        routes = subprocess.run([ip, "-4", "route"], capture_output=True, text=True, check=True).stdout
        name = f"lbt{octet}"
        if f" 10.{octet}." in f" {routes}":
            continue
        made = subprocess.run([ip, "link", "add", name, "type", "bridge"], capture_output=True, check=False)
        if made.returncode != 0:
            continue
        subprocess.run([ip, "addr", "add", f"10.{octet}.0.1/24", "dev", name], check=True)
        subprocess.run([ip, "link", "set", name, "up"], check=True)
        return name, octet
    raise RuntimeError("no bridge could be made for dockerd (ip link add … type bridge)")


def _answers(sock: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
        s.settimeout(2)
        s.connect(str(sock))
        s.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b" 200 " in s.recv(200)
    return False


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"


def _which(name: str) -> str | None:
    return shutil.which(name, path=_path())


def main(argv: list[str]) -> int:
    """`start DIR` or `stop DIR`."""
    if len(argv) != 2 or argv[0] not in ("start", "stop"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[1]).absolute()
    if argv[0] == "stop":
        stop(folder)
        return 0
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 4
    print(f"DOCKER_HOST={start(folder).host}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
