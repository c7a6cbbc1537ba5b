"""Opening a study: from a question to a driver, or back to one that a journal holds.

Everything that can be refused is refused here, before the first boot: arguments and profile (exit status
2), the machine and the journal (4).
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llm_bisect import __version__
from llm_bisect.journal.locate import check_writable, study_path
from llm_bisect.journal.state import State, fold, values_key
from llm_bisect.journal.store import Journal, read_journal
from llm_bisect.model import AxisValue, EnvironmentProblem, Launch, UsageProblem
from llm_bisect.probing.prober import Prober
from llm_bisect.probing.served import served_facts
from llm_bisect.runners.make import make_runner
from llm_bisect.runners.protocol import Runner
from llm_bisect.search.ceiling import contradictions, decide
from llm_bisect.search.foresee import prices_of
from llm_bisect.search.plan import Ask, Plan
from llm_bisect.spaces.apply import own_values, resolve_launch
from llm_bisect.spaces.load import axis as axis_of
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.profile import Axis, Profile
from llm_bisect.spaces.values import parse_value
from llm_bisect.study import Budget, Driver, Reporter

REAL_RUNNERS = ("docker", "process")  # the simulated one is never chosen unless asked for
P90_OVER_MEAN = 1.5
LEAST_FREE_MIB = 16  # a night's journal and logs take less; without them a verdict has no evidence


@dataclass(frozen=True)
class Question:
    """A `ceiling` question as the user asked it; kept in the journal so that `resume` can ask it again."""

    profile: str
    axis: str
    runner: str | None = None
    study: str | None = None
    target_tokens: int | None = None
    sets: Mapping[str, str] = field(default_factory=dict)
    confirm: int = 3
    tolerance: str | None = None
    gpus: tuple[str, ...] = ()
    allow_pull: bool = False
    reserve_mib: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prepared:
    """A question made concrete: nothing has been booted and nothing written."""

    question: Question
    profile: Profile
    runner: str
    plan: Plan
    own: Launch
    study: str


def prepare(question: Question) -> Prepared:
    """Resolve profile, axis and launch. Raises UsageProblem."""
    profile = load_profile(question.profile, runner=question.runner)
    runner = question.runner or default_runner(profile)
    if question.gpus and runner == "simulated":
        raise UsageProblem(
            "--gpu selects GPUs of this machine, and the simulated rig uses none",
            hint="its card is named in the profile (launches.simulated.card)",
        )
    chosen = axis_of(profile, question.axis)
    fixed = {
        name: parse_value(axis_of(profile, name), text, where=f"--set {name}={text}")
        for name, text in question.sets.items()
        if name != question.axis
    }
    own = own_values(profile, runner)
    own_value = own.get(chosen.name)
    if question.axis in question.sets:
        own_value = parse_value(chosen, question.sets[question.axis], where=f"--set {question.axis}")
    plan = _plan(question, profile, chosen, own_value, fixed, runner)
    study = _default_study(question, profile, plan, runner) if question.study is None else question.study
    return Prepared(question, profile, runner, plan, resolve_launch(profile, runner, plan.own_values), study)


def default_runner(profile: Profile) -> str:
    """The first real runner that the profile has a launch for. Raises UsageProblem where it has none."""
    for name in REAL_RUNNERS:
        if name in profile.launches:
            return name
    raise UsageProblem(
        f"profile {profile.name!r} has no launch for a real engine",
        hint="--runner simulated runs it on the simulated rig, and every answer will say so",
    )


def _default_study(question: Question, profile: Profile, plan: Plan, runner: str) -> str:
    """Profile, command, axis and target; the runner and set values too where they are not the default."""
    parts = [profile.name, "ceiling", plan.axis, f"{plan.target_tokens}"]
    if runner != "docker":
        parts.append(runner)
    parts += [f"{k}-{v}" for k, v in sorted(question.sets.items())]
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in "-".join(parts))[:120]


def _plan(
    question: Question,
    profile: Profile,
    axis: Axis,
    own: AxisValue,
    fixed: Mapping[str, AxisValue],
    runner: str,
) -> Plan:
    spec = profile.probe
    share, tokens = profile.tolerance, profile.tolerance_tokens
    if question.tolerance is not None:
        share, tokens = parse_tolerance(question.tolerance)
    # nobody else uses a simulated card: only a reserve that was asked for counts there
    usual = 0.0 if runner == "simulated" else profile.reserve_mib
    reserve = usual if question.reserve_mib is None else question.reserve_mib
    if not math.isfinite(reserve):
        raise UsageProblem(f"--reserve-mib {reserve} is no amount of memory", hint="e.g. 512")
    return Plan(
        axis=axis.name,
        kind=axis.kind,
        target_tokens=question.target_tokens or spec.target_tokens,
        own=None if axis.kind == "prompt" else own,
        points=axis.values,
        fixed=dict(fixed),
        prefer=axis.prefer,
        trends=dict(axis.trends),
        start_tokens=spec.start_tokens,
        confirm=question.confirm,
        tolerance=share,
        tolerance_tokens=tokens,
        margin_mib=profile.margin_mib + reserve,
        tiers_mib=profile.tiers_mib,
        deadline_s=spec.deadline_s,
        max_tokens=spec.max_tokens,
        max_prompt_tokens=spec.max_prompt_tokens,
    )


def parse_tolerance(text: str) -> tuple[float, int]:
    """`3%` is a share of the prompt, `128` or `1k` a number of tokens. Raises UsageProblem."""
    from llm_bisect.spaces.units import parse_tokens

    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 < share < 1:
            raise UsageProblem(f"--tolerance {text!r} is not a share between 0 and 100 %", hint="e.g. 3%")
        return share, 1
    try:
        return 0.0, parse_tokens(text)
    except UsageProblem:
        message = f"--tolerance {text!r} is neither a share nor a number of tokens"
        raise UsageProblem(message, hint="e.g. 3% or 1k") from None


def start(
    prepared: Prepared,
    journals: Path,
    reporter: Reporter,
    stop: threading.Event,
    budget: Budget,
    *,
    reverify: bool = False,
    runner: Runner | None = None,
) -> tuple[Driver, Journal]:
    """Check the machine, open or continue the journal, adopt or reap what a crash left.

    Raises EnvironmentProblem (nothing has been written then) or UsageProblem where the study of that name
    asks something else.
    """
    path = study_path(prepared.study, journals)
    if path.exists():
        refuse_other_question(prepared, fold(read_journal(path)))
    refuse_full_disk(path.parent)
    runner = runner or make_runner(prepared.runner)
    gpus = prepared.question.gpus
    runner.preflight(prepared.own, gpus=gpus, allow_pull=prepared.question.allow_pull)
    fingerprint = dict(runner.fingerprint(prepared.own))
    journal = Journal.open(path)
    try:
        if journal.repaired:
            reporter.notice(f"{path.name}: {journal.repaired} repaired; nothing that was recorded is lost")
        driver = Driver(
            study=prepared.study,
            profile=prepared.profile,
            journal=journal,
            runner=runner,
            prober=Prober(prepared.profile.engine),
            policy=partial(decide, plan=prepared.plan),
            resolve=partial(resolve_launch, prepared.profile, prepared.runner),
            check_room=partial(refuse_full_disk, path.parent),
            served=partial(served_facts, prepared.profile.engine),
            next_p90_s=partial(_next_p90_s, prepared.plan),
            contradictions=partial(contradictions, plan=prepared.plan),
            reporter=reporter,
            stop=stop,
            budget=budget,
            gpus=gpus,
            allow_pull=prepared.question.allow_pull,
        )
        _continue(driver, prepared, fingerprint, reverify=reverify)
    except BaseException:
        journal.close()
        raise
    return driver, journal


def refuse_full_disk(folder: Path) -> None:
    """Raise EnvironmentProblem where journals cannot be written, or hardly anything is free."""
    check_writable(folder)
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    free_mib = shutil.disk_usage(nearest).free / 2**20
    if free_mib < LEAST_FREE_MIB:
        raise EnvironmentProblem(
            f"{nearest} has {free_mib:.1f} MiB of space left: journal and logs need {LEAST_FREE_MIB} MiB",
            hint="free some space there, or give another folder with --journals or $BISECT_JOURNALS",
        )


def _continue(driver: Driver, prepared: Prepared, fingerprint: dict[str, str], *, reverify: bool) -> None:
    """Write the opening events of a new study, or take up an old one where it was left."""
    state = driver.state
    if not state.opened:
        # A crash may have left engines even where its journal was deleted.
        driver.runner.adopt(driver.study, None)
        driver.open_with(opening_body(prepared), fingerprint)
        return
    if not state.fingerprint:  # died between the first two events
        driver.open_with(None, fingerprint)
    elif changed := memory_differences(state.fingerprint, fingerprint):
        if not reverify:
            raise UsageProblem(
                f"study {driver.study!r} was begun on something else: {'; '.join(changed)}",
                hint="--reverify checks both ends of its bracket again; --study NAME starts a new study",
            )
        driver.reverify(changed, fingerprint)
    driver.take_up()


def opening_body(prepared: Prepared) -> dict[str, Any]:
    """What `study_opened` holds: the question, the plan, the profile and the user's own launch."""
    return {
        "study": prepared.study,
        "command": "ceiling",
        "question": asdict(prepared.question),
        "plan": prepared.plan.to_json(),
        "profile": prepared.profile.name,
        "profile_path": str(prepared.profile.path) if prepared.profile.path else None,
        "profile_sha256": prepared.profile.source_sha256,
        "engine": prepared.profile.engine.name,
        "runner": prepared.runner,
        "simulated": prepared.runner == "simulated",
        "launch": {"command": list(prepared.own.command), "image": prepared.own.image},
        "probe": asdict(prepared.profile.probe),
        "seed": prepared.question.seed,
        "version": __version__,
    }


