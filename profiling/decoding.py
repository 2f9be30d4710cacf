"""From the bytes of a Chrome trace to events, a megabyte at a time.

The events are cut out of the text in pieces that end between two events, and each piece is decoded
into typed structs, which skips every field that nobody asked for. A piece that does not decode
that way (a name with control characters, a time that is a string) goes through the slow decoder,
event by event; what even that cannot read is counted, never raised. The last piece always does,
for it holds the end of the list.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from profiling.files import Source

__all__ = ["Args", "Dropped", "Event", "NotATraceError", "Scan", "scan", "whole"]

Default = TypeVar("Default")

PIECE = 1 << 20  # bytes; what is decoded at once stays in a core's cache
HEADER = 1 << 28  # bytes; no traceEvents within as many: not a trace


class NotATraceError(ValueError):
    """The text is not a Chrome trace."""


# What fits the columns; a number beyond is no number of ours.
INT32, INT63 = 2**31 - 1, 2**62
Int32 = Annotated[int, msgspec.Meta(ge=-INT32, le=INT32)]
Int63 = Annotated[int, msgspec.Meta(ge=-INT63, le=INT63)]
_LARGEST = {"device": INT32, "in_device": INT32, "stream": INT32, "rank": INT32}


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that are read; a field's default says that the event does not have it."""

    correlation: Int63 = -1
    external: Int63 = msgspec.field(default=-1, name="External id")
    device: Int32 = -1
    in_device: Int32 = msgspec.field(
        default=-1, name="inDevice"
    )  # a copy between peers has no other
    stream: Int32 = -1
    name: str = ""  # of a thread or process, in a metadata event
    labels: str = ""  # of a process, in a metadata event
    rank: Int32 = -1  # tools that merge the files of several ranks write it into every event
    collective: str = msgspec.field(default="", name="Collective name")
    group: str = msgspec.field(default="", name="Process Group Name")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")
    group_size: int = msgspec.field(default=-1, name="Group size")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    dtype: str = ""
    sequence: int = msgspec.field(default=-1, name="Seq")
    comms_id: int | str = msgspec.field(default="", name="Comms Id")  # 64 bits without a sign
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


