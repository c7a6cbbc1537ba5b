"""Values reach the launch in the way that the launch offers, or an error says what to add."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_bisect.model import EnvironmentProblem, Launch, Mount, UsageProblem
from llm_bisect.spaces.apply import check_values, describe_difference, own_values, resolve_launch
from llm_bisect.spaces.compose import compose_command
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.profile import Profile

Make = Callable[..., Profile]


@pytest.fixture(autouse=True)
def real_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose must be here, and none of the variables may come from elsewhere."""
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(f"{problem.message} ({problem.hint})")
    for name in ("GPU_MEMORY_UTILIZATION", "MAX_MODEL_LEN", "SPEC_N", "CTX", "P1", "MY_LEN"):
        monkeypatch.delenv(name, raising=False)


HEAD = "profile: p\nengine: {engine}\nlaunch: {launch}\naxes:\n{axes}\n{more}"
AXES = """\
  mem-util: {grid: {low: 0.85, high: 0.98, step: 0.005}}
  max-model-len: {grid: {values: [60k, 120k, 180k]}}
  mtp: {choices: {off: null, k1: {method: mtp, num_speculative_tokens: 1}}}
  kv-dtype: {choices: {fp8: fp8, auto: auto}}"""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A profile of a compose file: the lines of its one service, axes and toggles."""

    def build(
        service: str, axes: str = AXES, more: str = "", engine: str = "vllm", top: str = "", process: str = ""
    ) -> Profile:
        body = "\n".join(f"    {line}" for line in service.splitlines())
        (tmp_path / "c.yml").write_text(f"services:\n  s:\n    image: i\n{body}\n{top}", encoding="utf-8")
        launch = process or "{compose: c.yml}"
        text = HEAD.format(engine=engine, launch=launch, axes=axes, more=more)
        (tmp_path / "p.yml").write_text(text, encoding="utf-8")
        return load_profile(str(tmp_path / "p.yml"))

    return build


SERVICE = """\
command:
  - --model
  - /m
  - --gpu-memory-utilization
  - ${GPU_MEMORY_UTILIZATION:-0.93}
  - --max-model-len=180000
  - --speculative-config
  - '{"num_speculative_tokens": 1, "method": "mtp"}'
environment: {GENESIS_ENABLE_P1: "1", HF_TOKEN: hf_abcdefghijklmnopqrstuvwx}
volumes: ['./w:/m:ro', './patches/patch_a.py:/patches/a.py:ro']"""
TOGGLES = """\
toggles:
  p1: {apply: {env: GENESIS_ENABLE_P1}}
  a: {apply: {mount: patches/patch_a.py, target: /patches/a.py}}
  b: {apply: {mount: patches/patch_b.py, target: /patches/b.py}, requires: [a]}
  eager: {apply: {flag: --enforce-eager}, conflicts: [p1]}
