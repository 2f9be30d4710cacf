"""A small MoE language model for the engine's tests, its data, and how ranks share them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe import MegaMoEConfig, MegaMoELayer

HIDDEN, VOCAB, TOKENS = 16, 11, 12  # TOKENS: of one rank and microbatch


class Block(nn.Module):
    def __init__(self, ep_group: Any, dtype: torch.dtype) -> None:
        super().__init__()
        config = MegaMoEConfig(
            hidden_size=HIDDEN,
            moe_ffn_hidden_size=24,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_aux_loss_coeff=0.0,  # it is no mean over tokens, so a full batch has another one
        )
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.mix = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.moe = MegaMoELayer(config, ep_group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.moe(x)[0]


class Model(nn.Module):
    """Embedding, blocks, head: [T] tokens to [T, VOCAB] logits."""

    def __init__(
        self, ep_group: Any = None, blocks: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.blocks = nn.ModuleList(Block(ep_group, dtype) for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
        with torch.no_grad():  # large enough that experts, and the routing, matter
            for name, param in self.named_parameters():
                if "experts" in name or "router" in name:
                    param.mul_(10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def batch(step: int, ranks: int, microbatch: int = 0) -> tuple[Tensor, Tensor]:
    """The global batch of a step: [ranks * TOKENS] tokens and as many targets."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens, targets = torch.randint(VOCAB, (2, ranks * TOKENS), generator=generator)
    return tokens, (tokens * 3 + targets % 2) % VOCAB


def own_batch(step: int, microbatch: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's part of the global batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = slice(rank * TOKENS, (rank + 1) * TOKENS)
    tokens, targets = batch(step, ranks, microbatch)
    return tokens[part], targets[part]


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
