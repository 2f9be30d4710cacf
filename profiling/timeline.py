"""What a timeline is: lanes of slices, exposed parts, collectives, iterations; and its JSON.

All times are nanoseconds after the timeline's begin. `drawing` makes it of a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from profiling.intervals import Intervals

__all__ = ["PAINTS", "Iteration", "Row", "Shown", "Timeline", "encode"]

# Key and label of each paint, in the order of `Paint`.
PAINTS = (
    ("stage1-forward", "stage 1 forward"),
    ("stage1-backward", "stage 1 backward"),
    ("stage2-forward", "stage 2 forward"),
    ("stage2-backward", "stage 2 backward"),
    ("compute", "other compute"),
    ("gather", "parameter gather"),
    ("reduce", "gradient reduce-scatter"),
    ("communication", "other communication"),
    ("copy", "copy"),
    ("memset", "memset"),
    ("wait", "compute waits"),
)


@dataclass(frozen=True, eq=False)
class Row:
    """One lane as it is drawn. The arrays are parallel.

    Attributes:
        place: "GPU 0", or "CPU".
        start, length: int64 [n].
        paint: int8 [n], index into the timeline's ``paints``.
        name: int32 [n], index into ``names``; -1 for a merged slice.
        layer: int32 [n], index into ``layers``; -1 for what belongs to none.
        collective: int32 [n], index into ``collectives``; -1 for what is none.
        count: int32 [n], how many events the slice stands for.
        exposed: When it communicated and nothing computed.
    """

    rank: str
    place: str
    title: str
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    paint: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int32]
    collective: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    exposed: Intervals


@dataclass(frozen=True)
class Shown:
    """What the page says about one collective on one rank. Times in nanoseconds.

    Attributes:
        issue: When it was issued; before the timeline's begin where negative, None if not known.
        start: When it began.
        under: (stage and layer, length) for each stage that hid a part of it.
        beside: How long something else computed meanwhile.
        late: How long it waited for a late rank.
        wait: How long compute stood still for it.
    """

    name: str
    issue: int | None
    start: int
    transfer: int
    under: tuple[tuple[str, int], ...]
    beside: int
    exposed: int
    late: int
    wait: int
    inferred: bool


@dataclass(frozen=True)
class Iteration:
    """When the work of one iteration of one rank ran."""

    rank: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """All that is drawn.

    Attributes:
        length: From begin to end.
        paints: Key and label of each paint.
        notes: What was left out or merged, one sentence each.
    """

    length: int
    rows: tuple[Row, ...]
    paints: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    collectives: tuple[Shown, ...]
    iterations: tuple[Iteration, ...]
    notes: tuple[str, ...]


def encode(shown: Timeline) -> bytes:
    """Return the timeline as JSON: an object with the fields of `Timeline`."""
    return msgspec.json.encode(shown, enc_hook=_listed)


def _listed(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return value.tolist()
