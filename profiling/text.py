"""Results as text for people: at most 100 columns, the verdict on the last line."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import singledispatch
from itertools import groupby

from profiling.bounds import Bound
from profiling.clocks import Offset
from profiling.comparing import Change, Diff
from profiling.effectiveness import CONFIDENCE, Effective
from profiling.layout import clip, ms, percent, wrap
from profiling.listing import CollectiveCount, Listing, RankListing
from profiling.overview import DeviceOverview
from profiling.results import Report, Row

__all__ = ["full_text", "to_text"]

_NAME = 34  # columns; INCONCLUSIVE ends at 100


@singledispatch
def to_text(result: object) -> str:
    """Return a `Report`, `Effective`, `Listing` or `Diff` as lines."""
    raise TypeError(f"{type(result).__name__} has no text form")


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def _head(path: str, ranks: int, notes: Iterable[str]) -> Iterator[str]:
    yield from wrap(f"{path}: {ranks} {'rank' if ranks == 1 else 'ranks'}")
    for note in notes:
        yield from wrap(f"note: {note}")


# Report


@to_text.register
def _(report: Report) -> str:
    return _joined([*_head(report.path, report.ranks, report.notes), *_rows(report), *_end(report)])


def full_text(report: Report) -> str:
    """Return all that a report knows; `to_text` leaves out what no rule bounds."""
    parts: list[str] = [*_head(report.path, report.ranks, report.notes), ""]
    for rank, devices in report.devices.items():
        parts += [f"{rank}:", *_devices(devices)] if devices else []
    if any(report.devices.values()):
        parts += wrap(CONVENTIONS)
    parts += [*_rows(report), "", *_further(report.rows), "", *_bounds(report.bounds)]
    if any(offset is not None for offset in report.clocks.values()) and len(report.clocks) > 1:
        parts += ["", *_clocks(report.clocks)]
    return _joined([*parts, *_end(report)])


CONVENTIONS = (
    "overlap: the union of the communication kernels in which any other kernel of the same device "
    "ran; copies and memsets are no kernels (beside memsets, too: in brackets); every step counts, "
    "and so do kernels without a launch in the trace"
)


def _rows(report: Report) -> Iterator[str]:
    for (title, bounds), rows in groupby(report.rows, key=lambda row: (row.check, row.bounds)):
        yield ""
        yield from wrap(f"{title} ({bounds})")
        yield _HEAD
        for row in rows:
            yield from _row(row)


_HEAD = f"  {'layer':<{_NAME}}{'hidden':>8}{'spread':>12}{'exposed':>11}{'wait':>11}{'n':>5}  "


def _row(row: Row) -> Iterator[str]:
    spread = "-" if row.spread is None else f"{row.spread[0]:.0%}-{row.spread[1]:.0%}"
    yield (
        f"  {clip(row.layer, _NAME) or '-':<{_NAME}}{percent(row.hidden):>8}{spread:>12}"
        f"{ms(row.exposed_ms):>11}{ms(row.wait_ms):>11}{row.occurrences:>5}  {row.verdict.value}"
    )
    remarks = [f"{finding.kind.value}: {finding.text}" for finding in row.findings]
    remarks += [f"set aside: {count}, {reason}" for reason, count in row.set_aside.items()]
    if row.inferred:
        remarks.append("inferred: which parameter it is was concluded, not recorded")
    for remark in remarks:
        yield from wrap(remark, "    ")


def _further(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what else is known of each row."""
    yield f"  {'mean of an occurrence':<{_NAME}}{'lead':>11}{'skew':>11}{'stage slower':>14}"
    for title, group in groupby(rows, key=lambda row: row.check):
        yield from wrap(title, "  ")
        for row in group:
            slower = "-" if row.slowdown is None else f"{row.slowdown:.3f}x"
            yield (
                f"    {clip(row.layer, _NAME - 2) or '-':<{_NAME - 2}}{ms(row.lead_ms):>11}"
                f"{ms(row.skew_ms):>11}{slower:>14}"
            )


