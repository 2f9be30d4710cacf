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

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import symmetric
from overlap.additions import add_in_order
from overlap.collectives import InFlight
from overlap.streams import Mark, Streams
from overlap.symmetric import Region

__all__ = ["PullGather", "PullReduce"]

STAGING_BYTES = 128 * 2**20  # of one rank, all staging buffers of one transport together
REDUCE_SMS = 0  # the additions' blocks find room beside a product that has every SM


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

    name = "copy engine"
    stream = ""  # whose copies go one after the other

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        self.group = group
        self._device = device
        self._streams = streams
        self._side = streams.side(self.stream)
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

    stream = "gather"
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
    """A staging buffer.

    Attributes:
        pieces: [peers, bytes], a piece of each peer, in rank order.
        free: When its last content has been used.
    """

    def __init__(self, pieces: Tensor, free: Mark) -> None:
        self.pieces = pieces
        self.free = free


class PullReduce(_Pull):
    """Reduce-scatter; see `overlap.collectives.Reduces`.

    The result may be of another dtype than the source; it may be this rank's part of the source.

    Args:
        sms: SMs that compute should leave to the additions while one is under way.
        staging_bytes: Of all staging buffers; fewer make more and smaller pieces.
    """

    stream = "reduce"
    scales = True

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
        self._piece_bytes = max(512, staging_bytes // (2 * len(self._peers)) // 512 * 512)
        shape = (2, len(self._peers), self._piece_bytes)
        mark = streams.mark()
        self._stages = [
            _Stage(pieces, mark)
            for pieces in torch.empty(shape, dtype=torch.uint8, device=device).unbind()
        ]
        self._turn = 0

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
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
            part = slice(first + begin, first + end)
            self._reduce_piece(region, part, shard[begin:end], scale)
        with self._streams.on(self._side):
            region.barrier()
            read = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(read)
            added = self._streams.mark()
        return InFlight(_Enqueued(self._streams, added), (shard, source), what)

    def _reduce_piece(self, region: Region, part: slice, out: Tensor, scale: float) -> None:
        stage = self._stages[self._turn]
        self._turn = 1 - self._turn
        source = region.local[part]
        staged = stage.pieces.view(source.dtype)
        with self._streams.on(self._side):
            self._streams.after(stage.free)
            for peer in self._peers:
                row = peer if peer < self._rank else peer - 1
                staged[row, : out.numel()].copy_(region.of(peer)[part], non_blocking=True)
            pulled = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(pulled)
            add_in_order(source, staged, self._rank, out, scale)
            stage.free = self._streams.mark()
