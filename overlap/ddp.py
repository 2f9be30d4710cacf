"""The wrapper: it lays a model's parameters out, wires the hooks and takes them off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from overlap import budget, collectives, main_grad, parameters
from overlap.bucket import Bucket
from overlap.building import make_buckets
from overlap.config import OverlapConfig
from overlap.emulation.group import link_of
from overlap.errors import ModelMismatchError, WrapError
from overlap.gather import GatherSchedule
from overlap.groups import ProcessGroups
from overlap.hooks import Hooks
from overlap.layout import ParamSpec, digest
from overlap.plan import BucketPlan, Plan
from overlap.reduce import ReduceSchedule
from overlap.streams import Streams
from overlap.waiting import WaitClock
from profiling import ranges

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Replicates ``module`` over the data-parallel ranks and hides what that costs.

    The trainable parameters move into flat buffers (the Parameter objects stay the same); their
    gradients go to ``param.main_grad`` and ``param.grad`` stays None. All replicas start as the
    first rank's. Every rank constructs it at the same point of the program: it is a collective.

    Args:
        module: The model, on one device, its trainable parameters in fp32 or bf16. Experts carry
            ``param.allreduce = False``.
        config: See `OverlapConfig`.
        groups: See `ProcessGroups`; by default without expert parallelism.

    Raises:
        WrapError: The model is wrapped already or cannot be.
        ModelMismatchError: The ranks hold different models.
        TransportError: A transport that the config asks for cannot run here.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OverlapConfig | None = None,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config or OverlapConfig()
        self.groups = groups or ProcessGroups.build()
        params = parameters.trainable(module)
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        specs = parameters.describe(module, params)
        self.device = next(iter(params.values())).device
        self._check_same_model(specs)
        self._clock = WaitClock(self.device, enabled=self.config.measure_waits)
        streams = Streams(self.device)
        self.buckets, self.sm_budget = make_buckets(
            specs, params, self.config, self.groups, self.device, streams, self._clock
        )
        try:
            self._equalise()
        except BaseException:
            self._give_back()
            raise
        self.gather = GatherSchedule(
            self.buckets,
            streams,
            depth=self.config.prefetch_depth,
            overlap=self.config.overlap_param_gather,
            serialize=self.config.serialize,
        )
        self.reduce = ReduceSchedule(
            self.buckets,
            self.gather,
            overlap=self.config.overlap_grad_reduce,
            serialize=self.config.serialize,
            zero_unused=self.config.unused_parameters == "zero",
        )
        self._hooks = Hooks(module, self.buckets, self.gather, self.reduce)
        if self.config.gradient_accumulation_fusion and self.config.grad_dtype is torch.float32:
            takers = parameters.takes_main_grad(module)
            for slot in (slot for bucket in self.buckets for slot in bucket.slots):
                if slot.param in takers:
                    main_grad.offer(slot, self.reduce)
        budget.attach(self.sm_budget, self, module)
        ranges.name_modules(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # A wrapped model is saved and loaded like the bare one, without a "module." in its names. This
    # rank's experts only are in it: every expert-parallel rank saves its own.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def take_waited_ms(self) -> float:
        """Return how many milliseconds this rank's compute stood still for the engine's
        collectives since the last call (on a GPU the host waits for the figure).

        Raises:
            RuntimeError: OverlapConfig.measure_waits is off.
        """
        return self._clock.take_ms()

    # Construction

    def _check_same_model(self, specs: list[ParamSpec]) -> None:
        mine = digest(f"{s.name} {s.shape} {s.dtype} {s.expert} {s.weight_module}" for s in specs)
        table = collectives.exchange(
            [mine], self.groups.dp, self.device, "the comparison of the ranks' models"
        )
        others = [rank for rank, (value,) in enumerate(table) if value != table[0][0]]
        if others:
            raise ModelMismatchError(
                f"the trainable parameters on ranks {others} differ from those on rank 0 in name, "
                "order, shape, dtype or allreduce mark; build the same model on every rank"
            )

    @torch.no_grad()
    def _equalise(self) -> None:
        """Make all replicas those of the first rank of their group: buckets, frozen parameters
        and buffers."""
        for bucket in self.buckets:
            collectives.broadcast(bucket.params, bucket.group, f"the first copy of {bucket.name}")
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if not tensor.requires_grad:
                group = self.groups.edp if parameters.is_expert(tensor) else self.groups.dp
                collectives.broadcast(tensor.detach(), group, f"the first copy of {name}")

    def remove(self) -> None:
        """Give the model back as it was, with today's weights: no hooks, parameters of their own.

        A collective (it finishes what is under way). Calling it again does nothing.
        """
        if not self._hooks.attached:
            return
        try:
            self.finish_param_sync()
            self.reduce.reset()
        finally:
            self._hooks.remove()
            budget.detach(self.module)
            self._give_back()

    def _give_back(self) -> None:
        """Take the parameters out of the buckets."""
        for bucket in self.buckets:
            bucket.detach()

    def _check_attached(self) -> None:
        if not self._hooks.attached:
            raise WrapError("the model was unwrapped with remove(): wrap it again to train it")

    # Running

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them: for every microbatch but the last."""
        before = self.reduce.sync
        self.reduce.sync = False
        try:
            yield
        finally:
            self.reduce.sync = before

    def finish_param_sync(self) -> None:
        """Make every parameter safe to read, from any code. A collective."""
        self.gather.finish()

    def finish_in_flight(self) -> None:
        """Wait for the gathers that are on their way, and issue none: hand it to
        `profiling.record` as ``settle``. No collective of its own."""
        self.gather.finish_issued()

    def issue_grad_sync(self) -> list[Bucket]:
        """Issue the reductions that no hook has issued; the optimizer calls it. A collective.

        Returns the buckets to step before the other reductions have come, if it is worth it.

        Raises:
            UnusedParameterError, WrapError: As `finish_grad_sync`.
        """
        self._check_attached()
        return self.reduce.issue()

    def finish_grad_sync(self) -> int:
        """Make every reduced gradient safe to read. A collective; the optimizer calls it.

        Returns how many times gradients have been reduced, this one included.

        Raises:
            UnusedParameterError: See `OverlapConfig.unused_parameters`.
            WrapError: The model was unwrapped.
        """
        self._check_attached()
        self.reduce.finish()
        return self.reduce.rounds

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is torch's argument, and always meant here."""
        self.reduce.reset()

    def begin_step(self) -> list[Bucket]:
        """Get ready for the optimizer to write its shards.

        Returns the buckets whose parameters somebody else has written to since the last step (a
        checkpoint was loaded, say).

        Raises:
            WrapError: The model was moved, cast or unwrapped, or a parameter unfrozen.
        """
        self._check_attached()
        unfrozen = [name for name, param in self._frozen.items() if param.requires_grad]
        if unfrozen:
            raise WrapError(
                f"{', '.join(unfrozen)} was frozen when the model was wrapped and is not now, so "
                "nobody would train it: call remove(), unfreeze, and wrap again"
            )
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.param.data_ptr() != slot.address:
                    raise WrapError(
                        f"{slot.name} no longer lies in its bucket: the wrapped model was moved or "
                        "cast. Do that before wrapping, or call remove() and wrap again"
                    )
        self.gather.finish()  # what no forward has asked for
        if self.gather.learning:
            self._learn_orders()
        return [bucket for bucket in self.buckets if bucket.rewritten()]

    def _learn_orders(self) -> None:
        """Replace the guessed orders by those that rank 0 has seen in the first iteration."""
        index = {bucket: number for number, bucket in enumerate(self.buckets)}
        guess = (self.gather.observed(), self.reduce.observed())
        numbers = torch.tensor([[index[b] for b in order] for order in guess], device=self.device)
        collectives.broadcast(numbers, self.groups.dp, "the agreement on the buckets' order")
        gather, reduce = ([self.buckets[n] for n in order] for order in numbers.tolist())
        self.gather.adopt(gather)
        self.reduce.adopt(reduce)

    # Looking

    def plan(self) -> Plan:
        """What is gathered and reduced where, as the schedules stand now."""
        order = self.gather.order
        rows = []
        for position, bucket in enumerate(order):
            issuer = self.gather.issuer(position)
            if not self.config.overlap_param_gather:
                issued = waited = "optimizer step"
            else:
                issued = "optimizer step" if issuer is None else f"pre-hook of #{issuer}"
                waited = f"pre-hook of #{position}"
            layout = bucket.layout
            reduce_dtype = self.config.reduce_dtype or self.config.grad_dtype
            rows.append(
                BucketPlan(
                    name=bucket.name,
                    parameters=tuple(slot.name for slot in bucket.slots),
                    param_bytes=layout.nbytes,
                    grad_bytes=layout.numel * reduce_dtype.itemsize,
                    padding=layout.padding,
                    group="edp" if layout.expert else "dp",
                    group_size=layout.group_size,
                    gather_by=bucket.gather_by.name,
                    reduce_by=bucket.reduce_by.name,
                    gather_issued=issued,
                    gather_waited=waited,
                    reduce_issued="gradient hook"
                    if self.config.overlap_grad_reduce
                    else "finish_grad_sync",
                )
            )
        link = link_of(self.groups.dp)
        return Plan(
            tuple(rows),
            tuple(bucket.name for bucket in self.reduce.order),
            learned=not self.gather.learning,
            emulated=str(link) if link else "",
        )
