"""The copy-engine transports on CPU ranks with shared memory in place of symmetric memory: the same
code as on GPUs but for the memory and the barrier."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
    TransportError,
    collectives,
    symmetric,
)
from overlap.copy_engine import PullGather, PullReduce, Staging
from overlap.streams import Streams
from tests.overlap_models import Model, mean_over_ranks, own_batch
from tests.ranks import Ranks
from tests.shared_memory import SharedRegion, shared_memory

CPU = torch.device("cpu")


def world() -> Any:
    return dist.group.WORLD


def everyones(numel: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """What each rank contributes, drawn alike on every rank; their sum depends on its order."""
    parts = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        scale = 10.0 ** torch.randint(-4, 5, (numel,), generator=generator)
        parts.append((torch.randn(numel, generator=generator) * scale).to(dtype))
    return parts


def in_order(terms: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(dtype)


# One collective after the other


def gathers(count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pick = random.Random(5)
    transport = PullGather(world(), CPU, Streams(CPU))
    buffers = {}
    for dtype in (torch.float32, torch.bfloat16):
        buffers[dtype] = transport.allocate(4096 * size + 256, dtype)
    for seed in range(count):
        dtype = pick.choice((torch.float32, torch.bfloat16))
        numel, start = 64 * pick.randint(1, 64), 64 * pick.randint(0, 4)
        parts = everyones(numel, dtype, seed)
        buffer = buffers[dtype].fill_(torch.nan)
        output = buffer[start : start + size * numel]
        shard = output[rank * numel : (rank + 1) * numel]
        shard.copy_(parts[rank])
        transport.all_gather(output, shard, "a gather").wait()
        reference = torch.empty_like(output)
        collectives.all_gather(reference, parts[rank], world(), "a gather").wait()
        assert torch.equal(output, reference)
        assert buffer[:start].isnan().all()
        assert buffer[start + size * numel :].isnan().all()


@pytest.mark.parametrize("size", [2, 4])
def test_gathers_equal_the_groups_own(ranks: Ranks, size: int) -> None:
    with_memory(ranks, size, gathers, 30)


def reductions(count: int, staging_bytes: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pick = random.Random(6)
    streams = Streams(CPU)
    transport = PullReduce(world(), CPU, streams, Staging(CPU, streams, staging_bytes))
    buffers = {}
    for dtype in (torch.float32, torch.bfloat16):
        buffers[dtype] = transport.allocate(4096 * size, dtype)
    for seed in range(count):
        dtype = pick.choice((torch.float32, torch.bfloat16))
        numel = 64 * pick.randint(1, 64)
        parts = everyones(size * numel, dtype, seed)
        source = buffers[dtype][: size * numel]
        source.copy_(parts[rank])
        own = slice(rank * numel, (rank + 1) * numel)
        for out in (torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16), source[own]):
            scale = pick.choice((1.0, 1 / 3))
            transport.reduce_scatter(out, source, "a reduction", scale).wait()
            total = in_order([part[own] for part in parts], torch.float32) * scale
            assert torch.equal(out, total.to(out.dtype))
        source[own] = parts[rank][own]
        assert torch.equal(source, parts[rank])  # in place, nothing but the own part was written


@pytest.mark.parametrize("staging_bytes", [4096, 2**20], ids=["many pieces", "one piece"])
@pytest.mark.parametrize("size", [2, 4])
def test_reductions_are_sums_in_the_order_of_ranks(
    ranks: Ranks, size: int, staging_bytes: int
) -> None:
    with_memory(ranks, size, reductions, 20, staging_bytes)


def order_matters() -> bool:
    parts = everyones(4096, torch.float32, 1)
    return not torch.equal(in_order(parts, torch.float32), in_order(parts[::-1], torch.float32))


def test_the_oracle_of_the_order_can_fail(ranks: Ranks) -> None:
    assert all(ranks.run(4, order_matters))


@pytest.mark.parametrize("peers", [1, 3, 7])
def test_pieces_of_all_peers_fit_into_a_staging_buffer(peers: int) -> None:
    staging = Staging(CPU, Streams(CPU), 2**20)
    first, second = staging.next(), staging.next()
    assert first is not second
    assert staging.next() is first
    for dtype in (torch.float32, torch.bfloat16):
        taken = peers * staging.piece(peers, dtype) * dtype.itemsize
        assert 2**19 - peers * 512 < taken <= first.memory.nbytes == 2**19


_copy = Tensor.copy_


def _slow_copy(target: Tensor, source: Tensor, **options: Any) -> Tensor:
    """The copy of a slow reader: it begins in time and takes a while."""
    time.sleep(0.1)
    return _copy(target, source, **options)


def late_writer(broken: str) -> bool:
    """Whether the gather brings what a late rank writes only just before its own issue, and leaves
    what it overwrites right after its wait to those that still read it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = PullGather(world(), CPU, Streams(CPU))
    buffer = transport.allocate(64 * size, torch.float32)
    shard = buffer[64 * rank : 64 * rank + 64]
    good = True
    calls = {"count": 0}
    real = SharedRegion.barrier

    def barrier(region: SharedRegion) -> None:
        calls["count"] += 1
        first = calls["count"] % 2 == 1
        if (broken == "first" and first) or (broken == "second" and not first):
            return
        real(region)

    with mock.patch.object(SharedRegion, "barrier", barrier):
        for step in range(1, 4):
            if rank == 1:
                time.sleep(0.05)
            shard.fill_(step)
            if broken == "second" and rank == 0:
                with mock.patch.object(Tensor, "copy_", _slow_copy):
                    transport.all_gather(buffer, shard, "a gather").wait()
            else:
                transport.all_gather(buffer, shard, "a gather").wait()
            good &= bool((buffer == step).all())
    dist.barrier()
    return good