"""


def test_own_values_in_every_form(make: Make) -> None:
    """Numbers with their kind, choices by payload, toggles by presence, None where nothing is set."""
    assert own_values(make(SERVICE, more=TOGGLES), "docker") == {
        "mem-util": 0.93,
        "max-model-len": 180_000,
        "mtp": "k1",
        "kv-dtype": None,
        "p1": "on",
        "a": "on",
        "b": "off",
        "eager": "off",
    }


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-model-len 128K", 131_072),
        ("--max-model-len 128k", 128_000),
        ("--max-model-len 1.5m", 1_500_000),
        ("--max-model-len auto", None),
        ("--max-model-len 0", None),
        ("", None),
    ],
)
def test_lengths_as_the_engine_reads_them(make: Make, flag: str, value: int | None) -> None:
    """Capitals are binary units for the engine, small letters decimal ones."""
    assert own_values(make(f"command: -x {flag}"), "docker")["max-model-len"] == value


@pytest.mark.parametrize("text", ["nan", "inf", "much"])
def test_what_is_no_number_is_not_set(make: Make, text: str) -> None:
    """A value that cannot be a point of the axis is none."""
    assert own_values(make(f"command: --gpu-memory-utilization {text}"), "docker")["mem-util"] is None


def test_the_users_own_launch(make: Make, tmp_path: Path) -> None:
    """No values: what the file says, and nothing for an override to change."""
    launch = resolve_launch(make(SERVICE), "docker", {})
    assert launch.command[2:4] == ("--gpu-memory-utilization", "0.93")
    assert launch.model_path == str(tmp_path / "w") and launch.container_port == 8000
    ref = launch.compose
    assert ref is not None and (ref.service, ref.variables, ref.sets_command) == ("s", {}, False)
    assert (ref.sets_env, ref.adds_mounts, ref.drops_mount_targets, ref.sets_image) == ({}, (), (), False)


def test_own_values_change_nothing(make: Make) -> None:
    """A value that the launch has already is left in its own spelling."""
    profile = make(SERVICE, more=TOGGLES)
    own = resolve_launch(profile, "docker", {})
    assert resolve_launch(profile, "docker", own_values(profile, "docker")) == own
    assert describe_difference(own, own) == []


def test_a_variable_before_a_flag(make: Make) -> None:
    """The file offers a variable: it is set, and the command is left to the file."""
    launch = resolve_launch(make(SERVICE), "docker", {"mem-util": 0.95})
    ref = launch.compose
    assert ref is not None and ref.variables == {"GPU_MEMORY_UTILIZATION": "0.95"} and not ref.sets_command
    assert launch.command[3] == "0.95"


def test_a_variable_that_goes_elsewhere_is_not_taken(make: Make) -> None:
    """A variable of the right name that does not reach the flag: the flag itself is replaced."""
    service = SERVICE.replace(
        "--max-model-len=180000", "--max-model-len=180000\n  - --seed\n  - ${MAX_MODEL_LEN:-7}"
    )
    launch = resolve_launch(make(service), "docker", {"max-model-len": 60_000})
    assert launch.compose is not None and launch.compose.variables == {}
    assert "--max-model-len=60000" in launch.command and launch.command[-1].startswith("{")
    assert launch.command[launch.command.index("--seed") + 1] == "7"


def test_a_flag_is_replaced_added_and_taken_out(make: Make) -> None:
    """In its own spelling where it stood; a null payload leaves it out."""
    profile = make(SERVICE)
    launch = resolve_launch(profile, "docker", {"max-model-len": 60_000, "mtp": "off", "kv-dtype": "fp8"})
    assert launch.compose is not None and launch.compose.sets_command
    assert "--max-model-len=60000" in launch.command and "--speculative-config" not in launch.command
    assert launch.command[-2:] == ("--kv-cache-dtype", "fp8")


def test_none_takes_a_value_out(make: Make) -> None:
    """None is the engine's own default."""
    launch = resolve_launch(make(SERVICE), "docker", {"max-model-len": None, "mtp": None})
    assert not [w for w in launch.command if w.startswith(("--max-model-len", "--spec"))]


def test_toggles(make: Make, tmp_path: Path) -> None:
    """Environment, mounts and flags without a value are switched; an override knows what changed."""
    profile = make(SERVICE, more=TOGGLES)
    off = resolve_launch(profile, "docker", {"p1": "off", "a": "off", "b": "off", "eager": "on"})
    ref = off.compose
    assert ref is not None and ref.sets_env == {"GENESIS_ENABLE_P1": "0"}
    assert ref.drops_mount_targets == ("/patches/a.py",) and off.command[-1] == "--enforce-eager"
    on = resolve_launch(profile, "docker", {"b": "on"})
    added = Mount(str(tmp_path / "patches/patch_b.py"), "/patches/b.py", read_only=True)
    assert on.compose is not None and on.compose.adds_mounts == (added,) and added in on.mounts
    back = make(SERVICE.replace("--speculative-config", "--enforce-eager"), more=TOGGLES)
    assert "--enforce-eager" not in resolve_launch(back, "docker", {"eager": "off"}).command


def test_a_toggle_written_as_a_word(make: Make) -> None:
    """`true` stays a word of that kind; a variable of the file carries a toggle, too."""
    more = "toggles:\n  p1: {apply: {env: GENESIS_ENABLE_P1}}\n  p2: {apply: {variable: P1}}\n"
    service = 'command: [-x]\nenvironment: {GENESIS_ENABLE_P1: "True", OTHER: "${P1:-1}"}'
    profile = make(service, more=more)
    assert own_values(profile, "docker")["p2"] == "on"
    launch = resolve_launch(profile, "docker", {"p1": "off", "p2": "off"})
    assert launch.env == {"GENESIS_ENABLE_P1": "false", "OTHER": "0"}
    assert launch.compose is not None and launch.compose.variables == {"P1": "0"}


