"""Compose's own YAML tags, as they are written into override files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True)
class Override:
    """Written as `!override value`: replaces what the base has instead of merging with it."""

    value: Any


class Reset:
    """Written as `!reset null`: takes away what the base has."""


def add_compose_tags(dumper: type[yaml.SafeDumper]) -> None:
    """Teach a dumper both tags."""
    dumper.add_representer(Override, _override)
    dumper.add_representer(Reset, _reset)


def _override(dumper: yaml.SafeDumper, tagged: Override) -> yaml.Node:
    node = dumper.represent_data(tagged.value)
    node.tag = "!override"
    if isinstance(node, yaml.CollectionNode) and not node.value:
        node.flow_style = True
    return node


def _reset(dumper: yaml.SafeDumper, _: Reset) -> yaml.Node:
    return dumper.represent_scalar("!reset", "null")
