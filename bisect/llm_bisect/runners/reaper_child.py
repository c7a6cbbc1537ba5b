"""What the reaper's own process runs. Starts with next to no imports: it must be there within moments."""

from __future__ import annotations

import json
import signal
import sys

_PATIENCE_S = 60.0
_LOOK_AGAIN_S = 0.4


def main() -> int:
    """Read messages until told `done` (exit 0) or until the pipe closes: then stop what is guarded."""
    for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    guarded: dict[str, dict[str, object]] = {}
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # bisect died in the middle of a line
        if message.get("done"):
            return 0
        if "guard" in message:
            guarded[message["guard"]["boot"]] = message["guard"]
        if "release" in message:
            guarded.pop(message["release"], None)
    for item in guarded.values():
        stop(item)
    return 0


def stop(item: dict[str, object]) -> None:
    """Stop one boot, looking again until nothing of it is left: a start may still be on its way."""
    import time
    from pathlib import Path

    from llm_bisect.runners import procs

    study, boot, owner = (str(item[name]) for name in ("study", "boot", "owner"))
    deadline = time.monotonic() + _PATIENCE_S
    clean = 0
    while clean < 2 and time.monotonic() < deadline:
        # the engine itself, or a compose command that is still starting it
        left = [str(identity) for identity, _ in procs.find(study, boot, owner)]
        procs.kill_all(study, boot, owner)
        if item.get("kind") == "docker":
            from llm_bisect.runners.engine_api import DaemonGone, remove_labelled

            try:
                left += remove_labelled(str(item["socket"]), study, boot, owner)
            except DaemonGone:
                left.append("unknown")
        clean = 0 if left else clean + 1
        if clean < 2:
            time.sleep(_LOOK_AGAIN_S)
    folder = str(item.get("cgroup") or "")
    if folder:
        from llm_bisect.runners.cgroup import MemoryGroup

        version = item.get("cgroup_version")
        MemoryGroup(Path(folder), version if isinstance(version, int) else 1).kill_and_remove()
