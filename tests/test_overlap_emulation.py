"""Emulated collectives: their values, their order and least time, and the engine on top of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
    collectives,
    emulation,
)
from overlap.emulation import EmulatedLink
from overlap.emulation.transfer import NONE, Transfer
from tests.overlap_models import Model, batch

RANKS = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = EmulatedLink(bandwidth=100, latency=0)


@pytest.fixture
def start() -> Iterator[Callable[..., dist.ProcessGroup]]:
    def init(link: EmulatedLink = FAST, ranks: int = RANKS) -> dist.ProcessGroup:
        emulation.init_process_group(link, ranks)
        return dist.group.WORLD

    yield init
    dist.destroy_process_group()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 24, 70_001])
def test_a_gather_repeats_the_own_shard(start: Any, dtype: torch.dtype, size: int) -> None:
    world = start()
    mine = normal(size, dtype=dtype)
    everyone = torch.full((RANKS * size,), torch.nan, dtype=dtype, device=DEVICE)
    collectives.all_gather(everyone, mine, world, "test").wait()
    assert torch.equal(everyone, mine.repeat(RANKS))
    in_place = torch.cat((mine, torch.full_like(everyone[size:], torch.nan)))
    collectives.all_gather(in_place, in_place[:size], world, "test").wait()
    assert torch.equal(in_place, everyone)
    listed = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(listed, mine)
    assert torch.equal(torch.cat(listed), everyone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 24, 70_001])
def test_a_reduce_scatter_multiplies_the_own_chunk(
    start: Any, dtype: torch.dtype, size: int
) -> None:
    world = start()
    source = normal(RANKS * size, dtype=dtype)
    want = source[:size] * RANKS
    mine = torch.full((size,), torch.nan, dtype=dtype, device=DEVICE)
    before = source.clone()
    collectives.reduce_scatter(mine, source, world, "test").wait()
    assert torch.equal(mine, want)
    assert torch.equal(source, before)
    collectives.reduce_scatter(source[:size], source, world, "test").wait()
    assert torch.equal(source, torch.cat((want, before[size:])))


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        (dist.ReduceOp.SUM, RANKS),
        (dist.ReduceOp.AVG, 1),
        (dist.ReduceOp.MAX, 1),
        (dist.ReduceOp.MIN, 1),
    ],
)
def test_reductions_of_equal_data(start: Any, op: Any, factor: int) -> None:
    start()
    value = normal(3, 5)
    reduced = value.clone()
    dist.all_reduce(reduced, op)
    assert torch.equal(reduced, value * factor)


def test_a_broadcast_changes_nothing(start: Any) -> None:
    start()
    value = normal(3, 5)
    sent = value.clone()
    dist.broadcast(sent, 0)
    dist.barrier()
    assert torch.equal(sent, value)


def test_everyone_sends_what_this_rank_sends_itself(start: Any) -> None:
    start()
    source = normal(2 + 3 + 0 + 1, 7)
    target = torch.full((RANKS * 2, 7), torch.nan, device=DEVICE)
    dist.all_to_all_single(target, source, [2] * RANKS, [2, 3, 0, 1])
    assert torch.equal(target, source[:2].repeat(RANKS, 1))
    even = torch.full((8, 7), torch.nan, device=DEVICE)
    dist.all_to_all_single(even, target)
    assert torch.equal(even, target[:2].repeat(RANKS, 1))
    with pytest.raises(ValueError, match="rank 1 is to send 21 elements"):
        dist.all_to_all_single(source, source, [2, 3, 0, 1], [2, 3, 0, 1])


def test_empty_tensors(start: Any) -> None:
    start()
    nothing = normal(0, 7)
    dist.all_to_all_single(nothing.clone(), nothing, [0] * RANKS, [0] * RANKS)
    dist.all_reduce(nothing)


def test_what_is_refused(start: Any) -> None:
    world = start()
    with pytest.raises(ValueError, match="not contiguous"):
        collectives.all_gather(normal(8, 4).T, normal(8), world, "test")
    with pytest.raises(ValueError, match="not 4 ranks' parts"):
        collectives.all_gather(normal(9), normal(2), world, "test")
    with pytest.raises(ValueError, match="SUM, AVG, MAX and MIN"):
        dist.all_reduce(normal(2), dist.ReduceOp.PRODUCT)
    with pytest.raises(ValueError, match="not meta ones"):
        dist.all_reduce(torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be more than 0"),
        ({"bandwidth": 1, "latency": -1}, "latency must be 0 us or more"),
        ({"bandwidth": 1, "ctas": -1}, "ctas must be 1 or more, or 0"),
        ({"bandwidth": 1, "clusters": 3}, r"clusters must be one of \(1, 2, 4, 8\), got 3"),
        ({"bandwidth": 1, "ctas": 6, "clusters": 4}, "6 CTAs are no multiple of clusters 4"),
        ({"bandwidth": 1, "ctas": 0, "clusters": 4}, "the copy engine has none"),
    ],
)
def test_impossible_links(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedLink(**options)


def test_a_ring_moves_the_others_parts(start: Any) -> None:
    """Least times only: 10 ms of bytes at this bandwidth, of which (n - 1) / n travel."""
    world = start(EmulatedLink(bandwidth=1e-3, latency=2000))
    shard, whole = normal(625), normal(2500)  # whole: 10 000 bytes, 10 ms
    for issue, least in (
        (lambda: collectives.all_gather(whole, shard, world, "test").wait(), 7.5 + 2),
        (lambda: collectives.reduce_scatter(shard, whole, world, "test").wait(), 7.5 + 2),
        (lambda: collectives.all_reduce(whole, world, "test"), 15 + 2),
        (lambda: dist.broadcast(whole, 0), 10 + 2),
        (lambda: dist.barrier(), 2),
    ):
        begin = time.perf_counter()
        issue()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert (time.perf_counter() - begin) * 1e3 >= least * 0.999


def test_one_link_carries_one_collective_at_a_time_in_order(start: Any) -> None:
    start(EmulatedLink(bandwidth=1e-3, latency=100_000))
    groups = ProcessGroups.build(expert_parallel_size=2, device_type=DEVICE)
    first = dist.all_reduce(normal(1), group=groups.dp, async_op=True)
    second = dist.all_reduce(normal(1), group=groups.edp, async_op=True)
    assert not first.is_completed()
    second.wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert first.is_completed()


def test_groups_share_the_link_unless_they_have_their_own(start: Any) -> None:
    world = start()
    groups = ProcessGroups.build(expert_parallel_size=2, device_type=DEVICE)
    sizes = {name: getattr(groups, name).size() for name in ("dp", "ep", "edp")}
    assert sizes == {"dp": 4, "ep": 2, "edp": 2}
    assert dist.get_process_group_ranks(groups.edp) == [0, 2]
    assert dist.get_backend(groups.dp) == "emulated"
    assert emulation.link_of(groups.ep) is FAST
    assert groups.collective_sms == FAST.ctas
    nvlink = EmulatedLink(bandwidth=300)
    own = dist.new_group([0, 1], pg_options=nvlink)
    assert emulation.link_of(own) is nvlink
    dist.all_reduce(normal(1))
    dist.all_reduce(normal(1), group=own)
    assert own.wires.keys() == world.wires.keys()
    assert own.wires.items().isdisjoint(world.wires.items())


def test_a_group_needs_a_link() -> None:
    emulation.register()
    with pytest.raises(TypeError, match="needs an EmulatedLink"):
        dist.init_process_group("emulated", store=dist.HashStore(), rank=0, world_size=2)
    assert not dist.is_initialized()


# The engine, unmodified


def train(serialize: bool, steps: int = 3) -> DistributedDataParallel:
    torch.manual_seed(0)
    groups = ProcessGroups.build(device_type=DEVICE)
    model = Model().to(DEVICE)
    ddp = DistributedDataParallel(model, OverlapConfig(serialize=serialize), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        tokens, targets = (part.to(DEVICE) for part in batch(step, 1))
        F.cross_entropy(ddp(tokens), targets).backward()
        optimizer.clip_grad_norm(1e9)
        optimizer.step()
        optimizer.zero_grad()
    ddp.finish_param_sync()
    return ddp


def test_a_step_is_that_of_the_first_shard(start: Any) -> None:
    """One optimizer step by torch alone; of each bucket the first shard, n times."""
    start()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = (part.to(DEVICE) for part in batch(0, 1))
    F.cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    stepped = dict(model.named_parameters())
    for bucket in train(serialize=False, steps=1).buckets:
        assert bucket.layout.group_size == RANKS
        flat = torch.zeros_like(bucket.params)
        for member in bucket.layout.members:
            flat[member.start : member.stop] = stepped[member.spec.name].detach().flatten()
        want = flat[: bucket.layout.shard_numel].repeat(RANKS)
        assert torch.allclose(bucket.params, want, rtol=1e-5, atol=1e-6), bucket.name


def test_overlapped_and_serialised_have_the_same_bits(start: Any) -> None:
    start(EmulatedLink(bandwidth=0.01, latency=500))
    overlapped, serialised = (train(serialize) for serialize in (False, True))
    for a, b in zip(overlapped.buckets, serialised.buckets, strict=True):
        assert torch.isfinite(a.params).all()
        assert torch.equal(a.params, b.params)


# The copy kernel. Its factor is a power of two: the interpreter rounds bf16 otherwise.

SHAPES = {
    "gather": lambda x: Transfer(x[:1], torch.full_like(x, torch.nan), chunks=len(x)),
    "scatter": lambda x: Transfer(
        x, torch.full_like(x[:1], torch.nan), chunks=len(x), kept=1, factor=4
    ),
    "reduce": lambda x: Transfer(x.view(1, -1), x.view(1, -1), chunks=1, factor=4),
    "broadcast": lambda x: Transfer(x.view(1, -1), x.view(1, -1), chunks=1, kept=NONE),
}


@pytest.mark.parametrize("clusters", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("length", [1, 1040, 150_003])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_moves_what_torch_does(
    shape: str, length: int, dtype: torch.dtype, clusters: int
) -> None:
    pytest.importorskip("triton")
    import tests.triton_cases  # noqa: F401  fills the interpreter's gaps
    from overlap.emulation import kernels

    if dtype is torch.uint8:
        if shape == "gather":
            pytest.skip("no NaN to poison the target with")
        rows = torch.randint(0, 60, (3, length), dtype=dtype, device=DEVICE)
    else:
        rows = normal(3, length, dtype=dtype)
    if dtype is torch.uint8 and shape == "scatter":
        transfer = Transfer(rows, torch.zeros_like(rows[:1]), chunks=3, kept=1, factor=4)
    else:
        transfer = SHAPES[shape](rows)
    expected = copy.deepcopy(transfer)
    expected.deliver()
    staging = torch.empty(kernels.STAGING_BYTES, dtype=torch.uint8, device=DEVICE)
    kernels.launch(
        transfer,
        staging,
        ctas=8,
        clusters=clusters,
        latency_ns=1000,
        wire_ns=100_000,
        paced=DEVICE == "cuda",
    )
    assert torch.equal(transfer.target, expected.target)
    assert shape in ("reduce", "broadcast") or torch.equal(transfer.source, expected.source)
