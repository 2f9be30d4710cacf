"""Transports that move bytes with the GPUs' copy engines instead of with SMs.

Every rank pulls what it needs out of its peers' symmetric memory with plain device-to-device
copies, on a stream of its own, between two barriers of the devices: the first says that what is
read has been written, the second that it has been read and may be written again. As with NCCL, a
collective starts after what the current stream was given before its issue, and ``wait`` orders the
current stream after it; the host never waits.

A barrier is one small kernel. It needs a place on an SM, but not one of its own, and its stream has
high priority; no compute kernel waits for it unless its stream was told to, so the ranks cannot
lock each other up.

The sum of a reduce-scatter is taken in fp32 in the order of ranks, ((g0 + g1) + g2) + ..., and
rounded once, into the result: the same bits in every run, whatever the timing. Each piece of a
peer's part is pulled into one of two staging buffers while the other one is added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import symmetric
from overlap.collectives import InFlight
from overlap.streams import Mark, Streams
from overlap.symmetric import Region

__all__ = ["PullGather", "PullReduce"]

STAGING_BYTES = 128 * 2**20  # of one rank, all staging buffers of one transport together
REDUCE_SMS = 8  # the additions: SMs that keep up with the copies


class _Enqueued:
    """The work handle of something whose last part ends at a mark."""

    def __init__(self, streams: Streams, end: Mark) -> None:
        self._streams = streams
        self._end = end

    def wait(self) -> None:
        self._streams.after(self._end)

    def is_completed(self) -> bool:
        return self._end.reached()


class _Pull:
    """What both directions share: the group, its regions and the stream of the copies.

    Groups share their streams, one a direction: all ranks issue in one order, dense and expert.
    """

    name = ""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        self.group = group
        self._device = device
        self._streams = streams
        self._side = streams.side(self.name)
        self._rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        # Each rank starts with the next one, so that not all pull from the same.
        self._peers = [(self._rank + step) % size for step in range(1, size)]
        self._regions: list[Region] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] that this transport can move slices of. A collective.

        Raises:
            TransportError: The ranks cannot see each other's memory.
        """
        self._regions.append(symmetric.allocate(numel, dtype, self._device, self.group))
        return self._regions[-1].local

    def _find(self, part: Tensor) -> tuple[Region, int]:
        """The region that ``part`` lies in, and the element it starts at."""
        for region in self._regions:
            start, odd = divmod(part.data_ptr() - region.local.data_ptr(), part.itemsize)
            if region.local.dtype is part.dtype and 0 <= start < region.local.numel():
                assert not odd
                assert start + part.numel() <= region.local.numel()
                return region, start
        raise AssertionError("not in memory that was allocated for this transport")


class PullGather(_Pull):
    """All-gather; see `overlap.collectives.Gathers`."""

    name = "gather"
    sms = 0

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        region, start = self._find(output)
        numel = shard.numel()
        issued = self._streams.mark()
        with self._streams.on(self._side):
            self._streams.after(issued)
            region.barrier()
            for peer in self._peers:
                part = slice(start + peer * numel, start + (peer + 1) * numel)
                region.local[part].copy_(region.of(peer)[part], non_blocking=True)
            region.barrier()
            end = self._streams.mark()
        return InFlight(_Enqueued(self._streams, end), (output, shard), what)


class _Stage:
    """A staging buffer: a piece from each peer, and their sum so far.

    Attributes:
        pieces: By peer, bytes.
        free: When its last content has been used.
    """

    def __init__(self, peers: Sequence[int], piece_bytes: int, mark: Mark, like: Tensor) -> None:
        self.pieces = {peer: like.new_empty(piece_bytes, dtype=torch.uint8) for peer in peers}
        self.free = mark


class PullReduce(_Pull):
    """Reduce-scatter; see `overlap.collectives.Reduces`.

    The result may be of another dtype than the source; it may be this rank's part of the source.

    Args:
        sms: SMs that compute should leave to the additions while one is under way.
        staging_bytes: Of all staging buffers; fewer make more and smaller pieces.
    """

    name = "reduce"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: Streams,
        *,
        sms: int = REDUCE_SMS,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__(group, device, streams)
        self.sms = sms
        self._adding = streams.side("add")
        # In each of two stages a piece per peer, and one sum in fp32: twice the bytes of bf16.
        self._piece_bytes = max(512, staging_bytes // (2 * len(self._peers) + 2) // 512 * 512)
        mark = streams.mark()
        like = torch.empty(0, device=device)
        self._stages = [_Stage(self._peers, self._piece_bytes, mark, like) for _ in range(2)]
        self._sum = like.new_empty(self._piece_bytes // 2, dtype=torch.float32)
        self._turn = 0

    def reduce_scatter(self, shard: Tensor, source: Tensor, what: str) -> InFlight:
        region, start = self._find(source)
        numel = shard.numel()
        first = start + self._rank * numel
        piece = self._piece_bytes // source.itemsize
        issued = self._streams.mark()
        with self._streams.on(self._side):
            self._streams.after(issued)
            region.barrier()
        for begin in range(0, numel, piece):
            end = min(begin + piece, numel)
            self._reduce_piece(region, slice(first + begin, first + end), shard[begin:end])
        with self._streams.on(self._side):
            region.barrier()
            read = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(read)
            added = self._streams.mark()
        return InFlight(_Enqueued(self._streams, added), (shard, source), what)

    def _reduce_piece(self, region: Region, part: slice, out: Tensor) -> None:
        stage = self._stages[self._turn]
        self._turn = 1 - self._turn
        terms = {self._rank: region.local[part]}
        with self._streams.on(self._side):
            self._streams.after(stage.free)
            for peer in self._peers:
                staged = stage.pieces[peer].view(region.local.dtype)[: out.numel()]
                terms[peer] = staged.copy_(region.of(peer)[part], non_blocking=True)
            pulled = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(pulled)
            _add([terms[rank] for rank in sorted(terms)], self._sum[: out.numel()], out)
            stage.free = self._streams.mark()


def _add(terms: Sequence[Tensor], partial: Tensor, out: Tensor) -> None:
    """Write the sum of ``terms``, added from left to right in fp32, to ``out``.

    ``out`` may be one of the terms: nothing is written to it before all have been read.
    """
    total = terms[0]
    if total.dtype is not torch.float32:
        total = partial.copy_(total)
    for term in terms[1:-1]:
        total = torch.add(total, term, out=partial)
    if out.dtype is torch.float32:
        torch.add(total, terms[-1], out=out)
    else:
        out.copy_(torch.add(total, terms[-1], out=partial))
