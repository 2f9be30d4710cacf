"""The whole MoE layer: router, experts and an optional shared expert."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.config import MegaMoEConfig
from megamoe.errors import ConfigError, InputError
from megamoe.experts import MegaMoEExperts
from megamoe.router import MegaMoERouter
from megamoe.weight import init_normal_

__all__ = ["MegaMoELayer", "SharedExpert"]


class SharedExpert(nn.Module):
    """A dense SwiGLU block that every token passes; same gate-then-up order as the experts."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.fc1 = nn.Linear(
            hidden_size, 2 * ffn_hidden_size, bias=False, dtype=dtype, device=device
        )
        self.fc2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False, dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, init_std^2) with torch's default CPU generator."""
        init_normal_(self.fc1.weight.data, self.init_std)
        init_normal_(self.fc2.weight.data, self.init_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(gate) * up)


class MegaMoELayer(nn.Module):
    """Router, experts and, where the configuration has one, a shared expert.

    forward(x [..., H]) returns (y [..., H], aux_loss []); the caller adds aux_loss to its loss,
    once per microbatch and scaled like it. aux_loss is in the router's dtype.

    Args:
        config: What to build; see `MegaMoEConfig`.
        ep_group: The expert-parallel group; None where this rank holds all experts.
        fused: Build the unsplit baseline: same bits, no overlap possible.
        dtype: Of parameters and tokens; bf16 if config.bf16 says so, else torch's default.

    Raises ConfigError, UnsupportedFeatureError, ExpertBiasError, UnknownBackendError.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        ep_group: dist.ProcessGroup | None = None,
        *,
        fused: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        config.require_supported()
        ranks = 1 if ep_group is None else dist.get_world_size(ep_group)
        if config.expert_model_parallel_size not in (None, ranks):
            raise ConfigError(
                f"expert_model_parallel_size is {config.expert_model_parallel_size}, but ep_group "
                f"has {ranks} ranks; pass a group of that size or leave the option out"
            )
        if dtype is None and config.bf16:
            dtype = torch.bfloat16
        self.config = config
        self.router = MegaMoERouter(config, dtype=dtype, device=device)
        self.experts = MegaMoEExperts(
            config.hidden_size,
            config.moe_ffn_hidden_size,
            config.num_moe_experts,
            ep_group,
            init_std=config.init_method_std,
            clamp=config.activation_func_clamp_value,
            fused=fused,
            backend=config.mega_moe_backend,
            dtype=dtype,
            device=device,
        )
        self.shared_expert: SharedExpert | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_expert = SharedExpert(
                config.hidden_size,
                config.moe_shared_expert_intermediate_size,
                init_std=config.init_method_std,
                dtype=dtype,
                device=device,
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[-1:] != (self.config.hidden_size,):
            raise InputError(
                f"x has shape {list(x.shape)}; its last size must be "
                f"hidden_size {self.config.hidden_size}"
            )
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights, aux_loss = self.router(tokens)
        if tokens.dtype != torch.float64:
            topk_weights = topk_weights.float()  # fp64 scores choose; the stages weigh in fp32
        y = self.experts(tokens, topk_idx, topk_weights)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        return y.view_as(x), aux_loss
