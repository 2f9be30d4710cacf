"""The page's tables: a row per layer for each check, and what is true of the run as a whole."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from profiling.markup import listed, table, tone, verdict_mark

if TYPE_CHECKING:
    from profiling.results import Report, Row

__all__ = ["by_check", "by_layer", "whole_run"]

# What has a place of its own on the page; every other field of a row is a column.
NO_COLUMN = {
    "measured",
    *("check", "bounds", "threshold", "layer", "verdict", "findings", "set_aside", "inferred"),
}
SHARES = {"hidden", "spread"}
HEADINGS = {"occurrences": "n", "lead_ms": "issue lead"}


def by_check(report: Report) -> list[tuple[str, list[Row]]]:
    return [(title, list(rows)) for title, rows in groupby(report.rows, key=lambda row: row.check)]


def by_layer(report: Report) -> Iterator[str]:
    yield '<h2 id="layers">Layers</h2>'
    for title, rows in by_check(report):
        names = [field.name for field in dataclasses.fields(rows[0])]
        names = [name for name in names if name not in NO_COLUMN]
        names = [name for name in names if any(getattr(row, name) is not None for row in rows)]
        yield f"<h3>{escape(title)}</h3>"
        yield table(
            title,
            ["layer", *map(_heading, names), "verdict"],
            [
                (
                    tone(row.verdict),
                    escape(row.layer or "-")
                    + ('<span class="mark">inferred</span>' if row.inferred else ""),
                    *(_cell(name, getattr(row, name), row.threshold) for name in names),
                    verdict_mark(row.verdict),
                )
                for row in rows
            ],
        )
        aside = [
            f"{row.layer}: {count} set aside, {reason}"
            for row in rows
            for reason, count in row.set_aside.items()
        ]
        if aside:
            yield f'<div class="soft aside">{listed(aside)}</div>'


def whole_run(report: Report) -> Iterator[str]:
    """What is true of the run as a whole."""
    yield '<h2 id="run">Whole run</h2>'
    if exposed := report.every_exposed_ms:
        yield (
            f"<p>Exposed communication: <strong>{statistics.fmean(exposed):.1f} ms</strong> per "
            f'iteration and rank <span class="soft">({min(exposed):.1f} to {max(exposed):.1f})'
            "</span></p>"
        )
    if (saved := report.effective) is not None:
        share = "-" if saved.value is None else f"{saved.value:.1%}"
        between = "" if saved.interval is None else f"({_text('hidden', saved.interval)})"
        yield (
            f"<p>Effective: <strong>{share}</strong> of the communication's time is saved "
            f'<span class="soft">{between} {escape(saved.finding)}</span></p>'
        )
    yield from _devices(report)
    if report.bounds:
        title = "The least that the same collectives could leave exposed, per iteration and rank"
        yield f"<h3>{title}</h3>"
        yield table(
            title,
            ["bound", "at least", "measured", ""],
            [
                (
                    "",
                    escape(bound.name),
                    _text("_ms", bound.least_ms),
                    _text("_ms", bound.exposed_ms),
                    escape(bound.missing),
                )
                for bound in report.bounds
            ],
        )


def _devices(report: Report) -> Iterator[str]:
    """What each device did, by the conventions that the text report has."""
    found = [
        (rank, device)
        for rank, devices in report.devices.items()
        for device in (devices[:1] if len(devices) == 2 else devices)  # of one, not the sum too
    ]
    if not found:
        return
    title = "Communication that any other kernel of its device overlaps"
    yield f"<h3>{title}</h3>"
    yield table(
        title,
        ["device", "streams", "communication", "overlapped", "memsets counted"],
        [
            (
                "",
                escape(f"{rank}, {'all' if device.device is None else f'GPU {device.device}'}"),
                str(device.streams),
                _text("_ms", device.communication / 1e6),
                _text("hidden", device.overlap),
                _text("hidden", device.overlap_with_memset),
            )
            for rank, device in found
        ],
    )
    yield (
        '<p class="soft aside">Overlapped: the part of the union of the communication kernels in '
        "which any other kernel of the device ran. Copies and memsets are no kernels; the last "
        "column counts memsets. Every step counts, and so do kernels without a launch.</p>"
    )


def _heading(name: str) -> str:
    return escape(HEADINGS.get(name, name.removesuffix("_ms").replace("_", " ")))


def _cell(name: str, value: Any, threshold: float | None) -> str:
    text = escape(_text(name, value))
    if name != "hidden" or value is None:
        return text
    asked = "" if threshold is None else f'<b style="left:{threshold:.1%}"></b>'
    return (
        f'<span class="bar" aria-hidden="true"><i style="width:{value:.1%}"></i>{asked}</span>'
        f'<span class="share">{text}</span>'
    )


def _text(name: str, value: Any) -> str:
    """Return a field's value as people read it: the name says the unit."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " to ".join(_text(name, part) for part in value)
    if name.endswith("_ms"):
        return f"{value:.2f} ms"
    if name in SHARES:
        return f"{value:.1%}"
    if name == "slowdown":
        return f"{value:.2f}x"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
