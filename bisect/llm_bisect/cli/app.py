"""The Typer application: what may be typed. Each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm_bisect._version import __version__

EXIT_HELP = (
    "Exit status: 0 answered · 2 bad arguments, profile or search space · 3 no answer (no feasible point, "
    "budget spent) · 4 this machine cannot run it · 130 interrupted (the same command continues)."
)

app = typer.Typer(
    name="bisect",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Finds how far an LLM serving configuration can be pushed on this GPU, and proves it.",
    epilog=EXIT_HELP,
)

ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", help="A profile's name, a profile file, or a compose file.")
]
RunnerOption = Annotated[
    str | None, typer.Option("--runner", help="docker, process, or simulated (never chosen by itself).")
]
JournalsOption = Annotated[
    str | None,
    typer.Option("--journals", help="Folder of the journals [default: $BISECT_JOURNALS, ./journals]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
GpuOption = Annotated[list[str] | None, typer.Option("--gpu", help="GPU index or UUID (may be repeated).")]
UntilOption = Annotated[str | None, typer.Option("--until", help="Local time to end at, e.g. 07:00.")]
MaxHoursOption = Annotated[
    float | None, typer.Option("--max-hours", min=0, help="Hours that this run may take.")
]
MaxBootsOption = Annotated[
    int | None, typer.Option("--max-boots", min=1, help="Boots that this run may take.")
]
ReverifyOption = Annotated[
    bool, typer.Option("--reverify", help="The machine changed: check both ends of the bracket again.")
]
StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study's name, or the path of its journal.")
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bisect {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command(epilog=EXIT_HELP)
def ceiling(
    profile: ProfileOption,
    axis: Annotated[str, typer.Option("--axis", "-a", help="The knob to push: mem-util, prompt, …")],
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="Target prompt in tokens, e.g. 60k [default: the profile's]."),
    ] = None,
    runner: RunnerOption = None,
    set_values: Annotated[
        list[str] | None,
        typer.Option("--set", help="Hold another axis at a value: AXIS=VALUE (may be repeated)."),
    ] = None,
    study: Annotated[str | None, typer.Option("--study", help="The study's name.")] = None,
    journals: JournalsOption = None,
    confirm: Annotated[
        int, typer.Option("--confirm", min=1, help="Fresh boots a recommended point must pass.")
    ] = 3,
    tolerance: Annotated[
        str | None, typer.Option("--tolerance", help="Width of a prompt bracket: 3% or 1k tokens.")
    ] = None,
    gpu: GpuOption = None,
    allow_pull: Annotated[
        bool, typer.Option("--allow-pull", help="Images and models may be downloaded.")
    ] = False,
    reserve_mib: Annotated[
        float | None, typer.Option("--reserve-mib", min=0, help="Memory kept free on top of the margin.")
    ] = None,
    until: UntilOption = None,
    max_hours: MaxHoursOption = None,
    max_boots: MaxBootsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts' salts.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with its times; boot nothing.")
    ] = False,
    reverify: ReverifyOption = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Accept a downloaded profile without asking.")
    ] = False,
    json_output: JsonOption = False,
) -> int:
    """How far can one knob go before the profile stops surviving its target prompt?"""
    from llm_bisect.cli.ceiling import run_ceiling

    return run_ceiling(
        profile=profile,
        axis=axis,
        prompt=prompt,
        runner=runner,
        set_values=set_values or [],
        study=study,
        journals=journals,
        confirm=confirm,
        tolerance=tolerance,
        gpus=tuple(gpu or ()),
        allow_pull=allow_pull,
        reserve_mib=reserve_mib,
        until=until,
        max_hours=max_hours,
        max_boots=max_boots,
        seed=seed,
        dry_run=dry_run,
        reverify=reverify,
        trust=trust,
        json_output=json_output,
    )


@app.command(epilog=EXIT_HELP)
def resume(
    study: StudyArgument,
    journals: JournalsOption = None,
    until: UntilOption = None,
    max_hours: MaxHoursOption = None,
    max_boots: MaxBootsOption = None,
    reverify: ReverifyOption = False,
    json_output: JsonOption = False,
) -> int:
    """Go on with a study that was stopped, or that a crash ended."""
    from llm_bisect.cli.resume import run_resume

    return run_resume(study, journals, until, max_hours, max_boots, reverify, json_output)


@app.command(epilog=EXIT_HELP)
def stop(study: StudyArgument, journals: JournalsOption = None) -> int:
    """Stop a running study from any terminal: its GPU is free within 30 s, its journal whole."""
    from llm_bisect.cli.resume import run_stop

    return run_stop(study, journals)


@app.command(epilog=EXIT_HELP)
def status(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A study; without it, all of them.")
    ] = None,
    journals: JournalsOption = None,
    json_output: JsonOption = False,
) -> int:
    """What is known so far, on one screen."""
    from llm_bisect.cli.look import run_status

    return run_status(study, journals, json_output)


@app.command(epilog=EXIT_HELP)
def explain(study: StudyArgument, journals: JournalsOption = None) -> int:
    """Why each probe was asked, what it moved, and what each outcome means for this question."""
    from llm_bisect.cli.look import run_explain

    return run_explain(study, journals)


@app.command(epilog=EXIT_HELP)
def doctor(
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", help="Check what this profile needs.")
    ] = None,
    runner: RunnerOption = None,
    gpu: GpuOption = None,
    json_output: JsonOption = False,
) -> int:
    """Whether this machine can run it: Docker, GPU, driver, memory, disk, port, image, model."""
    from llm_bisect.cli.doctor import run_doctor

    return run_doctor(profile, runner, tuple(gpu or ()), json_output)


@app.command(epilog=EXIT_HELP)
def init(
    compose: Annotated[
        Path | None, typer.Argument(metavar="[COMPOSE]", help="Compose file [default: compose.yml here].")
    ] = None,
    service: Annotated[
        str | None, typer.Option("--service", help="The service, where the file has several.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the profile.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing profile.")] = False,
) -> int:
    """Write a profile from a compose file: its engine, knobs and toggles."""
    from llm_bisect.cli.init import run_init

    return run_init(compose, service, output, force)


@app.command(epilog=EXIT_HELP)
def export(
    study: StudyArgument,
    to: Annotated[str, typer.Option("--to", help="compose, env, markdown, or json.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write [default: standard output].")
    ] = None,
    journals: JournalsOption = None,
    include_unconfirmed: Annotated[
        bool, typer.Option("--include-unconfirmed", help="Also what is not confirmed yet, marked so.")
    ] = False,
) -> int:
    """Write a recommended point out, with its evidence and its limits."""
    from llm_bisect.cli.export import run_export

    return run_export(study, to, output, journals, include_unconfirmed)