@pytest.mark.parametrize("broken", ["", "first", "second"], ids=["whole", "no first", "no second"])
def test_both_barriers_are_needed(ranks: Ranks, broken: str) -> None:
    assert all(with_memory(ranks, 2, late_writer, broken)) is not bool(broken)


# Training

STEPS = 5


def train(ep: int, disturbed: bool = False, **config: Any) -> tuple[list[float], list[Tensor]]:
    with shared_memory():
        groups = ProcessGroups.build(ep)
        torch.manual_seed(7)
        model = Model(groups.ep, dtype=config.pop("dtype", torch.float32))
        ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    late = random.Random(dist.get_rank())
    losses = []
    for step in range(STEPS):
        tokens, targets = own_batch(step)
        optimizer.zero_grad()
        delays = [0.02 * disturbed * late.randrange(2) for _ in range(2)]
        time.sleep(delays[0])
        loss = F.cross_entropy(ddp(tokens), targets)
        time.sleep(delays[1])
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    ddp.finish_param_sync()
    dist.barrier()
    return losses, [p.detach().clone() for p in model.parameters()]


def same(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


PULLED = {"param_gather_transport": "copy_engine", "grad_reduce_transport": "copy_engine"}


@pytest.mark.parametrize(
    ("size", "ep"), [(2, 1), (2, 2), (4, 2), (4, 1)], ids=["2x1", "1x2", "2x2", "4x1"]
)
def test_training_equals_that_on_collectives(ranks: Ranks, size: int, ep: int) -> None:
    gathered = ranks.run(size, train, ep, param_gather_transport="copy_engine")
    pulled = ranks.run(size, train, ep, **PULLED)
    collective = ranks.run(size, train, ep, param_gather_transport="nccl")
    assert all(map(same, gathered, collective))  # a gather changes no bit
    if size // ep == 2 and size == 2:
        assert all(map(same, pulled, collective))  # a + b is b + a
    for one, other in zip(pulled, collective, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"serialize": True},
        {"overlap_param_gather": False, "overlap_grad_reduce": False},
        {"prefetch_depth": 3},
        {"disturbed": True},
    ],
    ids=["serialised", "no overlap", "depth 3", "late ranks"],
)
def test_schedules_and_late_ranks_change_no_bit(ranks: Ranks, config: dict[str, Any]) -> None:
    assert all(
        map(same, ranks.run(4, train, 2, **PULLED, **config), ranks.run(4, train, 2, **PULLED))
    )


