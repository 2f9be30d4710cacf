"""The experts of one MoE layer: two weight modules and the two stages between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.backends import check_backend, check_layer, sm_budget_adder
from megamoe.errors import ConfigError
from megamoe.stages import fused_mega_moe, mega_moe_stage1, mega_moe_stage2
from megamoe.weight import MegaMoEWeightModule, init_normal_

__all__ = ["MegaMoEExperts"]


def _nothing() -> None:
    pass


class MegaMoEExperts(nn.Module):
    """SwiGLU experts whose weights are fetched one at a time, each just before its stage.

    forward: fc1_weight() -> stage 1 -> fc2_weight() -> stage 2. With ``fused`` both weights are
    fetched first and one autograd node does the rest: the same bits, but nothing can hide.

    This rank holds the experts rank * g ... rank * g + g - 1 of the group, g = num_experts / ranks.

    Args:
        num_experts: The global count; a multiple of the group's size.
        ep_group: The expert-parallel group; None where this rank holds all experts.
        init_std: Standard deviation of the initial weights (see `reset_parameters`).
        clamp: SwiGLU's clamp, see `mega_moe_stage2`.
        backend: Who computes; see `megamoe.backends.BACKENDS`.

    Raises ConfigError, UnknownBackendError, BackendUnavailableError.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        ep_group: dist.ProcessGroup | None = None,
        *,
        init_std: float = 0.02,
        clamp: float | None = None,
        fused: bool = False,
        backend: str = "reference",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend)
        ranks, rank = 1, 0
        if ep_group is not None:
            ranks, rank = dist.get_world_size(ep_group), dist.get_rank(ep_group)
            if rank < 0:
                raise ConfigError("this rank is not in the expert-parallel group it was given")
        if num_experts % ranks:
            raise ConfigError(
                f"num_experts {num_experts} does not divide by the {ranks} ranks of the "
                "expert-parallel group"
            )
        check_layer(backend, hidden_size, ranks, clamp)
        local = num_experts // ranks
        self.num_experts = num_experts
        self.first_expert = rank * local
        self.ep_group = ep_group
        self.init_std = init_std
        self.clamp = clamp
        self.fused = fused
        self.backend = backend
        self._remove_sm_budget: Callable[[], None] = _nothing
        self.range_name = ""  # this module's path, once profiling.ranges.name_modules told it
        # fc1 first: the order of registration is the engine's first guess at the order of use.
        self.fc1_weight = MegaMoEWeightModule(
            (local, 2 * ffn_hidden_size, hidden_size),
            expert_parallel=ranks > 1,
            dtype=dtype,
            device=device,
        )
        self.fc2_weight = MegaMoEWeightModule(
            (local, hidden_size, ffn_hidden_size),
            expert_parallel=ranks > 1,
            dtype=dtype,
            device=device,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, init_std^2), each global expert from a seed of its own.

        One number is taken from torch's default CPU generator; the expert's seed is that number
        plus its global index. So ranks that agree on the default seed build the same global
        experts for any expert-parallel size, and everything drawn later is the same as well.
        """
        layer_seed = int(torch.randint(2**62, ()))
        generator = torch.Generator()
        fc1, fc2 = self.fc1_weight.weight, self.fc2_weight.weight
        for expert in range(fc1.shape[0]):
            generator.manual_seed(layer_seed + self.first_expert + expert)
            init_normal_(fc1.data[expert], self.init_std, generator)
            init_normal_(fc2.data[expert], self.init_std, generator)

    def set_sm_budget(self, budget: Callable[[], int] | None) -> None:
        """Leave ``budget()`` SMs free at every launch; None takes the budget back.

        Only backends with kernels of their own can (triton); others ignore it. It acts on all
        layers of the process, since they share the device: every layer may be handed the same one.
        """
        self._remove_sm_budget()
        self._remove_sm_budget = sm_budget_adder(self.backend)(budget) if budget else _nothing

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return y [T, H] for x [T, H], ids [T, K] int64 and weights [T, K] fp32.

        Raises InputError before any collective of this rank.
        """
        w1 = self.fc1_weight()
        if self.fused:
            w2 = self.fc2_weight()
            return fused_mega_moe(
                x,
                topk_idx,
                topk_weights,
                w1,
                w2,
                self.ep_group,
                num_experts=self.num_experts,
                clamp=self.clamp,
                name=self.range_name,
                backend=self.backend,
            )
        l1_out, dispatch_weights, handle = mega_moe_stage1(
            x,
            topk_idx,
            topk_weights,
            w1,
            self.ep_group,
            num_experts=self.num_experts,
            name=self.range_name,
            backend=self.backend,
        )
        w2 = self.fc2_weight()
        return mega_moe_stage2(
            l1_out,
            dispatch_weights,
            handle,
            topk_idx,
            topk_weights,
            w2,
            self.ep_group,
            clamp=self.clamp,
            name=self.range_name,
            backend=self.backend,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoEExperts:
        memo[id(self.ep_group)] = self.ep_group  # a process group is shared and cannot be copied
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__dict__, memo))
        return result

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, fused={self.fused}, backend={self.backend!r}"
