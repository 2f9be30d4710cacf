"""A bucket at run time: its tensors, its two states and what it has in flight.

A bucket's parameters and its gradients each go round a small cycle, once per optimizer step:

    parameters   READY -> STALE       the optimizer has written this rank's shard
                 STALE -> GATHERING   the all-gather has been issued
                 GATHERING -> READY   and waited for: every element is this step's
    gradients    ACCUMULATING -> REDUCING   the reduce-scatter has been issued
                 REDUCING -> REDUCED        and waited for: the shard holds the reduced gradient
                 REDUCED -> ACCUMULATING    the gradients were dropped (zero_grad)

When to move is decided by the schedules (gather.py, reduce.py); a bucket only refuses moves that
are not in its tables. In a group of one the cycles are the same and no collective is issued.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap import main_grad
from overlap.budget import SmBudget
from overlap.buffer import member_view
from overlap.collectives import Gathers, InFlight, Reduces
from overlap.errors import GradientOrderError, OverlapError, StaleParameterError
from overlap.layout import BucketLayout, Member
from overlap.streams import Streams
from overlap.waiting import WaitClock
from profiling import ranges
from profiling.ranges import Kind

__all__ = ["Bucket", "GradState", "ParamState", "Slot"]


class ParamState(Enum):
    READY = "ready"
    STALE = "stale"
    GATHERING = "gathering"


class GradState(Enum):
    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


PARAM_MOVES = {
    ParamState.READY: ParamState.STALE,
    ParamState.STALE: ParamState.GATHERING,
    ParamState.GATHERING: ParamState.READY,
}
GRAD_MOVES = {
    GradState.ACCUMULATING: GradState.REDUCING,
    GradState.REDUCING: GradState.REDUCED,
    GradState.REDUCED: GradState.ACCUMULATING,
}


class Slot:
    """A parameter and its place in a bucket.

    Attributes:
        address: Where the parameter lies; it may not move while it is in the bucket.
        grad: View of the bucket's gradients in the parameter's shape, in the gradient dtype.
        arrived: ``grad`` holds a gradient; until then its content means nothing.
        version: The parameter's version when this package last wrote to it.
        reported: The gradient of the last microbatch has arrived too.
        forward: Number of the last iteration in which the forward of a module that owns the
            parameter has run (-1: none).
        offered: ``grad`` is offered for writing, see `overlap.main_grad`.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "arrived",
        "bucket",
        "forward",
        "grad",
        "member",
        "offered",
        "param",
        "reported",
        "version",
    )

    def __init__(self, param: nn.Parameter, member: Member, bucket: Bucket) -> None:
        self.param = param
        self.member = member
        self.bucket = bucket
        self.address = member_view(bucket.params, member).data_ptr()
        self.grad = member_view(bucket.grads, member)
        self.arrived = False
        self.reported = False
        self.forward = -1
        self.offered = False
        self.version = param._version

    @property
    def name(self) -> str:
        return self.member.spec.name

    def accumulate(self, grad: Tensor) -> None:
        """Add ``grad`` to what was written ahead of it or has arrived; else it overwrites.

        Raises:
            TypeError: The gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self.name} is sparse; a bucket holds dense ones only"
            )
        grad = grad.detach()  # under create_graph it has a history
        if not (main_grad.take(self) or self.arrived):
            self.grad.copy_(grad)
        elif not grad._is_zerotensor():  # which says that nothing but the write has come
            self.grad.add_(grad)
        self.arrived = True


class Bucket:
    """Parameters that move together.

    Attributes:
        params: [layout.numel], the model's parameters are views of it.
        grads: [layout.numel] in the gradient dtype; once reduced, only the shard means anything.
        param_shard, grad_shard: This rank's part of both, [layout.shard_numel].
        missing: Members whose gradient of the last microbatch is still to come.
        scale: What reduced gradients are multiplied by.
        gather_by, reduce_by: Who moves them.

    Args:
        wire: [layout.numel] in the reduce dtype, for gradients that have to travel from memory of
            the transport's; the result then comes in the gradient dtype.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Tensor,
        grads: Tensor,
        group: dist.ProcessGroup,
        streams: Streams,
        clock: WaitClock,
        budget: SmBudget,
        *,
        gather_by: Gathers,
        reduce_by: Reduces,
        reduce_dtype: torch.dtype,
        scale: float,
        wire: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.params = params
        self.grads = grads
        self.group = group
        self.rank = dist.get_rank(group)
        own = layout.shard(self.rank)
        self.param_shard = params[own]
        self.grad_shard = grads[own]
        self.scale = scale
        self.slots: tuple[Slot, ...] = ()
        self.missing = 0
        self.param_state = ParamState.READY
        self.grad_state = GradState.ACCUMULATING
        self._reduce_dtype = reduce_dtype
        self._wire = wire
        self._streams = streams
        self._clock = clock
        self._budget = budget
        self.gather_by = gather_by
        self.reduce_by = reduce_by
        self._stepped = self.ready = streams.mark()
        self._grad_stream: Any = streams.current()
        self._gather: InFlight | None = None
        self._reduce: InFlight | None = None

    @property
    def name(self) -> str:
        return self.layout.name

    def attach(self, params: list[nn.Parameter]) -> None:
        """Take the model's parameters in, one per member: from here on they live in the bucket."""
        self.slots = tuple(
            Slot(param, member, self)
            for param, member in zip(params, self.layout.members, strict=True)
        )
        self.missing = len(self.slots)
        for slot in self.slots:
            view = member_view(self.params, slot.member)
            view.copy_(slot.param.detach())
            slot.param.data = view
            slot.param.grad = None
            slot.param.main_grad = slot.grad  # type: ignore[attr-defined]
            slot.version = slot.param._version

    def detach(self) -> None:
        """Give the parameters memory of their own again."""
        for slot in self.slots:
            slot.param.data = slot.param.data.clone()
            main_grad.withdraw(slot)
            del slot.param.main_grad  # type: ignore[attr-defined]

    # Parameters

    def rewritten(self) -> bool:
        """Whether anybody else has written to the parameters since the last gather."""
        return any(slot.param._version != slot.version for slot in self.slots)

    def stepped(self) -> None:
        """The optimizer has written this rank's shard on the current stream."""
        self._move_params(ParamState.STALE)
        for slot in self.slots:
            slot.version = slot.param._version
        self._stepped = self._streams.mark()

    def issue_gather(self) -> None:
        """Start the all-gather of the shards."""
        self._move_params(ParamState.GATHERING)
        if self.layout.group_size == 1:
            return
        with ranges.span(Kind.PARAM_GATHER, self.name):
            self._streams.after(self._stepped)
            self._gather = self.gather_by.all_gather(
                self.params, self.param_shard, f"the all-gather of bucket {self.name}"
            )
        self._budget.issued(self.gather_by, self._gather)

    def finish_gather(self) -> None:
        """Order the current stream after the all-gather; nothing where it is done."""
        if self.param_state is ParamState.READY:
            return
        if self._gather is not None:
            with ranges.span(Kind.PARAM_WAIT, self.name):
                self._clock.around(self._gather.wait)
            self._budget.waited(self.gather_by, self._gather)
            self._gather = None
        self._move_params(ParamState.READY)
        self.ready = self._streams.mark()
        if self.rewritten():
            raise StaleParameterError(
                f"a parameter of bucket {self.name} was written to while its all-gather was under "
                "way, and that write may be lost: call ddp.finish_param_sync() before it"
            )
        # A graph that saved these weights before this moment saw torn ones (or is older than the
        # step): let its backward fail, as after any other in-place update.
        torch.autograd.graph.increment_version([slot.param for slot in self.slots])
        for slot in self.slots:
            slot.version = slot.param._version

    def _move_params(self, to: ParamState) -> None:
        if self._streams.capturing():
            raise OverlapError(
                f"bucket {self.name} must go from {self.param_state.value} to {to.value} inside a "
                "graph capture, where the all-gather would be recorded without its other half: "
                "call ddp.finish_param_sync() before the capture"
            )
        assert PARAM_MOVES[self.param_state] is to, (self.name, self.param_state, to)
        self.param_state = to

    # Gradients

    def accumulate(self, slot: Slot, grad: Tensor) -> None:
        """Add a gradient of ``slot``.

        Raises:
            GradientOrderError: The bucket has been reduced already.
        """
        if self.grad_state is not GradState.ACCUMULATING:
            raise GradientOrderError(
                f"a gradient of {slot.name} arrived after its bucket {self.name} was reduced. "
                "Call zero_grad() once per iteration, run every backward but the last under "
                "ddp.no_sync(), and use non-reentrant activation checkpointing for a weight that "
                "is used in several checkpointed segments"
            )
        self._join_grad_stream()
        slot.accumulate(grad)

    def open_for_writing(self, slot: Slot) -> Tensor | None:
        """Return ``slot.grad`` for a write on the current stream, to which `accumulate` is then
        called in the same backward; None where that write would be lost, or not be replayed."""
        accumulating = self.grad_state is GradState.ACCUMULATING
        if not accumulating or self._streams.capturing() or not main_grad.hook_will_run(slot.param):
            return None
        self._join_grad_stream()
        return slot.grad

    def issue_reduce(self) -> None:
        """Start the reduce-scatter of the gradients, those without a gradient as zeros."""
        self._move_grads(GradState.REDUCING)
        for slot in self.slots:
            if not slot.arrived:
                slot.grad.zero_()
        if self.layout.group_size == 1:
            return
        with ranges.span(Kind.GRAD_REDUCE, self.name):
            self._join_grad_stream()
            self._reduce = self.reduce_by.reduce_scatter(
                *self._outgoing(), f"the reduce-scatter of bucket {self.name}", self.scale
            )
        self._budget.issued(self.reduce_by, self._reduce)

    @property
    def reducing(self) -> bool:
        """Whether a reduce-scatter has been issued and not waited for."""
        return self._reduce is not None

    def _outgoing(self) -> tuple[Tensor, Tensor]:
        """Where the reduced shard goes, and what travels."""
        if self._wire is not None:
            return self.grad_shard, self._wire.copy_(self.grads)
        source = self.grads.to(self._reduce_dtype)  # the buffer itself, if it is that dtype
        return source[self.layout.shard(self.rank)], source

    def _join_grad_stream(self) -> None:
        """Order the current stream after the one that last touched the gradients."""
        stream = self._streams.current()
        if stream != self._grad_stream:
            stream.wait_stream(self._grad_stream)
            self._grad_stream = stream

    def finish_reduce(self) -> None:
        """Order the current stream after the reduce-scatter; the shard then holds its result."""
        if self.grad_state is not GradState.REDUCING:
            return
        scaled = False
        if self._reduce is not None:
            with ranges.span(Kind.GRAD_WAIT, self.name):
                self._clock.around(self._reduce.wait)
            self._budget.waited(self.reduce_by, self._reduce)
            shard = self._reduce.tensors[0]
            if shard.dtype != self.grad_shard.dtype:
                self.grad_shard.copy_(shard)
            self._reduce = None
            scaled = self.reduce_by.scales
        if self.scale != 1.0 and not scaled:
            self.grad_shard.mul_(self.scale)
        self._move_grads(GradState.REDUCED)

    def reset_grads(self) -> None:
        """Drop the gradients."""
        if self.grad_state is GradState.REDUCED:
            self._move_grads(GradState.ACCUMULATING)
        assert self.grad_state is GradState.ACCUMULATING, (self.name, self.grad_state)
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.arrived = slot.reported = False
            main_grad.reset(slot)

    def _move_grads(self, to: GradState) -> None:
        assert GRAD_MOVES[self.grad_state] is to, (self.name, self.grad_state, to)
        self.grad_state = to
