"""How each product is cut into tiles: a stated set of candidates, measured once, kept on disk.

A launch only ever looks its shape up: in the table that `tune` wrote, else in the defaults. It
never measures, so no step synchronises or depends on timing noise, and a run is reproduced by
keeping the file. No choice changes a result: every candidate sums in the same order.

The file is JSON, one per GPU model and Triton version, in $MEGAMOE_CACHE_DIR, else in megamoe under
$XDG_CACHE_HOME, else in ~/.cache/megamoe.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton

__all__ = [
    "PRODUCTS",
    "Shape",
    "TileConfig",
    "cache_file",
    "candidates",
    "choose",
    "forget",
    "tune",
]

PRODUCTS = ("fc1", "fc2", "d_act", "d_x", "d_w1", "d_w2")


@dataclass(frozen=True)
class TileConfig:
    """How one product is cut."""

    block_m: int = 128  # rows; in fc1, fc2, d_act and d_x a divisor of ROW_ALIGN
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8  # row tiles that share a pass over the columns
    warps: int = 8
    stages: int = 4


@dataclass(frozen=True)
class Shape:
    """What a choice depends on."""

    product: str  # one of PRODUCTS
    m: int  # of a weight gradient; 0 for the products whose M is the rows
    n: int
    k: int  # 0 for a weight gradient, whose K is the rows
    experts: int
    rows: int  # slots, rounded up to a power of two: a ragged batch keeps its choice
    dtype: str

    @property
    def key(self) -> str:
        sizes = f"m{self.m}/n{self.n}/k{self.k}/g{self.experts}/r{self.rows}"
        return f"{self.product}/{sizes}/{self.dtype}"


_LARGE = TileConfig()
_WORTH = 0.98  # of the default's time
_SMALL = TileConfig(block_m=64, block_n=128, warps=4)


def candidates(product: str) -> tuple[TileConfig, ...]:
    """Return the stated set that `tune` measures for a product; the first is the default."""
    return (
        _LARGE,
        TileConfig(128, 256, 64, 8, 8, 3),
        TileConfig(128, 256, 64, 16, 8, 4),
        TileConfig(128, 128, 64, 8, 4, 3),
        _SMALL,
    )


def choose(shape: Shape, device: torch.device) -> TileConfig:
    """Return the measured choice for a shape, or its default."""
    return _table(_cache_name(device)).get(shape.key) or _default(shape)


def _default(shape: Shape) -> TileConfig:
    if shape.rows < 64 * shape.experts and not shape.m:
        return _SMALL  # most tiles would be padding
    return candidates(shape.product)[0]


def tune(
    products: Iterable[tuple[Shape, Callable[[TileConfig], object]]],
    measure: Callable[[Sequence[Callable[[], object]]], Sequence[float]],
    device: torch.device,
) -> dict[str, TileConfig]:
    """Measure every candidate of every product, keep the fastest on disk, and return the choices.

    ``products`` pairs each shape with what runs it in one cut; ``measure`` returns the times of
    several runs, infinity where one does not fit the device. The default stays unless another takes
    less than `_WORTH` of its time: beside a collective, which is not measured, its deeper pipeline
    is worth more.
    """
    chosen: dict[str, TileConfig] = {}
    for shape, run in products:
        options = candidates(shape.product)
        times = dict(zip(options, measure([partial(run, cut) for cut in options]), strict=True))
        best, default = min(times, key=times.__getitem__), _default(shape)
        chosen[shape.key] = best if times[best] < _WORTH * times[default] else default
    path = cache_file(device)
    table = {**_table(path.name), **chosen}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    rows = {key: asdict(config) for key, config in sorted(table.items())}
    draft.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)  # readers see the old table or the new one
    forget()
    return chosen


def cache_file(device: torch.device) -> Path:
    """Return where the choices for this device are kept."""
    return _directory() / _cache_name(device)


def forget() -> None:
    """Read the table from disk again at the next launch."""
    _table.cache_clear()


def _directory() -> Path:
    if "MEGAMOE_CACHE_DIR" in os.environ:
        return Path(os.environ["MEGAMOE_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamoe"


@functools.cache
def _cache_name(device: torch.device) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return f"tiles-{gpu.replace(' ', '-')}-triton-{triton.__version__}.json"


@functools.cache
def _table(name: str) -> dict[str, TileConfig]:
    path = _directory() / name
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {key: TileConfig(**row) for key, row in rows.items()}
