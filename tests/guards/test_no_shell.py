"""No shell, no unsafe YAML, no code from data: found by reading every file of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "bisect/llm_bisect"

FORBIDDEN_CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all",
    "yaml.full_load_all", "pickle.load", "pickle.loads", "marshal.loads", "eval", "exec",
}  # fmt: skip
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def _last(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> full name, so that `from os import system as s` is seen as os.system."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _safe_loaders(trees: list[ast.Module]) -> set[str]:
    """Names of classes that are, through however many steps, made from a safe loader."""
    safe = set(SAFE_LOADERS)
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {c.name for c in classes if c.bases and all(_last(base) in safe for base in c.bases)} - safe
        if not more:
            return safe
        safe |= more


def _offences(tree: ast.Module, safe: set[str]) -> list[str]:
    names = _imported_names(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, dot, rest = _dotted(node.func).partition(".")
        called = names.get(head, head) + dot + rest
        if called in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: {called}")
        if any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords):
            found.append(f"line {node.lineno}: shell=")
        if called in ("yaml.load", "yaml.load_all"):
            loaders = [k.value for k in node.keywords if k.arg == "Loader"] + node.args[1:2]
            if not loaders or _last(loaders[0]) not in safe:
                found.append(f"line {node.lineno}: {called} without a safe loader")
    return found


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_package_calls_no_shell_and_loads_nothing_unsafely() -> None:
    """No file of the package calls a shell, runs text as code, or reads YAML with an unsafe loader."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    assert trees
    safe = _safe_loaders(list(trees.values()))
    found = {str(path.relative_to(PACKAGE)): _offences(tree, safe) for path, tree in trees.items()}
    assert {name: offences for name, offences in found.items() if offences} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.Popen('ls', shell=wanted)",
        "import os\nos.system('ls')",
        "from os import system as s\ns('ls')",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml as y\ny.unsafe_load(text)",
        "class Mine(yaml.FullLoader): ...\nimport yaml\nyaml.load(text, Mine)",
        "eval(text)",
    ],
)
def test_each_offence_would_be_seen(source: str) -> None:
    """The reader finds each kind of offence, under another name too."""
    tree = ast.parse(source)
    assert _offences(tree, _safe_loaders([tree]))


def test_a_safe_loader_of_our_own_is_accepted() -> None:
    """A class made from PyYAML's safe loader may be given to yaml.load."""
    tree = ast.parse("import yaml\nclass Mine(yaml.SafeLoader): ...\nyaml.load(text, Loader=Mine)")
    assert _offences(tree, _safe_loaders([tree])) == []
