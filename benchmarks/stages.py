"""The stages on one GPU: right, fast and lean, beside the reference backend and torch's grouped_mm.

    python benchmarks/stages.py [--shapes dsv3 qwen3 small] [--tune] [--rounds 15]

For every shape, with fresh random inputs and uniform routing, three tables:

right  relative error and cosine of y and every gradient against a float64 loop over the experts
       and against the reference backend, outputs poisoned first; equality of ten runs
fast   forward, backward and both, triton and reference measured in turn; `products` is the sum of
       torch's grouped_mm times for the same products on rows already gathered, each timed by
       itself; below the table the same timed in a row, as a stage runs them
lean   bytes held between forward and backward (weights not counted), and the peak of one
       forward + backward above what was allocated before; `keep x` adds the dispatched x

Times are medians over rounds in which the variants take turns, in ms, from CUDA events.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
from torch import Tensor

from benchmarks import output
from megamoe import mega_moe_stage1, mega_moe_stage2
from megamoe.timing import in_turn

NAMES = ("y", "dx", "d_topk_weights", "dW1", "dW2")
PARTS = {"forward": ("fc1", "fc2"), "backward": ("d_act", "d_w2", "d_w1", "d_x")}


@dataclass(frozen=True)
class Shape:
    """One rank's work: uniform routing of T tokens to K of E local experts."""

    tokens: int
    top_k: int
    hidden: int
    ffn: int
    experts: int


SHAPES = {
    "dsv3": Shape(8192, 8, 7168, 2048, 32),  # DeepSeek-V3, EP 8
    "qwen3": Shape(8192, 8, 2048, 768, 128),  # Qwen3-30B-A3B, EP 1
    "small": Shape(1000, 4, 1024, 520, 16),
}


class Inputs:
    """Random inputs of one shape, by default as the GPU gets them."""

    def __init__(
        self, shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device=device) * scale).to(dtype)

        self.shape = shape
        self.x = normal(shape.tokens, shape.hidden).requires_grad_()
        self.w1 = normal(shape.experts, 2 * shape.ffn, shape.hidden, scale=shape.hidden**-0.5)
        self.w2 = normal(shape.experts, shape.hidden, shape.ffn, scale=shape.ffn**-0.5)
        self.w1.requires_grad_()
        self.w2.requires_grad_()
        scores = torch.rand(shape.tokens, shape.experts, device=device)
        self.ids = scores.topk(shape.top_k, dim=1).indices
        self.weights = torch.rand(shape.tokens, shape.top_k, device=device).requires_grad_()
        self.dy = normal(shape.tokens, shape.hidden)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.weights, self.w1, self.w2

    def forward(self, backend: str) -> Tensor:
        l1, dispatch_weights, handle = mega_moe_stage1(
            self.x, self.ids, self.weights, self.w1, None, backend=backend
        )
        return mega_moe_stage2(
            l1, dispatch_weights, handle, self.ids, self.weights, self.w2, None, backend=backend
        )

    def both(self, backend: str) -> tuple[Tensor, ...]:
        y = self.forward(backend)
        return y, *torch.autograd.grad(y, self.leaves, self.dy)

    def oracle(self) -> tuple[Tensor, ...]:
        """y and the gradients in float64, expert by expert, from the definition."""
        x, weights, w1, w2 = (leaf.detach().double() for leaf in self.leaves)
        dy, ffn = self.dy.double(), self.shape.ffn
        y, dx = torch.zeros_like(x), torch.zeros_like(x)
        d_weights, dw1, dw2 = (torch.zeros_like(t) for t in (weights, w1, w2))
        for expert in range(self.shape.experts):
            token, k = (self.ids == expert).nonzero(as_tuple=True)
            rows, weight = x[token], weights[token, k][:, None]
            gate, up = (rows @ w1[expert].T).split(ffn, dim=1)
            sigmoid = torch.sigmoid(gate)
            act = gate * sigmoid * up
            out = act @ w2[expert].T
            y.index_add_(0, token, weight * out)
            d_weights[token, k] = (dy[token] * out).sum(1)
            d_out = weight * dy[token]
            dw2[expert] = d_out.T @ act
            d_act = d_out @ w2[expert]
            d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_l1 = torch.cat((d_gate, d_act * gate * sigmoid), 1)
            dw1[expert] = d_l1.T @ rows
            dx.index_add_(0, token, d_l1 @ w1[expert])
        return y, dx, d_weights, dw1, dw2


