"""A report as text for people (100 columns) and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import statistics
import textwrap
from itertools import groupby

from profiling.checks import Report, Row

__all__ = ["WIDTH", "to_json", "to_text"]

WIDTH = 100
_LAYER = 38  # columns
SCHEMA = 1  # counts up when a field changes its meaning or goes


def to_json(report: Report) -> str:
    """Return the report as one JSON object.

    Its fields are those of `Report` and `Row`, with the overall ``verdict`` and ``exit_code`` and
    the ``schema`` number.
    """
    entry = {
        "schema": SCHEMA,
        "verdict": report.verdict.value,
        "exit_code": report.verdict.exit_code,
        **dataclasses.asdict(report),
    }
    return json.dumps(entry, indent=2)


def to_text(report: Report) -> str:
    """Return the report as lines of at most `WIDTH` columns; the overall verdict is the last."""
    lines = [f"{report.path}: {report.ranks} {'rank' if report.ranks == 1 else 'ranks'}"]
    lines += [line for note in report.notes for line in _wrap(f"note: {note}", "")]
    for title, rows in groupby(report.rows, key=lambda row: row.check):
        lines += ["", f"{title} (at least {report.threshold:.0%} hidden)", _HEAD]
        for row in rows:
            lines += _row(row)
    lines.append("")
    if exposed := [ms for per_rank in report.exposed_ms.values() for ms in per_rank]:
        lines.append(
            f"exposed communication: {statistics.fmean(exposed):.1f} ms per iteration and rank "
            f"({min(exposed):.1f} to {max(exposed):.1f})"
        )
    lines.append(f"verdict: {report.verdict.value}")
    return "\n".join(line.rstrip() for line in lines)


_HEAD = f"  {'layer':<{_LAYER}}{'hidden':>8}{'spread':>12}{'exposed':>11}{'wait':>11}{'n':>5}  "


def _row(row: Row) -> list[str]:
    layer = row.layer if len(row.layer) < _LAYER else "…" + row.layer[-(_LAYER - 2) :]
    spread = "-" if row.spread is None else f"{row.spread[0]:.0%}-{row.spread[1]:.0%}"
    hidden = "-" if row.hidden is None else f"{row.hidden:.1%}"
    line = (
        f"  {layer or '-':<{_LAYER}}{hidden:>8}{spread:>12}{_ms(row.exposed_ms):>11}"
        f"{_ms(row.wait_ms):>11}{row.occurrences:>5}  {row.verdict.value}"
    )
    remarks = [row.finding] if row.finding else []
    remarks += [f"set aside: {count}, {reason}" for reason, count in row.set_aside.items()]
    return [line, *(part for remark in remarks for part in _wrap(remark, "    "))]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
