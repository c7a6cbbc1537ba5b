"""Compose overrides, checked with the real `docker compose config`: base + override is the tested launch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_bisect.model import ComposeRef, EnvironmentProblem, Launch, Mount, UsageProblem
from llm_bisect.reports.compose_words import quote
from llm_bisect.reports.export_compose import compose_override, service_file
from llm_bisect.spaces.compose import compose_command

BASE = """\
x-shared: &shared
  ipc: host
  environment:
    - HF_TOKEN=${HF_TOKEN:-}
    - UTIL=${GPU_MEMORY_UTILIZATION:-0.95}
    - ENABLE_P103=1
services:
  engine:
    <<: *shared
    image: vllm/vllm-openai:${TAG:-nightly}
    shm_size: 16g
    privileged: off
    volumes:
      - ${MODELS:-/srv/models}:/models:ro
      - ./patches/a.py:/patches/a.py:ro
      - ~/cache:/cache
    ports: ["${PORT:-8020}:8000"]
    entrypoint: [vllm, serve]
    command:
      - /models/q
      - --gpu-memory-utilization
      - "${GPU_MEMORY_UTILIZATION:-0.95}"
      - --max-model-len
      - "180000"
      - --served-model-name
      - ${NAME:-q}
      - --speculative-config
      - '{"method":"mtp","num_speculative_tokens":3}'
      - --api-key=${API_KEY:-none}
  watcher:
    image: busybox
    command: watch --at ${GPU_MEMORY_UTILIZATION:-0.95}
"""
TEXT_BASE = """\
services:
  engine:
    image: vllm
    command: >
      /models/q --gpu-memory-utilization ${GPU_MEMORY_UTILIZATION:-0.95} ${EXTRA}
      --max-model-len 180000 --speculative-config '{"method":"mtp"}' --name "$NAME and more" --cost 5$$
"""


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(problem.message)
    return tmp_path


def resolved(*files: Path, **env: str) -> dict[str, Any]:
    """What Compose makes of the files."""
    argv = [*compose_command(), *(a for f in files for a in ("-f", str(f))), "config", "--format", "json"]
    clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    done = subprocess.run(argv, capture_output=True, text=True, env={**clean, **env}, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return found


def own_launch(base: Path, **env: str) -> Launch:
    """The user's own launch as Compose resolves it."""
    service = resolved(base, **env)["services"]["engine"]
    return Launch(
        "docker",
        "vllm",
        tuple(service["command"]),
        service.get("environment") or {},
        image=service["image"],
        compose=ComposeRef(str(base), "engine", "user"),
    )


