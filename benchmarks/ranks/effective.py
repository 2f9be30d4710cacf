"""Does a collective beside stage 1 save time? Real collectives, every transport, with budgets.

    effective = (serial - together) / collective alone

The collective is issued before the stage, as the engine does: the gather of w2 beside stage 1
forward, the reduce-scatter of dW2 (in bf16, and in fp32, the engine's default) beside stage 1
backward. `pair` is the time of both together over the longer one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks.here import Here
from benchmarks.stages import SHAPES, Shape
from megamoe import mega_moe_stage1
from megamoe.backends import sm_budget_adder
from overlap import NcclOptions, ProcessGroups
from overlap.collectives import Collective, Gathers, Reduces
from overlap.copy_engine import PullGather, PullReduce
from overlap.streams import Streams

TOY = Shape(64, 2, 32, 64, 4)

NCCL = {
    "nccl default": NcclOptions(),
    "8 in clusters": NcclOptions(min_ctas=8, max_ctas=8),
    "8": NcclOptions(min_ctas=8, max_ctas=8, cluster_size=0),
    "16 in clusters": NcclOptions(min_ctas=16, max_ctas=16),
    "16": NcclOptions(min_ctas=16, max_ctas=16, cluster_size=0),
    "32": NcclOptions(min_ctas=32, max_ctas=32, cluster_size=0),
}
_DEFAULT_CTAS = 32  # what NCCL takes between two H200


@dataclass
class Window:
    """A stage, and the collective beside it."""

    name: str
    stage: Callable[[], object]
    collective: Callable[[], Callable[[], None]]  # issues it and returns its wait
    num_bytes: int  # that each rank receives


def run(here: Here) -> None:
    shape = TOY if here.toy else SHAPES["dsv3"]
    here.say(f"{shape}")
    backends = ("reference",) if here.toy else ("triton", "reference")
    stages = {backend: stage1(shape, backend, here.device) for backend in backends}
    for name, options in (("copy engine", NCCL["8"]), *NCCL.items()):
        if here.seconds_left() < 15:
            here.say(f"no time left for {name} and after")
            return
        group = ProcessGroups.build(nccl=options).edp
        ctas = options.max_ctas or _DEFAULT_CTAS
        gather: Gathers = Collective(group, here.device, ctas)
        reduce: Reduces = Collective(group, here.device, ctas)
        budgets = {"gather": (0, ctas, 2 * ctas), "reduce": (0, ctas, 2 * ctas)}
        if name == "copy engine":
            streams = Streams(here.device)
            gather = PullGather(group, here.device, streams)
            reduce = PullReduce(group, here.device, streams)
            budgets = {"gather": (0, 1, 2), "reduce": (0, 4, 8, 16)}
        for backend in backends:
            for window in _windows(here, shape, stages[backend], gather, reduce):
                _measure(here, name, backend, window, budgets[window.name.split()[0]])
        here.synchronize()
        del gather, reduce, window
        dist.destroy_process_group(group)


def stage1(shape: Shape, backend: str, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return stage 1's "forward" and "backward" on random inputs, uniform routing."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device) * scale).to(dtype)

    x = normal(shape.tokens, shape.hidden).requires_grad_()
    w1 = normal(shape.experts, 2 * shape.ffn, shape.hidden, scale=shape.hidden**-0.5)
    w1.requires_grad_()
    ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.top_k, dim=1).indices
    weights = torch.rand(shape.tokens, shape.top_k, device=device).requires_grad_()
    l1, dispatch_weights, _ = mega_moe_stage1(x, ids, weights, w1, None, backend=backend)
    d_l1, d_weights = torch.randn_like(l1), torch.randn_like(dispatch_weights)

    def forward() -> None:
        with torch.no_grad():
            mega_moe_stage1(x, ids, weights, w1, None, backend=backend)

    def backward() -> None:
        torch.autograd.grad(
            (l1, dispatch_weights), (x, weights, w1), (d_l1, d_weights), retain_graph=True
        )

    return {"forward": forward, "backward": backward}


def _windows(
    here: Here,
    shape: Shape,
    stage: dict[str, Callable[[], object]],
    gather: Gathers,
    reduce: Reduces,
) -> Iterator[Window]:
    numel = shape.experts * shape.hidden * shape.ffn
    own = slice(here.rank * numel // here.world, (here.rank + 1) * numel // here.world)
    narrow = torch.bfloat16 if here.cuda else torch.float32
    what = "a benchmark's collective"
    for name, dtype in (
        ("gather", narrow),
        ("reduce bf16", narrow),
        ("reduce fp32", torch.float32),
    ):
        with here.peer_memory():
            memory = (gather if name == "gather" else reduce).allocate(numel, dtype).zero_()

        def collective(name: str = name, memory: Tensor = memory) -> Callable[[], None]:
            if name == "gather":
                return gather.all_gather(memory, memory[own], what).wait
            return reduce.reduce_scatter(memory[own], memory, what).wait

        yield Window(
            name,
            stage["forward" if name == "gather" else "backward"],
            collective,
            numel * dtype.itemsize * (here.world - 1) // here.world,
        )


def _measure(
    here: Here, transport: str, backend: str, window: Window, budgets: tuple[int, ...]
) -> None:
    def alone() -> None:
        window.collective()()

    def serial() -> None:
        window.collective()()
        window.stage()

    def together() -> None:
        wait = window.collective()
        window.stage()
        wait()

    def with_budget(sms: int) -> Callable[[], None]:
        def run() -> None:
            with _reserved(backend, sms):
                together()

        return run

    variants: dict[str, Callable[[], object]] = {
        "stage": window.stage,
        "alone": alone,
        "serial": serial,
    }
    variants.update({f"budget {sms}": with_budget(sms) for sms in budgets})
    ms = here.medians(variants, 2 if here.toy else 7)
    rate = window.num_bytes / ms["alone"] / 1e6
    effective, pair = {}, {}
    for name in variants:
        if name.startswith("budget"):
            effective[name] = (ms["serial"] - ms[name]) / ms["alone"]
            pair[name] = ms[name] / max(ms["stage"], ms["alone"])
    cells = "  ".join(
        f"{name}: {ms[name]:.2f} ms eff {effective[name]:5.2f} pair {pair[name]:.3f}"
        for name in effective
    )
    here.say(
        f"{transport:15}{backend:10}{window.name:12}alone {ms['alone']:.2f} ms ({rate:.0f} GB/s)"
        f"  stage {ms['stage']:.2f}  serial {ms['serial']:.2f}  {cells}"
    )
    here.note(
        transport=transport,
        backend=backend,
        window=window.name,
        ms=ms,
        gb_per_s=rate,
        effective=effective,
        pair_over_longer=pair,
    )


@contextmanager
def _reserved(backend: str, sms: int) -> Iterator[None]:
    """Leave SMs free: by the backend's budget, or by what torch offers for its own products."""
    if not sms:
        yield
    elif backend == "triton":
        remove = sm_budget_adder(backend)(lambda: sms)
        yield
        remove()
    elif torch.cuda.is_available():
        torch._C._set_sm_carveout_experimental(sms)
        yield
        torch._C._set_sm_carveout_experimental(None)
    else:
        yield
