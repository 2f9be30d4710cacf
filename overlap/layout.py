"""Where each parameter lies: pure arithmetic, no storage and no process group.

Vocabulary: a *bucket* is a run of parameters that is moved by one collective each way. It is padded
so that it divides by the size of its group; rank r of the group owns the r-th equal part, its
*shard*. A *piece* is what one shard holds of one parameter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["BucketLayout", "Member", "ParamSpec", "Piece", "digest", "plan_buckets"]

# Parameters and shards start on multiples of this many elements: 128 bytes or more in any dtype,
# what tensor-memory loads, vectorised copies and collectives ask for.
ALIGNMENT = 64


def _align(numel: int, to: int = ALIGNMENT) -> int:
    return -(-numel // to) * to


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a trainable parameter.

    Attributes:
        name: Its path in the model.
        expert: It belongs to the expert-data-parallel group.
        weight_module: Path of the weight module that owns it, or None for any other parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    expert: bool = False
    weight_module: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket, in elements."""

    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Piece:
    """What one shard holds of one member: elements [start, stop) of the bucket."""

    member: Member
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: its members one after the other, each aligned, then padding.

    Attributes:
        name: What ranges and the plan call it (see profiling.ranges).
        numel: Elements including padding; divides by ``group_size``.
    """

    name: str
    dtype: torch.dtype
    expert: bool
    group_size: int
    members: tuple[Member, ...]
    numel: int

    def __post_init__(self) -> None:
        assert self.members
        assert self.numel % (self.group_size * ALIGNMENT) == 0
        end = 0
        for member in self.members:
            assert member.start >= end
            assert (member.spec.dtype, member.spec.expert) == (self.dtype, self.expert)
            end = member.stop
        assert end <= self.numel

    @classmethod
    def pack(cls, name: str, specs: Sequence[ParamSpec], group_size: int) -> BucketLayout:
        """Lay ``specs`` out in the order given."""
        members = []
        end = 0
        for spec in specs:
            members.append(Member(spec, end))
            end = _align(end + spec.numel)
        numel = _align(end, group_size * ALIGNMENT)
        first = specs[0]
        return cls(name, first.dtype, first.expert, group_size, tuple(members), numel)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.group_size

    @property
    def nbytes(self) -> int:
        """Of the parameters, padding included."""
        return self.numel * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(member.spec.numel for member in self.members)

    def shard(self, rank: int) -> slice:
        """The elements of the bucket that ``rank`` of the group owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the shard of ``rank`` holds, in order; empty where it is all padding."""
        own = self.shard(rank)
        clipped = (Piece(m, max(m.start, own.start), min(m.stop, own.stop)) for m in self.members)
        return tuple(piece for piece in clipped if piece.start < piece.stop)


def plan_buckets(
    specs: Sequence[ParamSpec],
    *,
    dense_group_size: int,
    expert_group_size: int,
    bucket_bytes: int,
    share_expert_buckets: bool = False,
) -> tuple[BucketLayout, ...]:
    """Sort parameters, given in registration order, into buckets.

    Each weight module's parameter gets a bucket of its own (with ``share_expert_buckets``, those of
    one layer get one together). The others are packed from the last registered to the first, as
    backward meets them, until a bucket reaches ``bucket_bytes``; dense and expert parameters, and
    different dtypes, never mix. Returned in the order of first registered member, which is the
    first guess at the order of use.
    """
    registered = {spec.name: index for index, spec in enumerate(specs)}
    alone: dict[str, list[ParamSpec]] = {}
    packs: list[list[ParamSpec]] = []
    filling: dict[tuple[torch.dtype, bool], tuple[list[ParamSpec], int]] = {}
    for spec in reversed(specs):
        if spec.weight_module is not None:
            layer = spec.weight_module.rpartition(".")[0]
            key = f"layer {layer}" if share_expert_buckets else spec.weight_module
            alone.setdefault(key, []).append(spec)
            continue
        family = (spec.dtype, spec.expert)
        pack, size = filling.pop(family, ([], 0))
        if not pack:
            packs.append(pack)
        pack.append(spec)
        size += spec.numel * spec.dtype.itemsize
        if size < bucket_bytes:
            filling[family] = (pack, size)

    named = [
        (",".join(str(spec.weight_module) for spec in reversed(weights)), weights)
        for weights in alone.values()
    ]
    for kind, expert in (("dense", False), ("expert", True)):
        those = [pack for pack in packs if pack[0].expert is expert]
        named += [(f"{kind}.{index}", pack) for index, pack in enumerate(those)]
    layouts = [
        BucketLayout.pack(name, pack, expert_group_size if pack[0].expert else dense_group_size)
        for name, pack in named
    ]
    layouts.sort(key=lambda layout: min(registered[m.spec.name] for m in layout.members))
    return tuple(layouts)


def digest(lines: Iterable[str]) -> int:
    """A 63-bit fingerprint of some text lines, the same in every process."""
    text = "\n".join(lines).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
