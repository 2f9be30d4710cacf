"""From the bytes of a Chrome trace to events, a few megabytes at a time.

The events are cut out of the text in pieces that end between two events, and each piece is decoded
into typed structs, which skips every field that nobody asked for. A piece that does not decode
that way (a name with control characters, a time that is a string) goes through the slow decoder,
event by event; what even that cannot read is counted, never raised. The last piece always does,
for it holds the end of the list.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from profiling.files import Source

__all__ = ["Args", "Event", "NotATraceError", "Scan", "scan"]

PIECE = 1 << 23  # bytes; what is decoded at once
HEADER = 1 << 28  # bytes; no traceEvents within as many: not a trace


class NotATraceError(ValueError):
    """The text is not a Chrome trace."""


# What fits the columns; a number beyond is no number of ours.
INT32, INT63 = 2**31 - 1, 2**62
Int32 = Annotated[int, msgspec.Meta(ge=-INT32, le=INT32)]
Int63 = Annotated[int, msgspec.Meta(ge=-INT63, le=INT63)]
_LARGEST = {"device": INT32, "stream": INT32}


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that are read; a field's default says that the event does not have it."""

    correlation: Int63 = -1
    device: Int32 = -1
    stream: Int32 = -1
    name: str = ""  # of a thread, in a metadata event
    collective: str = msgspec.field(default="", name="Collective name")
    group: str = msgspec.field(default="", name="Process Group Name")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")
    group_size: int = msgspec.field(default=-1, name="Group size")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    dtype: str = ""
    comms_id: int | str = msgspec.field(default="", name="Comms Id")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event, with times in microseconds as the file has them."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = -1.0
    dur: float = -1.0
    args: Args = NO_ARGS


@dataclass
class Scan:
    """What `scan` found beside the events."""

    metadata: dict[str, Any] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> number of events
    complete: bool = True


_DECODER = msgspec.json.Decoder(list[Event])
_SLOW = json.JSONDecoder(strict=False)  # it takes control characters, and NaN
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
# Between two events. The key that follows tells an event from an object in some argument's list.
_KEY = r'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp)"'
_BETWEEN = re.compile(rb"\}\s*,\s*(?=" + _KEY.encode() + rb")")
_NEXT = re.compile(r"\}\s*,\s*(?=" + _KEY + r")")
_SOLID = re.compile(r"[^\s,]")


def scan(stream: Source, take: Callable[[list[Event]], None]) -> Scan:
    """Decode a trace, handing its events to ``take`` piece by piece.

    Returns the file's other entries, wherever in it they stand, and what could not be read.

    Raises:
        NotATraceError: There is no list of events in it.
    """
    found = Scan(complete=False)
    head, buffer = _head(stream)
    tail, at_end, size = b"", False, PIECE
    while buffer or not at_end:
        while not at_end and len(buffer) < size:
            more = stream.read(size - len(buffer))
            buffer, at_end = buffer + more, not more
        piece, rest = (buffer, b"") if at_end else _cut(buffer)
        if not piece:
            size += PIECE  # one event longer than that
            continue
        events = _decode(piece)
        if events is None:
            events, left, found.complete = _decode_slowly(piece, found.dropped, last=at_end)
            rest = left + b"," + rest if left and rest else left or rest
            size = max(PIECE, len(left) + PIECE)
        else:
            size = PIECE
        take(events)
        buffer = rest
        if found.complete:
            tail = buffer + stream.read()
            break
    if head is not None:
        found.metadata = _metadata(head, tail)
    return found


def _head(stream: Source) -> tuple[bytes | None, bytes]:
    """Return what stands before the first event (None for a bare list) and what was read after."""
    buffer = b""
    while more := stream.read(PIECE):
        buffer += more
        start = buffer.lstrip()
        if start.startswith(b"["):
            return None, start[1:]
        match = _START.search(buffer)
        if match:
            return buffer[: match.end()], buffer[match.end() :]
        if not start.startswith(b"{") or len(buffer) > HEADER:
            break
    raise NotATraceError("it holds no list of traceEvents")


def _metadata(head: bytes, tail: bytes) -> dict[str, Any]:
    """Return the top-level entries beside the events; those before them where the rest is cut."""
    for end in (tail, b"]}"):
        try:
            entries = _SLOW.decode((head + end).decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        entries.pop("traceEvents", None)
        return entries
    return {}


def _cut(buffer: bytes) -> tuple[bytes, bytes]:
    """Split after the last whole event; without a boundary, nothing is before it."""
    for span in (1 << 16, len(buffer)):
        found = list(_BETWEEN.finditer(buffer, max(0, len(buffer) - span)))
        if found:
            return buffer[: found[-1].start() + 1], buffer[found[-1].end() :]
    return b"", buffer


def _decode(piece: bytes) -> list[Event] | None:
    try:
        return _DECODER.decode(b"[" + piece + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _decode_slowly(
    piece: bytes, dropped: Counter[str], *, last: bool
) -> tuple[list[Event], bytes, bool]:
    """Decode event by event.

    Returns the events, the text behind them, and whether that text begins with the bracket that
    closes the list. Text that is no event is dropped and counted, but not where more may follow.
    """
    text = piece.decode("utf-8", "replace")
    events: list[Event] = []
    position = 0
    while start := _SOLID.search(text, position):
        position = start.start()
        if text[position] == "]":
            return events, text[position:].encode(), True
        try:
            entry, position = _SLOW.raw_decode(text, position)
        except (ValueError, RecursionError):
            following = _NEXT.search(text, position)
            if following is None:
                if not last:
                    return events, text[position:].encode(), False
                dropped["cut off in the middle"] += 1
                break
            dropped["not JSON"] += 1
            position = following.end()
        else:
            event = _coerce(entry)
            if isinstance(event, Event):
                events.append(event)
            else:
                dropped[event] += 1
    return events, b"", False


def _coerce(entry: Any) -> Event | str:
    """Return what the typed decoder would have made of the event, or why there is none."""
    if not isinstance(entry, dict):
        return "not an object"
    try:
        event = Event(
            ph=str(entry.get("ph", "")),
            cat=str(entry.get("cat", "")),
            name=str(entry.get("name", "")),
            pid=_lane(entry.get("pid")),
            tid=_lane(entry.get("tid")),
            ts=float(entry.get("ts", Event().ts)),
            dur=float(entry.get("dur", Event().dur)),
        )
    except (TypeError, ValueError):
        return "a time that is not a number"
    given = entry.get("args")
    if isinstance(given, dict):
        event.args = _coerce_args(given)
    return event


def _coerce_args(given: dict[str, Any]) -> Args:
    taken: dict[str, Any] = {}
    for spec in msgspec.structs.fields(Args):
        value = given.get(spec.encode_name)
        if value is None:
            continue
        if isinstance(spec.default, int):
            number = _whole(value, spec.default)
            fits = abs(number) <= _LARGEST.get(spec.name, INT63)
            taken[spec.name] = number if fits else spec.default
        elif isinstance(spec.default, str):
            taken[spec.name] = str(value)
        else:
            taken[spec.name] = msgspec.Raw(json.dumps(value).encode())
    return Args(**taken)


def _lane(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value or 0)


def _whole(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default
