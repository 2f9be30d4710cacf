"""Results as Markdown, for a pull request or a job's summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from itertools import groupby

from profiling.comparing import Diff
from profiling.effectiveness import CONFIDENCE, Effective
from profiling.layout import ms, percent
from profiling.results import Report
from profiling.verdicts import Verdict

__all__ = ["to_markdown"]


@singledispatch
def to_markdown(result: object) -> str:
    """Return a `Report`, `Effective` or `Diff` as Markdown; a verdict is the last line."""
    raise TypeError(f"{type(result).__name__} has no Markdown form")


@to_markdown.register
def _(report: Report) -> str:
    many = f"{report.ranks} {'rank' if report.ranks == 1 else 'ranks'}"
    lines = [
        f"# {_cell(report.path)}: {many}",
        *(f"- note: {_cell(note)}" for note in report.notes),
    ]
    for (title, bounds), group in groupby(report.rows, key=lambda row: (row.check, row.bounds)):
        rows = list(group)
        lines += ["", f"## {_cell(title)}", "", _cell(bounds), ""]
        lines += _table(
            ("layer", "hidden", "spread", "exposed", "wait", "n", "verdict"),
            (
                (
                    row.layer + (" (inferred)" if row.inferred else "") or "-",
                    percent(row.hidden),
                    "-" if row.spread is None else f"{row.spread[0]:.0%} to {row.spread[1]:.0%}",
                    ms(row.exposed_ms),
                    ms(row.wait_ms),
                    str(row.occurrences),
                    row.verdict.value,
                )
                for row in rows
            ),
        )
        remarks = [
            f"- {_cell(row.layer or '-')}: **{finding.kind.value}**: {_cell(finding.text)}"
            for row in rows
            for finding in row.findings
        ]
        remarks += [
            f"- {_cell(row.layer)}: set aside: {count}, {_cell(reason)}"
            for row in rows
            for reason, count in row.set_aside.items()
        ]
        lines += ["", *remarks] if remarks else []
    lines += ["", "## Least exposed time of an iteration", ""]
    lines += _table(
        ("bound", "least", "measured", "ratio"),
        (
            (
                bound.name,
                ms(bound.least_ms) + (f" ({bound.missing})" if bound.missing else ""),
                ms(bound.exposed_ms),
                "-" if bound.ratio is None else f"{bound.ratio:.2f}",
            )
            for bound in report.bounds
        ),
    )
    if report.effective is not None:
        lines += ["", *_saved(report.effective)]
    return _ended(lines, report.verdict)


@to_markdown.register
def _(result: Effective) -> str:
    names = f"{_cell(result.overlapped.path)} against {_cell(result.serial.path)}"
    return _ended([f"# Effective: {names}", "", *_saved(result)], result.verdict)


@to_markdown.register
def _(result: Diff) -> str:
    said = {None: "", True: "better", False: "worse"}
    changes = [("step", result.step)] if result.step is not None else []
    changes += [
        (f"{entry.check}: {entry.name}", change)
        for entry in result.entries
        for change in entry.changes
    ]
    lines = [f"# From {_cell(result.before)} to {_cell(result.after)}", ""]
    lines += _table(
        ("collective", "figure", "before", "after", "spread", "beyond the spread"),
        (
            (
                name,
                change.figure.removesuffix("_ms"),
                *(
                    percent(value) if change.figure == "hidden" else f"{value:.3f} ms"
                    for value in (change.before, change.after, change.spread)
                ),
                said[change.better],
            )
            for name, change in changes
        ),
    )
    for where, names in (("before", result.only_before), ("after", result.only_after)):
        lines += [f"- only {where}: {_cell(name)}" for name in names]
    return "\n".join(lines)


def _saved(result: Effective) -> Iterator[str]:
    if result.finding:
        yield f"- {_cell(result.finding)}"
    if result.value is not None and result.interval is not None:
        low, high = result.interval
        yield (
            f"Effective: {result.value:.1%} of the communication's time is saved "
            f"({CONFIDENCE:.0%} interval {low:.1%} to {high:.1%})."
        )


def _ended(lines: list[str], verdict: Verdict | None) -> str:
    return "\n".join(lines if verdict is None else [*lines, "", f"**verdict: {verdict.value}**"])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Return a text from a trace or a file so that it stays one: no markup, one line."""
    for mark in ("\\", "|", "*", "_", "`", "[", "]", "<", ">", "#"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
