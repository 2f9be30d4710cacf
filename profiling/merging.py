"""From lanes to the rows of a timeline: what is too short is merged, names are numbered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from profiling.attribution import CPU, Attribution
from profiling.intervals import total, union
from profiling.lanes import Lane, Paint, Slices
from profiling.parts import Parts
from profiling.timeline import Row, Shown

__all__ = ["Page", "resolution"]

NAMES = 5_000
LONGEST = 120  # characters of a name; names of templates are longer than anybody reads


def _groups(slices: Slices, resolution: int) -> npt.NDArray[np.int64]:
    """Return the index of each group's first slice: short neighbours in one cell are a group."""
    if not resolution:
        return np.arange(len(slices))
    short = slices.end - slices.start < resolution
    cell = slices.start // resolution
    joins = short[1:] & short[:-1] & (cell[1:] == cell[:-1])
    return np.flatnonzero(np.append(True, ~joins))


def resolution(lanes: Sequence[Slices], length: int, most: int) -> int:
    """Return the shortest time, in ns, to merge at so that ``most`` slices are left; 0 for none."""
    found = 0
    while sum(len(_groups(lane, found)) for lane in lanes) > most:
        found = found * 2 or max(1, length >> 20)
    return found


class Page:
    """Makes rows, and numbers what they refer to."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.collectives: list[Shown] = []

    def row(
        self, rank: Attribution, parts: Sequence[Parts], lane: Lane, begin: int, resolution: int
    ) -> Row:
        slices = lane.slices
        first = _groups(slices, resolution)
        count = np.diff(np.append(first, len(slices)))
        merged = count > 1
        end = np.maximum.reduceat(slices.end, first) if len(first) else slices.end
        paint = slices.paint[first].copy()
        paint[merged] = _heaviest(slices, count)[merged]
        name, layer, collective = (np.full(len(first), -1, np.int32) for _ in range(3))
        shown: dict[int, int] = {}
        for index in np.flatnonzero(~merged).tolist():
            at = first[index]
            owner, what = int(slices.owner[at]), Paint(int(slices.paint[at]))
            if slices.name[at] >= 0:
                name[index] = self._name(rank.trace.names[slices.name[at]])
            if owner < 0:
                continue
            if what <= Paint.STAGE2_BACKWARD:
                layer[index] = self._layer(rank.stages[owner].span.name)
            else:
                if parts[owner].subject.kind is not None:
                    layer[index] = self._layer(parts[owner].subject.name)
                if owner not in shown:
                    shown[owner] = len(self.collectives)
                    self.collectives.append(_shown(parts[owner], begin))
                collective[index] = shown[owner]
        closed = union(lane.exposed[:, 0], lane.exposed[:, 1] + resolution)
        return Row(
            rank=rank.trace.label,
            place="CPU" if lane.device == CPU else f"GPU {lane.device}",
            title=lane.title,
            start=slices.start[first] - begin,
            length=end - slices.start[first],
            paint=paint,
            name=name,
            layer=layer,
            collective=collective,
            count=count.astype(np.int32),
            exposed=closed - np.array([begin, begin + resolution], np.int64),
        )

    def _name(self, name: str) -> int:
        short = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        if len(self.names) >= NAMES:
            return self.names.get(short, -1)
        return self.names.setdefault(short, len(self.names))

    def _layer(self, name: str) -> int:
        return self.layers.setdefault(name, len(self.layers))


def _heaviest(slices: Slices, count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return of each group the paint that it has for longest."""
    group = np.repeat(np.arange(len(count)), count)
    spent = np.zeros((len(count), len(Paint)))
    np.add.at(spent, (group, slices.paint), slices.end - slices.start + 1)
    return spent.argmax(axis=1)


def _shown(parts: Parts, begin: int) -> Shown:
    subject = parts.subject
    return Shown(
        name=subject.name,
        issue=None if subject.issued is None else subject.issued - begin,
        start=int(subject.found.busy[0, 0]) - begin,
        transfer=total(parts.transfer),
        under=tuple(
            (f"{kind.value.split('::')[-1]} of {layer}", total(when))
            for (kind, layer), when in parts.under.items()
        ),
        beside=total(parts.beside),
        exposed=total(parts.exposed),
        late=total(parts.late),
        wait=total(parts.wait),
        inferred=subject.inferred,
    )
