"""The only file that calls torch.distributed's collectives.

What an asynchronous call needs until it has finished - its tensors - travels with its handle in an
`InFlight`, so that no buffer can be freed under a running collective and no stream has to be told
about it (`record_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.errors import CollectiveError

__all__ = [
    "Collective",
    "Gathers",
    "InFlight",
    "Reduces",
    "all_gather",
    "all_reduce",
    "broadcast",
    "exchange",
    "reduce_scatter",
]

# torch 2.13 renamed both; the old names warn from then on.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class InFlight:
    """A collective on its way, with the tensors that it reads and writes."""

    work: Any
    tensors: tuple[Tensor, ...]
    what: str

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) after the collective.

        Raises:
            CollectiveError: A peer died, timed out or never issued it.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _failed(self.what, error) from error

    def done(self) -> bool:
        """Whether it has finished, as far as the device tells without being waited for."""
        return bool(self.work.is_completed())


def _failed(what: str, error: Exception) -> CollectiveError:
    return CollectiveError(
        f"{what} failed: {error}. Most likely another rank died, or ran into an error before it "
        "issued this collective: look for the first error in the logs of the other ranks."
    )


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, what: str) -> InFlight:
    """Start to gather every rank's ``shard`` [n] into ``output`` [n * size], in rank order.

    ``shard`` may be this rank's own part of ``output``.
    """
    try:
        work = _all_gather_single(output, shard, group=group, async_op=True)
    except RuntimeError as error:
        raise _failed(what, error) from error
    return InFlight(work, (output, shard), what)


def reduce_scatter(shard: Tensor, source: Tensor, group: dist.ProcessGroup, what: str) -> InFlight:
    """Start to sum ``source`` [n * size] over the ranks, of which this one keeps ``shard`` [n].

    ``shard`` may be this rank's own part of ``source``; the other parts are not changed.
    """
    try:
        work = _reduce_scatter_single(shard, source, group=group, async_op=True)
    except RuntimeError as error:
        raise _failed(what, error) from error
    return InFlight(work, (shard, source), what)


class Gathers(Protocol):
    """Who gathers the buckets of one group, one after the other.

    Attributes:
        name: What plans call it.
        sms: SMs that compute should leave free while something is under way.
    """

    name: str
    sms: int

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the memory in which the buckets have to lie. A collective."""
        ...

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        """As `all_gather`; ``output`` is a slice of what was allocated, ``shard`` one of it."""
        ...


class Reduces(Protocol):
    """Who reduces the buckets of one group; as `Gathers`.

    Attributes:
        scales: It multiplies the sum by ``scale`` on the way; otherwise the caller has to.
    """

    name: str
    sms: int
    scales: bool

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
        """As `reduce_scatter`; ``source`` is a slice of what was allocated."""
        ...


class Collective:
    """The transport that is the process group's own collectives (NCCL's, gloo's)."""

    name = "collective"
    scales = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sms: int) -> None:
        self.group = group
        self.sms = sms
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        return all_gather(output, shard, self.group, what)

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
        return reduce_scatter(shard, source, self.group, what)


def broadcast(tensor: Tensor, group: dist.ProcessGroup, what: str) -> None:
    """Overwrite ``tensor``, of any dtype and strides, with that of the group's first rank, and wait
    for it."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded: one element stands for all
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    dense = tensor.contiguous()
    bits = dense.view(-1).view(torch.uint8)  # gloo and NCCL do not take every dtype
    try:
        dist.broadcast(bits, dist.get_global_rank(group, 0), group=group)
    except RuntimeError as error:
        raise _failed(what, error) from error
    if dense is not tensor:
        tensor.copy_(dense)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, what: str, op: Any = dist.ReduceOp.SUM
) -> None:
    """Overwrite ``tensor`` with its sum (or maximum) over the group, and wait for it."""
    try:
        dist.all_reduce(tensor, op, group=group)
    except RuntimeError as error:
        raise _failed(what, error) from error


def exchange(
    values: Sequence[int], group: dist.ProcessGroup, device: torch.device, what: str
) -> list[list[int]]:
    """Return the ``values`` (64-bit, as many on every rank) of each rank, in rank order."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
    all_gather(everyone, mine, group, what).wait()
    table: list[list[int]] = everyone.view(-1, max(1, mine.numel())).tolist()
    return table
