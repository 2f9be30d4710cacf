"""The hooks on a wrapped model: put on in one place, taken off in one place.

The model holds them and may outlive the wrapper, so they refer to the engine weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

from overlap.bucket import Bucket, Slot
from overlap.errors import WrapError
from overlap.gather import GatherSchedule
from overlap.guard import GuardedParameters
from overlap.reduce import ReduceSchedule

__all__ = ["Hooks"]


class Hooks:
    """The hooks on ``module``, from construction until `remove`.

    A forward pre-hook on each module that owns parameters (and on the root), a
    post-accumulate-grad hook on each parameter, a guard in place of each ``_parameters``, and
    torch's global registration hooks, which see whether the model grows.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        gather: GatherSchedule,
        reduce: ReduceSchedule,
    ) -> None:
        self._handles: list[Any] = []
        self._guarded: list[nn.Module] = []
        slots = {slot.param: slot for bucket in buckets for slot in bucket.slots}
        for param, slot in slots.items():
            self._handles.append(param.register_post_accumulate_grad_hook(_grad_hook(reduce, slot)))
        for child in module.modules():
            names = {n: slots[p] for n, p in child._parameters.items() if p in slots}
            if names or child is module:
                hook = _forward_hook(gather, child, list(names.values()))
                # First in line: other pre-hooks (weight norm, say) read the weights.
                self._handles.append(child.register_forward_pre_hook(hook, prepend=True))
            if names:
                child._parameters = GuardedParameters(child._parameters, gather, names)
                self._guarded.append(child)
        refuse = _registration_hook(weakref.WeakSet(module.modules()))
        self._handles.append(registration.register_module_parameter_registration_hook(refuse))
        self._handles.append(registration.register_module_module_registration_hook(refuse))

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        """Take all of them off; again, it does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._guarded:
            module._parameters = dict(module._parameters)
        self._guarded.clear()


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
    # torch's garbage collection does not see through a parameter's hooks: what they hold strongly
    # and holds the parameter (a slot does) would never be freed.
    reference, own = weakref.ref(schedule), weakref.ref(slot)

    def reduce(param: Tensor) -> None:
        schedule, slot = reference(), own()
        if schedule is not None and slot is not None:
            schedule.on_grad(slot)

    return reduce


def _registration_hook(modules: weakref.WeakSet[nn.Module]) -> Callable[..., None]:
    """Refuse parameters that would join a wrapped model, directly or inside a new submodule."""

    def refuse(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        new = value.parameters() if isinstance(value, nn.Module) else (value,)
        if module in modules and any(p is not None and p.requires_grad for p in new):
            raise WrapError(
                f"{name} was added to (or replaced in) a {type(module).__name__} of a wrapped "
                "model: call remove(), change the model, and wrap it again"
            )

    return refuse
