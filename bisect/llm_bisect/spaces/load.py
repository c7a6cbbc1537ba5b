"""Reading profiles: a name, a profile file, or a compose file. Every error names file, line and key."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_bisect.model import Bound, Trend, UsageProblem
from llm_bisect.spaces import resources
from llm_bisect.spaces.engine_files import load_engine
from llm_bisect.spaces.engines import EngineDescription
from llm_bisect.spaces.load_axes import read_axes, read_toggles
from llm_bisect.spaces.load_launches import RUNNERS, read_launches
from llm_bisect.spaces.node import Node, amount, parse_yaml, shown
from llm_bisect.spaces.profile import Axis, ProbeSpec, Profile
from llm_bisect.spaces.units import parse_duration_s, parse_mib, parse_tokens
from llm_bisect.spaces.yaml_limits import MAX_BYTES, compose_files, content

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
    "share_mounts",
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
_PIN_SOURCES = ("repository", "image", "package")


def load_profile(name_or_path: str, *, runner: str | None = None) -> Profile:
    """The profile of that name, in that file, or made from that compose file. Raises UsageProblem, also
    where it has no launch for `runner`."""
    if name_or_path.startswith(("http://", "https://")):
        raise UsageProblem(
            f"{name_or_path} is an address: bisect downloads nothing",
            hint="download it, read it, give its path",
        )
    path = resources.find("search_spaces", name_or_path)
    if _is_compose(path):
        return _from_compose(path, runner)
    profile = read_profile(Node(path, "", parse_yaml(path)), extra=b"")
    if runner is not None and runner not in RUNNERS:
        raise UsageProblem(f"there is no runner {runner!r}", hint=f"known: {', '.join(RUNNERS)}")
    if runner is not None and runner not in profile.launches:
        raise UsageProblem(
            f"profile {profile.name!r} has no launch for --runner {runner}",
            hint=f"it has: {', '.join(profile.launches)}; add launches.{runner} to {path.name} for another",
        )
    return profile


def _is_compose(path: Path) -> bool:
    """By its top-level key. A compose file may hold tags (`!override`) that no profile has, so that one
    which cannot be parsed here is judged by its text and left to Compose."""
    try:
        data = parse_yaml(path)
    except UsageProblem:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_BYTES)  # it may be anything, weights too
        return bool(re.search(r"^services:", text, re.MULTILINE)) and "\nprofile:" not in f"\n{text}"
    return isinstance(data, dict) and "services" in data and "profile" not in data


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
    engine = _engine(root)
    launches = read_launches(root)
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
        pins=_pins(root),
        source_sha256=_digest(root.path if path is None else path, launches, extra),
    )


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


def _pins(root: Node) -> dict[str, Mapping[str, object]]:
    """What may be pinned: each names where its versions come from; the rest is kept as it is."""
    pins = root.mappings("pins")
    for node in pins.values():
        named = [key for key in _PIN_SOURCES if node.get(key) is not None]
        if len(named) != 1:
            raise node.problem(
                "", f"a pin needs one of {', '.join(_PIN_SOURCES)}", "e.g. {repository: patches/genesis}"
            )
        node.text(named[0])
    return {name: dict(node.data) for name, node in pins.items()}


def _engine(root: Node) -> EngineDescription:
    """By name; a path lies beside the profile."""
    name = root.text("engine")
    beside_it = root.path.parent / Path(name).expanduser()
    try:
        return load_engine(str(beside_it) if "/" in name and beside_it.is_file() else name)
    except UsageProblem as problem:
        raise root.problem("engine", problem.message.rstrip("."), problem.hint or "") from None


def _digest(path: Path, launches: Mapping[str, Mapping[str, Any]], extra: bytes) -> str:
    """Hash of the profile's and its compose files' bytes, with what these include: a study is refused when
    they change."""
    digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"")
    digest.update(extra)
    for launch in launches.values():
        for file in compose_files(Path(str(launch["compose"]))) if launch.get("compose") else ():
            digest.update(content(file))
    return digest.hexdigest()
