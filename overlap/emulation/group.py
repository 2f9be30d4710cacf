"""The c10d backend "emulated": a process group whose peers do not exist.

It is a Python subclass of torch's ProcessGroup, so that `torch.distributed` calls its methods
directly. It covers what data-parallel engines use; what is missing (send, recv, gather, scatter)
raises torch's own error.
"""

# torch's stubs name the parameters of these methods; everybody passes them by position.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.emulation.link import EmulatedLink
from overlap.emulation.transfer import NONE, Transfer
from overlap.emulation.wires import Delivery, Wire, wire_for
from profiling import ranges

__all__ = ["BACKEND", "EmulatedProcessGroup", "init_process_group", "link_of", "register"]

BACKEND = ranges.EMULATED


class EmulatedWork(dist.Work):
    """The handle of one collective. It keeps the tensors alive."""

    def __init__(self, delivery: Delivery, tensors: Sequence[Tensor], *, block: bool) -> None:
        super().__init__()
        self._delivery = delivery
        self._tensors = tuple(tensors)
        self._block = block

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream (on a CPU: the caller) after the collective."""
        self._delivery.wait()
        if self._block and self._tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        return True

    def is_completed(self) -> bool:
        return self._delivery.done()

    def result(self) -> list[Tensor]:
        return list(self._tensors)


class EmulatedProcessGroup(dist.ProcessGroup):
    """This rank's end of a group over an `EmulatedLink`.

    Attributes:
        link: What is emulated.
        wires: The wire of each device type; groups that share the link share them.
    """

    def __init__(
        self, rank: int, size: int, link: EmulatedLink, wires: dict[torch.device, Wire]
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in the stubs
        self.link = link
        self.wires = wires
        self._index = rank
        self._ranks = size

    # What torch.distributed asks a group about itself; the base class asks C++ backends.

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        for wire in self.wires.values():
            wire.close()
        self.wires.clear()

    # Collectives. torch 2.13 renamed some of the methods; both names stand at the end.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        rows = [_row(tensor) for tensor in tensors]
        transfers = [Transfer(row, row, chunks=1, kept=NONE) for row in rows]
        return self._send("broadcast", transfers, tensors, sum(row.nbytes for row in rows))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        factor = self._factor(opts)
        rows = [_row(tensor) for tensor in tensors]
        transfers = [Transfer(row, row, chunks=1, factor=factor) for row in rows]
        moved = 2 * self._others(sum(row.nbytes for row in rows))
        return self._send("all_reduce", transfers, tensors, moved)

    allreduce_coalesced = allreduce

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        transfers = [
            Transfer(_row(mine), self._rows(everyone, mine), chunks=self._ranks)
            for everyone, mine in zip(outputs, inputs, strict=True)
        ]
        moved = self._others(sum(output.nbytes for output in outputs))
        return self._send("all_gather", transfers, [*outputs, *inputs], moved)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (targets,), (mine,) = outputs, inputs
        return self._deal("all_gather", targets, [mine] * len(targets))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        factor = self._factor(opts)
        transfers = [
            Transfer(
                self._rows(everyone, mine),
                _row(mine),
                chunks=self._ranks,
                kept=self._index,
                factor=factor,
            )
            for mine, everyone in zip(outputs, inputs, strict=True)
        ]
        moved = self._others(sum(tensor.nbytes for tensor in inputs))
        return self._send("reduce_scatter", transfers, [*outputs, *inputs], moved)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        sources = _split(input, input_split_sizes, self._ranks)
        targets = _split(output, output_split_sizes, self._ranks)
        return self._deal("all_to_all", targets, [sources[self._index]] * self._ranks)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._deal("all_to_all", outputs, [inputs[self._index]] * self._ranks)

    def barrier(self, opts: Any = None) -> dist.Work:
        if torch.cuda.is_available():
            token = torch.zeros(1, device="cuda")
        else:
            token = torch.zeros(1)
        row = _row(token)
        transfer = Transfer(row, row, chunks=1)
        return self._send("barrier", [transfer], [token], 0, block=True)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Between a call and its transfers

    def _deal(
        self, operation: str, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> dist.Work:
        """Send to this rank from each peer."""
        for peer, (target, source) in enumerate(zip(targets, sources, strict=True)):
            if target.numel() != source.numel():
                raise ValueError(
                    f"rank {peer} is to send {target.numel()} elements, but an emulated peer "
                    f"holds this rank's data and would send {source.numel()}: receive as much "
                    "from each rank as this rank sends to itself"
                )
        transfers = [
            Transfer(_row(source), _row(target), chunks=1)
            for target, source in zip(targets, sources, strict=True)
        ]
        moved = self._others(sum(target.nbytes for target in targets))
        return self._send(operation, transfers, [*targets, *sources], moved)

    def _send(
        self,
        operation: str,
        transfers: Sequence[Transfer],
        tensors: Sequence[Tensor],
        wire_bytes: float,
        *,
        block: bool = False,
    ) -> dist.Work:
        device = tensors[0].device
        if device not in self.wires:
            self.wires[device] = wire_for(device, self.link)
        delivery = self.wires[device].send(operation, transfers, wire_bytes)
        return EmulatedWork(delivery, tensors, block=block)

    def _others(self, num_bytes: int) -> float:
        """The part of ``num_bytes`` that belongs to the other ranks."""
        return num_bytes * (self._ranks - 1) / self._ranks

    def _rows(self, whole: Tensor, part: Tensor) -> Tensor:
        if whole.numel() != self._ranks * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{whole.numel()} {whole.dtype} elements are not {self._ranks} ranks' parts of "
                f"{part.numel()} {part.dtype} ones"
            )
        return _row(whole).view(self._ranks, part.numel())

    def _factor(self, opts: Any) -> int:
        """What a reduction over peers with the same data multiplies by."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._ranks
        if any(op == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            return 1
        raise ValueError(f"emulated reductions are SUM, AVG, MAX and MIN, not {op}")


def _row(tensor: Tensor) -> Tensor:
    """View ``tensor`` as [1, numel]; without a version counter, as no backend touches it."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous: collectives move contiguous ones"
        )
    return tensor.data.view(1, tensor.numel())


def _split(tensor: Tensor, sizes: list[int], ranks: int) -> Sequence[Tensor]:
    return tensor.split(sizes) if sizes else tensor.tensor_split(ranks)


def _create(options: Any, link: EmulatedLink | None) -> EmulatedProcessGroup:
    """What torch calls for a new group: without a link of its own it shares the default group's."""
    wires: dict[torch.device, Wire] = {}
    if link is None:
        default = dist.group.WORLD
        if not isinstance(default, EmulatedProcessGroup):
            raise TypeError(
                "an emulated group needs an EmulatedLink: give it as pg_options, or initialise "
                "with overlap.emulation.init_process_group(link, world_size)"
            )
        link, wires = default.link, default.wires
    return EmulatedProcessGroup(options.group_rank, options.group_size, link, wires)


def register() -> None:
    """Make "emulated" a backend of torch.distributed; again, it does nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def init_process_group(link: EmulatedLink, world_size: int) -> None:
    """Initialise torch.distributed as rank 0 of ``world_size`` emulated ranks.

    All groups made later share ``link``, unless `torch.distributed.new_group` is given another
    one as ``pg_options``.
    """
    register()
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=world_size, pg_options=link)


def link_of(group: dist.ProcessGroup) -> EmulatedLink | None:
    """The link of an emulated group; None for a group that measures something."""
    return group.link if isinstance(group, EmulatedProcessGroup) else None