def refuse_other_question(prepared: Prepared, state: State) -> None:
    """A study goes on only with the question that it was opened with. Raises UsageProblem."""
    if not state.opened:
        return
    now = opening_body(prepared)
    differences = [
        f"{key} was {old!r}, now {new!r}"
        for key in ("command", "profile", "runner")
        if (old := state.opened.get(key)) != (new := now[key])
    ]
    before, after = Plan.from_json(state.opened["plan"]).to_json(), prepared.plan.to_json()
    differences += [f"{k} was {before[k]!r}, now {v!r}" for k, v in after.items() if before.get(k) != v]
    if not differences and state.opened["profile_sha256"] != now["profile_sha256"]:
        differences = [f"the profile or its compose file was edited ({prepared.profile.path})"]
    if differences:
        raise UsageProblem(
            f"study {prepared.study!r} asked something else: {'; '.join(differences)}",
            hint="--study NAME starts a new study under another name",
        )


def memory_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Fingerprint items that bear on memory and changed, in words."""
    keys = sorted({k for k in (*before, *now) if k.startswith("memory.")})
    return [
        f"{k.removeprefix('memory.')} was {before.get(k, 'unknown')}, now {now.get(k, 'unknown')}"
        for k in keys
        if before.get(k) != now.get(k)
    ]


def budget_from(max_boots: int | None, max_hours: float | None, until_epoch_s: float | None) -> Budget:
    """Limits of this run, as seconds from now. Raises UsageProblem for hours that are no number."""
    if max_hours is not None and not math.isfinite(max_hours):
        raise UsageProblem(f"--max-hours {max_hours} is no number of hours", hint="e.g. 8, or leave it out")
    limits = [max_hours * 3600] if max_hours is not None else []
    if until_epoch_s is not None:
        limits.append(until_epoch_s - time.time())
    return Budget(max_boots, min(limits) if limits else None)


def _next_p90_s(plan: Plan, state: State, ask: Ask) -> float:
    prices = prices_of(state, plan)
    live = state.live_boot
    served = live is not None and any(t.boot == live.id for t in state.trials)
    usable = live is not None and live.key == values_key(ask.values) and not (ask.fresh and served)
    boot_s = 0.0 if usable else prices.boot_s
    probe_s = min(plan.deadline_s, prices.probe_s(ask.prompt_tokens, plan.target_tokens))
    return P90_OVER_MEAN * (boot_s + probe_s)


def question_of(state: State) -> Question:
    """The question that a journal was opened with. Raises EnvironmentProblem for an empty journal."""
    if not state.opened:
        raise EnvironmentProblem(
            "this journal holds no question yet", hint="run the command that began it again"
        )
    fields = dict(state.opened["question"])
    fields["gpus"] = tuple(fields["gpus"])
    fields["study"] = state.opened["study"]
    return Question(**fields)
