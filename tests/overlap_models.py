"""Small models for the engine's tests: expert weights behind stand-in weight modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

H, I, LOCAL_TOKENS, VOCAB = 16, 24, 12, 11  # noqa: E741


class Weight(nn.Module):
    """A weight module: forward returns the parameter."""

    def __init__(self, shape: tuple[int, ...], expert: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.weight.allreduce = not expert

    def forward(self) -> Tensor:
        return self.weight

    def backward_dw(self) -> None: ...


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts over the expert-parallel group; its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(grad, ctx.group), None


class Experts(nn.Module):
    """Each token goes to all experts (a mean over them), spread over the expert-parallel ranks.

    That keeps the routing even, so the exchange is a plain all-to-all of equal parts.
    """

    range_name = "experts"

    def __init__(self, experts: int, ep_group: Any = None) -> None:
        super().__init__()
        self.group = ep_group
        self.size = 1 if ep_group is None else dist.get_world_size(ep_group)
        self.rank = 0 if ep_group is None else dist.get_rank(ep_group)
        self.local = experts // self.size
        self.experts = experts
        self.fc1_weight = Weight((self.local, I, H), self.size > 1)
        self.fc2_weight = Weight((self.local, H, I), self.size > 1)
        mine = slice(self.rank * self.local, (self.rank + 1) * self.local)
        with torch.no_grad():  # the same global experts whatever the size
            self.fc1_weight.weight.copy_(torch.randn(experts, I, H)[mine] / H**0.5)
            self.fc2_weight.weight.copy_(torch.randn(experts, H, I)[mine] / I**0.5)

    def forward(self, x: Tensor) -> Tensor:
        w1 = self.fc1_weight()
        tokens = x.repeat(self.size, 1)
        if self.size > 1:
            tokens = Exchange.apply(tokens, self.group)
        hidden = torch.einsum("th,gih->gti", tokens, w1)
        w2 = self.fc2_weight()
        out = torch.einsum("gti,ghi->th", F.silu(hidden), w2) / self.experts
        if self.size > 1:
            out = Exchange.apply(out, self.group)
        return out.view(self.size, -1, H).sum(0)


class Block(nn.Module):
    def __init__(self, experts: int, ep_group: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mix = nn.Linear(H, H)
        self.experts = Experts(experts, ep_group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.experts(x)


class Model(nn.Module):
    """Embedding, blocks, head; a language model on random tokens."""

    def __init__(self, ep_group: Any = None, blocks: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.blocks = nn.ModuleList(Block(experts, ep_group) for _ in range(blocks))
        self.head = nn.Linear(H, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, ranks: int, microbatch: int = 0) -> tuple[Tensor, Tensor]:
    """The global batch of a step, [ranks * LOCAL_TOKENS] tokens and targets."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(VOCAB, (2, ranks * LOCAL_TOKENS), generator=generator)
    return tokens[0], tokens[1]


def own_part(whole: Tensor, rank: int) -> Tensor:
    return whole[rank * LOCAL_TOKENS : (rank + 1) * LOCAL_TOKENS]


def global_loss(loss: Tensor) -> float:
    """The mean of the ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
