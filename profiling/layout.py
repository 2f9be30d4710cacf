"""How text output looks: its width, wrapping, and how figures are written."""

from __future__ import annotations

import textwrap

__all__ = ["WIDTH", "clip", "ms", "percent", "wrap"]

WIDTH = 100  # columns


def wrap(text: str, indent: str = "") -> list[str]:
    """Return ``text`` as lines of at most `WIDTH` columns, the later ones indented further."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def clip(text: str, width: int) -> str:
    """Return ``text`` in less than ``width`` columns: its end, which tells layers apart."""
    return text if len(text) < width else "…" + text[-(width - 2) :]


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"
