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
rounded once, into the result: the same bits in every run, whatever the timing. Each piece of the
peers' parts is pulled into one of two staging buffers while the other one is added up.
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

__all__ = ["PullGather", "PullReduce", "Staging"]

STAGING_BYTES = 256 * 2**20  # of one rank, both buffers together
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


class _Half:
    """One of two staging buffers: flat bytes, and when its last content has been used."""

    def __init__(self, memory: Tensor, free: Mark) -> None:
        self.memory = memory
        self.free = free


class Staging:
    """Where pieces of peers' gradients lie until they are added: two buffers, taken in turns.

    All groups share it, since their reductions follow one another on the same streams. Large pieces
    are few, and the host pays for each: about 0.2 ms.
    """

    def __init__(
        self, device: torch.device, streams: Streams, num_bytes: int = STAGING_BYTES
    ) -> None:
        mark = streams.mark()
        halves = torch.empty(2, num_bytes // 2, dtype=torch.uint8, device=device).unbind()
        self._halves = [_Half(memory, mark) for memory in halves]

    def piece(self, peers: int, dtype: torch.dtype) -> int:
        """Return how many elements of each peer fit into one buffer."""
        return max(512, self._halves[0].memory.numel() // peers // 512 * 512) // dtype.itemsize

    def next(self) -> _Half:
        """Return the buffer whose turn it is."""
        self._halves.reverse()
        return self._halves[0]


class PullReduce(_Pull):
    """Reduce-scatter; see `overlap.collectives.Reduces`.

    The result may be of another dtype than the source; it may be this rank's part of the source.

    Args:
        sms: SMs that compute should leave to the additions while one is under way.
    """

    stream = "reduce"
    scales = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: Streams,
        staging: Staging,
        *,
        sms: int = REDUCE_SMS,
    ) -> None:
        super().__init__(group, device, streams)
        self.sms = sms
        self._adding = streams.side("add")
        self._staging = staging

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
        region, start = self._find(source)
        numel = shard.numel()
        first = start + self._rank * numel
        piece = self._staging.piece(len(self._peers), source.dtype)
        issued = self._streams.mark()
        with self._streams.on(self._side):
            self._streams.after(issued)
            region.barrier()
            for begin in range(0, numel, piece):
                end = min(begin + piece, numel)
                part = slice(first + begin, first + end)
                self._reduce_piece(region, part, shard[begin:end], scale)
            region.barrier()
            read = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(read)
            added = self._streams.mark()
        return InFlight(_Enqueued(self._streams, added), (shard, source), what)

    def _reduce_piece(self, region: Region, part: slice, out: Tensor, scale: float) -> None:
        """Pull a piece of every peer on the current stream; add them up on the other one."""
        half = self._staging.next()
        source = region.local[part]
        peers = len(self._peers)
        staged = half.memory.view(source.dtype)[: peers * len(source)].view(peers, len(source))
        self._streams.after(half.free)
        for peer in self._peers:
            row = peer if peer < self._rank else peer - 1
            staged[row].copy_(region.of(peer)[part], non_blocking=True)
        pulled = self._streams.mark()
        with self._streams.on(self._adding):
            self._streams.after(pulled)
            add_in_order(source, staged, self._rank, out, scale)
            half.free = self._streams.mark()
