"""The shipped search spaces: whole, resolvable, and true to the recipes that they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.model import Launch, Mount
from llm_bisect.spaces import resources
from llm_bisect.spaces.apply import candidate_id, describe_difference, own_values, resolve_launch
from llm_bisect.spaces.load import load_profile

NAMES = ["long-text", "long-text-no-mtp", "tiny-llama", "tiny-recall"]
GENESIS = {
    "GENESIS_ENABLE_P103": "1",
    "GENESIS_ENABLE_PN30_DS_LAYOUT_SPEC_DECODE": "1",
    "GENESIS_ENABLE_PN32_GDN_CHUNKED_PREFILL": "1",
    "GENESIS_PN32_GDN_CHUNK_SIZE": "8192",
    "GENESIS_PN32_GDN_CHUNK_THRESHOLD": "16384",
    "GENESIS_FLA_FWD_H_MAX_T": "16384",
    "GENESIS_ENABLE_PN34_WORKSPACE_LOCK_RELAX": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
RECIPE = [
    "--max-model-len 180000",
    "--gpu-memory-utilization 0.93",
    '--speculative-config {"method":"mtp","num_speculative_tokens":3}',
    "--max-num-batched-tokens 4128",
    "--max-num-seqs 1",
    "--kv-cache-dtype turboquant_3bit_nc",
    "--enable-chunked-prefill",
    "--language-model-only",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults of the files, whatever this shell exports."""
    for name in (
        "MAX_MODEL_LEN",
        "GPU_MEMORY_UTILIZATION",
        "KV_CACHE_DTYPE",
        "PATCHES",
        "MODEL_DIR",
        "VLLM_IMAGE",
    ):
        monkeypatch.delenv(name, raising=False)


def every(name: str) -> list[tuple[str, Launch]]:
    profile = load_profile(name)
    return [(runner, resolve_launch(profile, runner, {})) for runner in profile.launches]


