"""From compose files as people write them to profiles, back through the loader, to launches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.apply import candidate_id, describe_difference, own_values, resolve_launch
from llm_bisect.spaces.init import profile_from_compose
from llm_bisect.spaces.load import load_profile

DIGEST = f"sha256:{'5f914f1c' * 8}"
SCRIPT = """\
    entrypoint:
      - /bin/bash
      - -c
      - |
        # it isn't much
        source /etc/detect.sh
        if [ "$${LINK:-0}" = "1" ]; then
          exec vllm serve "$$@"
        else
          exec vllm serve --disable-custom-all-reduce "$$@"
        fi
      - --
"""
FILES = {
    "folded": """\
services:
  server:
    image: ${IMAGE:-ghcr.io/someone/ik-llama-cpp@DIGEST}
    ports: ["${RIG_PORT:-${PORT:-8020}}:8080"]
    volumes: ["${MODEL_DIR:-../models}:/models:ro"]
    command: >-
      --host 0.0.0.0 --port 8080 --model /models/${GGUF:-a/b.gguf} -ngl 99
      --ctx-size ${CTX_SIZE:-200000} -ub ${UBATCH_SIZE:-1024} -np ${NP:-1}
      -ctk ${KV_TYPE:-q4_0} -ctv ${KV_TYPE:-q4_0} -fa on
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, device_ids: ["${GPU:-0}"], capabilities: [gpu]}]
""",
    "script": f"""\
services:
  vllm:
    image: vllm/vllm-openai:v0.22.0
    gpus: all
    environment:
      - CUDA_VISIBLE_DEVICES
      - HF_HUB_OFFLINE=${{HF_HUB_OFFLINE:-${{OFFLINE:-0}}}}
      - TREE_ENABLE_P1=1
    volumes: [./cache:/cache, ./patches/patch_one.py:/patches/patch_one.py:ro]
{SCRIPT}    command:
      - --model
      - /m
      - --max-model-len
      - "${{MAX_MODEL_LEN:-131072}}"
      - --gpu-memory-utilization=${{UTIL:-0.95}}
      - --max_num_batched_tokens
      - "4096"
      - --speculative-config
      - '{{"model":"/m/draft","num_speculative_tokens":4}}'
""",
    "inline": """\
