"""Opening a trace's bytes, compressed or not, in bounded memory and up to a cut or damage.

What a file is compressed with is told by its first bytes, for files get renamed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import zstandard

__all__ = ["SUFFIXES", "CompressionError", "Source", "open_trace"]

SUFFIXES = (".json", ".json.gz", ".json.zst")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ = 1 << 16  # compressed bytes at once
_STEP = 1 << 12  # bytes that zstd decompresses at once; up to as many are lost before damage
_MEMBER = 16 + zlib.MAX_WBITS  # zlib's word for gzip


class CompressionError(ValueError):
    """Not even the beginning of the file can be decompressed."""


class Source(Protocol):
    """Something to read bytes from.

    Attributes:
        damaged: The bytes ended where they did because what follows cannot be decompressed.
    """

    damaged: bool

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _Plain:
    """A file as it is."""

    def __init__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        self._file = file
        self._report = report
        self.damaged = False

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._report(len(data))
        return data

    def close(self) -> None:
        self._file.close()


class _Gunzip:
    """A gzip file that ends where its sound part ends, instead of raising there."""

    def __init__(self, source: _Plain) -> None:
        self._source = source
        self._member = zlib.decompressobj(_MEMBER)
        self._rest = b""
        self._sound = False  # something has been read
        self.damaged = False

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size and not self.damaged:
            compressed = self._rest or self._source.read(_READ)
            if self._member.eof:
                compressed = compressed.lstrip(b"\0")  # padding, which gzip allows
            if not compressed:
                break
            if self._member.eof:
                self._member = zlib.decompressobj(_MEMBER)  # the next member
            before = self._member.copy()
            try:
                part = self._member.decompress(compressed, size)
            except zlib.error as error:
                part = _salvage(before, compressed)
                if not self._sound and not part:
                    raise CompressionError(str(error)) from None
                self.damaged = True
            self._rest = self._member.unconsumed_tail or self._member.unused_data
            self._sound = self._sound or bool(part)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._source.close()


def _salvage(member: zlib._Decompress, compressed: bytes) -> bytes:
    """Return what can be decompressed before the damage, to the byte."""
    parts: list[bytes] = []
    for step in (1 << 12, 1 << 6, 1):
        with suppress(zlib.error):
            while True:
                before = member.copy()
                part = member.decompress(compressed, step)
                if not part:
                    break
                parts.append(part)
                compressed = member.unconsumed_tail
        member = before
    return b"".join(parts)


class _Unzstd:
    """A zstd file that ends where its sound part ends, instead of raising there."""

    def __init__(self, source: _Plain) -> None:
        self._source = source
        decompressor = zstandard.ZstdDecompressor()
        file = cast(BinaryIO, source)  # of which nothing but read() is called
        self._stream = decompressor.stream_reader(file, _READ, read_across_frames=True)
        self._sound = False
        self.damaged = False

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size and not self.damaged:
            try:
                part = self._stream.read(min(size, _STEP))
            except zstandard.ZstdError as error:
                if not self._sound:
                    raise CompressionError(str(error)) from None
                self.damaged = True
                break
            if not part:
                break
            self._sound = True
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._source.close()


def open_trace(path: Path, report: Callable[[int], None] = lambda size: None) -> Source:
    """Open ``path`` for reading its text.

    Args:
        report: Called with the number of bytes of the file that were read since the last call.

    Raises:
        OSError: It cannot be opened; or on reading, that it cannot be read.
        CompressionError: On reading, if not even the beginning can be decompressed.
    """
    file = path.open("rb")
    try:
        start = file.read(len(_ZSTD))
        file.seek(0)
    except OSError:
        file.close()
        raise
    plain = _Plain(file, report)
    if start.startswith(_GZIP):
        return _Gunzip(plain)
    return _Unzstd(plain) if start == _ZSTD else plain
