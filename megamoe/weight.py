"""One expert weight behind a module of its own, and how it is initialised.

The module exists for its hooks: whoever shards parameters hangs the all-gather on its forward
pre-hook and the reduce-scatter on its parameter's gradient hook, one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MegaMoEWeightModule", "init_normal_"]


class MegaMoEWeightModule(nn.Module):
    """Holds one stacked expert weight; ``forward()`` returns the parameter itself.

    The parameter's attribute ``allreduce`` follows Megatron's convention: False means that its
    gradient belongs to the expert-data-parallel group. Deep copies, pickles, ``to_empty`` and
    ``load_state_dict(assign=True)`` keep it.

    Args:
        shape: (local experts, output features, input features).
        expert_parallel: Whether the experts are spread over several ranks.
    """

    weight: nn.Parameter
    takes_main_grad = True  # the stages that compute its gradient know the offer

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        expert_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.expert_parallel = expert_parallel
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self) -> nn.Parameter:
        """Return the weight; it takes no input, so that its hooks see nothing but the weight."""
        return self.weight

    def backward_dw(self) -> None:
        """Do nothing: the weight gradient is computed with the stage's backward, never later."""

    def extra_repr(self) -> str:
        shape = ", ".join(map(str, self.weight.shape))
        return f"[{shape}], {self.weight.dtype}, expert_parallel={self.expert_parallel}"

    # torch drops a parameter's attributes whenever it makes a new Parameter object. A lost mark
    # would send expert gradients to the wrong group without a word, so each such door marks again.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MegaMoEWeightModule:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        for param in self._parameters.values():
            if param is not None:
                param.allreduce = not self.expert_parallel  # type: ignore[attr-defined]


@torch.no_grad()
def init_normal_(tensor: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill ``tensor`` from N(0, std^2); the same values on every device and in every dtype.

    The numbers are drawn in fp32 on the CPU (from torch's default generator where none is given)
    and rounded to the tensor's dtype. A tensor on the meta device is left alone.
    """
    if tensor.is_meta:
        return
    drawn = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    tensor.copy_(drawn)