services:
  v:
    image: vllm/vllm-openai:v1
    runtime: nvidia
    entrypoint: [/bin/bash, -c, "exec vllm serve /m --max-model-len ${MAX_MODEL_LEN:-32768}
      --gpu-memory-utilization $${SHARE:-0.9} --kv-cache-dtype fp8"]
    environment: {SHARE: "0.91"}
""",
    "two-services": """\
services:
  web: {image: "open-webui:main", depends_on: [llm], ports: ["3000:8080"]}
  llm:
    image: lmsysorg/sglang:latest
    command: python3 -m sglang.launch_server --model-path /m --mem-fraction-static 0.85 --context-length 65536
""",
    "anchors": """\
x-gpu: &gpu
  gpus: all
  environment: &env {HF_TOKEN: "${HF_TOKEN:-}", A: "x$$y"}
services:
  vllm:
    <<: *gpu
    image: my.registry:5000/team/vllm-fork:2024@DIGEST
    command: [serve, /m, --max-model-len, 32k, --api-key, sk-aaaaaaaaaaaaaaaaaaaaaaaa]
    volumes: [hf-cache:/root/.cache/huggingface]
volumes: {hf-cache: {}}
""",
}
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """The named file in a folder of its own, and a shell that exports none of its variables."""
    for name in (
        "CTX_SIZE",
        "MAX_MODEL_LEN",
        "UTIL",
        "NP",
        "KV_TYPE",
        "MODEL_DIR",
        "HF_TOKEN",
        "UBATCH_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)

    def make(name: str) -> Path:
        path = tmp_path / f"{name}.yml"
        path.write_text(FILES[name].replace("DIGEST", DIGEST), encoding="utf-8")
        return path

    return make


@pytest.mark.parametrize("name", FILES)
def test_the_profile_loads_and_every_value_reaches_the_engine(
    write: Write, tmp_path: Path, name: str
) -> None:
    """What init writes is accepted; own values are on the axes; every other value changes the launch."""
    file = write(name)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    made = tmp_path / "made" / "p.yml"
    made.parent.mkdir()
    made.write_text(profile_from_compose(file), encoding="utf-8")
    profile = load_profile(str(made))
    own = own_values(profile, "docker")
    user = resolve_launch(profile, "docker", {})
    assert own and not any(value is None for value in own.values()), own
    for axis in profile.axes.values():
        for value in axis.values:
            launch = resolve_launch(profile, "docker", {axis.name: value})
            assert bool(describe_difference(user, launch)) == (value != own[axis.name]), (axis.name, value)
            assert (candidate_id(user) == candidate_id(launch)) == (value == own[axis.name]), (
                axis.name,
                value,
            )
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([file.name, "made"])


@pytest.mark.parametrize("name", FILES)
def test_a_bare_compose_file_is_a_profile(write: Write, name: str) -> None:
    """`--profile compose.yml` is what init would have written, under the file's own path."""
    file = write(name)
    profile = load_profile(str(file))
    assert profile.path == file and profile.name == name
    assert load_profile(str(file), runner="docker").source_sha256 == profile.source_sha256
    file.write_text(file.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    assert load_profile(str(file)).source_sha256 != profile.source_sha256
    with pytest.raises(UsageProblem, match="runs in Docker only"):
        load_profile(str(file), runner="process")


def test_what_is_found(write: Write) -> None:
    """Engines by image, name and command; knobs by variable and by flag; toggles; no secret is written."""
    folded, script, inline = (load_profile(str(write(n))) for n in ("folded", "script", "inline"))
    assert [p.engine.name for p in (folded, script, inline)] == ["llamacpp", "vllm", "vllm"]
    assert folded.axes["kv-dtype"].apply.variable[0] == "KV_TYPE"
    assert own_values(script, "docker") == {
        "mem-util": 0.95,
        "max-model-len": 131_072,
        "ubatch": 4096,
        "mtp": "own",
        "p1": "on",
        "one": "on",
    }
    assert own_values(inline, "docker") == {"mem-util": 0.91, "max-model-len": 32_768}
    assert "kv-dtype is fixed inside a script" in profile_from_compose(write("inline"))
    assert load_profile(str(write("two-services"))).engine.name == "sglang"
    text = profile_from_compose(write("anchors"))
    assert "sk-aaaa" not in text and "HF_TOKEN: no default" in text
    assert load_profile(str(write("anchors"))).probe.target_tokens == 10_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("services:\n  a: {image: postgres}\n", "no service of .* an engine that bisect knows"),
        (
            "services:\n  a: {image: vllm/vllm-openai}\n  b: {image: vllm/vllm-openai}\n",
            "several engines: a, b",
        ),
        (
            "services:\n  a: {image: x, command: ['${NEED:?say where}']}\n",
            "NEED is missing a value: say where",
        ),
        ("services:\n\ta: 1\n", "c.yml:2: .*cannot start any token"),
        ("services: {}\n", "c.yml"),
    ],
)
def test_files_that_give_no_profile(tmp_path: Path, text: str, says: str) -> None:
    """One sentence that names the file, by init and by --profile alike."""
    file = tmp_path / "c.yml"
    file.write_text(text, encoding="utf-8")
    for make in (profile_from_compose, lambda f: load_profile(str(f))):
        with pytest.raises(UsageProblem, match=says) as told:
            make(file)
        assert "c.yml" in told.value.message and told.value.hint


def test_a_file_with_tags_of_compose_is_still_a_compose_file(tmp_path: Path) -> None:
    """`!override` and `!reset` are Compose's, not a mistake."""
    (tmp_path / "base.yml").write_text("services: {v: {image: vllm/vllm-openai:v1, ports: ['1:1']}}\n")
    file = tmp_path / "c.yml"
    file.write_text(
        "include: [base.yml]\n"
        "services:\n  w:\n    image: vllm/vllm-openai:v1\n    ports: !override ['8000:8000']\n"
        "    command: [--max-model-len, '8192']\n"
    )
    with pytest.raises(UsageProblem, match="several engines: ") as told:
        load_profile(str(file))
    assert "--service" in str(told.value.hint)
    assert "service: w" in profile_from_compose(file, "w")
