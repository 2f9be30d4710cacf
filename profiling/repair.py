"""Events that a file has in halves, twice, or at no time: joined, or dropped and counted.

Two events are one event written twice only if everything that is read of them is equal: name,
category, thread or stream, start, end, correlation, External id and what they say about a
collective. Two tiny operators in the same microsecond of an old trace differ in their External id,
a graph launch's kernels in their start or stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiling.columns import LONGEST, OTHER, Half, Table

__all__ = ["repair"]

_FROM_END = ("device", "stream", "correlation", "external", "rank")
_IDENTITY = ("start", "end", "name", "category", "lane", *_FROM_END)


def repair(table: Table) -> Table:
    """Return a table of whole events only, each once. Times in ``table`` change."""
    if (table.columns["half"] != Half.WHOLE).any():
        table = _join_halves(table)
    return _drop_copies(_drop_timeless(table))


def _join_halves(table: Table) -> Table:
    """Give each beginning (ph B) the end (ph E) that closes it on its thread.

    An end closes the innermost event that is open, or the innermost of its name if it has one.
    """
    columns = table.columns
    half, lane, start, name = (columns[key] for key in ("half", "lane", "start", "name"))
    halves = np.flatnonzero(half != Half.WHOLE)
    halves = halves[np.lexsort((halves, start[halves], lane[halves]))]
    chosen = half == Half.WHOLE
    nameless = table.names.index("") if "" in table.names else -1
    unmatched: list[int] = []
    stack: list[int] = []  # what is open, of one lane
    for event in halves.tolist():
        if stack and lane[stack[-1]] != lane[event]:
            unmatched += stack
            stack = []
        if half[event] == Half.BEGIN:
            stack.append(event)
            continue
        depth = len(stack) - 1
        while depth >= 0 and name[event] not in (name[stack[depth]], nameless):
            depth -= 1
        if depth < 0:
            unmatched.append(event)
            continue
        begin = stack[depth]
        unmatched += stack[depth + 1 :]
        del stack[depth:]
        chosen[begin] = True
        columns["end"][begin] = start[event]
        for key in _FROM_END:
            if columns[key][begin] == -1:
                columns[key][begin] = columns[key][event]
        if event in table.details:
            table.details.setdefault(begin, table.details[event])
    unmatched += stack
    lost = [event for event in unmatched if columns["category"][event] != OTHER]
    if lost:
        first = table.names[name[min(lost)]]
        table.dropped.add("half of a pair (ph B and E) without the other", first, len(lost))
    return table.part(chosen & (columns["category"] != OTHER))


def _drop_timeless(table: Table) -> Table:
    """Drop what starts at 0 in a file whose clock is far from there: nobody noted its time."""
    start = table.columns["start"]
    if not len(start) or np.median(start[:: 1 + len(start) // 100_000]) <= LONGEST * 1000:
        return table
    timeless = start == 0
    if timeless.any():
        first = table.names[table.columns["name"][timeless.argmax()]]
        table.dropped.add("at time 0, days before the others", first, int(timeless.sum()))
        table = table.part(~timeless)
    return table


def _drop_copies(table: Table) -> Table:
    """Drop each event that is there already."""
    hashes = _hash(table)
    ordered = np.sort(hashes)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(twice):
        return table
    suspects = np.flatnonzero(np.isin(hashes, twice))
    keys = [table.columns[key][suspects] for key in _IDENTITY]
    order = np.lexsort((suspects, *keys))
    equal = np.ones(len(order) - 1, np.bool_)
    for key in keys:
        equal &= key[order][1:] == key[order][:-1]
    copies: list[int] = []
    said = [table.details.get(int(suspects[order[0]]))]  # by the events that are equal so far
    for event, same in zip(suspects[order[1:]].tolist(), equal.tolist(), strict=True):
        detail = table.details.get(event)
        if not same:
            said = [detail]
        elif detail in said:
            copies.append(event)
        else:
            said.append(detail)
    if copies:
        first = table.names[table.columns["name"][min(copies)]]
        table.dropped.add("written twice", first, len(copies))
        chosen = np.ones(len(table), np.bool_)
        chosen[copies] = False
        table = table.part(chosen)
    return table


def _hash(table: Table) -> npt.NDArray[np.uint64]:
    """Return uint64 [n] that is equal for equal events."""
    mixed = np.zeros(len(table), np.uint64)
    for key in _IDENTITY:
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed += table.columns[key].astype(np.uint64)
    return mixed
