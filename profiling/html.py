"""A report as one self-contained page: verdicts, a table per check, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from profiling.attribution import Attribution

if TYPE_CHECKING:
    from profiling.checks import Report

__all__ = ["write_html"]


def write_html(report: Report, ranks: Sequence[Attribution], path: str | Path) -> None:
    """Write ``report`` as one page that needs nothing else, with the timeline of ``ranks``.

    Args:
        report: What `check` returned.
        ranks: The traces that it judged, attributed.
        path: The file to write; an existing one is replaced.

    Raises:
        OSError: It cannot be written.
    """
    raise NotImplementedError
