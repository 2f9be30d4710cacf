"""A profile's traces again, with what was found drawn in: tracks and arrows for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.trace import Profile

__all__ = ["AnnotateError", "Annotated", "annotate"]


class AnnotateError(ValueError):
    """The output cannot be written as asked. The message is one sentence for the user."""


@dataclass(frozen=True)
class Annotated:
    """One file that `annotate` wrote, and how many slices and arrows it added."""

    source: Path
    path: Path
    slices: int
    arrows: int
    notes: tuple[str, ...]


def annotate(
    profile: Profile | str | Path, output: str | Path, *, assumptions: Any = None
) -> tuple[Annotated, ...]:
    """Write the traces of ``profile`` again, with tracks of hidden, exposed and waiting time.

    Args:
        profile: What `load` returned, or a path for it.
        output: A file (.json, .json.gz) for a profile of one file; otherwise a directory, in which
            each trace gets its source's name.
        assumptions: What `read_assumptions` returned, for traces without our ranges.

    Returns:
        One entry per file written.

    Raises:
        LoadError: The path holds no usable profile.
        AnnotateError: The output would replace a source, or is one file for several.
        OSError: It cannot be written.
    """
    raise NotImplementedError
