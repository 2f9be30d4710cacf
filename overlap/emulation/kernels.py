"""The copy kernel that stands in for a collective's kernel on the device.

Each CTA moves its parts of the transfer and, after each, waits for the moment at which the link
would have delivered as much. So a collective takes the time of its link and as many SMs as NCCL's
kernel would, whatever the copies cost, and a CTA that had to wait for an SM is as late as it would
be there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from overlap.emulation.transfer import Transfer

__all__ = ["STAGING_BYTES", "launch"]

_PART_BYTES = 1 << 18  # per CTA, between two looks at the clock
_BLOCK_BYTES = 1 << 15  # per CTA and load; four of them in shared memory leave no room for another
STAGING_BYTES = 1 << 24  # where rows go that leave this rank; a peer's buffer, as it were


@triton.jit(do_not_specialize=["kept", "factor", "latency_ns", "wire_ns"])
def emulated_collective(
    source,
    target,
    staging,
    length,
    chunks,
    source_step,
    target_step,
    kept,
    factor,
    latency_ns,
    wire_ns,
    PART: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PACED: tl.constexpr,
):
    """Move ``chunks`` rows of ``length`` elements; a program's parts are paced over ``wire_ns``."""
    if PACED:
        begin = globaltimer() + latency_ns
    per_chunk = tl.cdiv(length, PART)
    parts = chunks * per_chunk
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    own = tl.cdiv(parts - program, programs)
    done = 0  # enumerate() is not Triton
    for part in range(program, parts, programs):
        chunk = part // per_chunk
        first = (part % per_chunk).to(tl.int64) * PART
        here = source + chunk.to(tl.int64) * source_step + first
        there = tl.where(
            (kept == -1) | (chunk == kept),
            target + chunk.to(tl.int64) * target_step + first,
            staging + (part % SLOTS) * PART,
        )
        # Pipelined through shared memory, so that nothing else of that kind fits on the same SM.
        for offset in tl.range(0, PART, BLOCK, num_stages=5):
            within = offset + tl.arange(0, BLOCK)
            mask = first + within < length
            value = tl.load(here + within, mask=mask)
            if SCALED:
                value = (value * factor).to(source.dtype.element_ty)
            tl.store(there + within, value, mask=mask)
        done += 1  # noqa: SIM113
        if PACED:
            due = begin + wire_ns.to(tl.int64) * done // own
            while globaltimer() < due:
                pass


def launch(
    transfer: Transfer,
    staging: Tensor,
    *,
    ctas: int,
    clusters: int,
    latency_ns: int,
    wire_ns: int,
    paced: bool = True,
) -> None:
    """Move ``transfer`` on the current stream with ``ctas`` CTAs in ``wire_ns`` nanoseconds.

    Args:
        staging: [STAGING_BYTES] uint8 of scratch.
        paced: False does without the clock, which Triton's interpreter does not have.
    """
    source, target = transfer.source, transfer.target
    if transfer.factor == 1:
        source, target = _as_words(source, target)
    item = source.element_size()
    part, block = (clusters * size // item for size in (_PART_BYTES, _BLOCK_BYTES))
    emulated_collective[(ctas // clusters,)](
        source,
        target,
        staging.view(source.dtype),
        source.shape[1],
        transfer.chunks,
        0 if source.shape[0] == 1 else source.shape[1],
        0 if transfer.target_step == 0 else target.shape[1],
        transfer.kept,
        transfer.factor,
        latency_ns,
        wire_ns,
        PART=part,
        SLOTS=STAGING_BYTES // item // part,
        BLOCK=block,
        SCALED=transfer.factor != 1,
        PACED=paced,
        num_warps=16,
        num_ctas=clusters,
    )


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """View rows of any dtype as rows of the widest integers that they are made of."""
    rows = [tensor.view(torch.uint8) for tensor in tensors]
    for dtype in (torch.int32, torch.int16):
        if all(
            size % dtype.itemsize == 0
            for row in rows
            for size in (row.shape[1], row.storage_offset())
        ):
            return [row.view(dtype) for row in rows]
    return rows
