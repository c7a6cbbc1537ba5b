"""Profiles: what is read, and the sentence for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_bisect.model import Bound, Trend, UsageProblem
from llm_bisect.spaces.load import axis, load_profile
from llm_bisect.spaces.profile import Profile
from llm_bisect.spaces.values import parse_value

GOOD = """\
profile: p
engine: llamacpp
launch: {runner: process, command: [llama-server, --port, "{port}", -c, "8192"], model: builtin:tiny-llama}
probe: {shape: prefill, target: 2k, start: 500, deadline: 1m, depths: [0, 1]}
margin_mib: 0.5g
reserve_mib: 100
margin_tiers_mib: [512, 1024]
tolerance: 5%
boot: {deadline: 10m, silence: 30s}
axes:
  ubatch:
    grid: {low: 256, high: 1k, step: 256}
  flash-attn:
    choices: {on: on, off: off}
  odd:
    apply: {env: ODD}
    grid: {values: [3, 1, 2]}
    prefer: low
    survival: rises
toggles:
  one: {apply: {env: ONE}}
  two: {apply: {env: TWO}, requires: [one]}
  three: {apply: {mount: patches/x.py}, target: /patches/x.py, conflicts: [one]}
pins:
  tree: {repository: patches/tree, mount: vllm/_tree}
historical: 2026-05-02
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def make(text: str) -> str:
        path = tmp_path / "p.yml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


def test_a_whole_profile(write: Callable[[str], str]) -> None:
    """Every key arrives with its unit; on and off stay text."""
    p = load_profile(write(GOOD))
    assert (p.name, p.engine.name, list(p.launches)) == ("p", "llamacpp", ["process"])
    assert (p.probe.target_tokens, p.probe.deadline_s, p.probe.depths) == (2_000, 60.0, (0.0, 1.0))
    assert (p.margin_mib, p.reserve_mib, p.tiers_mib) == (512, 100, (512, 1024))
    assert (p.tolerance, p.tolerance_tokens, p.boot_silence_s) == (0.05, 1, 30.0)
    assert p.axes["ubatch"].values == (256, 512, 768)
    assert p.axes["flash-attn"].payloads == {"on": "on", "off": "off"}
    odd = p.axes["odd"]
    assert (odd.values, odd.prefer, odd.trends[Bound.MEMORY]) == ((1, 2, 3), "low", Trend.RISES)
    assert p.axes["two"].requires == ("one",) and p.axes["two"].toggle
    three = p.axes["three"]
    assert p.path is not None and three.apply.mount == str(p.path.parent / "patches/x.py")
    assert (three.apply.mount_target, three.conflicts) == ("/patches/x.py", ("one",))
    assert p.pins == {"tree": {"repository": "patches/tree", "mount": "vllm/_tree"}}
    assert p.historical == "2026-05-02"
    assert p.axes["prompt"].kind == "prompt"


@pytest.mark.parametrize("name", ["long-text", "long-text-no-mtp", "tiny-llama", "tiny-recall"])
def test_shipped_profiles(name: str) -> None:
    """Every shipped profile loads, and every axis says which way it is monotone or is unordered."""
    p = load_profile(name)
    for one in p.axes.values():
        assert one.kind in ("choices", "prompt") or one.trends, one.name
        assert one.kind == "prompt" or len(one.values) >= 2


