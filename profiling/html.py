"""A report as one self-contained page: verdicts, findings, a table per check, and a timeline.

The page fetches nothing: its style, its script and its data (`page/`) stand in it. Names in a trace
are anybody's text, so each is escaped where it enters, the page's policy lets no script run but its
own, and that one writes text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from profiling.drawing import draw
from profiling.html_tables import by_check, by_layer, whole_run
from profiling.markup import icon, listed, tone, verdict_mark
from profiling.timeline import Timeline, encode
from profiling.understanding import Reading
from profiling.writing import write

if TYPE_CHECKING:
    from profiling.results import Report

__all__ = ["write_html"]

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
    shown = draw(reading)
    script = _part("page.js")
    page = Template(_part("page.html")).substitute(
        policy=_policy(script),
        title=escape(f"{report.verdict.value}: {report.path}"),
        style=_part("page.css"),
        body="\n".join(
            itertools.chain(
                _summary(report),
                _findings(report),
                by_layer(report),
                whole_run(report),
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
    yield f'<header class="{tone(verdict)}"><h1>{icon(verdict)} {verdict.value}</h1>'
    yield f"<p>{SAYS[verdict.value]}</p>"
    yield f'<p class="soft"><code>{escape(report.path)}</code> · {many}</p></header>'
    yield '<ul class="checks">'
    for title, rows in by_check(report):
        overall = type(verdict).of_all(row.verdict for row in rows)
        bounds = escape(rows[0].bounds)
        good = sum(row.verdict.value == "PASS" for row in rows)
        yield (
            f'<li class="{tone(overall)}">{verdict_mark(overall)}<h3>{escape(title)}</h3>'
            f'<p class="soft">{good} of {len(rows)} {"layer" if len(rows) == 1 else "layers"} '
            f"pass, {bounds}</p></li>"
        )
    yield "</ul>"


def _findings(report: Report) -> Iterator[str]:
    yield '<h2 id="findings">Findings</h2>'
    found = [(row, finding) for row in report.rows for finding in row.findings]
    if found:
        yield '<ul class="findings">'
        for row, finding in found:
            yield (
                f'<li class="{tone(row.verdict)}">{icon(row.verdict)}<div>'
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
        yield listed(report.notes)


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
        f'<div class="controls">{buttons}<span class="soft">Drag to pan, pinch or Ctrl and '
        "wheel to zoom. After a click on the lanes: wheel, + and - zoom, ← → pan, 0 shows all, n "
        "and p go to the longest exposed parts.</span></div>"
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
        yield f'<div class="soft aside">{listed(shown.notes)}</div>'