def written(folder: Path, text: str, name: str = "base.yml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def override_for(own: Launch, chosen: Launch, **changes: Any) -> str:
    assert chosen.compose is not None
    return compose_override(
        own, dataclasses.replace(chosen, compose=dataclasses.replace(chosen.compose, **changes)), ["a study"]
    )


def replaced(argv: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if a == old else a for a in argv)


def test_a_variable_is_put_in_and_nothing_else_is_resolved(folder: Path) -> None:
    """Only fields that mention it are written; tokens, names and models stay `${VAR}` or are not there."""
    base = written(folder, BASE)
    own = own_launch(base, HF_TOKEN="hf_abcdefghijklmnopqrst", NAME="secretname")
    text = override_for(own, own, variables={"GPU_MEMORY_UTILIZATION": "0.93"})
    over = written(folder, text, "over.yml")
    found = resolved(base, over, NAME="mine", HF_TOKEN="t")["services"]
    assert found["engine"]["command"][2] == "0.93"
    assert found["engine"]["command"][6] == "mine"
    assert found["engine"]["environment"] == {"HF_TOKEN": "t", "UTIL": "0.93", "ENABLE_P103": "1"}
    assert found["watcher"]["command"][-1] == "0.93"
    assert "hf_abc" not in text and "secretname" not in text and "${API_KEY:-none}" in text
    keys = yaml.safe_load(text)["services"]
    assert set(keys["engine"]) == {"command", "environment"}
    assert keys["engine"]["environment"] == ["UTIL=0.93"]


@pytest.mark.parametrize("source", [BASE, TEXT_BASE], ids=["list", "string"])
def test_flags_are_replaced_added_and_taken_out(folder: Path, source: str) -> None:
    """Base and override together resolve to the candidate's argv, JSON and dollars included."""
    base = written(folder, source)
    env = {"EXTRA": "--x 1 --y", "NAME": "n"}
    own = own_launch(base, **env)
    i = own.command.index("--speculative-config")
    argv = replaced(own.command[:i] + own.command[i + 2 :], "180000", "200000")
    argv += ("--kv-transfer-config", '{"a": "it\'s $5", "b": [1, 2]}', "--flag")
    text = override_for(own, dataclasses.replace(own, command=argv), sets_command=True)
    over = written(folder, text, "over.yml")
    assert tuple(resolved(base, over, **env)["services"]["engine"]["command"]) == argv
    other = resolved(base, over, EXTRA="", NAME="other")["services"]["engine"]["command"]
    assert "other" in other or "other and more" in other


def test_flag_and_variable_together(folder: Path) -> None:
    """The variable's place keeps what the value gives, the flag is written out."""
    base = written(folder, TEXT_BASE)
    own = own_launch(base, EXTRA="", NAME="n")
    argv = replaced(replaced(own.command, "0.95", "0.93"), "180000", "160000")
    text = override_for(
        own,
        dataclasses.replace(own, command=argv),
        variables={"GPU_MEMORY_UTILIZATION": "0.93"},
        sets_command=True,
    )
    over = written(folder, text, "over.yml")
    assert tuple(resolved(base, over, NAME="n")["services"]["engine"]["command"]) == argv
    assert "${EXTRA}" in text and "$NAME" in text


flags = st.lists(
    st.tuples(
        st.sampled_from(["--a", "--b", "--c", "--dd"]),
        st.one_of(st.none(), st.text(st.sampled_from("ab1 .$\"'{},\\-"), min_size=1, max_size=8)),
    ),
    max_size=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags, flags, st.booleans())
def test_any_argv_can_be_reached(folder: Path, before: list[Any], after: list[Any], as_text: bool) -> None:
    """Whatever the two argvs are, the override turns one into the other and keeps the variable."""
    own_argv = ["serve", *(a for pair in before for a in pair if a is not None)]
    argv = ["serve", *(a for pair in after for a in pair if a is not None), "m"]
    command: Any = [*(a.replace("$", "$$") for a in own_argv), "${MODEL:-m}"]
    if as_text:
        command = " ".join([*(quote(a) for a in own_argv), "${MODEL:-m}"])
    base = written(folder, yaml.safe_dump({"services": {"engine": {"image": "x", "command": command}}}))
    own = own_launch(base)
    assert own.command == (*own_argv, "m")
    text = override_for(own, dataclasses.replace(own, command=tuple(argv)), sets_command=True)
    over = written(folder, text, "over.yml")
    assert resolved(base, over)["services"]["engine"]["command"] == argv


def test_environment_is_set_and_taken_out(folder: Path) -> None:
    """A variable that is taken out is not passed on, also where the shell has it."""
    base = written(folder, BASE)
    own = own_launch(base)
    text = override_for(own, own, sets_env={"ENABLE_P103": None, "UTIL": "$1", "NEW": "2"})
    over = written(folder, text, "over.yml")
    found = resolved(base, over, ENABLE_P103="9", HF_TOKEN="t")["services"]["engine"]["environment"]
    assert found == {"HF_TOKEN": "t", "UTIL": "$1", "NEW": "2"}


def test_toggle_mounts(folder: Path) -> None:
    """On: one more entry, its source counted from the compose file. Off: the list without it, raw."""
    base = written(folder, BASE)
    own = own_launch(base)
    mount = Mount(str(folder / "patches" / "b.py"), "/patches/b.py", read_only=True)
    on = written(folder, override_for(own, own, adds_mounts=(mount,)), "on.yml")
    volumes = resolved(base, on)["services"]["engine"]["volumes"]
    assert [v["target"] for v in volumes] == ["/models", "/patches/a.py", "/cache", "/patches/b.py"]
    assert volumes[-1]["source"] == mount.source and volumes[-1]["read_only"]
    assert str(folder) not in on.read_text() and "create_host_path: false" in on.read_text()
    text = override_for(own, own, drops_mount_targets=("/patches/a.py",))
    off = written(folder, text, "off.yml")
    volumes = resolved(base, off, MODELS="/m")["services"]["engine"]["volumes"]
    assert (volumes[0]["source"], volumes[0]["target"]) == ("/m", "/models")
    assert [v["target"] for v in volumes] == ["/models", "/cache"]
    assert "${MODELS:-/srv/models}" in text and "!override" in text


def test_no_home_path_secret_or_address_gets_out(folder: Path) -> None:
    """What the base spells out and the override has to repeat is a variable there."""
    home = os.environ["HOME"] if os.environ.get("HOME", "/") != "/" else "/root"
    base = written(
        folder,
        f"""\
services:
  engine:
    image: x
    volumes: [{home}/m:/m, /home/somebody/x:/x, ./p.py:/p.py]
    environment: {{API_TOKEN: abc123, KEEP: "1", DROP: "1"}}
    command: serve --api-key sk-verysecretverysecret --host 192.168.7.9 --util 0.9
""",
    )
    own = own_launch(base)
    text = override_for(
        own,
        dataclasses.replace(own, command=replaced(own.command, "0.9", "0.8")),
        sets_command=True,
        sets_env={"DROP": None},
        drops_mount_targets=("/p.py",),
    )
    for private in ("verysecret", "192.168", "somebody", f"{home}/m", "abc123"):
        assert private not in text
    over = written(folder, text, "over.yml")
    found = resolved(
        base,
        over,
        HOME=home,
        API_TOKEN="abc123",
        API_KEY="k",
        HOST_ADDRESS="192.168.7.9",
        HOME_FOLDER="/home/somebody",
    )["services"]["engine"]
    assert found["command"] == ["serve", "--api-key", "k", "--host", "192.168.7.9", "--util", "0.8"]
    assert found["environment"] == {"API_TOKEN": "abc123", "KEEP": "1"}
    assert [v["source"] for v in found["volumes"]] == [f"{home}/m", "/home/somebody/x"]


def test_what_a_service_extends_is_known(folder: Path) -> None:
    """A field inherited from another file is written with the value, its variables kept."""
    (folder / "common").mkdir()
    written(
        folder / "common",
        "services:\n  base:\n    image: x\n    command: [a, --u, '${U:-1}', '${V:-2}']\n"
        "    volumes: ['./p.py:/p.py', '/w:/w']\n",
    )
    base = written(
        folder,
        "services:\n  engine:\n    extends: {file: common/base.yml, service: base}\n"
        "    volumes: ['./q:/q']\n",
        "top.yml",
    )
    own = own_launch(base)
    over = written(
        folder, override_for(own, own, variables={"U": "7"}, drops_mount_targets=("/w",)), "over.yml"
    )
    found = resolved(base, over, V="v")["services"]["engine"]
    assert found["command"] == ["a", "--u", "7", "v"]
    assert [v["source"] for v in found["volumes"]] == [str(folder / "common" / "p.py"), str(folder / "q")]


def test_scripts_take_variables_and_refuse_flags(folder: Path) -> None:
    """A flag inside an entrypoint's script is reached by its variable; otherwise it is said, not resolved."""
    base = written(
        folder,
        "services:\n  engine:\n    image: x\n    entrypoint: [sh, -c]\n    command:\n      - |\n"
        "        set -e\n        exec vllm serve --util ${U:-0.9} --key $$KEY ${REST}\n",
    )
    own = own_launch(base, REST="--r secret")
    over = written(folder, override_for(own, own, variables={"U": "0.8"}), "over.yml")
    text = over.read_text()
    assert "secret" not in text and "${REST}" in text and "$$KEY" in text
    assert resolved(base, over)["services"]["engine"]["command"][0].split()[6] == "0.8"
    changed = (own.command[0].replace("0.9", "0.8"),)
    with pytest.raises(UsageProblem, match="would have to be resolved"):
        override_for(own, dataclasses.replace(own, command=changed), sets_command=True)


def test_nothing_differs(folder: Path) -> None:
    """The user's own values: a valid override that changes nothing, and says so."""
    base = written(folder, BASE)
    own = own_launch(base)
    text = override_for(own, own)
    assert "nothing differs" in text
    assert resolved(base, written(folder, text, "over.yml")) == resolved(base)


def test_a_variable_that_the_file_does_not_mention_is_told(folder: Path) -> None:
    """An override cannot set it, so a comment says where it goes."""
    base = written(folder, BASE)
    own = own_launch(base)
    assert "also put ELSEWHERE=1 into .env" in override_for(own, own, variables={"ELSEWHERE": "1"})


def test_standalone_is_the_whole_file(folder: Path) -> None:
    """The base with the values in it works alone, without a literal of this machine."""
    base = written(folder, BASE)
    own = own_launch(base)
    chosen = dataclasses.replace(
        own, compose=ComposeRef(str(base), "engine", "user", {"GPU_MEMORY_UTILIZATION": "0.93"})
    )
    alone = written(folder, compose_override(own, chosen, [], standalone=True), "alone.yml")
    expected = resolved(base, GPU_MEMORY_UTILIZATION="0.93", HF_TOKEN="t")
    assert resolved(alone, HF_TOKEN="t")["services"] == expected["services"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("services: [", "line 1"),
        ("- a", "not a mapping"),
        ("services: {other: {image: x}}", "no service 'engine'"),
        ("services: &s\n  <<: *s\n", "no service"),
        ("services: &s\n  engine: *s\n", "expand too far"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, told: str) -> None:
    """One sentence with the file, never a traceback."""
    base = written(tmp_path, text)
    launch = Launch("docker", "vllm", (), compose=ComposeRef(str(base), "engine", "user"))
    with pytest.raises(UsageProblem, match=told):
        compose_override(launch, launch, [])


def test_aliases_that_expand_without_end_are_refused(tmp_path: Path) -> None:
    """A few hundred bytes of YAML must not take all memory."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    base = written(tmp_path, "\n".join(rows))
    launch = Launch("docker", "vllm", (), compose=ComposeRef(str(base), "engine", "user"))
    with pytest.raises(UsageProblem, match="expand too far"):
        compose_override(launch, launch, [])


def test_an_image_launch_becomes_a_whole_service(folder: Path) -> None:
    """Image, argv, environment, mounts, port on loopback and GPUs; a token is a variable."""
    launch = Launch(
        "docker",
        "vllm",
        ("--model", "/m", "--x", "a $1"),
        {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "A": "1"},
        image="vllm/vllm-openai:v1",
        mounts=(Mount(f"{Path.home()}/m", "/m", read_only=True), Mount("cache", "/c", kind="volume")),
        container_port=8000,
        ipc="host",
        shm_size_mib=1024,
        wants_gpu=True,
    )
    path = written(folder, service_file(launch, "engine", ["a study"]))
    found = resolved(path, HF_TOKEN="t", HOME=str(Path.home()))["services"]["engine"]
    assert tuple(found["command"]) == launch.command
    assert found["environment"] == {"HF_TOKEN": "t", "A": "1"}
    assert found["volumes"][0]["source"] == f"{Path.home()}/m"
    assert found["ports"][0]["host_ip"] == "127.0.0.1"
    assert found["deploy"]["resources"]["reservations"]["devices"][0]["count"] == -1
    assert "hf_abc" not in path.read_text()
    with_model = dataclasses.replace(launch, command=("-m", "{model}", "--port", "{port}"))
    for model, env in ((f"{Path.home()}/q.gguf", {}), ("builtin:tiny-llama", {"MODEL_FILE": "/w/q.gguf"})):
        text = service_file(dataclasses.replace(with_model, model_path=model), "engine", [])
        again = resolved(written(folder, text), HF_TOKEN="t", HOME=str(Path.home()), **env)
        found = again["services"]["engine"]
        assert found["command"] == ["-m", "/models/model.gguf", "--port", "8000"]
        assert found["volumes"][-1]["source"] == env.get("MODEL_FILE", model)
    with pytest.raises(UsageProblem, match="starts a process"):
        service_file(Launch("process", "llamacpp", ("x",)), "engine", [])
