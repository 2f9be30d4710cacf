"""What the user says about a trace that cannot say it: the weights, their sizes, the layers.

    layers = ["decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.experts"]  # in forward order

    [[weight]]                 # one per expert weight of a layer
    name = "fc2_weight"
    elements = 234881024       # of its whole padded bucket, before sharding
    group_size = 8             # ranks that shard it

    [stage]                    # optional: regular expressions for whole names of ranges
    "stage1.forward" = 'Experts.fc1 forward'

`inference` and `layering` say what is made of it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiling.ranges import Kind
from profiling.spans import STAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["AssumeError", "Assumptions", "Weight", "read_assumptions"]


class AssumeError(ValueError):
    """The file cannot be used; the message is one sentence that names it."""


@dataclass(frozen=True)
class Weight:
    """An expert weight that every layer has, in a bucket of its own.

    Attributes:
        name: Its module's name inside the experts module.
        elements: Of its whole bucket, padding included.
        group_size: Over how many ranks the bucket is sharded.
    """

    name: str
    elements: int
    group_size: int


@dataclass(frozen=True)
class Assumptions:
    """What a file says.

    Attributes:
        layers: Paths of the experts modules, in forward order.
        stages: Regular expressions that a range's whole name has to match, by stage.
    """

    layers: tuple[str, ...]
    weights: tuple[Weight, ...] = ()
    stages: dict[Kind, re.Pattern[str]] = field(default_factory=dict)


_SHORT = {kind.value.removeprefix("megamoe::"): kind for kind in STAGES}


def read_assumptions(path: str | Path) -> Assumptions:
    """Return what the TOML file ``path`` says.

    Raises:
        AssumeError: It cannot be read, is no TOML, or lacks or misspells something.
    """
    try:
        return _parse(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AssumeError(f"{path}: {error}") from error
    except AssumeError as error:
        raise AssumeError(f"{path}: {error}") from None


def _parse(table: dict[str, Any]) -> Assumptions:
    _only(table, {"layers", "weight", "stage"}, "the file")
    layers = table.get("layers")
    if not _texts(layers) or not layers or len(set(layers)) < len(layers):
        raise AssumeError("layers must list the experts modules in forward order, each once")
    weights = table.get("weight", [])
    if not isinstance(weights, list) or not all(isinstance(entry, dict) for entry in weights):
        raise AssumeError("weights are written as [[weight]] tables")
    parsed = tuple(_weight(entry) for entry in weights)
    if len({weight.name for weight in parsed}) < len(parsed):
        raise AssumeError("two [[weight]] tables have the same name")
    stages = table.get("stage", {})
    if not isinstance(stages, dict):
        raise AssumeError("stages are written as a [stage] table")
    _only(stages, set(_SHORT), "[stage]")
    return Assumptions(
        tuple(layers), parsed, {_SHORT[key]: _pattern(key, text) for key, text in stages.items()}
    )


def _weight(entry: dict[str, Any]) -> Weight:
    _only(entry, {"name", "elements", "group_size"}, "[[weight]]")
    name, elements, size = (entry.get(key) for key in ("name", "elements", "group_size"))
    if not isinstance(name, str) or not name:
        raise AssumeError("a [[weight]] needs a name")
    if type(elements) is not int or elements < 1 or type(size) is not int or size < 1:
        raise AssumeError(
            f"weight {name!r} has elements {elements!r} and group_size {size!r}, but both must be "
            "whole numbers of at least 1"
        )
    if elements % size:
        raise AssumeError(
            f"weight {name!r} has {elements} elements, which do not divide by its group_size "
            f"{size}: give those of the padded bucket"
        )
    return Weight(name, elements, size)


def _pattern(key: str, text: object) -> re.Pattern[str]:
    try:
        return re.compile(text)  # type: ignore[call-overload]
    except (TypeError, re.error) as error:
        raise AssumeError(f"[stage] {key} is no regular expression: {error}") from None


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise AssumeError(f"{where} has no {key!r}, only {', '.join(sorted(known))}")


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) and entry for entry in value)