def _bounds(bounds: Iterable[Bound]) -> Iterator[str]:
    head = "least exposed time of an iteration"
    yield f"  {head:<{_NAME}}{'bound':>11}{'measured':>11}{'ratio':>8}"
    for bound in bounds:
        ratio = "-" if bound.ratio is None else f"{bound.ratio:.2f}"
        figures = f"{ms(bound.least_ms):>11}{ms(bound.exposed_ms):>11}{ratio:>8}"
        yield f"  {bound.name:<{_NAME}}{figures}"
        if bound.missing:
            yield from wrap(bound.missing, "    ")


def _clocks(clocks: dict[str, Offset | None]) -> Iterator[str]:
    yield f"  clocks against {next(iter(clocks))}'s, from the ends of matched collectives"
    for rank, offset in clocks.items():
        if offset is None:
            yield f"    {rank}: unknown"
        elif offset.collectives:
            yield (
                f"    {rank}: {offset.ns / 1e6:+.3f} ms (scatter {offset.scatter_ns / 1e6:.3f} ms, "
                f"{offset.collectives} collectives)"
            )


def _end(report: Report) -> Iterator[str]:
    yield ""
    if exposed := report.every_exposed_ms:
        yield (
            f"exposed communication: {statistics.fmean(exposed):.1f} ms per iteration and rank "
            f"({min(exposed):.1f} to {max(exposed):.1f})"
        )
    if report.effective is not None:
        yield from _saved(report.effective)
    yield f"verdict: {report.verdict.value}"


# Effective


@to_text.register
def _(result: Effective) -> str:
    lines: list[str] = []
    for name, profile in (("serialised", result.serial), ("overlapped", result.overlapped)):
        steps = profile.step_ms
        middle = ms(statistics.median(steps)) if steps else "-"
        lines += wrap(f"{name}: {profile.path}: {len(steps)} steps, median {middle}")
    moved = result.serial.communication_ms
    alone = ms(statistics.median(moved)) if moved else "-"
    lines.append(f"collectives alone: {alone} per step, in the serialised profile")
    lines += _saved(result)
    if result.threshold is not None:
        lines.append(f"asked for: at least {result.threshold:.0%}")
    if result.verdict is not None:
        lines.append(f"verdict: {result.verdict.value}")
    return _joined(lines)


def _saved(result: Effective) -> Iterator[str]:
    if result.finding:
        yield from wrap(result.finding)
    if result.value is None or result.interval is None:
        yield "effective: cannot be told"
        return
    low, high = result.interval
    yield (
        f"effective: {result.value:.1%} of the communication's time is saved ({CONFIDENCE:.0%} "
        f"interval {low:.1%} to {high:.1%})"
    )


# Listing


@to_text.register
def _(found: Listing) -> str:
    lines = list(_head(found.path, len(found.ranks), found.notes))
    for rank in found.ranks:
        lines += ["", *_listed(rank)]
    return _joined(lines)


def _listed(rank: RankListing) -> Iterator[str]:
    yield from wrap(f"{rank.rank}: {rank.path}, {rank.events:,} events")
    yield from _devices(rank.devices)
    if rank.unattributed:
        yield f"  without a launch in the trace: {rank.unattributed:,} of the devices' events"
    numbers = rank.iterations
    span = f"{len(numbers)}, {numbers[0]} to {numbers[-1]}" if numbers else "none"
    yield f"  iterations: {span}"
    for name, count in _merged((layer, 1) for layer in rank.layers):
        yield from wrap(f"layer {name}" + (f" ({count} of them)" if count > 1 else ""), "  ")
    for name, count in rank.stages.items():
        yield f"  {name}: {count} runs"
    yield from _collectives(rank.collectives)
    for group in rank.groups:
        what = f" ({group.description})" if group.description else ""
        yield from wrap(f"group {group.name}{what}: ranks {_ranks(group.ranks)}", "  ")


