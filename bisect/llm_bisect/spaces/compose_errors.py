"""What Compose says when it refuses a file, as one sentence that names the place."""

from __future__ import annotations

import re
from pathlib import Path

_REQUIRED = re.compile(r"required variable (?P<name>\w+) is missing a value")
_KEY = re.compile(r"validating \S+: (?P<path>services(?:\.[\w-]+)+)")
_LINES = (re.compile(r" at (?:L\d+\.C\d+-)?L(?P<line>\d+)\.C\d+"), re.compile(r"\bline (?P<line>\d+)\b"))
_LONGEST = 500


def refusal(file: Path, stderr: str) -> tuple[str, str]:
    """(sentence, hint) for what Compose printed about `file`. The sentence begins with the file and, where it
    is known, the line."""
    said = _said(stderr)
    required = _REQUIRED.search(said)
    line = _line_of(file, rf"\$\{{{required['name']}:?\?") if required else _line_said(file, said)
    place = f"{file}:{line}" if line else str(file)
    said = re.sub(rf"^validating {re.escape(str(file))}: ", "", said)
    if required:
        name = required["name"]
        return f"{place}: {said}", f"export {name}=…, or write {name}=… into the file .env beside it"
    if "remote resource is disabled" in said:
        return (
            f"{place}: it includes a file from the network: {said}",
            "download it, read it, include the copy",
        )
    return f"{place}: {said}", f"docker compose -f {file} config shows the same"


def _said(stderr: str) -> str:
    """Compose's own words without its warnings, in one line."""
    lines = [line.strip() for line in stderr.splitlines() if "level=warning" not in line]
    return " ".join(line for line in lines if line)[:_LONGEST] or "Compose refuses this file"


def _line_said(file: Path, said: str) -> int | None:
    found = next((m for pattern in _LINES if (m := pattern.search(said))), None)
    if found:
        return int(found["line"])
    key = _KEY.search(said)
    return (
        _line_of(file, rf"^\s*['\"]?{re.escape(key['path'].rpartition('.')[2])}['\"]?\s*:") if key else None
    )


def _line_of(file: Path, pattern: str) -> int | None:
    """The first line of the file with this pattern; None where it stands in another file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((n for n, line in enumerate(lines, 1) if re.search(pattern, line)), None)
