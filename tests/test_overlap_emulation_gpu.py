"""What only a GPU shows of emulated collectives: streams, the copy engine, graphs, no host sync.

tests/test_overlap_emulation.py runs there, too, through the copy kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap import collectives, emulation
from overlap.emulation import EmulatedLink

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

RANKS = 4
NUMEL = 1 << 20  # of a shard, fp32: 4 MiB
LINKS = {
    "kernel": EmulatedLink(bandwidth=20, latency=50, ctas=8),
    "clusters": EmulatedLink(bandwidth=20, latency=50, ctas=8, clusters=4),
    "copy engine": EmulatedLink(bandwidth=20, latency=50, ctas=0),
}


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[EmulatedLink]:
    emulation.init_process_group(LINKS[request.param], RANKS)
    # What is run for the first time is compiled or loaded, which takes longer than what it does.
    collectives.all_reduce(torch.zeros(1, device="cuda"), dist.group.WORLD, "the first")
    whole, flight = gather(torch.zeros(NUMEL, device="cuda"))
    flight.wait()
    (whole.sum() * (whole[:64].view(8, 8) @ whole[:64].view(8, 8))).sum()
    torch.cuda.synchronize()
    yield LINKS[request.param]
    dist.destroy_process_group()


def gather(shard: Tensor) -> tuple[Tensor, collectives.InFlight]:
    whole = torch.full((RANKS * shard.numel(),), torch.nan, device="cuda")
    return whole, collectives.all_gather(whole, shard, dist.group.WORLD, "test")


def test_values_both_ways(link: EmulatedLink) -> None:
    shard = torch.randn(NUMEL, device="cuda")
    whole, flight = gather(shard)
    flight.wait()
    assert torch.equal(whole, shard.repeat(RANKS))
    summed = torch.full_like(shard, torch.nan)
    source = torch.randn(RANKS * NUMEL, device="cuda")
    flight = collectives.reduce_scatter(summed, source, dist.group.WORLD, "test")
    flight.wait()
    flight.wait()  # again, it changes nothing
    assert torch.equal(summed, source[:NUMEL] * RANKS)


def test_it_takes_at_least_the_time_of_the_link(link: EmulatedLink) -> None:
    """The copy engine's filler is as long as its rate was when measured: less exact."""
    shard = torch.randn(NUMEL, device="cuda")
    gather(shard)[1].wait()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    gather(shard)[1].wait()
    end.record()
    end.synchronize()
    exact = 1e3 * link.seconds((RANKS - 1) * NUMEL * 4)
    assert begin.elapsed_time(end) >= exact * (0.98 if link.ctas else 0.7)


def test_it_starts_after_what_the_stream_held_and_the_host_does_not_wait(
    link: EmulatedLink,
) -> None:
    shard = torch.zeros(NUMEL, device="cuda")
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    shard.fill_(7.0)
    whole, flight = gather(shard)
    flight.wait()
    result = whole.sum()
    assert not flight.done()  # so neither the issue nor the wait has waited here
    assert float(result) == 7.0 * RANKS * NUMEL


def test_compute_goes_on_beside_it(link: EmulatedLink) -> None:
    shard = torch.randn(NUMEL, device="cuda")
    done = torch.cuda.Event()
    x = torch.randn(64, 64, device="cuda")
    wholes = torch.empty(50, RANKS * NUMEL, device="cuda")  # at once: to allocate can wait
    (x @ x).sum()  # so does the first use of a kernel
    torch.cuda.synchronize()
    slow = [collectives.all_gather(w, shard, dist.group.WORLD, "test") for w in wholes]  # 35 ms
    (x @ x).sum()
    done.record()
    done.synchronize()
    assert not slow[-1].done()
    for flight in slow:
        flight.wait()
    torch.cuda.synchronize()


def test_nothing_waits_for_the_device(link: EmulatedLink) -> None:
    shard = torch.randn(NUMEL, device="cuda")
    gather(shard)[1].wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather(shard)[1].wait()
        dist.all_reduce(shard)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_captures_issue_and_wait(link: EmulatedLink) -> None:
    shard = torch.zeros(NUMEL, device="cuda")
    whole = torch.empty(RANKS * NUMEL, device="cuda")
    collectives.all_gather(whole, shard, dist.group.WORLD, "test").wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        collectives.all_gather(whole, shard, dist.group.WORLD, "test").wait()
    for value in (1.0, 2.0):
        shard.fill_(value)
        graph.replay()
        assert torch.equal(whole, torch.full_like(whole, value))