def _collectives(counts: Iterable[CollectiveCount]) -> Iterator[str]:
    parts: dict[tuple[str, str, int | None], list[int]] = {}
    for one in counts:
        totals = parts.setdefault((_pattern(one.name), one.source, one.group_size), [0, 0, 0])
        totals[0] += one.issued
        totals[1] += one.found
        totals[2] += 1
    if not parts:
        yield "  no collective"
    for (name, source, size), (issued, found, names) in parts.items():
        remarks = [f"{issued} issued"]
        remarks += [f"{found} of them found"] if found < issued else []
        remarks += [f"{names} names"] if names > 1 else []
        remarks += [f"group of {size}"] if size is not None else []
        remarks += [f"by {source}"] if source else ["foreign"]
        yield from wrap(f"{name}: {', '.join(remarks)}", "  ")


def _devices(devices: tuple[DeviceOverview, ...]) -> Iterator[str]:
    if not devices:
        yield "  no device"
    for device in devices[:1] if len(devices) == 2 else devices:  # of one device, not the sum too
        yield from _device(device)


def _device(device: DeviceOverview) -> Iterator[str]:
    name = "all devices" if device.device is None else f"device {device.device}"
    work = ", ".join(
        f"{kind.name.lower()} {count:,} ({device.times[kind] / 1e6:.2f} ms)"
        for kind, count in device.counts.items()
        if kind
    )
    streams = f"{device.streams} {'stream' if device.streams == 1 else 'streams'}"
    yield from wrap(f"{name}: {streams}; {work}", "  ")
    if device.overlap is not None:
        yield (
            f"    overlap: {device.overlap:.2%} of {device.communication / 1e6:.2f} ms "
            f"communication ({device.overlap_with_memset:.2%})"
        )


def _pattern(name: str) -> str:
    """Return a name with its numbers left out, so that layers fall together."""
    short = name.split("(")[0] if "(" in name else name
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", short)


def _merged(names: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for name, count in names:
        counts[_pattern(name)] += count
        first.setdefault(_pattern(name), name)
    return [(name if count > 1 else first[name], count) for name, count in counts.items()]


def _ranks(ranks: tuple[int, ...]) -> str:
    """Return 0-7 for what follows without a gap, else each one."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


# Diff


@to_text.register
def _(result: Diff) -> str:
    lines = [*wrap(f"before: {result.before}"), *wrap(f"after: {result.after}"), ""]
    lines.append(f"  {'':<{_NAME}}{'before':>12}{'after':>12}{'spread':>12}")
    if result.step is not None:
        lines += ["step", _change(result.step)]
    for entry in result.entries:
        counts = f"{entry.occurrences[0]} and {entry.occurrences[1]} occurrences"
        lines += wrap(f"{entry.check}: {entry.name} ({counts})")
        lines += map(_change, entry.changes)
    for where, names in (("before", result.only_before), ("after", result.only_after)):
        for name in names:
            lines += wrap(f"only {where}: {name}")
    changes = [change for entry in result.entries for change in entry.changes]
    changes += [] if result.step is None else [result.step]
    better, worse = (sum(one.better is way for one in changes) for way in (True, False))
    if not changes:
        lines.append("nothing can be compared: no collective was measured twice in both")
    lines += ["", f"beyond the spread: {better} better, {worse} worse, of {len(changes)} figures"]
    return _joined(lines)


def _change(change: Change) -> str:
    write = percent if change.figure == "hidden" else _fine
    said = {None: "", True: "better", False: "WORSE"}[change.better]
    if change.beyond and change.better is None:
        said = "longer" if change.after > change.before else "shorter"
    return (
        f"  {change.figure.removesuffix('_ms'):<{_NAME}}{write(change.before):>12}"
        f"{write(change.after):>12}{write(change.spread):>12}  {said}"
    )


def _fine(value: float) -> str:
    return f"{value:.3f} ms"