def poison(num_bytes: int = 8 << 30) -> None:
    """Fill the allocator's cache with NaN, so that what a kernel fails to write shows."""
    blocks = [torch.full((num_bytes // 16,), float("nan"), device="cuda") for _ in range(4)]
    del blocks


def right(inputs: Inputs) -> None:
    poison()
    got = inputs.both("triton")
    repeats = all(
        all(torch.equal(a, b) for a, b in zip(got, inputs.both("triton"), strict=True))
        for _ in range(9)
    )
    reference = inputs.both("reference")
    print(f"  ten runs, the same bits: {repeats}")
    print(f"  {'right':16}{'rel. error':>12}{'cosine':>12}{'vs reference':>14}")
    for name, a, exact, b in zip(NAMES, got, inputs.oracle(), reference, strict=True):
        a64 = a.double()
        error = (a64 - exact).norm() / exact.norm()
        cosine = torch.nn.functional.cosine_similarity(a64.flatten(), exact.flatten(), dim=0)
        other = (a64 - b.double()).norm() / b.double().norm()
        print(f"  {name:16}{error:12.1e}{cosine:12.6f}{other:14.1e}")


def products(inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    """torch's grouped product for each of the six, on rows that are gathered beforehand."""
    ids = inputs.ids.flatten()
    order = ids.sort(stable=True).indices
    offsets = torch.bincount(ids, minlength=inputs.shape.experts).cumsum(0).int()
    token = order // inputs.shape.top_k
    x, dy = inputs.x.detach()[token], inputs.dy[token]
    act = torch.randn(len(ids), inputs.shape.ffn, device=x.device).to(x.dtype)
    d_l1 = torch.randn(len(ids), 2 * inputs.shape.ffn, device=x.device).to(x.dtype)
    w1, w2 = inputs.w1.detach(), inputs.w2.detach()

    def product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
        return lambda: torch._grouped_mm(a, b, offs=offsets)

    return {
        "fc1": product(x, w1.transpose(1, 2)),
        "fc2": product(act, w2.transpose(1, 2)),
        "d_act": product(dy, w2),
        "d_w2": product(dy.T, act),
        "d_w1": product(d_l1.T, x),
        "d_x": product(d_l1, w1),
    }


def fast(inputs: Inputs, rounds: int) -> None:
    alone = products(inputs)
    variants: dict[str, Callable[[], object]] = dict(alone)
    for part, names in PARTS.items():
        variants[f"products {part}"] = lambda names=names: [alone[name]() for name in names]
    for backend in ("triton", "reference"):
        y = inputs.forward(backend)

        def forward(backend: str = backend) -> None:
            with torch.no_grad():
                inputs.forward(backend)

        def backward(y: Tensor = y) -> None:
            torch.autograd.grad(y, inputs.leaves, inputs.dy, retain_graph=True)

        variants[f"{backend} forward"] = forward
        variants[f"{backend} backward"] = backward
    ms = in_turn(variants, rounds)
    tera = 6 * len(inputs.ids.flatten()) * inputs.shape.hidden * inputs.shape.ffn / 1e12
    print("  products, ms    " + "  ".join(f"{name} {ms[name]:.3f}" for name in alone))
    header = ("triton", "reference", "ref/triton", "products", "prod/triton", "TFLOP/s")
    print(f"  {'fast, ms':16}" + "".join(f"{h:>12}" for h in header))
    for part, names in PARTS.items():
        ms[f"alone {part}"] = sum(ms[name] for name in names)
    totals = [0.0, 0.0, 0.0]
    for part, work in {"forward": tera, "backward": 2 * tera}.items():
        times = [ms[f"{variant} {part}"] for variant in ("triton", "reference", "alone")]
        totals = [a + b for a, b in zip(totals, times, strict=True)]
        print(_row(part, *times, work))
    print(_row("both", *totals, 3 * tera))
    in_a_row = (f"{part} {ms[f'products {part}'] / ms[f'triton {part}']:.3f}" for part in PARTS)
    print(f"  products timed in a row / triton: {', '.join(in_a_row)}")


def _row(part: str, ours: float, theirs: float, ideal: float, work: float) -> str:
    numbers = f"{ours:12.3f}{theirs:12.3f}{theirs / ours:12.2f}{ideal:12.3f}{ideal / ours:12.3f}"
    return f"  {part:16}{numbers}{work / ours * 1e3:12.0f}"


def lean(inputs: Inputs) -> None:
    print(f"  {'lean, MB':16}{'held':>12}{'keep x':>12}{'peak':>12}")
    dispatched = inputs.ids.numel() * inputs.shape.hidden * 2
    for backend in ("triton", "reference"):
        inputs.both(backend)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        y = inputs.forward(backend)
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(y, inputs.leaves, inputs.dy)
        peak = torch.cuda.max_memory_allocated() - before
        del y, grads
        print(
            f"  {backend:16}{held / 1e6:12.0f}{(held + dispatched) / 1e6:12.0f}{peak / 1e6:12.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tune", action="store_true", help="measure the tile candidates first")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    output.need_gpu(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    for name in args.shapes:
        shape = SHAPES[name]
        print(f"\n{name}: {shape}", flush=True)
        if args.tune:
            from megamoe.backends.triton.tune import tune_shape

            for key, config in tune_shape(
                shape.tokens, shape.top_k, shape.hidden, shape.ffn, shape.experts
            ).items():
                print(f"  tuned {key}: {config}")
        inputs = Inputs(shape)
        right(inputs)
        fast(inputs, args.rounds)
        lean(inputs)


if __name__ == "__main__":
    main()
