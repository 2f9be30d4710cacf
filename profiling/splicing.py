"""Copies a trace's text with events put in before its own, a few megabytes at a time.

Sound text is copied as it is, to the digit. What no JSON parser would take is not: an event that
does not parse is written anew, or left out and counted, and what is cut off is closed. So the copy
is always valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from profiling.decoding import NotATraceError
from profiling.files import Source

__all__ = ["Spliced", "splice"]

PIECE = 1 << 22  # bytes; what is held at once
HEADER = 1 << 28  # bytes; no traceEvents within as many: not a trace
LONGEST = 1 << 26  # bytes; an event that has not ended by then never will
TRIES = 8  # places where a piece may be cut; one that is inside an event does not parse

Write = Callable[[bytes], object]

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}(\s*,\s*)(?=\{)")
_NEXT = re.compile(r"\}\s*,\s*(?=\{)")
_SOLID = re.compile(r"[^\s,]")


class _Object(msgspec.Struct, gc=False):
    """Any object; its fields are skipped."""


_EVENTS = msgspec.json.Decoder(list[_Object])
_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LENIENT = json.JSONDecoder(strict=False)  # takes control characters, and NaN


@dataclass
class Spliced:
    """What the copy lacks.

    Attributes:
        dropped: Events that are not JSON.
        complete: Whether the source's list of events ended; else it was cut off.
        metadata: Whether the source's other entries were copied.
    """

    dropped: int = 0
    complete: bool = False
    metadata: bool = True


def splice(
    source: Source, entries: dict[str, object], events: Iterable[bytes], write: Write
) -> Spliced:
    """Copy ``source`` to ``write``, and put in ``entries`` and ``events`` (the JSON of each).

    Raises:
        NotATraceError: There is no list of events in the source.
    """
    head, buffer = _head(source)
    copy = _Copy(head, entries, write)
    for event in events:
        copy.add(event)
    at_end, size = False, PIECE
    while buffer or not at_end:
        while not at_end and len(buffer) < size:
            more = source.read(size)
            buffer, at_end = buffer + more, not more
        cut = _cut(buffer)
        if cut is None:
            left, closed = copy.add_each(buffer, last=at_end)
            if closed:
                copy.close(left + _rest(source))
                return copy.done
            size = len(left) + PIECE
            buffer = left
        else:
            copy.add(buffer[: cut.start() + 1])
            buffer, size = buffer[cut.end() :], PIECE
    copy.close(None)
    return copy.done


def _head(source: Source) -> tuple[bytes, bytes]:
    """Return what stands before the first event, and what was read after it."""
    buffer = b""
    while more := source.read(PIECE):
        buffer += more
        start = buffer.lstrip()
        if start.startswith(b"["):
            return b'{"traceEvents":[', start[1:]
        if match := _START.search(buffer):
            return buffer[: match.end()], buffer[match.end() :]
        if not start.startswith(b"{") or len(buffer) > HEADER:
            break
    raise NotATraceError("it holds no list of traceEvents")


def _rest(source: Source) -> bytes:
    parts = []
    while more := source.read(PIECE):
        parts.append(more)
    return b"".join(parts)


def _cut(buffer: bytes) -> re.Match[bytes] | None:
    """Return a boundary that has nothing but whole events before it, as late as possible."""
    found = list(_BETWEEN.finditer(buffer, max(0, len(buffer) - (1 << 18))))
    for boundary in found[: -TRIES - 1 : -1]:
        if _parses(_EVENTS, b"[" + buffer[: boundary.start() + 1] + b"]"):
            return boundary
    return None


def _parses(decoder: msgspec.json.Decoder[Any], text: bytes) -> bool:
    try:
        decoder.decode(text)
        text.decode()  # which what is decoded to `Raw` does not prove
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _is_unfinished(error: Exception, text: str) -> bool:
    """Return whether more text might have mended what could not be decoded."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    literal = len("Infinity")  # one that is cut off is an error where it begins
    return error.msg.startswith("Unterminated") or len(text.rstrip()) - error.pos < literal


def _next_event(text: str, position: int) -> int | None:
    """Return where the next whole event begins: an object in an argument's list has no ``ph``."""
    for boundary in _NEXT.finditer(text, position):
        try:
            event, _ = _LENIENT.raw_decode(text, boundary.end())
        except (ValueError, RecursionError):
            continue
        if "ph" in event:
            return boundary.end()
    return None


class _Copy:
    """The copy while it is written."""

    def __init__(self, head: bytes, entries: dict[str, object], write: Write) -> None:
        self.done = Spliced()
        self._write = write
        self._first = True
        self._head = head if _parses(_ENTRIES, head + b"]}") else self._mended(head)
        added = b"".join(
            json.dumps(key).encode() + b": " + json.dumps(value).encode() + b","
            for key, value in entries.items()
        )
        opening = self._head.index(b"{") + 1
        write(self._head[:opening] + added + self._head[opening:])

    def _mended(self, head: bytes) -> bytes:
        """Return ``head`` without what is no JSON."""
        try:
            entries = _LENIENT.decode((head + b"]}").decode("utf-8", "replace"))
            entries.pop("traceEvents", None)
            text = json.dumps(entries, allow_nan=False)
        except (ValueError, RecursionError):
            self.done.metadata = False
            text = "{}"
        return text.encode()[:-1] + (b"," if text != "{}" else b"") + b'"traceEvents":['

    def add(self, events: bytes) -> None:
        """Write an event, or several with their commas."""
        self._write(b"\n" if self._first else b",\n")
        self._write(events.strip())
        self._first = False

    def add_each(self, piece: bytes, *, last: bool) -> tuple[bytes, bool]:
        """Write the events of ``piece`` one by one.

        Returns what is left of it, and whether that begins with the bracket that closes the list.
        """
        text = piece.decode("utf-8", "replace")
        position = 0
        while start := _SOLID.search(text, position):
            position = start.start()
            if text[position] == "]":
                return text[position:].encode(), True
            try:
                event, end = _LENIENT.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                following = None if _is_unfinished(error, text) else _next_event(text, position)
                if following is None and not last and len(piece) < LONGEST:
                    return text[position:].encode(), False
                self.done.dropped += 1
                position = len(text) if following is None else following
            else:
                self._add_mended(event, text[position:end].encode())
                position = end
        return b"", False

    def _add_mended(self, event: object, text: bytes) -> None:
        """Write an event as it stands, or what can be said of it in JSON."""
        if not _parses(_EVENTS, b"[" + text + b"]"):
            try:
                text = json.dumps(event, allow_nan=False).encode()
            except (ValueError, RecursionError):
                event = None
        if isinstance(event, dict):
            self.add(text)
        else:
            self.done.dropped += 1

    def close(self, tail: bytes | None) -> None:
        """Write the end: ``tail`` from the closing bracket on; None where the source was cut."""
        self.done.complete = tail is not None
        if tail is not None:
            for end in (tail, tail.rstrip() + b"}"):  # a bare list has no brace
                if _parses(_ENTRIES, self._head + end):
                    self._write(b"\n" + end)
                    return
            self.done.metadata = False
        self._write(b"\n]}\n")
