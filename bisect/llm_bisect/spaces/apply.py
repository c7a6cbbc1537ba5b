"""From a profile and values to a launch: each value goes in the way that the launch itself offers.

In this order: a Compose variable that the file really interpolates, a flag, an environment variable, a
flag that takes JSON, a mount, the image. What was applied is read back: a value that would not reach the
engine is an error, never a candidate that differs only in name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llm_bisect.model import AxisValue, Launch, Mount, UsageProblem, Values
from llm_bisect.model.secrets import MASK, is_secret_name, mask_secrets
from llm_bisect.spaces.argv import (
    effective,
    find_flag,
    flag_variable,
    is_flag,
    remove_flag,
    script_of,
    set_flag,
)
from llm_bisect.spaces.compose import variable_value
from llm_bisect.spaces.identity import candidate_id
from llm_bisect.spaces.launches import Base, base_launch, words_of
from llm_bisect.spaces.load import axis as axis_of
from llm_bisect.spaces.profile import Axis, Profile
from llm_bisect.spaces.reading import VariableValue, flags_of, mount_target, payload_of, read_axis, text_of

__all__ = ["candidate_id", "check_values", "describe_difference", "own_values", "resolve_launch"]


@dataclass
class _Draft:
    """A launch in the making, with what a compose override has to change for it."""

    launch: Launch
    variables: Mapping[str, str] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    command_set: bool = False
    added: dict[str, Mount] = field(default_factory=dict)  # by target
    dropped: list[str] = field(default_factory=list)
    image_set: bool = False


def own_values(profile: Profile, runner: str) -> dict[str, AxisValue]:
    """What each axis (but prompt) is in the user's own launch; None where the launch does not set it.
    Raises UsageProblem, EnvironmentProblem."""
    return _values_of(profile, base_launch(profile, runner, {}))


def resolve_launch(profile: Profile, runner: str, values: Values) -> Launch:
    """The effective launch with `values` applied; {} is the user's own. Raises UsageProblem, also where a
    value has no way to reach the launch, and EnvironmentProblem."""
    base = base_launch(profile, runner, {})
    if not values:
        return base.launch
    check_values(profile, values)
    own = _values_of(profile, base)
    _check_toggles(profile, {**own, **values}, changed=frozenset(values))
    wanted = {
        name: value for name, value in values.items() if name in own and not _equal(own[name], value)
    }  # what the launch has already would only change its spelling
    draft, rest = _by_variables(profile, runner, base, wanted)
    for name in rest:
        _apply(draft, profile.axes[name], wanted[name])
        if not _has(draft.launch, profile.axes[name], wanted[name]):
            raise _unreachable(draft, profile.axes[name])
    return _finish(draft)


def check_values(profile: Profile, values: Values) -> None:
    """Unknown axes, no such choice, toggles that need or exclude each other. Raises UsageProblem."""
    for name, value in values.items():
        one = axis_of(profile, name)
        if one.kind == "choices" and value is not None and str(value) not in {str(v) for v in one.values}:
            raise UsageProblem(
                f"{value!r} is no choice of axis {name!r}",
                hint=f"accepted: {', '.join(str(v) for v in one.values)}",
            )
    _check_toggles(profile, values, changed=frozenset(values))


def describe_difference(own: Launch, candidate: Launch) -> list[str]:
    """What a candidate changes against the user's own launch, one line each, without secrets; empty where
    nothing."""
    lines: list[str] = []
    if own.image != candidate.image:
        lines.append(f"image: {own.image} → {candidate.image}")
    # as the engine gets them: a variable may have changed the script of an entrypoint
    before_flags, after_flags = (_by_flag(effective(words_of(one), one.env)) for one in (own, candidate))
    for flag in {**before_flags, **after_flags}:
        before, after = (_flag_shown(flag, flags.get(flag)) for flags in (before_flags, after_flags))
        if before != after:
            lines.append(str(mask_secrets(f"{flag or 'command'}: {before} → {after}")))
    for key in sorted({*own.env, *candidate.env}):
        if own.env.get(key) != candidate.env.get(key):
            before, after = (_shown(key, one.env.get(key)) for one in (own, candidate))
            lines.append(f"environment {key}: {before} → {after}")
    had, has = ({m.target: m for m in one.mounts} for one in (own, candidate))
    lines += [f"mount {t}: {m.source} → taken out" for t, m in had.items() if t not in has]
    lines += [f"mount {t}: {m.source}" for t, m in has.items() if had.get(t) != m]
    return lines


def _by_flag(command: Sequence[str]) -> dict[str, list[str]]:
    """Each flag of a command with its values; what comes before the first flag stands under ''."""
    script = script_of(command)
    args = min(script.args, len(command)) if script is not None else 0
    flags: dict[str, list[str]] = {"": list(command[:args])}
    flag = ""
    for word in command[args:]:
        if is_flag(word):
            flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            flags.setdefault(flag, []).extend([value] if equals else [])
        else:
            flags[flag].append(word)
    return flags


def _flag_shown(flag: str, values: list[str] | None) -> str:
    return "not given" if values is None else shlex.join(values) or ("given" if flag else "nothing")


def _values_of(profile: Profile, base: Base) -> dict[str, AxisValue]:
    variable = _variable_reader(base)
    return {
        name: read_axis(one, base.launch, variable)
        for name, one in profile.axes.items()
        if one.kind != "prompt"
    }


def _variable_reader(base: Base) -> VariableValue:
    ref = base.launch.compose
    if ref is None:
        return lambda name: None
    return lambda name: variable_value(ref.file, name) if name in base.offered else None


def _check_toggles(profile: Profile, values: Values, *, changed: frozenset[str]) -> None:
    on = {name for name, value in values.items() if value == "on" and profile.axes[name].toggle}
    for name in sorted(on):
        for other in profile.axes[name].requires:
            if values.get(other) == "off" and changed & {name, other}:
                raise UsageProblem(f"toggle {name} needs {other}, which is off", hint=f"set {other} on, too")
        for other in profile.axes[name].conflicts:
            if other in on and changed & {name, other}:
                raise UsageProblem(
                    f"toggles {name} and {other} exclude each other", hint="set one of them off"
                )


def _by_variables(profile: Profile, runner: str, base: Base, wanted: Values) -> tuple[_Draft, list[str]]:
    """The launch with every value that a Compose variable of the file carries to the engine, and the names of
    the axes that are left."""
    variables: dict[str, str] = {}
    through: dict[str, str] = {}
    for name, value in wanted.items():
        one = profile.axes[name]
        variable = next((v for v in one.apply.variable if v in base.offered), None)
        text = _variable_text(one, value)
        if variable is not None and text is not None and variable not in variables:
            variables[variable], through[name] = text, variable
    if not variables:
        return _Draft(base.launch), list(wanted)
    trial = base_launch(profile, runner, variables).launch
    for name, variable in through.items():
        one = profile.axes[name]
        if _has(trial, one, wanted[name]):
            continue
        alone = base_launch(profile, runner, {variable: variables[variable]}).launch
        # A script may use it in ways that cannot be read; where it changes nothing, or something else, it
        # is not this axis's.
        if _config(alone) == _config(base.launch) or _is_read(one, alone):
            del variables[variable]
    reached = {name for name, variable in through.items() if variable in variables}
    launch = base_launch(profile, runner, variables).launch
    return _Draft(launch, variables), [name for name in wanted if name not in reached]


def _variable_text(one: Axis, value: AxisValue) -> str | None:
    if one.toggle:
        return "1" if value == "on" else "0"
    payload = payload_of(one, value)
    return None if payload is None else text_of(payload)


def _config(launch: Launch) -> Launch:
    return replace(launch, compose=None)


def _is_read(one: Axis, launch: Launch) -> bool:
    """True where the launch itself shows a value of the axis."""
    return not one.toggle and read_axis(one, launch) is not None


def _apply(draft: _Draft, one: Axis, value: AxisValue) -> None:
    apply, payload = one.apply, payload_of(one, value)
    on = value == "on" if one.toggle else payload is not None
    if apply.mount:
        target = mount_target(one, draft.launch)
        if target is None:
            raise UsageProblem(
                f"toggle {one.name!r}: the launch does not mount {apply.mount}, so its place is not known",
                hint="add target: /path/in/the/container to its apply",
            )
        _set_mount(draft, apply.mount, target, on=on)
    elif flags_of(one) and not _prefers_env(draft.launch, one):
        _set_flags(draft, one, None if one.toggle or not on else text_of(payload), on=on)
    elif apply.env:
        _set_env(draft, apply.env, _env_text(draft.launch, one, payload, on=on))
    elif apply.image and on:
        draft.launch = replace(draft.launch, image=text_of(payload))
        draft.image_set = True
    else:
        raise _unreachable(draft, one)


def _prefers_env(launch: Launch, one: Axis) -> bool:
    """True where the launch sets it by the environment, or has no command that a flag could join (the image's
    own would be replaced)."""
    if one.apply.env is None or find_flag(words_of(launch), flags_of(one), launch.env) is not None:
        return False
    return one.apply.env in launch.env or not words_of(launch)


def _env_text(launch: Launch, one: Axis, payload: object, *, on: bool) -> str | None:
    if not one.toggle:
        return text_of(payload) if on else None
    spelled = launch.env.get(str(one.apply.env), "").lower() in ("true", "false")
    return ("true" if on else "false") if spelled else ("1" if on else "0")


def _set_flags(draft: _Draft, one: Axis, text: str | None, *, on: bool) -> None:
    spellings = flags_of(one)
    carrier = flag_variable(words_of(draft.launch), spellings)
    if carrier is not None and carrier in draft.launch.env and text is not None:
        _set_env(draft, carrier, text)  # a script takes it from there
        return
    entrypoint, words = draft.launch.entrypoint or (), draft.launch.command
    for names in (spellings, *one.apply.also_flags):
        if on:
            words = set_flag(entrypoint, words, names, text)
        else:
            words = remove_flag(entrypoint, words, names, switch=one.toggle)
    if not on and one.apply.env and one.apply.env in draft.launch.env:
        _set_env(draft, one.apply.env, None)
    draft.launch = replace(draft.launch, command=words)
    draft.command_set = True


def _set_env(draft: _Draft, name: str, text: str | None) -> None:
    env = {k: v for k, v in draft.launch.env.items() if k != name}
    draft.launch = replace(draft.launch, env=env if text is None else {**env, name: text})
    draft.env[name] = text


def _set_mount(draft: _Draft, source: str, target: str, *, on: bool) -> None:
    rest = tuple(m for m in draft.launch.mounts if m.target != target)
    if on:
        mount = Mount(source, target, read_only=True)
        draft.launch = replace(draft.launch, mounts=(*rest, mount))
        draft.added[target] = mount
    else:
        draft.launch = replace(draft.launch, mounts=rest)
        draft.dropped.append(target)


def _unreachable(draft: _Draft, one: Axis) -> UsageProblem:
    ref = draft.launch.compose
    where = (
        f"service {ref.service} of {ref.file}" if ref else f"the launch for --runner {draft.launch.runner}"
    )
    name = (one.apply.variable or (one.name.upper().replace("-", "_"),))[0]
    flag = next(iter(flags_of(one)), one.apply.env or one.name)
    hint = f"write {flag} ${{{name}:-…}} there and apply: {{variable: {name}}} in the profile"
    if ref is None:
        hint = f"write {flag} as a word of its command, or correct the axis's `apply` in the profile"
    return UsageProblem(f"{where} offers no way to set axis {one.name!r}", hint=hint)


def _has(launch: Launch, one: Axis, value: AxisValue) -> bool:
    """True where the engine gets the value by this launch. None: it gets none."""
    found = read_axis(one, launch)
    is_unset = found is None or (one.kind == "choices" and not one.toggle and payload_of(one, found) is None)
    return is_unset if value is None else _equal(found, value)


def _equal(a: AxisValue, b: AxisValue) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _shown(key: str, value: str | None) -> str:
    if value is None:
        return "unset"
    return MASK if is_secret_name(key) else str(mask_secrets(value)) or "empty"


def _finish(draft: _Draft) -> Launch:
    if draft.launch.compose is None:
        return draft.launch
    compose = replace(
        draft.launch.compose,
        variables=dict(draft.variables),
        sets_command=draft.command_set,
        sets_env=dict(draft.env),
        adds_mounts=tuple(draft.added.values()),
        drops_mount_targets=tuple(draft.dropped),
        sets_image=draft.image_set,
    )
    return replace(draft.launch, compose=compose)
