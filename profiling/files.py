"""Opening a trace's bytes, compressed or not, in bounded memory and up to a cut."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

__all__ = ["SUFFIXES", "Source", "open_trace"]

SUFFIXES = (".json", ".json.gz")
_READ = 1 << 20  # compressed bytes at once
_GZIP = 16 + zlib.MAX_WBITS


class Source(Protocol):
    """Something to read bytes from."""

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...


class _Gunzip:
    """A gzip file that ends where its sound part ends, instead of raising there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._member = zlib.decompressobj(_GZIP)
        self._sound = False  # something has been read

    def read(self, size: int = -1, /) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            compressed = self._member.unconsumed_tail or self._member.unused_data
            if self._member.eof and compressed:
                self._member = zlib.decompressobj(_GZIP)  # the next member
            compressed = compressed or self._file.read(_READ)
            if not compressed:
                break
            try:
                part = self._member.decompress(compressed, max(left, 0))
            except zlib.error:
                if not self._sound:
                    raise
                self._file.seek(0, 2)
                self._member = zlib.decompressobj(_GZIP)
                break
            self._sound = True
            parts.append(part)
            left -= len(part) if size > 0 else 0
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()


def open_trace(path: Path) -> Source:
    """Open ``path`` for reading; what ends with .gz is decompressed.

    Raises:
        OSError: It cannot be opened.
        zlib.error: On reading, if it is not gzip at all.
    """
    file = path.open("rb")
    return _Gunzip(file) if path.name.endswith(".gz") else file
