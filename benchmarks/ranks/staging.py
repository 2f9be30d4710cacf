"""How large should a pulled reduction's staging buffers be? The fp32 reduction of dW1, of
DeepSeek-V3's shape per rank, alone and beside stage 1 backward and an operation that only moves
memory.

Pieces that stay in the L2 (50 MB on an H200) are added without a way through memory, but more of
them cost more launches: `issue` is what the host spends on one reduction.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.ranks.effective import TOY, stage1
from benchmarks.ranks.here import Here
from benchmarks.stages import SHAPES
from overlap import ProcessGroups
from overlap.copy_engine import PullReduce, Staging
from overlap.streams import Streams

MIB = 2**20
STAGING = (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB)
TOY_STAGING = (2**12, 2**14)
AHEAD_MS = 30.0  # small pieces make many launches
MOVED = 2**30  # elements that the memory-bound operation reads and writes


def run(here: Here) -> None:
    shape = TOY if here.toy else SHAPES["dsv3"]
    backward = stage1(shape, "triton" if here.cuda else "reference", here.device)["backward"]
    group = ProcessGroups.build().edp
    streams = Streams(here.device)
    numel = 2 * shape.ffn * shape.hidden * shape.experts
    own = slice(here.rank * numel // here.world, (here.rank + 1) * numel // here.world)
    moved = torch.ones(2**10 if here.toy else MOVED, device=here.device)

    def compute() -> None:
        backward()
        moved.mul_(1.0)

    variants: dict[str, Callable[[], object]] = {"compute": compute}
    issues: dict[int, list[float]] = {}

    def add(staging: int) -> None:
        reduce = PullReduce(group, here.device, streams, Staging(here.device, streams, staging))
        with here.peer_memory():
            memory = reduce.allocate(numel, torch.float32).normal_()
        issues[staging] = []

        def issue() -> Callable[[], None]:
            begin = time.perf_counter()
            flight = reduce.reduce_scatter(memory[own], memory, "a benchmark's sum")
            issues[staging].append((time.perf_counter() - begin) * 1e3)
            return flight.wait

        def alone() -> None:
            issue()()

        def together() -> None:
            wait = issue()
            compute()
            wait()

        variants[f"alone {staging}"] = alone
        variants[f"together {staging}"] = together

    for staging in TOY_STAGING if here.toy else STAGING:
        add(staging)
    ms = here.medians(variants, 2 if here.toy else 9, AHEAD_MS)
    here.say(f"{shape}: dW1 in fp32, {numel * 4 / 1e9:.2f} GB; compute {ms['compute']:.2f} ms")
    for staging, times in issues.items():
        alone_ms, together_ms = ms[f"alone {staging}"], ms[f"together {staging}"]
        issue_ms = here.slowest([statistics.median(times)])[0]
        here.say(
            f"  staging {staging / MIB:7.2f} MiB  alone {alone_ms:7.2f} ms  together "
            f"{together_ms:7.2f}  longer than the compute {together_ms - ms['compute']:6.2f}  "
            f"issue {issue_ms:6.2f} ms of the host"
        )
        here.note(
            staging_bytes=staging,
            compute_ms=ms["compute"],
            alone_ms=alone_ms,
            together_ms=together_ms,
            issue_host_ms=issue_ms,
        )
