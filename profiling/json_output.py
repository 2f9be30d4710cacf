"""Results as JSON for machines: what `schema/moe-trace.schema.json` describes."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum, IntEnum
from importlib import resources
from typing import Any

from profiling.bounds import Bound
from profiling.clocks import Offset
from profiling.comparing import Diff
from profiling.effectiveness import Effective
from profiling.listing import Listing
from profiling.overview import DeviceOverview
from profiling.results import Report
from profiling.verdicts import Verdict

__all__ = ["SCHEMA", "schema", "to_json"]

SCHEMA = 2  # counts up when a field changes its meaning or goes
_KINDS = {Report: "report", Effective: "effective", Listing: "listing", Diff: "diff"}
# What is worth having beside the fields.
_COMPUTED = {Bound: ("ratio",), DeviceOverview: ("overlap", "overlap_with_memset")}


def to_json(result: Report | Effective | Listing | Diff) -> str:
    """Return a result as one JSON object: its fields, and ``schema``, ``kind`` and verdict."""
    entry: dict[str, Any] = {"schema": SCHEMA, "kind": _KINDS[type(result)]}
    if isinstance(result, (Report, Effective)):
        verdict: Verdict | None = result.verdict
        entry["verdict"] = None if verdict is None else verdict.value
        entry["exit_code"] = 0 if verdict is None else verdict.exit_code
    return json.dumps(entry | _plain(result), indent=2)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `to_json` returns."""
    text = resources.files("profiling").joinpath("schema/moe-trace.schema.json").read_text("utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _plain(value: Any) -> Any:
    """Return ``value`` made of what JSON has."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Offset) or (isinstance(value, tuple) and hasattr(value, "_asdict")):
        return {key: _plain(part) for key, part in value._asdict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += _COMPUTED.get(type(value), ())
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {
            str(_plain(key) if isinstance(key, Enum) else key): _plain(part)
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