def test_the_axes_that_were_asked_for() -> None:
    """mem-util, max-model-len, mtp, kv-dtype, ubatch, prompt and patch toggles, with their directions."""
    p = load_profile("long-text", runner="simulated")
    assert {"mem-util", "max-model-len", "mtp", "kv-dtype", "ubatch", "prompt"} <= p.axes.keys()
    assert {"pr35975", "tolist-cudagraph", "p103", "pn30", "pn32", "pn34"} <= p.axes.keys()
    assert p.axes["mem-util"].trends[Bound.ADMISSION] is Trend.RISES
    assert p.axes["mem-util"].trends[Bound.MEMORY] is Trend.FALLS
    assert p.axes["max-model-len"].trends[Bound.ADMISSION] is Trend.FALLS
    assert p.margin_mib == 400 and p.probe.target_tokens == 60_000


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("engine: llamacpp", "engine: lamacpp", "line 2: engine: There is no engine named 'lamacpp'"),
        ("engine: llamacpp", "engine: ./gone.yml", "line 2: engine: .*gone.yml"),
        ("profile: p", "profil: p", "line 1: profil: unknown key"),
        ("target: 2k", "target: lots", "line 4: probe.target: 'lots' is not a number of tokens"),
        ("deadline: 1m", "deadline: soon", "probe.deadline: 'soon' is not a duration"),
        ("shape: prefill", "shape: spiral", "probe.shape: 'spiral' is not accepted"),
        ("depths: [0, 1]", "depths: [2]", "probe.depths: \\[2\\] is not a list of depths"),
        ("low: 256, high: 1k", "low: 2k, high: 1k", "axes.ubatch.grid: low 2000 is above high 1000"),
        ("step: 256}", "step: 0}", "axes.ubatch.grid: '?0'? is not a number of tokens|step 0"),
        ("step: 256}", "stap: 256}", "axes.ubatch.grid.stap: unknown key"),
        (", step: 256}", "}", "axes.ubatch.grid: step is missing"),
        ("values: [3, 1, 2]", "values: []", "is not a list of different values"),
        ("    apply: {env: ODD}\n", "", "axes.odd: llama.cpp has no axis of this name, so it needs `apply`"),
        ("choices: {on: on, off: off}", "choices: {}", "holds no choices"),
        ("choices: {on: on, off: off}", "prefer: high", "needs either a grid or choices"),
        ("requires: [one]", "requires: [four]", "toggles.two.requires: there is no other toggle 'four'"),
        ("tolerance: 5%", "tolerance: 500%", "tolerance: '500%' is no tolerance"),
        ("margin_mib: 0.5g", "margin_mib: much", "margin_mib: 'much' is not an amount of memory"),
        ("margin_tiers_mib: [512, 1024]", "margin_tiers_mib: [2, 1]", "is no pair of tiers"),
        ("runner: process, ", "runner: podman, ", "launch.runner: 'podman' is not accepted"),
        ("command: [llama-server", "commando: [llama-server", "launch.commando: unknown key"),
        ("  ubatch:\n", "  prompt:\n", "axes.prompt: the axis prompt is always there"),
        ("one: {apply: {env: ONE}}", "ubatch: {apply: {env: ONE}}", "there is an axis 'ubatch' already"),
        ("prefer: low", "prefer: best", "axes.odd.prefer: 'best' is not accepted"),
        ("survival: rises", "survival: up", "axes.odd.survival: 'up' is not accepted"),
        ("    grid: {low: 256", "\tgrid: {low: 256", "line 12: not valid YAML"),
        ("engine: llamacpp", "engine: llamacpp\nengine: vllm", "the key 'engine' appears twice"),
        ("launch: {", "launches: {}\nlaunch: {", "either launch or launches"),
        ("step: 256}", "step: 2k}", "axes.ubatch.grid: step 2000 is larger than the range 256 to 1000"),
        ("values: [3, 1, 2]", "values: [3, 3.0]", "is not a list of different values"),
        ("values: [3, 1, 2]", "values: 3", "3 is not a list of different values"),
        ("values: [3, 1, 2]", "values: [x]", "'x' is no number"),
        ("prefer: low", "unit: fraction", "axes.odd.grid: 3 is no share of the whole"),
        ("prefer: low", "unit: percent", "axes.odd.unit: 'percent' is not accepted"),
        ("values: [3, 1, 2]", "values: [true]", "True is no number"),
        ("values: [3, 1, 2]", "values: [nan]", "nan is no finite number"),
        ("choices: {on: on, off: off}", "choices: 5", "5 holds no choices"),
        ("apply: {env: ODD}", "apply: {target: /x}", "axes.odd.apply: it is not said how this is applied"),
        ("one: {apply: {env: ONE}}", "one: {}", "toggles.one.apply: it is not said how this is applied"),
        ("one: {apply: {env: ONE}}", "one:", "toggles.one.apply: it is not said how this is applied"),
        (
            "repository: patches/tree",
            "repo: patches/tree",
            "line 25: pins.tree: a pin needs one of repository",
        ),
        ("tolerance: 5%", "tolerance: x%", "tolerance: 'x%' is no tolerance"),
        ("tolerance: 5%", "tolerance: x", "tolerance: 'x' is not a number of tokens"),
        ("target: 2k", "target: [2k]", "probe.target: \\['2k'\\] is no amount"),
    ],
)
def test_each_mistake_has_its_sentence(write: Callable[[str], str], old: str, new: str, says: str) -> None:
    """The file, the key, what was wrong; exit status 2; and a hint."""
    assert old in GOOD
    with pytest.raises(UsageProblem, match=says) as caught:
        load_profile(write(GOOD.replace(old, new, 1)))
    assert caught.value.exit_status == 2 and caught.value.hint
    assert "p.yml" in caught.value.message


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n", "profile: [1]\nengine: vllm\n", "\x00"])
def test_what_is_no_profile(write: Callable[[str], str], text: str) -> None:
    """An empty file, a list, a text, bytes: one sentence, no traceback."""
    with pytest.raises(UsageProblem):
        load_profile(write(text))


