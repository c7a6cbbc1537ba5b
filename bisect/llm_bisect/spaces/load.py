"""Reading profiles: a name, a profile file, or a compose file. Every error names file, line and key."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from llm_bisect.model import Bound, Trend, UsageProblem
from llm_bisect.spaces import resources
from llm_bisect.spaces.engine_files import load_engine
from llm_bisect.spaces.engines import EngineDescription
from llm_bisect.spaces.load_axes import read_axes, read_toggles
from llm_bisect.spaces.node import Node, parse_yaml, shown
from llm_bisect.spaces.profile import Axis, ProbeSpec, Profile
from llm_bisect.spaces.units import parse_duration_s, parse_mib, parse_tokens

_T = TypeVar("_T")

RUNNERS = ("docker", "process", "simulated")
PROMPT_TRENDS = dict.fromkeys((Bound.MEMORY, Bound.TIME, Bound.RECALL, Bound.CONTEXT), Trend.FALLS)

_KEYS = (
    "profile",
    "engine",
    "launch",
    "launches",
    "probe",
    "margin_mib",
    "reserve_mib",
    "margin_tiers_mib",
    "tolerance",
    "boot",
    "axes",
    "toggles",
    "pins",
    "historical",
)
_PROBE_KEYS = (
    "shape",
    "target",
    "start",
    "max_tokens",
    "deadline",
    "silence",
    "slow",
    "depths",
    "max_prompt",
)
_COMPOSE_KEYS = ("runner", "compose", "service", "share_mounts")
_IMAGE_KEYS = (
    "runner",
    "image",
    "command",
    "entrypoint",
    "environment",
    "volumes",
    "gpus",
    "memory_limit",
    "model",
    "ipc",
    "shm_size",
    "port",
    "share_mounts",
)
_PROCESS_KEYS = ("runner", "command", "env", "model", "memory_limit", "gpus")
_SIMULATED_KEYS = ("runner", "card", "model")


def load_profile(name_or_path: str, *, runner: str | None = None) -> Profile:
    """The profile of that name, in that file, or made from that compose file. Raises UsageProblem, also
    where it has no launch for `runner`."""
    if name_or_path.startswith(("http://", "https://")):
        raise UsageProblem(
            f"{name_or_path} is an address: bisect downloads nothing",
            hint="download it, read it, give its path",
        )
    path = resources.find("search_spaces", name_or_path)
    data = parse_yaml(path)
    if isinstance(data, dict) and "services" in data and "profile" not in data:
        return _from_compose(path, runner)
    profile = read_profile(Node(path, "", data), extra=b"")
    if runner is not None and runner not in RUNNERS:
        raise UsageProblem(f"there is no runner {runner!r}", hint=f"known: {', '.join(RUNNERS)}")
    if runner is not None and runner not in profile.launches:
        raise UsageProblem(
            f"profile {profile.name!r} has no launch for --runner {runner}",
            hint=f"it has: {', '.join(profile.launches)}; add launches.{runner} to {path.name} for another",
        )
    return profile


def _from_compose(path: Path, runner: str | None) -> Profile:
    from llm_bisect.spaces.init import profile_from_compose

    if runner not in (None, "docker"):
        raise UsageProblem(
            f"a compose file runs in Docker only, not --runner {runner}", hint="bisect init makes a profile"
        )
    import tempfile

    text = profile_from_compose(path, None)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        made = Path(folder) / path.name
        made.write_text(text, encoding="utf-8")
        return read_profile(Node(made, "", parse_yaml(made)), extra=path.read_bytes(), path=path)


def axis(profile: Profile, name: str) -> Axis:
    """The axis of that name. Raises UsageProblem with the axes that there are."""
    if name in profile.axes:
        return profile.axes[name]
    known = list(profile.axes)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageProblem(
        f"profile {profile.name!r} has no axis {name!r}", hint=f"{hint}its axes: {', '.join(sorted(known))}"
    )


def read_profile(root: Node, *, extra: bytes, path: Path | None = None) -> Profile:
    """A profile from its parsed file. `extra` bytes count towards its hash. Raises UsageProblem."""
    root.only(_KEYS)
    engine = load_engine(root.text("engine"))
    launches = _launches(root, engine)
    axes = read_axes(root, engine)
    for name, toggle in read_toggles(root, axes).items():
        axes[name] = toggle
    axes["prompt"] = Axis("prompt", "prompt", unit="tokens", trends=PROMPT_TRENDS)
    tolerance, tolerance_tokens = _tolerance(root)
    boot = root.mapping("boot")
    boot.only(("deadline", "silence"))
    defaults = Profile("", None, engine, {}, ProbeSpec(), {})
    return Profile(
        name=root.text("profile"),
        path=path or root.path,
        engine=engine,
        launches=launches,
        probe=_probe(root),
        axes=axes,
        margin_mib=amount(root, "margin_mib", parse_mib, 0.0),
        reserve_mib=amount(root, "reserve_mib", parse_mib, 0.0),
        tiers_mib=_tiers(root, defaults.tiers_mib),
        tolerance=tolerance,
        tolerance_tokens=tolerance_tokens,
        boot_deadline_s=amount(boot, "deadline", parse_duration_s, defaults.boot_deadline_s),
        boot_silence_s=amount(boot, "silence", parse_duration_s, defaults.boot_silence_s),
        historical=root.optional_text("historical"),
        source_sha256=_digest(root.path if path is None else path, launches, extra),
    )


def amount(node: Node, key: str, parse: Callable[[str | int | float], _T], default: _T) -> _T:
    """A quantity with its unit. Raises UsageProblem naming the place."""
    value = node.get(key)
    if value is None:
        return default
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageProblem(
                f"{shown(value)} is no amount", hint="write a number or a text such as 60k or 25m"
            )
        return parse(value)
    except UsageProblem as problem:
        raise node.problem(key, problem.message, problem.hint or "") from None


def _probe(root: Node) -> ProbeSpec:
    node, default = root.mapping("probe"), ProbeSpec()
    node.only(_PROBE_KEYS)
    target = amount(node, "target", parse_tokens, default.target_tokens)
    depths = node.get("depths", list(default.depths))
    if not isinstance(depths, list) or not depths or not all(_is_share(d) for d in depths):
        raise node.problem(
            "depths", f"{shown(depths)} is not a list of depths", "Numbers from 0 to 1, e.g. [0.1, 0.9]."
        )
    return ProbeSpec(
        shape=node.choice("shape", ("needle", "prefill"), default.shape),
        target_tokens=target,
        start_tokens=min(target, amount(node, "start", parse_tokens, default.start_tokens)),
        max_tokens=amount(node, "max_tokens", parse_tokens, default.max_tokens),
        deadline_s=amount(node, "deadline", parse_duration_s, default.deadline_s),
        silence_s=amount(node, "silence", parse_duration_s, default.silence_s),
        slow_s=amount(node, "slow", parse_duration_s, 0.0) or None,
        depths=tuple(float(d) for d in depths),
        max_prompt_tokens=amount(node, "max_prompt", parse_tokens, 0) or None,
    )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _tolerance(root: Node) -> tuple[float, int]:
    value = root.get("tolerance")
    if value is None:
        return Profile.tolerance, Profile.tolerance_tokens
    text = str(value).strip()
    if not text.endswith("%"):
        return 0.0, amount(root, "tolerance", parse_tokens, 1)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise root.problem("tolerance", f"{shown(value)} is no tolerance", "Write 3% or a number of tokens.")
    return share, 1


def _tiers(root: Node, default: tuple[float, float]) -> tuple[float, float]:
    value = root.get("margin_tiers_mib")
    if value is None:
        return default
    fits = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    if not fits or value[0] > value[1]:
        raise root.problem("margin_tiers_mib", f"{shown(value)} is no pair of tiers", "Write [1024, 2048].")
    return float(value[0]), float(value[1])


def _launches(root: Node, engine: EngineDescription) -> dict[str, Mapping[str, object]]:
    """Each runner's launch, checked but not resolved. Compose paths become absolute."""
    if (root.get("launch") is None) == (root.get("launches") is None):
        raise root.problem(
            "launch", "a profile needs either launch or launches", "launch: {compose: FILE} is the shortest."
        )
    if root.get("launch") is not None:
        node = root.mapping("launch")
        named = {node.choice("runner", RUNNERS, "docker"): node}
    else:
        named = root.mapping("launches").data and root.mappings("launches")
        root.mapping("launches").only(RUNNERS)
    readers = {"docker": _docker, "process": _process, "simulated": _simulated}
    launches: dict[str, Mapping[str, object]] = {n: readers[n](node) for n, node in named.items()}
    if "simulated" in launches and "docker" not in launches:
        raise root.problem(
            "launches", "simulated needs the docker launch that it stands in for", "Add launches.docker."
        )
    if not launches:
        raise root.problem("launches", "there is no launch", f"Accepted: {', '.join(RUNNERS)}.")
    return launches


