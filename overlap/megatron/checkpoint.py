"""The optimizer state of Megatron-core's DDP in checkpoints, where buckets end in padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["padded_inside", "padding_kept"]


@contextmanager
def padding_kept(model_chunks: Iterable[Any]) -> Iterator[None]:
    """Have Megatron-core's "fully_reshardable" optimizer state right inside the block.

    Megatron-core (0.16.1 to 0.19.2) joins a buffer's buckets without their padding and cuts the
    parameters out of them by offsets with it: each one after a padded bucket would be saved with a
    part of its neighbour's master weights and moments. Call the optimizer's sharded_state_dict
    inside the block, to save and to load. What is written is the same as ever, by parameter.
    """
    changed: list[tuple[Any, int]] = []
    try:
        for buffer in _buffers(model_chunks):
            added = 0
            for bucket, padding in _padded(buffer):
                changed.append((bucket, bucket.numel_unpadded))
                bucket.numel_unpadded += padding
                added += padding
            changed.append((buffer, buffer.numel_unpadded))
            buffer.numel_unpadded += added
        yield
    finally:
        for owner, numel in changed:
            owner.numel_unpadded = numel


def padded_inside(model_chunks: Iterable[Any]) -> bool:
    """Whether some bucket ends in padding with another one behind it."""
    return any(True for buffer in _buffers(model_chunks) for _ in _padded(buffer))


def _buffers(model_chunks: Iterable[Any]) -> Iterator[Any]:
    for ddp in model_chunks:
        yield from ddp.buffers
        yield from ddp.expert_parallel_buffers


def _padded(buffer: Any) -> Iterator[tuple[Any, int]]:
    """The buckets before the last one that end in padding, and its elements."""
    for bucket in buffer.buckets[:-1]:
        padding = bucket.grad_data.numel() - bucket.numel_unpadded
        if padding:
            yield bucket, padding
