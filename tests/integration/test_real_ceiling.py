"""The main job on a real llama-server under a real memory limit, against an exhaustive ladder.

The ladder climbs by 128 tokens within one container until it is killed; the study knows nothing of it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from llm_bisect.runners.images import TINY_IMAGE
from llm_bisect.runners.models import builtin_model

ROOT = Path(__file__).resolve().parents[2]
STEP_TOKENS = 128
BAND = 0.05  # a cold page cache alone moves a ceiling by 2.5 %

# flags, memory limit, and where the ladder begins (memory grows with the prompt, so the rungs below tell
# nothing that a higher one does not)
CONFIGURATIONS = {
    "fa-off-ub2048-256m": ({"-ub": "2048"}, "256m", STEP_TOKENS),
    "fa-off-ub512-128m": ({"-ub": "512"}, "128m", STEP_TOKENS),
    "fa-on-ub2048-c65536-128m": ({"-fa": "on", "-c": "65536"}, "128m", 9_984),
    "fa-off-ub1024-q8-192m": ({"-ub": "1024", "-ctk": "q8_0"}, "192m", STEP_TOKENS),
}


def ladder(
    client: docker.DockerClient, command: list[str], limit: str, start: int = STEP_TOKENS, end: int = 32_768
) -> int:
    """The longest prompt, in steps of 128 tokens, that one container survives."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [w.replace("{model}", "/models/model.gguf") for w in command]
    container = client.containers.create(
        TINY_IMAGE,
        [*words, "--host", "0.0.0.0", "--port", "8080"],  # noqa: S104 - inside the container
        ports={"8080/tcp": ("127.0.0.1", port)},
        volumes={str(builtin_model("tiny-llama")): {"bind": "/models/model.gguf", "mode": "ro"}},
        mem_limit=limit,
        memswap_limit=limit,
        mem_swappiness=0,
        name=f"ladder-{secrets.token_hex(4)}",
    )
    try:
        container.start()
        base = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base, timeout=60) as http:
            for _ in range(200):
                with contextlib.suppress(httpx.HTTPError):
                    if http.get("/health").status_code == 200:
                        break
                time.sleep(0.05)
            survived = 0
            for tokens in range(start, end, STEP_TOKENS):
                prompt = [65 + (i * 7 + tokens) % 26 for i in range(tokens)]
                body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
                try:
                    if http.post("/completion", json=body).status_code != 200:
                        break
                except httpx.HTTPError:
                    break
                survived = tokens
            else:
                return survived  # the whole ladder
        container.wait(timeout=20)  # the socket closes a moment before the state shows it
        container.reload()
        assert container.attrs["State"]["OOMKilled"], container.logs().decode()[-2000:]
        return survived
    finally:
        container.remove(force=True)


def command_of(profile: Path) -> list[str]:
    from llm_bisect.spaces.load import load_profile

    return [str(w) for w in load_profile(str(profile)).launches["docker"]["command"]]  # type: ignore[attr-defined]


@pytest.mark.docker
@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_ceiling_is_the_ladders(
    name: str,
    tiny_image: str,
    docker_host: Any,
    tiny_profile: Callable[..., Path],
    bisect_cli: Callable[..., Any],
) -> None:
    """`bisect ceiling --axis prompt --runner docker` lands within 5 % of the exhaustive ladder, and the
    failing side was really killed for memory."""
    flags, limit, start = CONFIGURATIONS[name]
    profile = tiny_profile(name, flags, memory_limit=limit, target="2000")
    truth = ladder(docker_host.client, command_of(profile), limit, start)
    ran = bisect_cli(
        "ceiling", "--profile", str(profile), "--axis", "prompt", "--runner", "docker", "--tolerance", "128",
        "--confirm", "2", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    answer = ran.json["answer"]
    assert answer["bound_by"] == "memory" and answer["fail_outcome"] == "host_oom_killed"
    assert answer["first_fail"] - answer["last_pass"] <= STEP_TOKENS
    assert abs(answer["last_pass"] - truth) <= BAND * truth + STEP_TOKENS, (answer, truth)
    assert answer["recommended"] is not None and answer["confirmed"]["passes"] >= 2
    killed = [p for c in ran.json["candidates"] for p in c["probes"] if p["outcome"] == "host_oom_killed"]
    assert killed
    assert not docker_host.ours()


@pytest.mark.docker
@pytest.mark.llama
@pytest.mark.slow
def test_the_largest_ubatch_that_survives(
    tiny_image: str, docker_host: Any, tiny_profile: Callable[..., Path], bisect_cli: Callable[..., Any]
) -> None:
    """`--axis ubatch` at 5,000 tokens: the grid's values are tried one by one in containers of our own, and
    the study names the last that survives and the first that does not."""
    profile = tiny_profile("ubatch", {"-ub": "512"}, memory_limit="256m")
    command = command_of(profile)
    survives = {}
    for value in (256, 512, 1024, 1536, 2048):
        words = list(command)
        words[words.index("-ub") + 1] = str(value)
        survives[value] = ladder(docker_host.client, words, "256m", 4_992, 5_121) >= 4_992
    assert any(survives.values()) and not all(survives.values()), survives
    ran = bisect_cli(
        "ceiling", "--profile", str(profile), "--axis", "ubatch", "--prompt", "5000", "--runner", "docker",
        "--confirm", "2", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    answer = ran.json["answer"]
    assert answer["last_pass"] == max(v for v, ok in survives.items() if ok)
    assert answer["first_fail"] == min(v for v, ok in survives.items() if not ok)
    assert answer["recommended"] == answer["last_pass"]
    assert answer["prompt_ceiling"]["last_pass"] >= 5_000


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.serial
def test_the_same_profile_as_a_process(
    llama_server: Path, tiny_profile: Callable[..., Path], bisect_cli: Callable[..., Any]
) -> None:
    """`--runner process` under a memory cgroup finds a memory ceiling too, where the machine allows one."""
    profile = tiny_profile("cg", {"-ub": "2048"}, memory_limit="256m", target="2000")
    ran = bisect_cli(
        "ceiling", "--profile", str(profile), "--axis", "prompt", "--runner", "process", "--tolerance", "256",
        "--confirm", "1", "--json",
    )  # fmt: skip
    if ran.code == 4 and "cgroup" in ran.err:
        pytest.skip(f"no memory cgroup may be made here: {ran.err.strip()}")
    assert ran.code == 0, ran.err
    answer = ran.json["answer"]
    assert (answer["bound_by"], answer["fail_outcome"]) == ("memory", "host_oom_killed")
    assert 2_500 <= answer["last_pass"] <= 5_000


@pytest.mark.llama
@pytest.mark.slow
def test_time_binds_a_process_with_needles(
    llama_server: Path, bisect_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """The recall model with a short deadline: needles at every depth come back, and time ends the line."""
    shipped = (ROOT / "search_spaces" / "tiny-recall.yml").read_text(encoding="utf-8")
    profile = tmp_path / "quick-recall.yml"
    profile.write_text(shipped.replace("deadline: 20s", "deadline: 4s").replace("target: 8k", "target: 3k"))
    ran = bisect_cli("ceiling", "--profile", str(profile), "--axis", "prompt", "--confirm", "1", "--json")
    assert ran.code == 0, ran.err
    answer = ran.json["answer"]
    assert answer["bound_by"] in ("time", "context"), answer
    assert answer["recommended"] == answer["last_pass"] >= 3_000
