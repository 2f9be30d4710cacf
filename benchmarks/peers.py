"""The stages beside other libraries' fused MoE layers, on the same inputs and one GPU.

    python benchmarks/peers.py [--shapes dsv3 qwen3] [--rounds 9] [--all-candidates]

liger       LigerFusedMoEFunction of liger-kernel (0.8): Triton, autotuned when first called
scattermoe  ScatterMoE's `parallel_linear` twice with SwiGLU between, as its GLUMLP does; it is on
            the index inside axolotl (0.19), and loaded from there without axolotl's dependencies

Neither is a dependency: install the wheels without their own (`pip install --no-deps`), or unpack
them onto PYTHONPATH. A peer that is not there is named as absent, with the reason.

Each peer's tile candidates are its own. Liger's 200 take minutes for a shape, so by default its
autotuner measures the 28 that `LIGER` names; `--all-candidates` leaves it alone. What the peers
compile is compiled beforehand, in processes.

Printed per variant: the relative error of y and every gradient against the reference backend, so
that equal work is compared; then medians in ms over rounds in which all take turns in shuffled
order, and the ratio to ours. Measured are the forward, its graph recorded, and forward + backward,
every call with a graph of its own (ScatterMoE's backward overwrites what it saved); `backward` is
the difference. A peer's own sorting of the ids counts. A layer that raises is named and left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
from torch import Tensor

from benchmarks import output
from benchmarks.stages import NAMES, SHAPES, Inputs, Shape
from megamoe.timing import in_turn

Layer = Callable[[Inputs], Tensor]  # inputs -> y
Result = TypeVar("Result")

# Of Liger's own candidates, by kernel: the values of each option that are measured.
LIGER: dict[str, dict[str, tuple[int, ...]]] = {
    "up_proj|down_proj|dX": {"BLOCK_N": (128,), "BLOCK_K": (64,), "num_stages": (3, 4)},
    "dW": {"BLOCK_M": (128,), "BLOCK_N": (64, 128), "BLOCK_K": (32,)},
    "weighted_sum": {"BLOCK_H": (512,), "BLOCK_K": (2, 8)},
}


def load_liger() -> Layer:
    layer = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def run(inputs: Inputs) -> Tensor:
        ids = inputs.ids.int()
        y: Tensor = layer.apply(inputs.x, inputs.w1, inputs.w2, ids, inputs.weights)
        return y

    return run


def load_scattermoe() -> Layer:
    spec = importlib.util.find_spec("axolotl")  # a top-level name: found, and not imported
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'axolotl'")
    package = types.ModuleType("scattermoe_lora")
    relative = "integrations/kernels/libs/scattermoe_lora"
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / relative)]
    sys.modules[package.__name__] = package
    experts = importlib.import_module("scattermoe_lora.parallel_experts")
    # Compiled by its author, which is seconds of compilation for a sort and a count.
    sort = torch.compiler.set_stance("force_eager")(experts.flatten_sort_count)

    def run(inputs: Inputs) -> Tensor:
        order = sort(inputs.ids, inputs.shape.experts)  # experts, slots, offsets
        w1, w2 = (weight.transpose(1, 2) for weight in (inputs.w1, inputs.w2))
        rows = experts.parallel_linear(inputs.x, w1, inputs.shape.top_k, *order, grouped_out=True)
        gate, up = rows.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate) * up
        weights = inputs.weights.to(act.dtype)  # its product of weights and rows wants one dtype
        y: Tensor = experts.parallel_linear(act, w2, 1, *order, grouped_in=True, gates=weights)
        return y

    return run


LOADERS: dict[str, Callable[[], Layer]] = {"liger": load_liger, "scattermoe": load_scattermoe}


def load() -> dict[str, Layer]:
    """Return the peers that are there; say of each other one why it is not."""
    found: dict[str, Layer] = {}
    for name, loader in LOADERS.items():
        try:
            found[name] = loader()
        except ImportError as error:
            print(f"{name}: absent ({error})")
    return found


def narrow_liger(index: int | None = None) -> int:
    """Leave Liger's autotuners the candidates of `LIGER`, or of each only the ``index``-th of them.

    Returns the largest number of candidates of one kernel.
    """
    module = importlib.import_module("liger_kernel.ops.fused_moe")
    largest = 1
    for kernel_name, kernel in vars(module).items():
        if not hasattr(kernel, "configs"):
            continue
        wanted = next(
            options
            for names, options in LIGER.items()
            if any(name in kernel_name for name in names.split("|"))
        )
        kept = [config for config in kernel.configs if _is_wanted(config, wanted)]
        largest = max(largest, len(kept))
        kernel.configs = kept if index is None else [kept[index % len(kept)]]
    return largest


def _is_wanted(config: Any, wanted: dict[str, tuple[int, ...]]) -> bool:
    return all(config.all_kwargs()[option] in values for option, values in wanted.items())


def compile_ahead(peer: str, shape: Shape, index: int) -> None:
    """Compile a peer's kernels into Triton's cache on disk, of Liger one candidate of each."""
    shape = replace(shape, tokens=64)  # no product is compiled for its number of tokens,
    if peer == "liger":
        narrow_liger(index)
        shape = replace(shape, experts=shape.top_k)  # nor Liger's for that of experts
    both(LOADERS[peer](), Inputs(shape))
    torch.cuda.synchronize()


def both(layer: Layer, inputs: Inputs) -> tuple[Tensor, ...]:
    y = layer(inputs)
    return y, *torch.autograd.grad(y, inputs.leaves, inputs.dy)


def attempt(layers: dict[str, Layer], name: str, work: Callable[[Layer], Result]) -> Result | None:
    """Return what ``work`` makes of a layer; one that raises is named and taken out."""
    if name not in layers:
        return None
    try:
        return work(layers[name])
    except Exception as error:  # whatever a peer raises
        print(f"  {name}: cannot: {error!r}", flush=True)
        del layers[name]
        return None


def relative_errors(layers: dict[str, Layer], inputs: Inputs) -> dict[str, list[float]]:
    """Relative error of y and every gradient against the reference backend, per variant.

    A layer that fails is taken out of ``layers``.
    """
    exact = [tensor.detach().double() for tensor in both(layers["reference"], inputs)]

    def against_exact(layer: Layer) -> list[float]:
        return [
            float((got.detach().double() - want).norm() / want.norm())
            for got, want in zip(both(layer, inputs), exact, strict=True)
        ]

    found = {
        name: attempt(layers, name, against_exact) for name in list(layers) if name != "reference"
    }
    return {name: errors for name, errors in found.items() if errors is not None}


def times(layers: dict[str, Layer], inputs: Inputs, rounds: int) -> dict[str, tuple[float, float]]:
    """Median ms of forward and of forward + backward; a layer that fails is taken out."""
    runs: dict[str, Callable[[], object]] = {}
    for name in layers:
        runs[f"{name} forward"] = partial(attempt, layers, name, lambda layer: layer(inputs))
        runs[f"{name} both"] = partial(attempt, layers, name, lambda layer: both(layer, inputs))
    ms = in_turn(runs, rounds)
    return {name: (ms[f"{name} forward"], ms[f"{name} both"]) for name in layers}


def report(layers: dict[str, Layer], inputs: Inputs, rounds: int) -> None:
    layers = dict(layers)
    errors = relative_errors(layers, inputs)
    print(f"  {'error':12}" + "".join(f"{n:>16}" for n in NAMES))
    for name, values in errors.items():
        print(f"  {name:12}" + "".join(f"{value:16.1e}" for value in values), flush=True)
    torch.cuda.empty_cache()
    ms = times(layers, inputs, rounds)
    columns = ("forward", "backward", "both", "fwd/ours", "bwd/ours", "both/ours")
    print(f"  {'ms':12}" + "".join(f"{c:>10}" for c in columns))
    parts = {name: (fwd, total - fwd, total) for name, (fwd, total) in ms.items()}
    for name, figures in parts.items():
        row = "".join(f"{figure:10.3f}" for figure in figures)
        if ours := parts.get("triton"):
            row += "".join(f"{f / own:10.2f}" for f, own in zip(figures, ours, strict=True))
        print(f"  {name:12}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dsv3", "qwen3"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--all-candidates", action="store_true", help="Liger's own search, minutes")
    args = parser.parse_args()
    output.need_gpu(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    peers = load()
    shapes = [SHAPES[name] for name in args.shapes]
    layers: dict[str, Layer] = {
        backend: partial(Inputs.forward, backend=backend) for backend in ("triton", "reference")
    }
    layers.update(peers)
    work = [(peer, shape, 0) for peer in peers if peer != "liger" for shape in shapes]
    if "liger" in peers and not args.all_candidates:
        print(f"liger: autotuned over {LIGER}")
        count = narrow_liger()
        work += [("liger", shape, index) for shape in shapes for index in range(count)]
    if work:
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        with ProcessPoolExecutor(len(work), mp_context=spawn) as pool:
            jobs = [pool.submit(compile_ahead, *job) for job in work]
            both(layers["triton"], Inputs(shapes[0]))  # ours meanwhile
        for job, done in zip(work, jobs, strict=True):
            if error := done.exception():  # a candidate that is too large for the device, say
                print(f"compiling {job}: {error!r}")
    for name in args.shapes:
        print(f"\n{name}: {SHAPES[name]}", flush=True)
        inputs = Inputs(SHAPES[name])
        report(layers, inputs, args.rounds)


if __name__ == "__main__":
    main()
