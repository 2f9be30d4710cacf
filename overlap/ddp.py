"""The wrapper: it lays a model's parameters out, wires the hooks and takes them off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from overlap import collectives
from overlap.bucket import Bucket, Slot
from overlap.buffer import FlatBuffer
from overlap.config import OverlapConfig
from overlap.errors import ModelMismatchError, WrapError
from overlap.gather import GatherSchedule
from overlap.groups import ProcessGroups
from overlap.guard import GuardedParameters
from overlap.layout import BucketLayout, ParamSpec, digest, plan_buckets
from overlap.plan import BucketPlan, Plan
from overlap.reduce import ReduceSchedule
from overlap.streams import Streams
from overlap.waiting import WaitClock
from profiling import ranges

__all__ = ["DistributedDataParallel"]

_DTYPES = (torch.float32, torch.bfloat16)


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
        self._handles: list[Any] = []
        trainable = _trainable(module)
        self.device = next(iter(trainable.values())).device
        specs = _specs(module, trainable)
        self._check_same_model(specs)
        self._clock = WaitClock(self.device, enabled=self.config.measure_waits)
        self.buckets = self._make_buckets(specs, trainable)
        self._equalise()
        streams = Streams(self.device)
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
        self._attach()
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

    def _make_buckets(
        self, specs: list[ParamSpec], trainable: dict[str, nn.Parameter]
    ) -> tuple[Bucket, ...]:
        config = self.config
        dp_size = dist.get_world_size(self.groups.dp)
        layouts = plan_buckets(
            specs,
            dense_group_size=dp_size,
            expert_group_size=dist.get_world_size(self.groups.edp),
            bucket_bytes=config.bucket_bytes,
            share_expert_buckets=config.share_expert_buckets,
        )
        params: dict[BucketLayout, Tensor] = {}
        for dtype in dict.fromkeys(layout.dtype for layout in layouts):
            those = [layout for layout in layouts if layout.dtype is dtype]
            params.update(zip(those, FlatBuffer(those, dtype, self.device).slices, strict=True))
        grads = FlatBuffer(layouts, config.grad_dtype, self.device).slices
        buckets = []
        for layout, bucket_grads in zip(layouts, grads, strict=True):
            bucket = Bucket(
                layout,
                params[layout],
                bucket_grads,
                self.groups.edp if layout.expert else self.groups.dp,
                Streams(self.device),
                self._clock,
                reduce_dtype=config.reduce_dtype or config.grad_dtype,
                scale=1 / dp_size if config.grad_reduction == "average" else 1.0,
            )
            bucket.attach([trainable[member.spec.name] for member in layout.members])
            buckets.append(bucket)
        return tuple(buckets)

    @torch.no_grad()
    def _equalise(self) -> None:
        """Make all replicas those of the first rank of their group: buckets, frozen parameters
        and buffers."""
        for bucket in self.buckets:
            collectives.broadcast(bucket.params, bucket.group, f"the first copy of {bucket.name}")
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if not tensor.requires_grad:
                group = self.groups.edp if _is_expert(tensor) else self.groups.dp
                collectives.broadcast(tensor.detach(), group, f"the first copy of {name}")

    # Hooks

    def _attach(self) -> None:
        slots = {slot.param: slot for bucket in self.buckets for slot in bucket.slots}
        for param, slot in slots.items():
            param.main_grad = slot.grad  # type: ignore[attr-defined]
            self._handles.append(
                param.register_post_accumulate_grad_hook(_grad_hook(self.reduce, slot))
            )
        for module in self.module.modules():
            # Read raw: tied parameters once per name, and without waiting.
            names = {n: slots[p] for n, p in module._parameters.items() if p in slots}
            if names or module is self.module:
                hook = _forward_hook(self.gather, module, list(names.values()))
                # First in line: other pre-hooks (weight norm, say) read the weights.
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if names:
                module._parameters = GuardedParameters(module._parameters, self.gather, names)
        guard = _registration_guard(weakref.WeakSet(self.module.modules()))
        self._handles.append(module_hooks.register_module_parameter_registration_hook(guard))
        self._handles.append(module_hooks.register_module_module_registration_hook(guard))

    def remove(self) -> None:
        """Give the model back as it was, with today's weights: no hooks, parameters of their own.

        A collective (it finishes what is gathered). Calling it again does nothing.
        """
        if not self._handles:
            return
        try:
            self.finish_param_sync()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for module in self.module.modules():
                module._parameters = dict(module._parameters)
            for bucket in self.buckets:
                for slot in bucket.slots:
                    slot.param.data = slot.param.data.clone()
                    del slot.param.main_grad  # type: ignore[attr-defined]

    def _check_attached(self) -> None:
        if not self._handles:
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
            WrapError: The model was moved, cast or unwrapped.
        """
        self._check_attached()
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
        depth = self.config.prefetch_depth
        order = self.gather.order
        rows = []
        for position, bucket in enumerate(order):
            first = position < max(1, depth)
            if not self.config.overlap_param_gather:
                issued = waited = "optimizer step"
            else:
                issued = f"pre-hook of {order[max(0, position - depth)].name}"
                issued = "optimizer step" if first else issued
                waited = f"pre-hook of {bucket.name}"
            layout = bucket.layout
            reduce_dtype = self.config.reduce_dtype or self.config.grad_dtype
            rows.append(
                BucketPlan(
                    name=bucket.name,
                    parameters=tuple(slot.name for slot in bucket.slots),
                    param_bytes=layout.numel * layout.dtype.itemsize,
                    grad_bytes=layout.numel * reduce_dtype.itemsize,
                    padding=layout.padding,
                    group="edp" if layout.expert else "dp",
                    group_size=layout.group_size,
                    gather_issued=issued,
                    gather_waited=waited,
                    reduce_issued="gradient hook"
                    if self.config.overlap_grad_reduce
                    else "finish_grad_sync",
                )
            )
        return Plan(tuple(rows), tuple(b.name for b in self.reduce.order), not self.gather.learning)