def _docker(node: Node) -> dict[str, object]:
    if node.get("compose") is not None:
        node.only(_COMPOSE_KEYS)
        file = Path(node.text("compose")).expanduser()
        file = file if file.is_absolute() else node.path.parent / file
        return {
            "compose": str(file),
            "service": node.optional_text("service"),
            "share_mounts": node.flag("share_mounts", default=False),
        }
    node.only(_IMAGE_KEYS)
    return {
        "image": node.text("image"),
        "command": list(node.strings("command")),
        "entrypoint": list(node.strings("entrypoint")) or None,
        "environment": _environment(node, "environment"),
        "volumes": list(node.strings("volumes")),
        "gpus": node.get("gpus"),
        "memory_limit": _limit(node),
        "model": _model(node),
        "ipc": node.optional_text("ipc"),
        "shm_size": amount(node, "shm_size", parse_mib, 0.0) or None,
        "port": node.port("port") if node.get("port") is not None else None,
        "share_mounts": node.flag("share_mounts", default=False),
    }


def _process(node: Node) -> dict[str, object]:
    node.only(_PROCESS_KEYS)
    command = list(node.strings("command"))
    if not command:
        raise node.problem("command", "a process needs a command", 'e.g. [llama-server, --port, "{port}", …]')
    return {
        "command": command,
        "env": _environment(node, "env"),
        "model": _model(node),
        "memory_limit": _limit(node),
        "gpus": node.get("gpus"),
    }


def _simulated(node: Node) -> dict[str, object]:
    node.only(_SIMULATED_KEYS)
    return {"card": node.text("card"), "model": node.text("model")}


def _environment(node: Node, key: str) -> dict[str, str]:
    found = node.mapping(key).data
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise node.problem(key, f"{name}: {shown(value)} is no text", 'Put it in quotes, e.g. "1".')
    return {name: str(value) for name, value in found.items()}


def _limit(node: Node) -> int | None:
    mib = amount(node, "memory_limit", parse_mib, 0.0)
    return round(mib) if mib else None


def _model(node: Node) -> str | None:
    text = node.optional_text("model")
    if text is None or text.startswith("builtin:"):
        return text
    path = Path(text).expanduser()
    return str(path if path.is_absolute() else node.path.parent / path)


def _digest(path: Path, launches: Mapping[str, Mapping[str, Any]], extra: bytes) -> str:
    """Hash of the profile's and its compose files' bytes: a study is refused when they change."""
    digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"")
    digest.update(extra)
    for launch in launches.values():
        file = Path(str(launch.get("compose") or ""))
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()
