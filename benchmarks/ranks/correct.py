"""Right on this machine: against one process, between schedules, under delays; single collectives.

losses    every EP x EDP of the ranks against one process with the whole batch (fp32)
bits      one training run again and again, with another schedule or other delays: the weights
          must be the same bits on every rank
sizes     200 random sizes of a gather (exact) and a reduce-scatter (against float64)
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks.here import Here
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from overlap.collectives import Collective, Gathers, Reduces
from overlap.copy_engine import STAGING_BYTES, PullGather, PullReduce
from overlap.streams import Streams
from tests.overlap_models import Model, batch

STEPS = 6
BY_NCCL = {"param_gather_transport": "collective", "grad_reduce_transport": "collective"}
PULLED = {"param_gather_transport": "copy_engine", "grad_reduce_transport": "copy_engine"}


class Tower(nn.Module):
    """Two expert layers, in bf16 on a GPU: real kernels on small sizes."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        config = MegaMoEConfig(
            hidden_size=256,
            moe_ffn_hidden_size=128,
            num_moe_experts=8,
            moe_router_topk=2,
            mega_moe_backend=backend,
        )
        self.layers = nn.ModuleList(MegaMoELayer(config, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def run(here: Here) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # the reference adds with atomics
    good = _losses(here)
    groups = ProcessGroups.build(device_type=here.device.type)
    collective = Collective(groups.dp, here.device, 0)
    weights = _bits(here, "collective", groups, **BY_NCCL)
    good &= weights is not None
    good &= _sizes(here, "collective", collective, collective)
    if not here.shares_gpus:
        good &= _pulled(here, groups, weights)
    here.say("all as it should be" if good else "NOT as it should be")
    here.note(check="all", good=good)


def _pulled(here: Here, groups: ProcessGroups, weights: dict[str, list[str]] | None) -> bool:
    """What is special to copy engines; ``weights`` are the collectives' ones by backend."""
    good = True
    with here.peer_memory():
        streams = Streams(here.device)
        for staging in (2**20, STAGING_BYTES):
            reduce = PullReduce(groups.dp, here.device, streams, staging_bytes=staging)
            gather = PullGather(groups.dp, here.device, streams)
            good &= _sizes(here, f"copy engine, staging {staging >> 20} MiB", gather, reduce)
        good &= _bits(here, "copy engine", groups, **PULLED) is not None
        only_gather = {**BY_NCCL, "param_gather_transport": "copy_engine"}
        pulled = _train(here, groups, "reference", **only_gather)
        title = "bits, copy engine for the gather only = collective, reference"
        good &= _verdict(here, title, weights is not None and pulled == weights["reference"])
    return good


def _verdict(here: Here, check: str, good: bool, **facts: Any) -> bool:
    good = here.all_of(good)
    detail = "  ".join(f"{name} {value}" for name, value in facts.items())
    here.say(f"{'ok   ' if good else 'WRONG'} {check}  {detail}")
    here.note(check=check, good=good, **facts)
    return good


# Losses against one process


def _losses(here: Here) -> bool:
    expected = _alone(here)
    good = True
    transports = (BY_NCCL,) if here.shares_gpus else (BY_NCCL, PULLED)
    for ep in (size for size in range(1, here.world + 1) if here.world % size == 0):
        groups = ProcessGroups.build(ep, device_type=here.device.type)
        for overlap, transport in itertools.product((True, False), transports):
            got = _together(here, groups, overlap, transport)
            error = max(abs(a / b - 1) for a, b in zip(got, expected, strict=True))
            title = (
                f"losses, EP {ep} x EDP {here.world // ep}, overlap {'on' if overlap else 'off'}, "
                f"{'copy engine' if transport is PULLED else 'collective'}"
            )
            good &= _verdict(here, title, error < 1e-4, largest_relative_error=f"{error:.1e}")
    return good


def _alone(here: Here) -> list[float]:
    torch.manual_seed(7)
    model = Model().to(here.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = (part.to(here.device) for part in batch(step, here.world))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _together(
    here: Here, groups: ProcessGroups, overlap: bool, transport: dict[str, Any]
) -> list[float]:
    torch.manual_seed(7)
    model = Model(groups.ep).to(here.device)
    config = OverlapConfig(overlap_param_gather=overlap, overlap_grad_reduce=overlap, **transport)
    with here.peer_memory():
        ddp = DistributedDataParallel(model, config, groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = (
            part.chunk(here.world)[here.rank].to(here.device) for part in batch(step, here.world)
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(tokens), targets)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / here.world)
    ddp.remove()
    return losses


# The same bits, whatever happens around

DISTURBANCES = ("late host", "slow stream", "back to back")


def _bits(
    here: Here, transport: str, groups: ProcessGroups, **config: Any
) -> dict[str, list[str]] | None:
    """The weights by backend, where every run of one backend gave the same."""
    schedules: dict[str, dict[str, Any]] = {
        "overlap on": {},
        "overlap off": {"overlap_param_gather": False, "overlap_grad_reduce": False},
        "serialised": {"serialize": True},
        "depth 3": {"prefetch_depth": 3},
    }
    good = True
    weights = {}
    for backend in ("triton", "reference") if here.cuda else ("reference",):
        expected = weights[backend] = _train(here, groups, backend, **config)
        for name, schedule in schedules.items():
            got = _train(here, groups, backend, **config, **schedule)
            good &= _verdict(here, f"bits, {transport}, {backend}, {name}", got == expected)
        for disturbance in DISTURBANCES:
            got = _train(here, groups, backend, disturbance, **config)
            good &= _verdict(here, f"bits, {transport}, {backend}, {disturbance}", got == expected)
    return weights if good else None


def _train(
    here: Here, groups: ProcessGroups, backend: str, disturbance: str = "", **config: Any
) -> list[str]:
    """Train; return the digest of every rank's weights."""
    torch.manual_seed(3)
    model = Tower(backend, torch.bfloat16 if here.cuda else torch.float32).to(here.device)
    ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(here.rank)
    dtype = next(model.parameters()).dtype
    inputs = [torch.randn(384, 256, generator=generator).to(here.device, dtype) for _ in range(4)]
    late = random.Random(here.rank)  # another rank each time
    for step in range(STEPS):
        x = inputs[step % 4]
        optimizer.zero_grad()
        _disturb(here, disturbance, late)
        loss = ddp(x).float().square().mean()
        _disturb(here, disturbance, late)
        loss.backward()
        _disturb(here, disturbance, late)
        optimizer.step()
        if disturbance != "back to back":
            here.synchronize()
    ddp.finish_param_sync()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().view(torch.uint8).numpy().tobytes())
    ddp.remove()
    return here.gathered(digest.hexdigest())


def _disturb(here: Here, how: str, late: random.Random) -> None:
    if how == "late host" and late.random() < 0.5:
        time.sleep(0.02)
    if how == "slow stream" and here.cuda and late.random() < 0.5:
        torch.cuda._sleep(20_000_000)  # about 10 ms


# Single collectives


def _sizes(here: Here, name: str, gather: Gathers, reduce: Reduces) -> bool:
    """Gathers and reduce-scatters of random sizes, one after the other without a pause."""
    pick = random.Random(11)
    most = 64 * (4_000 if here.toy else 40_000)
    dtypes = (torch.float32, torch.bfloat16)
    gathering = {dtype: gather.allocate(most * here.world, dtype) for dtype in dtypes}
    reducing = {dtype: reduce.allocate(most * here.world, dtype) for dtype in dtypes}
    pulled = isinstance(reduce, PullReduce)
    wrong = wrong_sums = 0
    worst = 0.0
    for index in range(20 if here.toy else 200):
        numel = 64 * pick.choice((1, 2, pick.randint(1, 40), pick.randint(1, most // 64)))
        dtype = pick.choice(dtypes)
        everyone = _numbers(here, index, numel * here.world, dtype)
        own = slice(here.rank * numel, (here.rank + 1) * numel)
        whole = gathering[dtype][: numel * here.world].fill_(float("nan"))
        whole[own] = everyone[here.rank][own]
        gather.all_gather(whole, whole[own], "a gather").wait()
        shards = [part.chunk(here.world)[rank] for rank, part in enumerate(everyone)]
        wrong += not torch.equal(whole, torch.cat(shards))
        source = reducing[dtype][: numel * here.world]
        source.copy_(everyone[here.rank])
        reduce.reduce_scatter(source[own], source, "a reduce-scatter").wait()
        exact = torch.stack([part[own].double() for part in everyone]).sum(0)
        scale = torch.stack([part[own].double().abs() for part in everyone]).sum(0)
        error = ((source[own].double() - exact).abs() / scale).max().item()
        worst = max(worst, error / torch.finfo(dtype).eps)
        in_order = everyone[0][own].float()
        for part in everyone[1:]:
            in_order = in_order + part[own].float()
        wrong_sums += pulled and not torch.equal(source[own], in_order.to(dtype))
    limit = here.world  # rounded to dtype once per addition
    return _verdict(
        here,
        f"random sizes, {name}",
        wrong == 0 and wrong_sums == 0 and worst <= limit,
        gathers_wrong=wrong,
        reduce_error_in_eps=f"{worst:.2f}",
        sums_not_in_order=wrong_sums if pulled else "not promised",
    )


def _numbers(here: Here, index: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Every rank's numbers, drawn alike on each rank."""
    parts = []
    for rank in range(here.world):
        generator = torch.Generator(here.device).manual_seed(1000 * index + rank)
        drawn = torch.randn(numel, generator=generator, device=here.device)
        parts.append(drawn.to(dtype))
    return parts
