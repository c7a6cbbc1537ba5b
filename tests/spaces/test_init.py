"""A compose file becomes a profile that loads: engine, knobs, grids, toggles, and what is left over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.spaces import resources
from llm_bisect.spaces.apply import own_values, resolve_launch
from llm_bisect.spaces.compose import compose_command
from llm_bisect.spaces.init import profile_from_compose
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.profile import Profile


@pytest.fixture(autouse=True)
def real_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose must be here, and none of the variables may come from elsewhere."""
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(f"{problem.message} ({problem.hint})")
    for name in ("MAX_MODEL_LEN", "CTX", "GPU_MEMORY_UTILIZATION", "PORT", "API_KEY", "SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Profile, str]]:
    """The profile of a file with these services, loaded, and its text."""

    def make(text: str, service: str | None = None, name: str = "my.yml") -> tuple[Profile, str]:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        profile = tmp_path / "made" / "profile.yml"
        profile.parent.mkdir(exist_ok=True)
        profile.write_text(profile_from_compose(file, service), encoding="utf-8")
        return load_profile(str(profile)), profile.read_text(encoding="utf-8")

    return make


Made = Callable[..., tuple[Profile, str]]

VLLM = """\
services:
  engine:
    image: registry.local:5000/mirror/vllm/vllm-openai:nightly@sha256:{digest}
    command:
      - serve
      - /m
      - --max-model-len
      - ${{CTX:-180000}}
      - --gpu-memory-utilization=0.93
      - --kv-cache-dtype
      - int8_odd
      - --speculative-config
      - '{{"method": "ngram", "num_speculative_tokens": 4}}'
      - --max-num-seqs
      - ${{MAX_NUM_SEQS:-1}}
    environment:
      GENESIS_ENABLE_P103: "1"
      VLLM_USE_V2_ENABLED: "false"
      ENABLE_THING: maybe
      P103: "1"
    volumes:
      - ./patches/patch_p103.py:/p/patch_p103.py:ro
      - ./other.py:/p/other.py
      - ./tree:/p/tree:ro
    ports: ["${{PORT:-8020}}:8000"]
  ui: {{image: open-webui, environment: {{KEY: "${{API_KEY:-sk-abcdefghijklmnop}}"}}}}
""".format(digest="0" * 64)


def test_a_whole_file(made: Made, tmp_path: Path) -> None:
    """Engine by image, knobs with their own values, toggles, and the rest as comments."""
    profile, text = made(VLLM)
    assert (profile.name, profile.engine.name) == ("my", "vllm")
    assert profile.launches["docker"]["service"] == "engine"
    assert profile.probe.target_tokens == 60_000 and profile.probe.start_tokens == 8_000
    assert own_values(profile, "docker") == {
        "mem-util": 0.93,
        "max-model-len": 180_000,
        "max-num-seqs": 1,
        "kv-dtype": "int8_odd",
        "mtp": "own",
        "p103": "on",
        "vllm-use-v2": "off",
        "p103-2": "on",
    }
    assert profile.axes["mtp"].payloads["own"] == {"method": "ngram", "num_speculative_tokens": 4}
    assert profile.axes["p103-2"].apply.mount == str(tmp_path / "patches/patch_p103.py")
    assert "#   API_KEY: default ***" in text and "#   PORT: default 8020" in text
    assert "sk-abc" not in text and "MAX_NUM_SEQS" not in text and "CTX: default" not in text


def test_a_variable_of_another_name_is_followed_to_its_flag(made: Made) -> None:
    """`CTX` fills --max-model-len here, though no description says so: it becomes the way to set it."""
    profile, _ = made(VLLM)
    assert profile.axes["max-model-len"].apply.variable == ("CTX",)
    launch = resolve_launch(profile, "docker", {"max-model-len": 90_000})
    assert launch.compose is not None and launch.compose.variables == {"CTX": "90000"}


def test_every_value_of_every_axis_reaches_the_launch(made: Made) -> None:
    """What init writes can be applied, all of it."""
    profile, _ = made(VLLM)
    for name, axis in profile.axes.items():
        for value in axis.values:
            resolve_launch(profile, "docker", {name: value})


@pytest.mark.parametrize("name", ["long-text", "long-text-no-mtp"])
def test_the_shipped_compose_files(name: str, tmp_path: Path) -> None:
    """Their profiles come out with the values, knobs and toggles of the hand-written ones."""
    source = resources.find("search_spaces", name).parent / "compose" / f"{name}.yml"
    file = tmp_path / f"{name}.yml"
    shutil.copyfile(source, file)
    before = file.read_bytes(), file.stat().st_mtime_ns
    profile, written = load_profile(str(file)), load_profile(name)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    own, theirs = own_values(profile, "docker"), own_values(written, "docker")
    for axis in ("mem-util", "max-model-len", "ubatch", "kv-dtype", "mtp", "p103"):
        assert own.get(axis) == theirs.get(axis)
        assert (axis in profile.axes) == (axis in written.axes)
    assert [a for a, v in own.items() if v == "on" and profile.axes[a].apply.mount] == [
        "tolist-cudagraph",
        "inputs-embeds-optional",
    ]


def test_llama_by_its_command(made: Made) -> None:
    """An image of one's own: the program tells the engine; lengths in Ki stay so."""
    profile, text = made(
        "services:\n  l:\n    build: .\n    command: llama-server -c 32768 -fa on -ngl 99 -ub 512 -ctk q8_0\n"
        "    ports: ['8080:8080']\n"
    )
    assert profile.engine.name == "llamacpp" and profile.probe.target_tokens == 10_000
    assert profile.axes["max-model-len"].values == (16384, 20480, 24576, 28672, 32768, 40960, 49152)
    assert profile.axes["ubatch"].values == (256, 512, 1024, 2048)
    assert own_values(profile, "docker")["flash-attn"] == "on"
    assert profile.margin_mib == 0 and "margin_mib" not in text


def test_llama_by_its_environment(made: Made) -> None:
    """A file that sets everything by variables of the container."""
    profile, _ = made(
        "services:\n  l:\n    image: ghcr.io/ggml-org/llama.cpp:server-cuda\n    gpus: all\n"
        "    environment: {LLAMA_ARG_CTX_SIZE: '900', LLAMA_ARG_N_GPU_LAYERS: '-1'}\n"
    )
    assert own_values(profile, "docker") == {"max-model-len": 900, "gpu-layers": -1}
    assert (profile.probe.target_tokens, profile.probe.start_tokens) == (300, 300)
    assert profile.axes["gpu-layers"].values == (1, 2, 4, 8) and profile.margin_mib == 400


@pytest.mark.parametrize(
    ("service", "engine"),
    [
        ("{image: vllm/vllm-openai}", "vllm"),
        ("{image: 'me/my-vllm-fork:1'}", "vllm"),
        (
            "{image: 'python:3', command: [python3, -m, vllm.entrypoints.openai.api_server, --model, m]}",
            "vllm",
        ),
        ("{image: 'me/x', entrypoint: [bash, -c, 'exec vllm serve m \"$$@\"', --]}", "vllm"),
        ("{image: 'me/x', command: [/app/llama-server, -m, m]}", "llamacpp"),
        ("{image: 'me/llama.cpp:x'}", "llamacpp"),
    ],
)
def test_engines_are_known(made: Made, service: str, engine: str) -> None:
    """By image, by program, by module, inside a script, and by the name in an image of one's own."""
    assert made(f"services:\n  s: {service}\n")[0].engine.name == engine


def test_no_engine(made: Made) -> None:
    """What there is, and what is known."""
    with pytest.raises(
        UsageProblem, match=r"no service of .*my\.yml runs an engine that bisect knows"
    ) as none:
        made("services:\n  a: {image: nginx}\n  b: {image: redis, command: [--vllm]}\n")
    assert "services: a, b" in str(none.value.hint) and "vllm" in str(none.value.hint)
    with pytest.raises(UsageProblem, match=r"service 'a' of .*my\.yml runs no engine"):
        made("services:\n  a: {image: nginx}\n  v: {image: vllm/vllm-openai}\n", "a")
    with pytest.raises(UsageProblem, match="has no service 'c'"):
        made("services:\n  a: {image: nginx}\n", "c")


def test_several_engines(made: Made) -> None:
    """The user says which."""
    text = "services:\n  a: {image: vllm/vllm-openai}\n  b: {image: vllm/vllm-openai}\n"
    with pytest.raises(UsageProblem, match="has several engines: a, b"):
        made(text)
    assert made(text, "b")[0].launches["docker"]["service"] == "b"


def test_a_knob_that_cannot_be_reached_is_no_axis(made: Made) -> None:
    """It is named, with what to write; a bare file has no axis at all and says so."""
    script = "exec vllm serve m --max-model-len 5000 --gpu-memory-utilization $$SHARE"
    profile, text = made(
        "services:\n  s:\n    image: vllm/vllm-openai\n    entrypoint: [bash, -c]\n"
        f"    command: ['{script}']\n    environment: {{SHARE: '0.05'}}\n"
    )
    assert list(profile.axes) == ["mem-util", "prompt"]
    assert profile.axes["mem-util"].values[0] == 0.025 and profile.axes["mem-util"].values[-1] == 0.15
    assert "# max-model-len is fixed inside a script: write ${MAX_MODEL_LEN:-5000} there to vary it" in text
    assert profile.probe.target_tokens == 1_000
    bare, text = made("services:\n  s: {image: vllm/vllm-openai}\n")
    assert list(bare.axes) == ["prompt"] and "# axes: none of the engine's knobs" in text
    assert "--axis prompt" in text


def test_variables_that_may_not_be_numbers(made: Made) -> None:
    """A variable that Compose wants a size or a protocol of does not hide the others."""
    profile, text = made(
        "services:\n  s:\n    image: vllm/vllm-openai\n    ports: ['8000:8000/${PROTO:-tcp}']\n"
        "    command: [--max-model-len, '${CTX:-50000}', --kv-cache-memory-bytes, '2000000000']\n"
    )
    assert profile.axes["max-model-len"].apply.variable == ("CTX",) and "#   PROTO: default tcp" in text
    assert profile.axes["kv-bytes"].values[:2] == (1_000_000_000, 1_250_000_000)


def test_offered_but_not_set(made: Made) -> None:
    """A variable whose value only a mounted script reads still makes an axis."""
    profile, text = made(
        "services:\n  s:\n    image: vllm/vllm-openai\n    entrypoint: [/start.sh]\n"
        "    environment: {L: '${MAX_MODEL_LEN:-}', M: '${GPU_MEM_UTIL:-}', N: '${MAX_NUM_SEQS:-}',"
        " R: '${SIZE:?how large}'}\n".replace("${SIZE:?how large}", "x")
    )
    assert profile.axes["max-model-len"].values == (2048, 4096, 8192)
    assert profile.axes["max-num-seqs"].values == (1, 2, 4, 8)
    assert profile.axes["mem-util"].values[0] == 0.85 and "not set in the file" in text


def test_a_required_variable(made: Made) -> None:
    """Compose's own sentence; nothing is guessed."""
    with pytest.raises(UsageProblem, match=r"my\.yml:2: .*SIZE is missing a value: how large"):
        made("services:\n  s: {image: 'vllm/vllm-openai:${SIZE:?how large}'}\n")


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("compose.yml", None),
        ("docker-compose.yaml", None),
        ("docker-compose.gpu.yml", "gpu"),
        ("two words & more.yml", "two-words-more"),
        ("1.yml", "1"),
        ("null.yml", "null"),
    ],
)
def test_names(made: Made, tmp_path: Path, name: str, called: str | None) -> None:
    """After the file; a `compose.yml` after its folder; text that YAML reads as something else is quoted."""
    folder = "".join(c if c.isalnum() or c in "._-" else "-" for c in tmp_path.name)
    assert made("services:\n  s: {image: vllm/vllm-openai}\n", name=name)[0].name == (called or folder)


def test_odd_values_stay_one_comment(made: Made) -> None:
    """Values over several lines and broken JSON do not break the file."""
    profile, _ = made(
        "services:\n  s:\n    image: vllm/vllm-openai\n"
        "    command: ['--speculative-config', \"{no\\njson\", '--max-model-len', '7']\n"
        '    environment: {X: "${LONG:-a: b # c}"}\n'
    )
    assert profile.axes["mtp"].payloads["own"] == "{no\njson"
    assert profile.probe.target_tokens == 2 and profile.axes["max-model-len"].values == (4, 5, 6, 7, 9, 10)
