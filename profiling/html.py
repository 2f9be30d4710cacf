"""A report as one self-contained page: verdicts, findings, a table per check, and a timeline.

The page fetches nothing: its style, its script and its data (`page/`) stand in it. Names in a trace
are anybody's text, so each is escaped where it enters, the page's policy lets no script run but its
own, and that one writes text, never markup.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from profiling.timeline import Timeline, encode, timeline
from profiling.understanding import Reading
from profiling.writing import write

if TYPE_CHECKING:
    from profiling.results import Report, Row
    from profiling.verdicts import Verdict

__all__ = ["write_html"]

# What has a place of its own on the page; every other field of a row is a column.
NO_COLUMN = {
    *("check", "bounds", "threshold", "layer", "verdict", "findings", "set_aside", "inferred"),
    "measured",
}
SHARES = {"hidden", "spread"}
HEADINGS = {"occurrences": "n", "lead_ms": "issue lead"}

# Drawn in the text's colour; the shapes differ, for those to whom the colours do not.
ICONS = {
    "PASS": '<circle cx="8" cy="8" r="7"/><path d="m4.5 8.3 2.4 2.4 4.6-5"/>',
    "FAIL": '<path d="M5 1h6l4 4v6l-4 4H5l-4-4V5z"/><path d="m5.3 5.3 5.4 5.4m0-5.4-5.4 5.4"/>',
    "INCONCLUSIVE": '<path d="M8 1.2 15 14H1z"/><path d="M8 6v3.6M8 11.4v.9"/>',
}
SAYS = {
    "PASS": "Every collective that was checked is hidden.",
    "FAIL": "Not every collective that was checked is hidden.",
    "INCONCLUSIVE": "The profile does not tell whether the collectives are hidden.",
}


def write_html(report: Report, reading: Reading, path: str | Path) -> None:
    """Write ``report`` as one page that needs nothing else, with a timeline.

    Args:
        report: What `check` returned.
        reading: What it judged.
        path: The file to write; an existing one is replaced.

    Raises:
        WriteError: It cannot be written.
    """
    shown = timeline(reading)
    script = _part("page.js")
    page = Template(_part("page.html")).substitute(
        policy=_policy(script),
        title=escape(f"{report.verdict.value}: {report.path}"),
        style=_part("page.css"),
        body="\n".join(
            itertools.chain(
                _summary(report),
                _findings(report),
                _tables(report),
                _run(report),
                _notes(report),
                _drawn(shown),
            )
        ),
        data=_harmless(encode(shown)),
        script=script,
    )
    write(path, page)


def _part(name: str) -> str:
    return (files("profiling") / "page" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return the page's content security policy: nothing is fetched, only ``script`` runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _harmless(data: bytes) -> str:
    """Return JSON that cannot end the element it stands in."""
    text = data.decode()
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# Verdicts


def _summary(report: Report) -> Iterator[str]:
    verdict = report.verdict
    many = f"{report.ranks} {'rank' if report.ranks == 1 else 'ranks'}"
    yield (
        "<nav><strong>moe-trace report</strong>"
        '<a href="#findings">Findings</a><a href="#layers">Layers</a><a href="#run">Whole run</a>'
        '<a href="#when">Timeline</a><button id="theme" type="button">Dark</button></nav>'
    )
    yield f'<header class="{_tone(verdict)}"><h1>{_icon(verdict)} {verdict.value}</h1>'
    yield f"<p>{SAYS[verdict.value]}</p>"
    yield f'<p class="soft"><code>{escape(report.path)}</code> · {many}</p></header>'
    yield '<ul class="checks">'
    for title, rows in _by_check(report):
        overall = type(verdict).of_all(row.verdict for row in rows)
        bounds = escape(rows[0].bounds)
        good = sum(row.verdict.value == "PASS" for row in rows)
        yield (
            f'<li class="{_tone(overall)}">{_verdict(overall)}<h3>{escape(title)}</h3>'
            f'<p class="soft">{good} of {len(rows)} {"layer" if len(rows) == 1 else "layers"} '
            f"pass, {bounds}</p></li>"
        )
    yield "</ul>"


def _by_check(report: Report) -> list[tuple[str, list[Row]]]:
    return [(title, list(rows)) for title, rows in groupby(report.rows, key=lambda row: row.check)]


def _tone(verdict: Verdict) -> str:
    return verdict.value.lower()


def _icon(verdict: Verdict) -> str:
    return (
        '<svg class="icon" viewBox="0 0 16 16" fill="none" stroke="currentColor" '
        f'stroke-width="1.6" aria-hidden="true">{ICONS[verdict.value]}</svg>'
    )


def _verdict(verdict: Verdict) -> str:
    return f'<span class="verdict">{_icon(verdict)}{verdict.value}</span>'


def _findings(report: Report) -> Iterator[str]:
    yield '<h2 id="findings">Findings</h2>'
    found = [(row, finding) for row in report.rows for finding in row.findings]
    if found:
        yield '<ul class="findings">'
        for row, finding in found:
            yield (
                f'<li class="{_tone(row.verdict)}">{_icon(row.verdict)}<div>'
                f"<h3>{escape(row.layer or row.check)}"
                f'<span class="mark">{escape(finding.kind.value)}</span></h3>'
                f"<p>{escape(finding.text)}</p>"
                f'<p class="soft">{escape(row.check) if row.layer else ""}</p></div></li>'
            )
        yield "</ul>"
    else:
        yield '<p class="soft">None.</p>'


def _notes(report: Report) -> Iterator[str]:
    if any(row.inferred for row in report.rows):
        yield (
            '<p class="soft aside">Rows marked <span class="mark">inferred</span> rest on what was '
            "concluded about which parameter a collective moves, not on what the run recorded.</p>"
        )
    if report.notes:
        yield '<h2 id="notes">Notes on the input</h2>'
        yield _listed(report.notes)


def _listed(notes: Iterable[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'


# Tables


def _tables(report: Report) -> Iterator[str]:
    yield '<h2 id="layers">Layers</h2>'
    for title, rows in _by_check(report):
        names = [field.name for field in dataclasses.fields(rows[0])]
        names = [name for name in names if name not in NO_COLUMN]
        names = [name for name in names if any(getattr(row, name) is not None for row in rows)]
        yield f"<h3>{escape(title)}</h3>"
        yield _table(
            title,
            ["layer", *map(_heading, names), "verdict"],
            [
                (
                    _tone(row.verdict),
                    escape(row.layer or "-")
                    + ('<span class="mark">inferred</span>' if row.inferred else ""),
                    *(_cell(name, getattr(row, name), row.threshold) for name in names),
                    _verdict(row.verdict),
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
            yield f'<div class="soft aside">{_listed(aside)}</div>'


def _run(report: Report) -> Iterator[str]:
    """What is true of the run as a whole."""
    yield '<h2 id="run">Whole run</h2>'
    if exposed := [ms for per_rank in report.exposed_ms.values() for ms in per_rank]:
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
    if report.bounds:
        title = "The least that the same collectives could leave exposed, per iteration and rank"
        yield f"<h3>{title}</h3>"
        yield _table(
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


def _table(title: str, heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table that scrolls in a box of its own.

    Args:
        rows: Class of the row, then its cells, which are markup.
    """
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    body = "".join(
        f'<tr class="{tone}"><th scope="row">{first}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for tone, first, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
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


# Timeline

CONTROLS = (
    ("zoom-out", "Zoom out", "&minus;"),
    ("zoom-in", "Zoom in", "+"),
    ("reset", "Show all", "All"),
    ("previous", "Previous exposed part", "&lsaquo; exposed"),
    ("next", "Next exposed part", "exposed &rsaquo;"),
)


def _drawn(shown: Timeline) -> Iterator[str]:
    yield '<h2 id="when">Timeline</h2>'
    if not shown.rows:
        yield '<p class="soft">Nothing in the profile works.</p>'
        return
    buttons = "".join(
        f'<button type="button" data-action="{action}" aria-label="{label}" title="{label}">{text}'
        "</button>"
        for action, label, text in CONTROLS
    )
    yield (
        f'<div class="controls">{buttons}<span class="soft">Drag to pan. Click the lanes, then '
        "wheel or + and - to zoom (or Ctrl and wheel), ← → to pan, 0 for all, n and p for the "
        "longest exposed parts.</span></div>"
    )
    yield (
        '<div id="timeline"><canvas id="overview" aria-hidden="true"></canvas>'
        '<canvas id="lanes" tabindex="0" role="application" '
        'aria-label="Timeline. The tables above hold its figures."></canvas>'
        '<div id="tip" hidden></div><div id="spoken" aria-live="polite"></div></div>'
        "<noscript><p>The timeline is drawn by a script, which is switched off.</p></noscript>"
    )
    there = {int(paint) for row in shown.rows for paint in row.paint}
    swatches = [
        f'<li><i class="{key}" style="--paint:var(--{key})"></i>{label}</li>'
        for index, (key, label) in enumerate(shown.paints)
        if index in there
    ]
    if any(len(row.exposed) for row in shown.rows):
        swatches.append('<li><i class="exposed"></i>exposed: nothing computed</li>')
    yield f'<ul class="legend">{"".join(swatches)}</ul>'
    if shown.notes:
        yield f'<div class="soft aside">{_listed(shown.notes)}</div>'
