"""A few calls of the Docker Engine API over its unix socket, with the standard library alone.

The reaper uses it: it must start in moments, and the SDK takes a tenth of a second to import. Everything
here touches only what carries a study's label and a boot's.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any
from urllib.parse import quote

STUDY_LABEL = "llm-bisect.study"
BOOT_LABEL = "llm-bisect.boot"
OWNER_LABEL = "llm-bisect.owner"
MACHINE_LABEL = "llm-bisect.machine"
SPEC_LABEL = "llm-bisect.spec"

_ANONYMOUS = re.compile(r"[0-9a-f]{64}")


class DaemonGone(Exception):
    """The daemon does not answer."""


def remove_labelled(path: str, study: str, boot: str, owner: str | None = None) -> list[str]:
    """Remove the containers and networks that carry these labels; the ids of those that were there.

    Volumes stay, but for the nameless ones that Docker made for these very containers. Raises DaemonGone.
    """
    labels = [f"{STUDY_LABEL}={study}", f"{BOOT_LABEL}={boot}"]
    if owner is not None:
        labels.append(f"{OWNER_LABEL}={owner}")
    filters = quote(json.dumps({"label": labels}))
    found, nameless = [], []
    for one in _list(path, f"/containers/json?all=1&filters={filters}"):
        found.append(str(one["Id"]))
        for mount in one.get("Mounts") or []:
            if mount.get("Type") == "volume" and _ANONYMOUS.fullmatch(str(mount.get("Name"))):
                nameless.append(str(mount["Name"]))
        call(path, "DELETE", f"/containers/{one['Id']}?force=1")
    for name in nameless:
        call(path, "DELETE", f"/volumes/{name}")
    for one in _list(path, f"/networks?filters={filters}"):
        found.append(str(one["Id"]))
        call(path, "DELETE", f"/networks/{one['Id']}")
    return found


def remove_until_gone(path: str, study: str, boot: str, patience_s: float = 20.0) -> bool:
    """`remove_labelled` until nothing is left. True where that was reached. Raises DaemonGone."""
    deadline = time.monotonic() + patience_s
    while remove_labelled(path, study, boot):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _list(path: str, target: str) -> list[dict[str, Any]]:
    status, body = call(path, "GET", target)
    if status != 200:
        raise DaemonGone(f"{target}: HTTP {status}")
    answer = json.loads(body)
    return answer if isinstance(answer, list) else []


def call(path: str, method: str, target: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """One request without a body: status and the answer's body. Raises DaemonGone."""
    request = f"{method} {target} HTTP/1.0\r\nHost: docker\r\n\r\n".encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(request)
            parts = []
            while chunk := connection.recv(1 << 16):
                parts.append(chunk)
    except OSError as error:
        raise DaemonGone(str(error)) from error
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise DaemonGone("no HTTP answer")
    return int(words[1]), body
