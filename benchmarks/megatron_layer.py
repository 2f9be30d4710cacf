"""Training steps with our Megatron layer beside Megatron-core's own, from the same weights.

    python benchmarks/megatron_layer.py                     # one GPU, DeepSeek-V3 with 24 experts
    python benchmarks/megatron_layer.py --config tiny ...   # any flags of pretrain_megatron.py

    python benchmarks/megatron_layer.py --deterministic     # by torch's deterministic algorithms

Forward, backward and optimizer step on one rank. Every variant has a process of its own, since
Megatron's buffers and hooks outlive a model; the first one's weights reach the others in a file. A
size that does not fit is refused beforehand. MoELayer runs the best of its expert paths that is
installed; which one is printed. It runs twice: what its losses differ by is the noise of a run. A
loss difference before any update of the weights is the layers' own, rounding included. Afterwards
one of our layers is captured in a CUDA graph.

`--device cpu` runs the same code under the tests' shim: a test, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
import torch.distributed as dist

from benchmarks.marks import Marks
from benchmarks.megatron_weights import share_weights
from examples.pretraining import flags, model
from examples.pretraining.data import batches
from examples.pretraining.engines import MegatronEngine
from examples.pretraining.shapes import EMBEDDING, LOSS, MTP, stage_parameters

DEFAULTS = (
    *("--config", "deepseek_v3", "--num_layers", "4", "--moe_layer_freq", "[0]+[1]*3"),
    *("--mtp_num_layers", "0", "--num_experts", "24", "--moe_router_num_groups", "4"),
    *("--moe_router_group_topk", "2", "--vocab_size", "32768", "--global_batch_size", "1"),
    *("--train_iters", "8", "--mock_data"),
)
OURS = ("--enable_primus_turbo", "--use_turbo_mega_moe")
VARIANTS: dict[str, tuple[str, ...]] = {  # the first is what the others are compared with
    "MoELayer": (),
    "MoELayer, again": (),
    "ours, split": OURS,
    "ours, unsplit": (*OURS, "--mega_moe_fused"),
}
WARMUP = 3  # steps that are not timed
DETERMINISTIC = "--deterministic"

# Of a parameter, on one rank: bf16 weight, fp32 gradient and master, Adam's two moments, and the
# roots of the second ones, which torch's AdamW has beside them for all parameters at once.
BYTES = 2 + 4 + 4 + 2 * 4 + 4
USABLE = 0.9  # of the free memory; the rest is for activations and what libraries take


HEADER = (
    f"{'layer':<15} {'ms/step':>9} {'spread':>15} {'fwd+bwd':>9} {'optimizer':>9} {'peak GiB':>9} "
    f"{'f+b GiB':>8} {'last loss':>10} {'first off':>9} {'most off':>9}  experts"
)


def main(argv: Sequence[str]) -> int:
    deterministic = DETERMINISTIC in argv
    argv = [word for word in argv if word != DETERMINISTIC]
    variants = {name: flags.parse([*DEFAULTS, *own, *argv]) for name, own in VARIANTS.items()}
    for args in variants.values():
        args.deterministic = deterministic
    first, split = variants["MoELayer"], variants["ours, split"]
    if first.train_iters <= WARMUP:
        print(f"train_iters {first.train_iters} leaves no step to time: give more than {WARMUP}")
        return 2
    if first.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: run it where it does, or give --device cpu")
        return 2
    print(describe(first))
    free = torch.cuda.mem_get_info()[0] if first.device == "cuda" else None
    if free is not None and (refused := refusal(first, free)):
        print(refused)
        return 2
    print(HEADER, flush=True)
    want, failed = None, False
    with tempfile.TemporaryDirectory(prefix="megatron-layer-") as folder:
        weights = Path(folder) / "weights.pt"
        for name, args in variants.items():
            try:
                row = alone(partial(run, args, weights), args)
            except Exception as error:  # of Megatron, of CUDA, or the death of the process
                print(f"{name:<15} failed: {error!r}", flush=True)
                failed = True
                continue
            if name == "MoELayer":
                want = torch.tensor(row["losses"], dtype=torch.float64)
            print(line(name, row, want), flush=True)
        try:
            print(alone(partial(captured, split), split))
        except Exception as error:
            print(f"CUDA graph of a layer: failed: {error!r}")
            failed = True
    return int(failed)


def line(name: str, row: dict[str, Any], want: torch.Tensor | None) -> str:
    """A variant's row.

    "f+b GiB" is the peak of forward and backward over what the state takes (weights, gradients,
    moments); "off" are relative differences of the loss, in the first step (before any update) and
    in the one where it is largest.
    """
    ms, step = row["ms"], row["optimizer_ms"]
    passes = [total - own for total, own in zip(ms, step, strict=True)]
    off = [""] * 2
    if want is not None:
        differences = (torch.tensor(row["losses"], dtype=torch.float64) / want - 1).abs()
        off = [f"{float(differences[0]):.1e}", f"{float(differences.max()):.1e}"]
    return (
        f"{name:<15} {statistics.median(ms):>9.1f} {min(ms):>7.1f}-{max(ms):<7.1f} "
        f"{statistics.median(passes):>9.1f} {statistics.median(step):>9.1f} "
        f"{row['gib']:>9.2f} {row['passes_gib']:>8.2f} "
        f"{row['losses'][-1]:>10.5f} {off[0]:>9} {off[1]:>9}  {row['path']}"
    )


def needed(args: argparse.Namespace) -> int:
    """Bytes that a variant takes in its optimizer step, activations left out."""
    parts = (EMBEDDING, LOSS, *((MTP,) if args.mtp_num_layers else ()))
    parameters = stage_parameters(args, range(args.num_layers), parts)
    return BYTES * sum(parameter.numel for parameter in parameters)


def refusal(args: argparse.Namespace, free: int) -> str | None:
    """Say that a variant does not fit into ``free`` bytes, and what would; None if it does."""
    if needed(args) <= USABLE * free:
        return None
    told = (
        f"num_experts {args.num_experts} needs {needed(args) / 2**30:.1f} GiB, and "
        f"{USABLE:.0%} of the free {free / 2**30:.1f} GiB are {USABLE * free / 2**30:.1f}: "
    )
    groups = args.moe_router_num_groups or 1
    chosen = args.moe_router_group_topk or groups
    least = math.ceil(args.moe_router_topk / chosen) * groups  # choosable in the chosen groups
    for experts in range(args.num_experts - groups, least - 1, -groups):
        fewer = argparse.Namespace(**{**vars(args), "num_experts": experts})
        if needed(fewer) <= USABLE * free:
            return f"{told}at most {experts} experts fit"
    return f"{told}no number of experts fits, take fewer layers"


def alone(work: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Return what ``work`` returns in a process of its own, the only rank of its group."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(as_one_rank, work, args).result()


def as_one_rank(work: Callable[[], Any], args: argparse.Namespace) -> Any:
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    if args.device == "cuda":
        return _as_one_rank(work, args)
    from tests import megatron_shim

    with megatron_shim.on_cpu():
        return _as_one_rank(work, args)


def _as_one_rank(work: Callable[[], Any], args: argparse.Namespace) -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group(
            "nccl" if args.device == "cuda" else "gloo",
            init_method=f"file://{meeting}/store",
            rank=0,
            world_size=1,
        )
        try:
            parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
            torch.manual_seed(args.seed)
            model_parallel_cuda_manual_seed(args.seed)
            return work()
        finally:
            dist.destroy_process_group()


def describe(args: argparse.Namespace) -> str:
    import megatron.core

    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    return (
        f"{device}, torch {torch.__version__}, megatron-core {megatron.core.__version__}\n"
        f"{args.num_layers} layers ({args.moe_layer_freq}), hidden {args.hidden_size}, "
        f"{args.num_experts} experts of {args.moe_ffn_hidden_size}, top {args.moe_router_topk}, "
        f"{args.micro_batch_size} x {args.seq_length} tokens, {'bf16' if args.bf16 else 'fp32'}, "
        f"{args.train_iters - WARMUP} timed steps, "
        f"{'deterministic' if args.deterministic else 'any'} algorithms\n"
        f"a variant needs {needed(args) / 2**30:.1f} GiB, {BYTES} bytes per parameter, "
        "and its activations"
    )


@contextmanager
def enabled(args: argparse.Namespace) -> Iterator[None]:
    from megamoe.megatron import disable, enable

    enable(args)
    try:
        yield
    finally:
        disable()


def run(args: argparse.Namespace, weights: Path) -> dict[str, Any]:
    """Train; the first model's weights go into the file ``weights``, from there into later ones."""
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu(args) else CPU
    config = model.transformer_config(args)
    with enabled(args):
        chunks = model.build_chunks(args, config)
    path = share_weights(chunks[0], weights)
    engine = MegatronEngine(args, config, chunks)
    data = batches(args, 0, 1, device)
    losses, marks = [], Marks(on_gpu(args))
    update = engine.optimizer.step

    def step() -> Any:
        marks.set()
        result = update()
        marks.set()
        return result

    engine.optimizer.step = step
    for _ in range(args.train_iters):
        marks.set()
        loss, _ = engine.train_step(data, args.global_batch_size // args.micro_batch_size)
        marks.set()
        losses.append(loss)
    timed = marks.steps()[WARMUP:]
    return {
        "ms": [total for total, *_ in timed],
        "optimizer_ms": [own for _, own, *_ in timed],
        "gib": max(peak for *_, peak, _ in timed),
        "passes_gib": max(passes for *_, passes in timed),
        "losses": losses,
        "path": path,
    }


CPU = torch.device("cpu")


def on_gpu(args: argparse.Namespace) -> bool:
    return bool(args.device == "cuda")


def captured(args: argparse.Namespace) -> str:
    """Say what came of capturing forward and backward of one whole layer."""
    from megamoe.errors import UnsupportedFeatureError
    from megamoe.megatron import MegaMoEMegatronLayer, MegaMoEOptions

    if args.device != "cuda":
        return "CUDA graph: no GPU"
    lines = []
    for backend in ("reference", "triton"):
        config = model.transformer_config(args)
        config.moe_shared_expert_intermediate_size = None
        layer = MegaMoEMegatronLayer(config, options=MegaMoEOptions(backend=backend))
        layer = layer.to(device="cuda", dtype=config.params_dtype)
        layer.set_layer_number(1)
        shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
        x = torch.randn(shape, device="cuda", dtype=config.params_dtype, requires_grad=True)
        want = layer(x)[0].detach().clone()
        try:
            graphed = torch.cuda.make_graphed_callables(_OutputOnly(layer), (x,))
            off = (graphed(x) - want).abs().max() / want.abs().max()
            lines.append(f"CUDA graph of a layer, {backend}: captured, output off by {off:.1e}")
        except UnsupportedFeatureError as error:
            lines.append(f"CUDA graph of a layer, {backend}: refused, {error}")
        torch.cuda.synchronize()
    return "\n".join(lines)


class _OutputOnly(torch.nn.Module):
    """Graphed callables return tensors only; the layer also returns None."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