def wire_sums() -> None:
    """Gradients that travel in bf16 are added, and handed over, in fp32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with shared_memory():
        model = nn.Linear(64, 64, bias=False)
        config = OverlapConfig(reduce_dtype=torch.bfloat16, grad_reduction="sum", **PULLED)
        ddp = DistributedDataParallel(model, config, ProcessGroups.build())
    parts = everyones(64 * 64, torch.float32, 3)
    with torch.enable_grad():
        (ddp(torch.eye(64)) * parts[rank].view(64, 64).T).sum().backward()
    ddp.finish_grad_sync()
    [bucket] = ddp.buckets
    own = bucket.layout.shard(rank)
    expected = in_order([part[own].bfloat16() for part in parts], torch.float32)
    assert torch.equal(bucket.grad_shard, expected)
    assert size == 1 or not torch.equal(expected, expected.bfloat16().float())
    dist.barrier()


def test_bf16_gradients_are_added_in_fp32(ranks: Ranks) -> None:
    ranks.run(4, wire_sums)


def transports_of_one() -> list[str]:
    with shared_memory():
        ddp = DistributedDataParallel(Model(), OverlapConfig(**PULLED), ProcessGroups.build())
    return sorted({type(bucket.gather_by).__name__ for bucket in ddp.buckets})


def test_a_group_of_one_needs_no_such_memory(ranks: Ranks) -> None:
    assert ranks.run(1, transports_of_one) == [["Collective"]]


# Refusals


def refused_on_cpu() -> None:
    for direction in PULLED:
        config = OverlapConfig(**{direction: "copy_engine"})
        with pytest.raises(TransportError, match=r'is on cpu, not on GPUs: use "collective"'):
            DistributedDataParallel(Model(), config, ProcessGroups.build())


def test_a_cpu_model_is_refused(ranks: Ranks) -> None:
    ranks.run(2, refused_on_cpu)


def chosen(config: dict[str, Any], possible: bool) -> list[str]:
    """The transports of one group, by what they are and by what the plan says."""
    with shared_memory() if possible else nullcontext():
        groups = ProcessGroups.build()
        ddp = DistributedDataParallel(nn.Linear(64, 64), OverlapConfig(**config), groups)
    [bucket] = ddp.buckets
    dist.barrier()
    [row] = ddp.plan().buckets
    assert f"by {row.gather_by} from" in str(ddp.plan())
    ways = [type(way).__name__ for way in (bucket.gather_by, bucket.reduce_by)]
    return [*ways, row.gather_by, row.reduce_by]


@pytest.mark.parametrize(
    ("config", "possible", "transports"),
    [
        ({}, True, ["PullGather", "PullReduce", "copy engine", "copy engine"]),
        ({}, False, ["Collective", "Collective", "collective", "collective"]),
        (
            {"param_gather_transport": "nccl"},
            True,
            ["Collective", "PullReduce", "collective", "copy engine"],
        ),
        (
            {"grad_reduce_transport": "collective"},
            True,
            ["PullGather", "Collective", "copy engine", "collective"],
        ),
    ],
    ids=["auto, possible", "auto, impossible", "gather by NCCL", "reduce by NCCL"],
)
def test_auto_takes_copy_engines_where_they_can_run(
    ranks: Ranks, config: dict[str, Any], possible: bool, transports: list[str]
) -> None:
    assert ranks.run(2, chosen, config, possible) == [transports] * 2


def obstacle(table: list[list[int]], peers: bool) -> str | None:
    with (
        mock.patch.object(collectives, "exchange", return_value=table),
        mock.patch.object(torch.cuda, "get_device_properties"),
        mock.patch.object(torch.cuda, "device_count", return_value=len(table)),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=peers),
    ):
        return symmetric.obstacle(torch.device("cuda", 0), world())


@pytest.mark.parametrize(
    ("rows", "peers", "reason"),
    [  # node, GPU, index
        ([[5, 1, 0], [5, 2, 1], [5, 3, 2], [5, 4, 3]], True, None),
        ([[5, 1, 0], [5, 2, 0], [5, 3, 0], [5, 4, 0]], True, None),  # each sees its own only
        (
            [[5, 1, 0], [5, 2, 1], [7, 3, 0], [7, 4, 1]],
            True,
            "ranks [2, 3] are on another node than rank 0",
        ),
        ([[5, 1, 0], [5, 1, 0], [5, 3, 2], [5, 4, 3]], True, "ranks share a GPU"),
        (
            [[5, 1, 0], [5, 2, 1], [5, 3, 2], [5, 4, 3]],
            False,
            "cuda:0 cannot read the memory of cuda:1",
        ),
    ],
    ids=["one node", "hidden devices", "two nodes", "one GPU", "no peers"],
)
def test_groups_that_cannot_reach_each_other(
    ranks: Ranks, rows: list[list[int]], peers: bool, reason: str | None
) -> None:
    assert ranks.run(4, obstacle, rows, peers) == [reason] * 4


def no_symmetric_memory() -> None:
    with pytest.raises(TransportError, match=r'could not be set up over ranks \[0\].*"collective"'):
        symmetric.allocate(64, torch.float32, torch.device("cuda", 0), world())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have symmetric memory")
def test_a_torch_that_cannot_says_so(ranks: Ranks) -> None:
    ranks.run(1, no_symmetric_memory)


@pytest.mark.parametrize("direction", list(PULLED))
def test_unknown_transports(direction: str) -> None:
    with pytest.raises(ValueError, match=f"{direction} must be one of .*copy_engine.*'rdma'"):
        OverlapConfig(**{direction: "rdma"})


def _in_shared_memory(function: Any, args: tuple[Any, ...]) -> Any:
    with shared_memory():
        result = function(*args)
    dist.barrier()  # nobody leaves while another still reads
    return result


def with_memory(ranks: Ranks, size: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(size, _in_shared_memory, function, args)