def _is_expert(param: Tensor) -> bool:
    """Megatron's mark of a parameter that is not replicated over all data-parallel ranks."""
    return getattr(param, "allreduce", True) is False


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, checked; tied ones once, under their first name."""
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise WrapError("the model has no trainable parameter")
    device = next(iter(found.values())).device
    for name, param in found.items():
        if hasattr(param, "main_grad"):
            raise WrapError(
                f"{name} belongs to a wrapped model already (it has a main_grad); call remove() "
                "on the first wrapper before wrapping again"
            )
        if param.dtype not in _DTYPES:
            raise WrapError(f"{name} is {param.dtype}; trainable parameters are fp32 or bf16")
        if param.device != device or param.is_meta:
            raise WrapError(f"{name} is on {param.device}; all parameters must be on one device")
    return found


def _specs(module: nn.Module, trainable: dict[str, nn.Parameter]) -> list[ParamSpec]:
    weight_modules = {path for path, child in module.named_modules() if _is_weight_module(child)}
    specs = []
    for name, param in trainable.items():
        owner = name.rpartition(".")[0]
        specs.append(
            ParamSpec(
                name=name,
                shape=tuple(param.shape),
                dtype=param.dtype,
                expert=_is_expert(param),
                weight_module=owner if owner in weight_modules else None,
            )
        )
    return specs


def _is_weight_module(module: nn.Module) -> bool:
    """A leaf that holds one parameter and speaks Megatron's delayed-weight-gradient protocol, as
    the expert weight modules of `megamoe` do (which this package does not import)."""
    return (
        callable(getattr(module, "backward_dw", None))
        and not any(True for _ in module.children())
        and sum(1 for _ in module.parameters(recurse=False)) == 1
    )


# Hooks are held by the model, which may outlive the wrapper: they refer to the engine weakly.


def _forward_hook(
    schedule: GatherSchedule, module: nn.Module, slots: list[Slot]
) -> Callable[..., None]:
    reference, owner = weakref.ref(schedule), weakref.ref(module)
    own = tuple(slots)
    buckets = tuple(dict.fromkeys(slot.bucket for slot in own))

    def gather(module: nn.Module, args: Any) -> None:
        schedule = reference()
        # A deep copy of the model carries this hook too, and has weights of its own.
        if schedule is not None and module is owner():
            schedule.before_forward(own, buckets)

    return gather


def _grad_hook(schedule: ReduceSchedule, slot: Slot) -> Callable[[Tensor], None]:
    reference = weakref.ref(schedule)

    def reduce(param: Tensor) -> None:
        schedule = reference()
        if schedule is not None:
            schedule.on_grad(slot)

    return reduce


def _registration_guard(modules: weakref.WeakSet[nn.Module]) -> Callable[..., None]:
    """Refuse parameters that would join a wrapped model, directly or inside a new submodule."""

    def refuse(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        new = value.parameters() if isinstance(value, nn.Module) else (value,)
        if module in modules and any(p is not None and p.requires_grad for p in new):
            raise WrapError(
                f"{name} was added to (or replaced in) a {type(module).__name__} of a wrapped "
                "model: call remove(), change the model, and wrap it again"
            )

    return refuse