def test_a_mount_without_a_target(make: Make) -> None:
    """The launch shows where the file goes; where it does not, the profile has to."""
    more = "toggles:\n  a: {apply: {mount: elsewhere/patch_a.py}}\n  z: {apply: {mount: z.py}}\n"
    profile = make(SERVICE, more=more)
    assert own_values(profile, "docker") | {"a": "on", "z": "off"} == own_values(profile, "docker")
    launch = resolve_launch(profile, "docker", {"a": "off"})
    assert launch.compose is not None and launch.compose.drops_mount_targets == ("/patches/a.py",)
    with pytest.raises(UsageProblem, match="its place is not known"):
        resolve_launch(profile, "docker", {"z": "on"})


SCRIPT = """\
entrypoint: [bash, -c]
command:
  - {script}
  - --
environment: {{LEN: "5000"}}"""


@pytest.mark.parametrize(
    ("script", "reached"),
    [
        ("'exec vllm serve /m --max-model-len 5000 \"$$@\"'", "appended"),
        ("exec vllm serve /m --max-model-len $$LEN", "environment"),
        ("'exec vllm serve /m --max-model-len ${MAX_MODEL_LEN:-5000}'", "variable"),
        ("exec vllm serve /m --max-model-len 5000", None),
        ("'exec vllm serve /m \"$$@\" --max-model-len 5000'", None),
    ],
)
def test_flags_inside_a_script(make: Make, script: str, reached: str | None) -> None:
    """Read there; set by whichever way leads in from outside, and refused where none does."""
    profile = make(SCRIPT.format(script=script))
    assert own_values(profile, "docker")["max-model-len"] == 5000
    if reached is None:
        with pytest.raises(UsageProblem, match="offers no way to set axis 'max-model-len'") as refused:
            resolve_launch(profile, "docker", {"max-model-len": 60_000})
        assert "--max-model-len ${MAX_MODEL_LEN:-…}" in str(refused.value.hint)
        return
    launch = resolve_launch(profile, "docker", {"max-model-len": 60_000})
    ref = launch.compose
    assert ref is not None
    assert (launch.command[-2:] == ("--max-model-len", "60000")) == (reached == "appended")
    assert ref.sets_env == ({"LEN": "60000"} if reached == "environment" else {})
    assert ref.variables == ({"MAX_MODEL_LEN": "60000"} if reached == "variable" else {})


def test_a_variable_that_only_a_mounted_script_reads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that shows nothing of it: its value is the variable's, and the variable sets it."""
    axes = "  spec: {apply: {variable: SPEC_N}, grid: {values: [1, 2, 3]}}"
    profile = make("entrypoint: [/start.sh]\nenvironment: {SPEC_N: '${SPEC_N:-3}'}", axes)
    assert own_values(profile, "docker") == {"spec": 3}
    launch = resolve_launch(profile, "docker", {"spec": 1})
    assert launch.env == {"SPEC_N": "1"} and launch.compose is not None
    assert launch.compose.variables == {"SPEC_N": "1"}
    monkeypatch.setenv("SPEC_N", "2")
    assert own_values(profile, "docker") == {"spec": 2}
    gone = make("command: [-x]", axes)
    with pytest.raises(UsageProblem, match=r"service s of .*c\.yml offers no way to set axis 'spec'"):
        resolve_launch(gone, "docker", {"spec": 1})


def test_two_axes_through_variables_and_one_through_both(make: Make) -> None:
    """Each variable carries one axis; a second axis on the same variable takes its flag."""
    axes = (
        AXES + "\n  again: {apply: {variable: GPU_MEMORY_UTILIZATION, flag: --again}, grid: {values: [1, 2]}}"
    )
    launch = resolve_launch(make(SERVICE, axes), "docker", {"mem-util": 0.9, "again": 2})
    assert launch.compose is not None and launch.compose.variables == {"GPU_MEMORY_UTILIZATION": "0.9"}
    assert launch.command[-2:] == ("--again", "2")


def test_the_image(make: Make) -> None:
    """An axis may be the image itself."""
    axes = "  image: {apply: {image: true}, choices: {old: 'i', new: 'i:2'}}"
    profile = make("command: [-x]", axes)
    assert own_values(profile, "docker") == {"image": "old"}
    launch = resolve_launch(profile, "docker", {"image": "new"})
    assert launch.image == "i:2" and launch.compose is not None and launch.compose.sets_image


LLAMA = """\
  max-model-len: {grid: {values: [1k, 2k, 4k]}}
  kv-dtype: {choices: {f16: f16, q8_0: q8_0}}
  flash-attn: {choices: {on: on, off: off}}"""