class Dropped:
    """What was left out: how many events for which reason, and the first of each."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, first: str, count: int = 1) -> None:
        """Count ``count`` more events; ``first`` is the name (or text) of the first of them."""
        before, example = self._counts.get(reason, (0, first))
        self._counts[reason] = before + count, example

    @property
    def notes(self) -> list[str]:
        """One sentence for each reason."""
        return [
            f"{count:,} event{'s' if count > 1 else ''} dropped: {reason}; the first is {first!r}"
            for reason, (count, first) in sorted(self._counts.items())
        ]


@dataclass
class Scan:
    """What `scan` found beside the events."""

    metadata: dict[str, Any] = field(default_factory=dict)
    dropped: Dropped = field(default_factory=Dropped)
    complete: bool = False  # it saw the end of the events' list
    unread: str = ""  # what stands behind that and is no part of the trace


_DECODER = msgspec.json.Decoder(list[Event])
_FIELDS = msgspec.structs.fields(Args)
_SLOW = json.JSONDecoder(strict=False)  # it takes control characters, and NaN
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
# Between two events. The key that follows tells an event from an object in some argument's list.
_KEY = r'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|tts|cname|bind_id)"'
_BETWEEN = re.compile(rb"\}\s*,\s*(?=" + _KEY.encode() + rb")")
_NEXT = re.compile(r"\}\s*,\s*(?=" + _KEY + r")")
_SOLID = re.compile(r"[^\s,]")
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


def scan(stream: Source, take: Callable[[list[Event]], None]) -> Scan:
    """Decode a trace, handing its events to ``take`` piece by piece.

    Returns the file's other entries, wherever in it they stand, and what could not be read.

    Raises:
        NotATraceError: There is no list of events in it.
    """
    found = Scan()
    head, buffer = _head(stream)
    tail, at_end, size = b"", False, PIECE
    while buffer or not at_end:
        while not at_end and len(buffer) < size:
            more = stream.read(size - len(buffer))
            buffer, at_end = buffer + more, not more
        piece, rest = _cut(buffer)
        events = _decode(piece) if piece else None
        if events is None and not piece and not at_end:
            size *= 2  # one event longer than that
            continue
        if events is None:
            if at_end:
                piece, rest = buffer, b""
            events, left, found.complete = _decode_slowly(piece, found.dropped, last=at_end)
            rest = left + b"," + rest if left and rest else left or rest
            size = PIECE + 2 * len(rest) if left else PIECE
        else:
            size = PIECE
        take(events)
        buffer = rest
        if found.complete:
            tail = buffer + _rest(stream)
            break
    found.metadata, found.unread = _rest_of_trace(head, tail)
    return found


def _rest(stream: Source) -> bytes:
    """Read to the end, which tells whether all of the file is sound, but keep a bounded part."""
    parts: list[bytes] = []
    while part := stream.read(PIECE):
        if len(parts) * PIECE < HEADER:
            parts.append(part)
    return b"".join(parts)


def _head(stream: Source) -> tuple[bytes | None, bytes]:
    """Return what stands before the first event (None for a bare list) and what was read after."""
    buffer = b""
    searched = 0
    while more := stream.read(max(PIECE, len(buffer))):
        buffer = buffer + more if buffer else more.removeprefix(codecs.BOM_UTF8).lstrip()
        if buffer.startswith(b"[") and buffer[1:].lstrip()[:1] in (b"{", b"]", b""):
            return None, buffer[1:]
        match = _START.search(buffer, searched)
        if match:
            return buffer[: match.end()], buffer[match.end() :]
        if not buffer.startswith(b"{") or len(buffer) > HEADER:
            break
        searched = max(0, len(buffer) - 80)  # the match may be half there
    raise NotATraceError("it holds no list of traceEvents")


def _rest_of_trace(head: bytes | None, tail: bytes) -> tuple[dict[str, Any], str]:
    """Return the top-level entries beside the events, and the text that belongs to no trace.

    Where what follows the events cannot be read, the entries before them are what is left.
    """
    text = tail.decode("utf-8", "replace")
    behind = text[1:].strip()
    if head is None:
        return {}, behind
    before = head.decode("utf-8", "replace")
    for end, unread in ((text, ""), ("]}", behind)):
        try:
            entries, length = _SLOW.raw_decode(before + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(entries, dict) and length > len(before):  # not of something before the events
            entries.pop("traceEvents", None)
            return entries, end[length - len(before) :].strip() or unread
    return {}, behind


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
    piece: bytes, dropped: Dropped, *, last: bool
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
                dropped.add("cut off in the middle", _excerpt(text, position))
                break
            dropped.add("not JSON", _excerpt(text, position))
            position = following.end()
        else:
            event = _coerce(entry)
            if isinstance(event, Event):
                events.append(event)
            else:
                dropped.add(event, _excerpt(text, start.start()))
    return events, b"", False


def _excerpt(text: str, position: int) -> str:
    """Return how the event that begins there begins, or its name if that is near."""
    name = _NAME.search(text, position, position + 1000)
    return name[1] if name else text[position : position + 40]


def _coerce(entry: Any) -> Event | str:
    """Return what the typed decoder would have made of the event, or why there is none."""
    if not isinstance(entry, dict):
        return "not an object"
    try:
        event = Event(
            ph=_text(entry.get("ph", "")),
            cat=_text(entry.get("cat", "")),
            name=_text(entry.get("name", "")),
            pid=_lane(entry.get("pid")),
            tid=_lane(entry.get("tid")),
            ts=float(entry.get("ts", Event().ts)),
            dur=float(entry.get("dur", Event().dur)),
        )
    except (TypeError, ValueError, OverflowError):
        return "a time that is not a number"
    given = entry.get("args")
    if isinstance(given, dict):
        event.args = _coerce_args(given)
    return event


def _coerce_args(given: dict[str, Any]) -> Args:
    taken: dict[str, Any] = {}
    for spec in _FIELDS:
        value = given.get(spec.encode_name)
        if value is None:
            continue
        if isinstance(spec.default, int):
            number = whole(value, spec.default)
            fits = abs(number) <= _LARGEST.get(spec.name, INT63)
            taken[spec.name] = number if fits else spec.default
        elif isinstance(spec.default, str):
            taken[spec.name] = _text(value)
        else:
            taken[spec.name] = msgspec.Raw(json.dumps(value).encode())
    return Args(**taken)


def _lane(value: Any) -> int | str:
    return value if isinstance(value, int) else _text(value or 0)


def _text(value: Any) -> str:
    """Return ``value`` as text that can be printed: JSON can hold half of a surrogate pair."""
    return str(value).encode("utf-8", "replace").decode()


def whole(value: Any, default: Default) -> int | Default:
    """Return ``value`` as an integer, or ``default`` where it is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default