def test_nothing_is_left_out() -> None:
    """Every shipped file is tested here."""
    folder = resources.shipped("search_spaces")[-1]
    assert sorted(p.stem for p in folder.glob("*.yml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_every_axis_can_be_applied(name: str) -> None:
    """On every runner: it changes the launch, is read back, and says what it changed."""
    profile = load_profile(name)
    for runner in profile.launches:
        own = own_values(profile, runner)
        user = resolve_launch(profile, runner, {})
        assert own.keys() == profile.axes.keys() - {"prompt"}
        for axis in profile.axes.values():
            for value in axis.values:
                launch = resolve_launch(profile, runner, {axis.name: value})
                changed = describe_difference(user, launch)
                assert bool(changed) == (value != own[axis.name]), (axis.name, value)
                assert (candidate_id(launch) == candidate_id(user)) == (not changed), (axis.name, value)


@pytest.mark.parametrize("name", NAMES)
def test_the_users_own_point_is_on_the_axes(name: str) -> None:
    """Every axis reads its own value from the launch."""
    profile = load_profile(name)
    for runner in profile.launches:
        own = own_values(profile, runner)
        assert {k for k, v in own.items() if v is None} <= (
            {"kv-dtype"} if name == "tiny-recall" else set()
        ), own


@pytest.mark.parametrize(
    ("name", "context", "share"), [("long-text", "180000", "0.93"), ("long-text-no-mtp", "200000", "0.95")]
)
def test_the_recipes_of_the_study(name: str, context: str, share: str) -> None:
    """Every flag, environment toggle and mount of the two final recipes."""
    launch = resolve_launch(load_profile(name), "docker", {})
    words = " ".join(launch.command)
    for part in RECIPE:
        part = part.replace("180000", context).replace("0.93", share)
        if "speculative" in part and name == "long-text-no-mtp":
            assert "--speculative-config" not in words
        else:
            assert part in words
    assert launch.image == "vllm/vllm-openai:nightly-7a1eb8ac2ec4ea69338c51dc7afd4b15010abfa8"
    assert GENESIS.items() <= launch.env.items()
    targets = {m.target: m for m in launch.mounts}
    for file in ("patch_tolist_cudagraph.py", "patch_inputs_embeds_optional.py"):
        assert targets[f"/patches/{file}"].read_only
    assert all(m.read_only for m in launch.mounts) and launch.wants_gpu and launch.ipc == "host"
    assert launch.entrypoint is not None and launch.entrypoint[2].rstrip().endswith('exec vllm serve "$@"')
    assert "$$" not in launch.entrypoint[2]


def test_own_values_of_the_study() -> None:
    """The point that the study recommended is the one that the file starts."""
    own = own_values(load_profile("long-text"), "simulated")
    assert own == {
        "mem-util": 0.93,
        "max-model-len": 180_000,
        "mtp": "k3",
        "kv-dtype": "turboquant_3bit_nc",
        "ubatch": 4128,
        "pr35975": "on",
        "tolist-cudagraph": "on",
        "p103": "on",
        "pn30": "on",
        "pn32": "on",
        "pn34": "on",
    }


def test_knobs_go_through_variables_and_patches_through_mounts() -> None:
    """What the file offers as a variable is set by it; MTP is a flag; a patch is a mount, a switch is set."""
    profile = load_profile("long-text")
    launch = resolve_launch(
        profile,
        "docker",
        {"mem-util": 0.945, "max-model-len": 120_000, "mtp": "off", "pr35975": "off", "p103": "off"},
    )
    assert launch.compose is not None
    assert launch.compose.variables == {"GPU_MEMORY_UTILIZATION": "0.945", "MAX_MODEL_LEN": "120000"}
    assert launch.compose.sets_command and "--speculative-config" not in launch.command
    assert launch.compose.drops_mount_targets == ("/patches/patch_inputs_embeds_optional.py",)
    assert launch.compose.sets_env == {"GENESIS_ENABLE_P103": "0"}


def test_a_patch_is_mounted_from_where_the_compose_file_has_it(tmp_path: Path) -> None:
    """Switched on again it is the file that the compose file mounts, so nothing changes."""
    profile = load_profile("long-text")
    own = resolve_launch(profile, "docker", {})
    for name in ("pr35975", "tolist-cudagraph"):
        apply = profile.axes[name].apply
        assert apply.mount is not None and apply.mount_target is not None
        assert Mount(apply.mount, apply.mount_target, read_only=True) in own.mounts


def test_the_simulated_launch_is_the_docker_one() -> None:
    """Same command, environment and mounts; it asks for no GPU and names what stands in for one."""
    profile = load_profile("long-text")
    docker, simulated = (resolve_launch(profile, r, {"mem-util": 0.9}) for r in ("docker", "simulated"))
    assert (docker.command, docker.env, docker.mounts) == (simulated.command, simulated.env, simulated.mounts)
    assert simulated.simulated is not None and not simulated.wants_gpu
    assert (simulated.simulated.card, simulated.simulated.model) == ("rtx3090", "qwen3.6-27b-autoround-int4")
    assert profile.historical is not None and "no longer published" in profile.historical


def test_the_tiny_ones_hold_placeholders_and_limits() -> None:
    """Port and model are filled in by the runner; the model is made by the product itself."""
    for name in ("tiny-llama", "tiny-recall"):
        for runner, launch in every(name):
            words = launch.command
            assert "{model}" in words and ("{port}" in words) == (runner == "process")
            assert launch.model_path == ("builtin:tiny-llama" if name == "tiny-llama" else "builtin:recall")
            assert launch.memory_limit_mib == (256 if name == "tiny-llama" else None)
            assert words[words.index("-c") + 1] == ("32768" if name == "tiny-llama" else "65536")
    tiny, recall = load_profile("tiny-llama"), load_profile("tiny-recall")
    assert tiny.probe.shape == "prefill" and tiny.probe.max_tokens == 1 and tiny.tolerance_tokens == 128
    assert recall.probe.shape == "needle" and len(recall.probe.depths) >= 3 and recall.probe.deadline_s == 20


def test_one_value_sets_both_halves_of_the_kv_cache() -> None:
    """K and V are quantised together."""
    words = resolve_launch(load_profile("tiny-llama"), "process", {"kv-dtype": "q8_0"}).command
    assert words[words.index("-ctk") + 1] == words[words.index("-ctv") + 1] == "q8_0"
