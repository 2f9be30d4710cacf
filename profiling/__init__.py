"""Recording, reading and judging profiles of overlapped MoE training.

    with profiling.record("runs/profile") as recorder: ...
    report = profiling.check("runs/profile")      # report.verdict, report.rows

Reading needs no torch and does not import it: the names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiling.checks import Check, Report, Row, Verdict, check
    from profiling.loading import LoadError, load
    from profiling.output import to_json, to_text
    from profiling.recording import Recorder, record
    from profiling.trace import Profile, Trace

__all__ = [
    "Check",
    "LoadError",
    "Profile",
    "Recorder",
    "Report",
    "Row",
    "Trace",
    "Verdict",
    "check",
    "load",
    "record",
    "to_json",
    "to_text",
]

_MODULES = {
    "checks": ("Check", "Report", "Row", "Verdict", "check"),
    "loading": ("LoadError", "load"),
    "output": ("to_json", "to_text"),
    "recording": ("Recorder", "record"),
    "trace": ("Profile", "Trace"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
