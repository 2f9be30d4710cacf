"""The offer to write a weight's gradient straight into its bucket.

As a rule autograd makes a gradient in the weight's dtype, and a pass adds it to the bucket. Whoever
computes it in fp32 can spare that tensor, that pass and a rounding. The offer is made in attributes
of the parameter, under the names of Megatron-core, Megatron-FSDP and Transformer Engine:

    main_grad                the weight's part of the bucket, fp32
    get_main_grad()          main_grad, if the current stream may write to it now, else None
    overwrite_main_grad      no gradient has come in since the last reset: main_grad means nothing
    grad_added_to_main_grad  something was written there, and no hook has taken note yet
    zero_out_wgrad           always True: what autograd is given counts as well

Whoever takes it, in the backward that computes the gradient, asks get_main_grad(). Given None, it
returns the gradient to autograd as ever. Otherwise it writes on the current stream, adding to what
is there unless overwrite_main_grad holds and grad_added_to_main_grad does not, sets the latter, and
returns a gradient of zero, best one without memory (`torch._efficientzerotensor`). Autograd sums
that with what other uses of the weight yield, and the engine's hook adds the sum where it is not
known to be zero; so no use is lost, whoever takes the offer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from overlap.bucket import Slot

__all__ = ["hook_will_run", "offer", "reset", "take", "withdraw"]


def offer(slot: Slot, schedule: object) -> None:
    """Make the offer for ``slot``, whose ``main_grad`` is set and in fp32, as long as ``schedule``
    lives, to whom the parameter's hook reports."""
    slot.offered = True
    slot.param.zero_out_wgrad = True  # type: ignore[attr-defined]
    slot.param.get_main_grad = _GetMainGrad(slot, schedule)  # type: ignore[attr-defined]
    reset(slot)


def reset(slot: Slot) -> None:
    """What was written means nothing any more, be it that no hook has taken note of it."""
    if slot.offered:
        slot.param.overwrite_main_grad = True  # type: ignore[attr-defined]
        slot.param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def take(slot: Slot) -> bool:
    """A gradient arrives: say whether something was written ahead of it, and take note of both."""
    if not slot.offered:
        return False
    written: bool = slot.param.grad_added_to_main_grad  # type: ignore[attr-defined]
    slot.param.overwrite_main_grad = False  # type: ignore[attr-defined]
    slot.param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return written


def withdraw(slot: Slot) -> None:
    """Leave no trace of the offer on the parameter."""
    if slot.offered:
        slot.offered = False
        for name in (
            "get_main_grad",
            "grad_added_to_main_grad",
            "overwrite_main_grad",
            "zero_out_wgrad",
        ):
            delattr(slot.param, name)


def hook_will_run(param: nn.Parameter) -> bool:
    """Whether the backward that is running will bring ``param`` a gradient, which nobody but the
    engine looks at. Not so under ``torch.autograd.grad`` and ``backward(inputs=...)``."""
    watched = param._backward_hooks or len(param._post_accumulate_grad_hooks) > 1
    if watched or not param.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
    except RuntimeError:  # autograd.grad() of this very parameter, or no backward at all
        return False


class _GetMainGrad:
    """``param.get_main_grad``. The parameter may outlive the engine and be copied or pickled; the
    offer dies with the engine and does not go along."""

    def __init__(self, slot: Slot, schedule: object) -> None:
        self._slot, self._schedule = weakref.ref(slot), weakref.ref(schedule)

    def __call__(self) -> Tensor | None:
        slot = self._slot()
        if slot is None or self._schedule() is None:
            return None
        return slot.bucket.open_for_writing(slot)

    def __reduce__(self) -> tuple[type[_Nobody], tuple[()]]:
        return _Nobody, ()


class _Nobody:
    """What becomes of the offer in a copy or a pickle."""

    def __call__(self) -> None:
        return None
