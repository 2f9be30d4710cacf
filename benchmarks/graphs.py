"""A MoE layer without a host in the way: no synchronisation, CUDA graphs, one compiled graph.

    python benchmarks/graphs.py [--rounds 50]
    python benchmarks/graphs.py --device cpu     # what needs no GPU, interpreted

sync     torch.cuda.set_sync_debug_mode("error") over forward, backward and the engine's step, on
         EMULATED collectives of 8 ranks
layer    make_graphed_callables of the layer: replays with other tokens, and so other routes,
         against eager: y, the balancing loss, dx and every weight gradient, bit for bit
step     forward, backward and AdamW in one graph: weights after three replays with other tokens
         against an eager twin, bit for bit (torch's optimizer: the engine refuses to move
         parameters inside a capture, since a replay would not move its states)
compile  torch.compile(fullgraph=True): one graph for ten ragged batches, equal to eager

Then the time of forward + backward + AdamW at a small shape, where launches are what takes time:
eager, compiled (the layer) and as one graph. Medians of rounds in which the variants take turns.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
from torch import Tensor, nn

if not torch.cuda.is_available() or "cpu" in " ".join(sys.argv[1:]).replace("=", " ").split():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks when it is imported

from benchmarks import output
from examples.preview_overlap import emulated
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import DistributedDataParallel, DistributedOptimizer, ProcessGroups
from overlap.emulation import EmulatedLink

RAGGED = (200, 333, 417, 57, 640, 90, 210, 777, 505, 128)


class Small:
    """The layer, its tokens and its optimizer, at a shape that is bound by launches."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.tokens, hidden = (256, 512) if self.on_gpu else (16, 16)
        self.config = MegaMoEConfig(
            hidden_size=hidden,
            moe_ffn_hidden_size=hidden // 2,
            num_moe_experts=8 if self.on_gpu else 4,
            moe_router_topk=4 if self.on_gpu else 2,
            moe_aux_loss_coeff=0.01,
            mega_moe_backend="triton",
        )
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.device = device
        torch.manual_seed(1)
        self.layer = MegaMoELayer(self.config, dtype=self.dtype, device=device)

    def draw(self, tokens: int | None = None) -> Tensor:
        """Fresh tokens [T, H]."""
        size = (tokens or self.tokens, self.config.hidden_size)
        return torch.randn(size, device=self.device).to(self.dtype)


def forward_backward(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y, aux = layer(x)
    (y.float().square().mean() + aux).backward()
    return y, aux


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """y, the loss, dx and every weight gradient, by a forward and backward from nothing."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y, aux = forward_backward(layer, x)
    grads = [x.grad, *(param.grad for param in layer.parameters())]
    return [t.detach().clone() for t in (y, aux, *grads) if t is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sync_free(small: Small) -> bool:
    """Whether nothing waits for the device; an error names what does."""
    with emulated(EmulatedLink(bandwidth=200), 8):
        groups = ProcessGroups.build(device_type=small.device.type)
        ddp = DistributedDataParallel(copy.deepcopy(small.layer), groups=groups)
        optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-3)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            forward_backward(ddp, x)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()

        batches = [small.draw() for _ in range(5)]
        for x in batches[:3]:  # the first steps compile kernels and agree on orders
            step(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x in batches[3:]:
                step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ddp.remove()
    return True


def graphed_layer(small: Small) -> bool:
    """Whether the layer's replays equal eager runs."""
    eager = copy.deepcopy(small.layer)
    graphed = torch.cuda.make_graphed_callables(
        copy.deepcopy(small.layer), (small.draw().requires_grad_(),)
    )
    batches = [small.draw() for _ in range(4)]
    return all(same(results(graphed, x), results(eager, x)) for x in batches)


class GraphedStep:
    """Forward, backward and AdamW on a static batch, as one graph after three eager steps."""

    def __init__(self, small: Small) -> None:
        self.layer = copy.deepcopy(small.layer)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-3, capturable=True)
        self.x = small.draw()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        forward_backward(self.layer, self.x)
        self.optimizer.step()

    def replay(self, x: Tensor) -> None:
        self.x.copy_(x)
        self.graph.replay()


