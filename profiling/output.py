"""Results as text for people (100 columns) and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import statistics
from itertools import groupby

from profiling.checks import Report, Row
from profiling.effectiveness import CONFIDENCE, Effective
from profiling.layout import clip, ms, percent, wrap

__all__ = ["effective_text", "to_json", "to_text"]

_LAYER = 38  # columns
SCHEMA = 2  # counts up when a field changes its meaning or goes


def to_json(result: Report | Effective) -> str:
    """Return a result as one JSON object.

    Its fields are those of `Report` and `Row` (or `Effective`), with the overall ``verdict`` and
    ``exit_code`` and the ``schema`` number.
    """
    entry = {
        "schema": SCHEMA,
        "verdict": result.verdict,
        "exit_code": 0 if result.verdict is None else result.verdict.exit_code,
        **{key: value for key, value in dataclasses.asdict(result).items() if key != "verdict"},
    }
    return json.dumps(entry, indent=2)


def to_text(report: Report) -> str:
    """Return the report as lines of at most 100 columns; the overall verdict is the last."""
    lines = [f"{report.path}: {report.ranks} {'rank' if report.ranks == 1 else 'ranks'}"]
    lines += [line for note in report.notes for line in wrap(f"note: {note}")]
    for (title, bounds), rows in groupby(report.rows, key=lambda row: (row.check, row.bounds)):
        lines += ["", *wrap(f"{title} ({bounds})"), _HEAD]
        for row in rows:
            lines += _row(row)
    lines.append("")
    if exposed := [value for per_rank in report.exposed_ms.values() for value in per_rank]:
        lines.append(
            f"exposed communication: {statistics.fmean(exposed):.1f} ms per iteration and rank "
            f"({min(exposed):.1f} to {max(exposed):.1f})"
        )
    lines.append(f"verdict: {report.verdict.value}")
    return "\n".join(line.rstrip() for line in lines)


_HEAD = f"  {'layer':<{_LAYER}}{'hidden':>8}{'spread':>12}{'exposed':>11}{'wait':>11}{'n':>5}  "


def _row(row: Row) -> list[str]:
    spread = "-" if row.spread is None else f"{row.spread[0]:.0%}-{row.spread[1]:.0%}"
    line = (
        f"  {clip(row.layer, _LAYER) or '-':<{_LAYER}}{percent(row.hidden):>8}{spread:>12}"
        f"{ms(row.exposed_ms):>11}{ms(row.wait_ms):>11}{row.occurrences:>5}  {row.verdict.value}"
    )
    remarks = [f"{finding.kind.value}: {finding.text}" for finding in row.findings]
    remarks += [f"set aside: {count}, {reason}" for reason, count in row.set_aside.items()]
    return [line, *(part for remark in remarks for part in wrap(remark, "    "))]


def effective_text(result: Effective) -> str:
    """Return what overlap saved as lines; the last one is the verdict, or else the figure."""
    lines = []
    for name, profile in (("serialised", result.serial), ("overlapped", result.overlapped)):
        steps = profile.step_ms
        middle = ms(statistics.median(steps)) if steps else "-"
        lines += wrap(f"{name}: {profile.path}: {len(steps)} steps, median {middle}")
    moved = result.serial.communication_ms
    alone = ms(statistics.median(moved)) if moved else "-"
    lines.append(f"collectives alone: {alone} per step, in the serialised profile")
    if result.finding:
        lines += wrap(result.finding)
    figure = f"effective: {percent(result.value)} of the communication's time is saved"
    if result.interval is not None:
        low, high = result.interval
        figure += f" ({CONFIDENCE:.0%} interval {low:.1%} to {high:.1%})"
    lines.append(figure if result.value is not None else "effective: -")
    if result.threshold is not None:
        lines.append(f"asked for: at least {result.threshold:.0%}")
    if result.verdict is not None:
        lines.append(f"verdict: {result.verdict.value}")
    return "\n".join(lines)