def test_llama_by_flags_and_by_environment(make: Make) -> None:
    """Both caches take one dtype; what the environment sets is changed there, and nowhere else."""
    service = "command: -c 4000 -ctk f16 --cache-type-v f16\nenvironment: {LLAMA_ARG_FLASH_ATTN: 'off'}"
    profile = make(service, LLAMA, engine="llamacpp")
    assert own_values(profile, "docker") == {"max-model-len": 4000, "kv-dtype": "f16", "flash-attn": "off"}
    launch = resolve_launch(
        profile, "docker", {"kv-dtype": "q8_0", "flash-attn": "on", "max-model-len": 1000}
    )
    assert launch.command == ("-c", "1000", "-ctk", "q8_0", "--cache-type-v", "q8_0")
    assert launch.env == {"LLAMA_ARG_FLASH_ATTN": "on"}
    unset = resolve_launch(profile, "docker", {"flash-attn": None})
    assert unset.env == {} and unset.compose is not None
    assert unset.compose.sets_env == {"LLAMA_ARG_FLASH_ATTN": None}


def test_half_of_a_pair_is_no_value(make: Make) -> None:
    """One cache at q8_0 and the other not is none of the axis's choices."""
    profile = make("command: -ctk q8_0", LLAMA, engine="llamacpp")
    assert own_values(profile, "docker")["kv-dtype"] is None
    launch = resolve_launch(profile, "docker", {"kv-dtype": "q8_0"})
    assert launch.command == ("-ctk", "q8_0", "-ctv", "q8_0")


def test_an_image_with_its_own_command(make: Make) -> None:
    """Where the file has no command, a flag would replace the image's: the environment is set."""
    profile = make("restart: 'no'", LLAMA, engine="llamacpp")
    launch = resolve_launch(profile, "docker", {"max-model-len": 1000})
    assert launch.command == () and launch.env == {"LLAMA_ARG_CTX_SIZE": "1000"}


def test_a_flag_taken_out_does_not_leave_the_environments_value(make: Make) -> None:
    """A flag hides the variable of the same knob; without it the variable would come into force."""
    profile = make("command: -c 4000\nenvironment: {LLAMA_ARG_CTX_SIZE: '2000'}", LLAMA, engine="llamacpp")
    launch = resolve_launch(profile, "docker", {"max-model-len": None})
    assert launch.command == () and launch.env == {}


def test_image_and_process_launches(make: Make, tmp_path: Path) -> None:
    """Neither needs Compose; placeholders stay for the runner; volumes count from the profile."""
    image = (
        "{image: 'i:1', command: [-c, '4k', -m, '{model}'], environment: {K: v}, entrypoint: [e], port: 9,"
        " volumes: ['./d:/d:ro', 'cache:/c', '/abs:/a'], gpus: all, memory_limit: 256m, model: m.gguf,"
        " ipc: host, shm_size: 1g}"
    )
    launch = resolve_launch(
        make("", LLAMA, engine="llamacpp", process=image), "docker", {"max-model-len": 1000}
    )
    assert launch.command == ("-c", "1000", "-m", "{model}") and launch.compose is None
    assert launch.mounts == (
        Mount(str(tmp_path / "d"), "/d", read_only=True),
        Mount("cache", "/c", kind="volume"),
        Mount("/abs", "/a"),
    )
    assert (launch.container_port, launch.memory_limit_mib, launch.shm_size_mib) == (9, 256, 1024)
    assert launch.model_path == str(tmp_path / "m.gguf") and launch.wants_gpu and launch.entrypoint == ("e",)
    process = (
        "{runner: process, command: [llama-server, --port, '{port}', -c, '4000'], env: {A: b}, model: m}"
    )
    profile = make("", LLAMA, engine="llamacpp", process=process)
    launch = resolve_launch(profile, "process", {"max-model-len": 2000})
    assert launch.command == ("llama-server", "--port", "{port}", "-c", "2000") and launch.env == {"A": "b"}
    with pytest.raises(UsageProblem, match="has no launch for --runner docker"):
        own_values(profile, "docker")
    with pytest.raises(
        UsageProblem, match="the launch for --runner process offers no way to set axis 'spec'"
    ):
        axes = "  spec: {apply: {variable: SPEC_N}, grid: {values: [1, 2]}}"
        resolve_launch(make("", axes, engine="llamacpp", process=process), "process", {"spec": 1})