def graphed_step(small: Small) -> bool:
    """Whether whole steps in a graph leave the weights that eager ones do."""
    graphed = GraphedStep(small)
    twin = copy.deepcopy(small.layer)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, capturable=True)
    batches = [small.draw() for _ in range(3)]
    for x in [graphed.x.clone()] * 3 + batches:
        optimizer.zero_grad(set_to_none=True)
        forward_backward(twin, x)
        optimizer.step()
    for x in batches:
        graphed.replay(x)
    return same([*graphed.layer.parameters()], [*twin.parameters()])


def compiled(small: Small) -> tuple[int, bool]:
    """How many graphs ten ragged batches made, and whether all equal eager runs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    eager = copy.deepcopy(small.layer)
    # Inductor compiles what is around our operators, and may round otherwise: close is enough.
    how = {} if small.on_gpu else {"backend": "aot_eager"}
    layer = torch.compile(copy.deepcopy(small.layer), fullgraph=True, dynamic=True, **how)
    close = True
    for tokens in RAGGED if small.on_gpu else (20, 33, 41):
        x = small.draw(tokens)
        for a, b in zip(results(layer, x), results(eager, x), strict=True):
            error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)
            close &= bool(error < 1e-2)
    return counters["unique_graphs"] - before, close


def times(small: Small, rounds: int) -> dict[str, float]:
    """Median ms of a step of each variant."""
    batches = [small.draw() for _ in range(4)]

    def stepper(layer: nn.Module) -> Callable[[Tensor], None]:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)

        def step(x: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            forward_backward(layer, x)
            optimizer.step()

        return step

    variants = {"eager": stepper(copy.deepcopy(small.layer))}
    if small.on_gpu:
        reference = MegaMoELayer(
            dataclasses.replace(small.config, mega_moe_backend="reference"),
            dtype=small.dtype,
            device=small.device,
        )
        variants["reference, eager"] = stepper(reference)
        layer = torch.compile(copy.deepcopy(small.layer), fullgraph=True, dynamic=True)
        variants["compiled"] = stepper(layer)
        variants["one graph"] = GraphedStep(small).replay
    taken: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    warmup = 3 if small.on_gpu else 0
    for index in range(rounds + warmup):
        for name in order.sample(list(variants), len(variants)):
            if small.on_gpu:
                torch.cuda.synchronize()  # each step by itself, launches included
            begin = time.perf_counter()
            variants[name](batches[index % len(batches)])
            if small.on_gpu:
                torch.cuda.synchronize()
            if index >= warmup:
                taken[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(ms) for name, ms in taken.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    output.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args(argv)
    output.need_triton(parser)
    device = torch.device(args.device)
    small = Small(device)
    if not small.on_gpu:
        from tests import triton_cases  # noqa: F401  fills gaps of Triton's interpreter
    print(output.environment(device))
    config = small.config
    print(
        f"T {small.tokens}, K {config.moe_router_topk}, H {config.hidden_size}, "
        f"I {config.moe_ffn_hidden_size}, {config.num_moe_experts} experts, {small.dtype}",
        flush=True,
    )
    checks: dict[str, Any] = {}
    if small.on_gpu:
        checks["sync"] = sync_free(small)
        checks["layer"] = graphed_layer(small)
        checks["step"] = graphed_step(small)
    graphs, close = compiled(small)
    checks["compile"] = graphs == 1 and close
    for name, good in checks.items():
        print(f"{name:10}{'right' if good else 'WRONG'}")
    print(f"graphs compiled for ragged batches: {graphs}", flush=True)
    ms = times(small, args.rounds)
    for name, value in ms.items():
        print(f"{name:20}{value:10.3f} ms{ms['eager'] / value:10.2f} x eager")
    output.write_json(args.json, device, {"checks": checks, "graphs": graphs, "step_ms": ms})
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
