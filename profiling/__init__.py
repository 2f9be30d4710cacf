"""Recording, reading and judging profiles of overlapped MoE training.

    with profiling.record("runs/profile") as recorder: ...
    report = profiling.check("runs/profile")      # report.verdict, report.rows

Reading needs no torch and does not import it: the names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiling.checks import check
    from profiling.effectiveness import Effective, effective
    from profiling.findings import Finding, FindingKind
    from profiling.json_output import to_json
    from profiling.loading import LoadError, load
    from profiling.recording import Recorder, record
    from profiling.results import Measured, Report, Row
    from profiling.rules import Iterations, Rule, RuleError, built_in, read_rules
    from profiling.steps import NotComparableError
    from profiling.text import to_text
    from profiling.trace import Profile, Trace
    from profiling.understanding import Reading, read
    from profiling.verdicts import Verdict

__all__ = [
    "Effective",
    "Finding",
    "FindingKind",
    "Iterations",
    "LoadError",
    "Measured",
    "NotComparableError",
    "Profile",
    "Reading",
    "Recorder",
    "Report",
    "Row",
    "Rule",
    "RuleError",
    "Trace",
    "Verdict",
    "built_in",
    "check",
    "effective",
    "load",
    "read",
    "read_rules",
    "record",
    "to_json",
    "to_text",
]

_MODULES = {
    "checks": ("check",),
    "results": ("Measured", "Report", "Row"),
    "effectiveness": ("Effective", "effective"),
    "findings": ("Finding", "FindingKind"),
    "loading": ("LoadError", "load"),
    "json_output": ("to_json",),
    "text": ("to_text",),
    "understanding": ("Reading", "read"),
    "recording": ("Recorder", "record"),
    "rules": ("Iterations", "Rule", "RuleError", "built_in", "read_rules"),
    "steps": ("NotComparableError",),
    "trace": ("Profile", "Trace"),
    "verdicts": ("Verdict",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