def test_a_volume_that_is_none(make: Make) -> None:
    """The sentence shows the form."""
    profile = make("", LLAMA, engine="llamacpp", process="{image: i, volumes: ['./d']}")
    with pytest.raises(UsageProblem, match=r"p\.yml: launch\.volumes: '\./d' is no volume"):
        resolve_launch(profile, "docker", {})


def test_the_simulated_launch_stands_in_for_the_docker_one() -> None:
    """Same command and mounts, whose files need not be here; card and model named; no GPU wanted."""
    profile = load_profile("long-text")
    real, launch = (resolve_launch(profile, r, {"mem-util": 0.95}) for r in ("docker", "simulated"))
    assert launch.simulated is not None and launch.simulated.card == "rtx3090"
    assert (launch.command, launch.mounts) == (real.command, real.mounts)
    assert (real.wants_gpu, launch.wants_gpu, launch.runner) == (True, False, "simulated")


def test_toggles_that_need_or_exclude_each_other(make: Make) -> None:
    """Against the user's own launch, too; what the user has is not questioned."""
    profile = make(SERVICE, more=TOGGLES)
    with pytest.raises(UsageProblem, match="toggle b needs a, which is off"):
        check_values(profile, {"a": "off", "b": "on"})
    with pytest.raises(UsageProblem, match="toggles eager and p1 exclude each other"):
        resolve_launch(profile, "docker", {"eager": "on"})
    without = make(SERVICE.replace("patch_a.py:/patches/a.py", "x.py:/x.py"), more=TOGGLES)
    with pytest.raises(UsageProblem, match="toggle b needs a"):
        resolve_launch(without, "docker", {"b": "on"})
    check_values(profile, {"a": "on", "b": "on", "p1": "off", "eager": "on"})


def test_values_that_are_none(make: Make) -> None:
    """Unknown axes and choices are named, with what there is."""
    profile = make(SERVICE)
    with pytest.raises(UsageProblem, match="has no axis 'mem-utl'"):
        check_values(profile, {"mem-utl": 1})
    with pytest.raises(UsageProblem, match="'k9' is no choice of axis 'mtp'") as refused:
        resolve_launch(profile, "docker", {"mtp": "k9"})
    assert refused.value.hint == "accepted: off, k1"


def test_differences_in_words(make: Make, tmp_path: Path) -> None:
    """One line a change, by flag, without secrets."""
    profile = make(SERVICE, more=TOGGLES)
    own = resolve_launch(profile, "docker", {})
    changed = resolve_launch(profile, "docker", {"mem-util": 0.95, "mtp": "off", "p1": "off", "a": "off"})
    assert describe_difference(own, changed) == [
        "--gpu-memory-utilization: 0.93 → 0.95",
        """--speculative-config: '{"num_speculative_tokens": 1, "method": "mtp"}' → not given""",
        "environment GENESIS_ENABLE_P1: 1 → 0",
        f"mount /patches/a.py: {tmp_path}/patches/patch_a.py → taken out",
    ]
    assert describe_difference(own, resolve_launch(profile, "docker", {"b": "on"}))[0].startswith(
        "mount /patches/b.py"
    )
    other = Launch("docker", "vllm", ("serve", "--eager"), {"HF_TOKEN": "x"}, image="j")
    lines = describe_difference(own, other)
    assert (
        lines[0] == "image: i → j"
        and "command: nothing → serve" in lines
        and "--eager: not given → given" in lines
    )
    assert "environment HF_TOKEN: *** → ***" in lines


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mem-util": st.sampled_from([0.85, 0.9, 0.93, 0.975]),
            "max-model-len": st.sampled_from([60_000, 120_000, 180_000]),
            "mtp": st.sampled_from(["off", "k1"]),
            "kv-dtype": st.sampled_from(["fp8", "auto"]),
        },
    )
)
def test_what_was_set_is_what_is_there(make: Make, values: dict[str, str | int | float]) -> None:
    """Property: a launch made from values has exactly these, and the user's own elsewhere."""
    profile = make(SERVICE)
    own = own_values(profile, "docker")
    launch = resolve_launch(profile, "docker", values)
    words = " ".join(launch.command)
    wanted = {**own, **values}
    assert f"--gpu-memory-utilization {wanted['mem-util']}" in words
    assert f"--max-model-len={wanted['max-model-len']}" in words
    assert ("--speculative-config" in words) == (wanted["mtp"] == "k1")
    assert (f"--kv-cache-dtype {wanted['kv-dtype']}" in words) == (wanted["kv-dtype"] is not None)