def test_not_utf8(tmp_path: Path) -> None:
    """A file in another encoding is named."""
    (tmp_path / "p.yml").write_bytes(b"profile: \xff\xfe")
    with pytest.raises(UsageProblem, match=r"p\.yml is not UTF-8"):
        load_profile(str(tmp_path / "p.yml"))


def test_axes_of_the_engine_and_of_ones_own(write: Callable[[str], str]) -> None:
    """Choices as a list take the engine's payloads; how it is applied may be said, and then wins."""
    text = GOOD.replace("choices: {on: on, off: off}", "choices: [on, auto]")
    text = text.replace(
        "  odd:\n",
        "  kv-dtype: {choices: [f16, q8_0]}\n"
        "  max-model-len: {apply: {variable: LEN}, grid: {values: [8k, 16k]}}\n"
        "  batch: {apply: {flag: [-bb, --bb]}, grid: {values: [1, 2]}}\n"
        "  share: {apply: {variable: [S, T]}, grid: {low: '0.5', high: 0.9, step: 0.2}, unit: fraction}\n"
        "  odd:\n",
    )
    axes = load_profile(write(text)).axes
    assert axes["flash-attn"].payloads == {"on": "on", "auto": "auto"}
    assert axes["kv-dtype"].apply.also_flags == (("-ctv", "--cache-type-v"),)
    assert axes["max-model-len"].apply.variable == ("LEN",) and axes["max-model-len"].apply.flag[0] == "-c"
    assert axes["max-model-len"].values == (8_000, 16_000) and axes["max-model-len"].step is None
    assert axes["batch"].apply.flag == ("-bb", "--bb")
    assert (axes["share"].values, axes["share"].unit, axes["share"].step) == (
        (0.5, 0.7, 0.9),
        "fraction",
        0.2,
    )


def test_an_engine_of_ones_own(write: Callable[[str], str], tmp_path: Path) -> None:
    """A description beside the profile is found from anywhere."""
    (tmp_path / "own.yml").write_text(
        "name: own\ntitle: Own\ndialect: vllm\nport: 9000\nendpoints: {health: /health}\n"
    )
    profile = "profile: p\nengine: ./own.yml\nlaunch: {image: x}\ntolerance: 128\n"
    found = load_profile(write(profile))
    assert found.engine.name == "own"
    assert (found.tolerance, found.tolerance_tokens) == (0.0, 128)


def test_names_that_do_not_exist() -> None:
    """Unknown profiles, axes and runners offer what there is."""
    with pytest.raises(UsageProblem, match="no profile 'long-txt'") as caught:
        load_profile("long-txt")
    assert "did you mean 'long-text'?" in (caught.value.hint or "")
    with pytest.raises(UsageProblem, match="no axis 'memutil'") as caught:
        axis(load_profile("long-text"), "memutil")
    assert "'mem-util'" in (caught.value.hint or "")
    with pytest.raises(UsageProblem, match="has no launch for --runner process"):
        load_profile("long-text", runner="process")
    with pytest.raises(UsageProblem, match="there is no runner 'podman'"):
        load_profile("long-text", runner="podman")
    with pytest.raises(UsageProblem, match="there is no such file"):
        load_profile("./nowhere.yml")
    with pytest.raises(UsageProblem, match="bisect downloads nothing"):
        load_profile("https://example.org/p.yml")


def test_an_edit_changes_the_hash(write: Callable[[str], str]) -> None:
    """A study notices that its profile was edited."""
    before = load_profile(write(GOOD)).source_sha256
    assert load_profile(write(GOOD + "# more\n")).source_sha256 != before


def test_values_as_typed(write: Callable[[str], str]) -> None:
    """--set takes choices, tokens and numbers; anything else is one sentence."""
    p: Profile = load_profile(write(GOOD))
    assert parse_value(p.axes["ubatch"], "1k", where="--set") == 1_000
    assert parse_value(p.axes["odd"], "2", where="--set") == 2
    assert parse_value(p.axes["flash-attn"], "off", where="--set") == "off"
    for name, text in (
        ("flash-attn", "maybe"),
        ("odd", "x"),
        ("odd", "nan"),
        ("odd", "-inf"),
        ("prompt", "5"),
        ("ubatch", "x"),
    ):
        with pytest.raises(UsageProblem):
            parse_value(p.axes[name], text, where="--set")
