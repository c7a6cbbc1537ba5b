"""`bisect export`: a point of a study as a compose file, env lines, Markdown, or JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from llm_bisect.journal.state import State
from llm_bisect.model import Launch, UsageProblem, Values
from llm_bisect.model.secrets import mask_secrets
from llm_bisect.reports.answers import answer_object
from llm_bisect.reports.export_compose import compose_override, service_file
from llm_bisect.reports.export_env import env_lines
from llm_bisect.reports.export_markdown import markdown
from llm_bisect.reports.export_point import Point, point_of
from llm_bisect.reports.words import scrub_all
from llm_bisect.spaces.apply import resolve_launch
from llm_bisect.spaces.compose import compose_variables
from llm_bisect.spaces.profile import Profile

FORMATS = ("compose", "env", "markdown", "json")


def export(
    state: State,
    profile: Profile | None,
    to: str,
    *,
    include_unconfirmed: bool = False,
    standalone: bool = False,
    measured_on: str | None = None,
) -> str:
    """The recommended point of a study as text.

    `profile` may be None for `markdown` and `json`. `standalone`: with `compose`, the whole file instead of
    an override. `measured_on`: the date to print. Raises UsageProblem where there is no such point, format
    or launch.
    """
    if to not in FORMATS:
        raise UsageProblem(f"--to {to!r} is no export format", hint=f"accepted: {', '.join(FORMATS)}")
    if not state.opened:
        raise UsageProblem("this journal holds no question yet", hint="run the command that began it again")
    obj = answer_object(state)
    point = point_of(state, obj, include_unconfirmed=include_unconfirmed, measured_on=measured_on)
    if to == "markdown":
        return markdown(point, state)
    if to == "json":
        return _json(point)
    if profile is None:
        raise UsageProblem(
            f"--to {to} needs the study's profile, which cannot be found",
            hint="--to json and --to markdown need only the journal",
        )
    own, chosen = _launches(point, profile, to)
    if to == "env":
        return env_lines(point, profile, own, chosen)
    if chosen.compose is not None:
        heading = point.heading(f"override of {chosen.compose.service}")
        return compose_override(own, chosen, heading, standalone=standalone)
    name = re.sub(r"[^a-z0-9_-]", "-", str(point.obj["profile"]).lower()).strip("-_") or "engine"
    return service_file(chosen, name, point.heading(f"service {name}"))


def _launches(point: Point, profile: Profile, to: str) -> tuple[Launch, Launch]:
    """The user's own launch and the point's; a simulated point's are those that it stands for."""
    runner = str(point.obj["runner"])
    if runner == "simulated":
        real = [name for name in ("docker", "process") if name in profile.launches]
        if not real:
            raise UsageProblem(
                f"profile {profile.name!r} has only a simulated launch: --to {to} has nothing to write",
                hint="use --to markdown or --to json",
            )
        runner = real[0]
    if to == "compose" and runner == "process":
        raise UsageProblem(
            f"profile {profile.name!r} starts a process, which a compose file cannot say",
            hint="use --to env or --to json",
        )
    own, chosen = resolve_launch(profile, runner, {}), resolve_launch(profile, runner, point.values)
    return own, pinned(chosen, profile, point.values)


def pinned(launch: Launch, profile: Profile, values: Values) -> Launch:
    """The launch with every value that a Compose variable reaches set by it, also where it is the user's own.

    Their own value may come from an `.env` or a shell that nobody else has.
    """
    if launch.compose is None:
        return launch
    variables = dict(launch.compose.variables)
    offered = compose_variables(launch.compose.file)
    for name, value in values.items():
        axis = profile.axes.get(name)
        if axis is None or axis.toggle or value is None:
            continue
        payload = axis.payloads.get(str(value)) if axis.kind == "choices" else value
        variable = next((v for v in axis.apply.variable if v in offered), None)
        if variable is not None and payload is not None and variable not in variables:
            is_json = isinstance(payload, dict | list)
            variables[variable] = json.dumps(payload, separators=(",", ":")) if is_json else str(payload)
    return replace(launch, compose=replace(launch.compose, variables=variables))


def _json(point: Point) -> str:
    """The answer object and, under `export`, the point with its proof and limits."""
    export_part: dict[str, Any] = {
        "values": dict(point.values),
        "prompt_tokens": point.prompt_tokens,
        "confirmed": point.is_confirmed,
        "proof": list(point.proof),
        "limits": point.limits,
        "measured_on": point.measured_on,
        "version": point.version,
    }
    whole = scrub_all(mask_secrets({**point.obj, "export": export_part}))
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
