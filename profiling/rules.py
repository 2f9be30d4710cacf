"""What should be hidden under what, and how well: the built-in rules and those of TOML files.

    [[rule]]
    name = "fc1 gradients hide"                          # what it claims
    collective = "overlap::grad_reduce[*.fc1_weight]"    # a label of ours, c10d's word, or a kernel
    stage = "megamoe::stage2.backward[*]"                # or "any": whatever computes
    min_hidden = 0.9
    iterations = "3-"                                    # also [3, 4], or: skip_first = 1

Patterns know `*` and `?`; brackets stand for themselves, so a label can be pasted. A stage without
a bracket is that of the collective's own layer; with one it is every stage that matches.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from profiling.ranges import Kind, label

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ANY", "BUILT_IN", "Iterations", "Rule", "RuleError", "built_in", "read_rules"]

ANY = "any"
THRESHOLD = 0.9


class RuleError(ValueError):
    """A rule file cannot be used. The message is one sentence that names file, rule and key."""


@dataclass(frozen=True)
class Iterations:
    """Which iterations count: numbers and ranges of numbers, both ends included."""

    text: str
    spans: tuple[tuple[int, int | None], ...]  # None: open

    @classmethod
    def parse(cls, text: str) -> Iterations:
        """Read "3,5-8,10-".

        Raises:
            ValueError: It is written in another way.
        """
        spans: list[tuple[int, int | None]] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:(-)(\d*))?\s*", part)
            if match is None or (match[3] and int(match[3]) < int(match[1])):
                raise ValueError(
                    f"iterations are {text!r}, but must be numbers and rising ranges, as in "
                    "3,5-8,10-"
                )
            first = int(match[1])
            spans.append((first, (int(match[3]) if match[3] else None) if match[2] else first))
        return cls(text, tuple(spans))

    def __contains__(self, number: int | None) -> bool:
        return number is not None and any(
            first <= number and (last is None or number <= last) for first, last in self.spans
        )


@dataclass(frozen=True)
class Rule:
    """A collective that should run under a stage, in every layer that has it.

    Attributes:
        name: What it claims, for people.
        collective: Pattern for a collective's label, c10d's word for it, or its kernel's name.
        stage: Pattern for the stages that may hide it, or `ANY`.
        min_hidden: Share of the collectives' time that has to be hidden, in (0, 1].
        min_spread: The same for every single occurrence.
        max_exposed_ms, max_wait_ms: Bounds for the mean of an occurrence.
        min_effective: Share of the communication's time that the run has to save; needs a baseline.
        iterations: Which count; None for all.
        skip_first: How many of the profile's first iterations do not count.
        layers: Pattern for the layers that it is about.
    """

    name: str
    collective: str
    stage: str
    min_hidden: float | None = None
    min_spread: float | None = None
    max_exposed_ms: float | None = None
    max_wait_ms: float | None = None
    min_effective: float | None = None
    iterations: Iterations | None = None
    skip_first: int = 0
    layers: str = "*"

    def about(self, labels: tuple[str, ...]) -> bool:
        """Return whether a collective with any of these labels is what the rule is about."""
        return any(_matches(self.collective, text) for text in labels)

    def about_layer(self, layer: str) -> bool:
        return _matches(self.layers, layer)

    def expects(self, layer: str) -> bool:
        """Return whether an expert layer of this path should have such a collective."""
        return self.about_layer(layer) and any(
            _matches(self.collective, label(kind, f"{layer}.{weight}"))
            for kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE)
            for weight in ("fc1_weight", "fc2_weight")
        )

    def hides(self, stage: Kind, layer: str, own: str) -> bool:
        """Return whether this stage may hide the collective of layer ``own``."""
        if "[" in self.stage:
            return _matches(self.stage, label(stage, layer))
        return layer == own and _matches(self.stage, stage.value)

    @property
    def bounds(self) -> str:
        """Its thresholds, for people."""
        parts = [
            text.format(value)
            for text, value in (
                ("at least {:.0%} hidden", self.min_hidden),
                ("every occurrence at least {:.0%}", self.min_spread),
                ("at most {:g} ms exposed", self.max_exposed_ms),
                ("at most {:g} ms wait", self.max_wait_ms),
                ("at least {:.0%} effective", self.min_effective),
            )
            if value is not None
        ]
        return ", ".join(parts)


def built_in(threshold: float = THRESHOLD) -> tuple[Rule, ...]:
    """Return the two checks that every expert layer should pass.

    Raises:
        ValueError: The threshold is out of range.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}, but must be above 0 and at most 1")
    return (
        Rule(
            "fc2 gather overlaps stage1 forward",
            label(Kind.PARAM_GATHER, "*.fc2_weight"),
            Kind.STAGE1_FORWARD.value,
            min_hidden=threshold,
        ),
        Rule(
            "dW2 reduce-scatter overlaps stage1 backward",
            label(Kind.GRAD_REDUCE, "*.fc2_weight"),
            Kind.STAGE1_BACKWARD.value,
            min_hidden=threshold,
        ),
    )


