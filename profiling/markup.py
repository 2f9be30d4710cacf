"""Small pieces of the page's HTML. What they are given is text, and escaped here, unless said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from profiling.verdicts import Verdict

__all__ = ["icon", "listed", "table", "tone", "verdict_mark"]

# Drawn in the text's colour; the shapes differ, for those to whom the colours do not.
ICONS = {
    "PASS": '<circle cx="8" cy="8" r="7"/><path d="m4.5 8.3 2.4 2.4 4.6-5"/>',
    "FAIL": '<path d="M5 1h6l4 4v6l-4 4H5l-4-4V5z"/><path d="m5.3 5.3 5.4 5.4m0-5.4-5.4 5.4"/>',
    "INCONCLUSIVE": '<path d="M8 1.2 15 14H1z"/><path d="M8 6v3.6M8 11.4v.9"/>',
}


def tone(verdict: Verdict) -> str:
    return verdict.value.lower()


def icon(verdict: Verdict) -> str:
    return (
        '<svg class="icon" viewBox="0 0 16 16" fill="none" stroke="currentColor" '
        f'stroke-width="1.6" aria-hidden="true">{ICONS[verdict.value]}</svg>'
    )


def verdict_mark(verdict: Verdict) -> str:
    return f'<span class="verdict">{icon(verdict)}{verdict.value}</span>'


def listed(notes: Iterable[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'


def table(title: str, heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
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
