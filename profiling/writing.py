"""Files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["WriteError", "replacing", "write"]


class WriteError(ValueError):
    """A file cannot be written. The message is one sentence that names it."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, which takes its place if the body ends well.

    Raises:
        WriteError: The file or its folder cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    temporary: Path | None = None
    try:
        if target.exists() and not target.is_file():  # a directory, or a device such as /dev/null
            raise OSError(0, "it is no file")
        # The suffix stays: writers go by it.
        handle, name = tempfile.mkstemp("".join(target.suffixes), ".", target.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write(path: str | Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8, with a newline at its end.

    Raises:
        WriteError: It cannot be written.
    """
    with replacing(path) as temporary:
        # A name in a trace may hold what UTF-8 has no bytes for.
        data = (text.rstrip("\n") + "\n").encode("utf-8", "backslashreplace")
        temporary.write_bytes(data)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