BUILT_IN = built_in()


@lru_cache(maxsize=4096)
def _matches(pattern: str, text: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))


# Rule files


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    """Return the rules of a TOML file.

    Raises:
        RuleError: It cannot be read, is no TOML, or a rule in it is wrong.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RuleError(f"{path} is not TOML: {error}") from None
    for key in table:
        if key != "rule":
            raise RuleError(f"{path} has {key!r}, but only [[rule]] tables are allowed")
    entries = table.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RuleError(f"{path} has a rule that is not a [[rule]] table: use double brackets")
    if not entries:
        raise RuleError(f"{path} has no [[rule]] table")
    rules = tuple(_rule(entry, f"{path}, rule {at}") for at, entry in enumerate(entries, 1))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise RuleError(f"{path} has {names.count(name)} rules named {name!r}: rename one")
    return rules


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(value: Any) -> bool:
    return _number(value) and 0 < value <= 1


def _time(value: Any) -> bool:
    return _number(value) and 0 <= value < float("inf")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _chosen(value: Any) -> bool:
    return _text(value) or (isinstance(value, list) and bool(value) and all(map(_count, value)))


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_text, "a text"),
    "collective": (_text, "a pattern"),
    "stage": (_text, f'a pattern, or "{ANY}"'),
    "min_hidden": (_share, "a share above 0 and at most 1"),
    "min_spread": (_share, "a share above 0 and at most 1"),
    "max_exposed_ms": (_time, "a number of milliseconds"),
    "max_wait_ms": (_time, "a number of milliseconds"),
    "min_effective": (_share, "a share above 0 and at most 1"),
    "iterations": (_chosen, 'a list of numbers, or a text such as "3,5-8,10-"'),
    "skip_first": (_count, "a whole number from 0"),
    "layers": (_text, "a pattern"),
}
_NEEDED = ("name", "collective", "stage")
_THRESHOLDS = ("min_hidden", "min_spread", "max_exposed_ms", "max_wait_ms", "min_effective")
assert set(_ALLOWED) == {field.name for field in fields(Rule)}


def _rule(entry: dict[str, Any], where: str) -> Rule:
    if _text(entry.get("name")):
        where = f"{where} ({entry['name']!r})"
    for key, value in entry.items():
        if key not in _ALLOWED:
            raise RuleError(f"{where}: {key} is unknown, allowed are {', '.join(_ALLOWED)}")
        fits, what = _ALLOWED[key]
        if not fits(value):
            raise RuleError(f"{where}: {key} is {value!r}, but must be {what}")
    for key in _NEEDED:
        if key not in entry:
            raise RuleError(f"{where}: {key} is missing, and must be {_ALLOWED[key][1]}")
    if not any(key in entry for key in _THRESHOLDS):
        raise RuleError(f"{where}: it bounds nothing, give one of {', '.join(_THRESHOLDS)}")
    chosen = entry.get("iterations")
    if chosen is not None:
        text = chosen if isinstance(chosen, str) else ",".join(map(str, chosen))
        try:
            entry = entry | {"iterations": Iterations.parse(text)}
        except ValueError as error:
            raise RuleError(f"{where}: {error}") from None
    return Rule(**entry)
