"""Training steps with our Megatron layer beside Megatron-core's own, from the same weights.

    python benchmarks/megatron_layer.py                     # one GPU, DeepSeek-V3 with 32 experts
    python benchmarks/megatron_layer.py --config tiny ...   # any flags of pretrain_megatron.py

Forward, backward and optimizer step on one rank. MoELayer runs the best of its expert paths that is
installed; which one is printed. Afterwards one of our layers is captured in a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
import torch.distributed as dist

from examples.pretraining import flags, model
from examples.pretraining.data import batches
from examples.pretraining.engines import MegatronEngine

DEFAULTS = (
    *("--config", "deepseek_v3", "--num_layers", "4", "--moe_layer_freq", "[0]+[1]*3"),
    *("--mtp_num_layers", "0", "--num_experts", "32", "--moe_router_num_groups", "4"),
    *("--moe_router_group_topk", "2", "--vocab_size", "32768", "--global_batch_size", "1"),
    *("--train_iters", "8", "--mock_data"),
)
OURS = ("--enable_primus_turbo", "--use_turbo_mega_moe")
WARMUP = 3  # steps that are not timed


def main(argv: Sequence[str]) -> int:
    args = flags.parse([*DEFAULTS, *argv])
    initialize(args)
    variants = {
        "MoELayer": args,
        "ours, split": flags.parse([*DEFAULTS, *OURS, *argv]),
        "ours, unsplit": flags.parse([*DEFAULTS, *OURS, "--mega_moe_fused", *argv]),
    }
    print(describe(args))
    weights: dict[str, torch.Tensor] = {}
    rows = {name: run(own, weights) for name, own in variants.items()}
    print(f"{'layer':<15} {'ms/step':>9} {'spread':>15} {'peak GiB':>9} {'last loss':>10}  experts")
    for name, row in rows.items():
        print(
            f"{name:<15} {statistics.median(row['ms']):>9.1f} "
            f"{min(row['ms']):>7.1f}-{max(row['ms']):<7.1f} {row['gib']:>9.2f} "
            f"{row['losses'][-1]:>10.5f}  {row['path']}"
        )
    want = torch.tensor(rows["MoELayer"]["losses"])
    for name in ("ours, split", "ours, unsplit"):
        off = (torch.tensor(rows[name]["losses"]) / want - 1).abs().max()
        print(f"{name}: losses differ from MoELayer's by at most {off:.1e} of their value")
    print(captured(variants["ours, split"]))
    return 0


def initialize(args: argparse.Namespace) -> None:
    """One rank, its process groups and generators."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29501")
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def describe(args: argparse.Namespace) -> str:
    import megatron.core

    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    return (
        f"{device}, torch {torch.__version__}, megatron-core {megatron.core.__version__}\n"
        f"{args.num_layers} layers ({args.moe_layer_freq}), hidden {args.hidden_size}, "
        f"{args.num_experts} experts of {args.moe_ffn_hidden_size}, top {args.moe_router_topk}, "
        f"{args.micro_batch_size} x {args.seq_length} tokens, {'bf16' if args.bf16 else 'fp32'}, "
        f"{args.train_iters - WARMUP} timed steps"
    )


@contextmanager
def enabled(args: argparse.Namespace) -> Iterator[None]:
    from megamoe.megatron import disable, enable

    enable(args)
    try:
        yield
    finally:
        disable()


def run(args: argparse.Namespace, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train; the first model's weights go into ``weights``, and from there into later ones."""
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    gc.collect()  # the model before lives in cycles of hooks
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = model.transformer_config(args)
    with enabled(args):
        chunks = model.build_chunks(args, config)
    path = share_weights(chunks[0], weights)
    engine = MegatronEngine(args, config, chunks)
    data = batches(args, 0, 1, device)
    times, losses = [], []
    for _ in range(args.train_iters):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss, _ = engine.train_step(data, args.global_batch_size // args.micro_batch_size)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return {"ms": times[WARMUP:], "losses": losses, "gib": peak, "path": path}


@torch.no_grad()
def share_weights(chunk: Any, weights: dict[str, torch.Tensor]) -> str:
    """Keep or take the weights; return the class that holds the experts."""
    params = dict(chunk.named_parameters())
    if not weights:
        weights.update(under_our_names(params))
    else:
        missing = params.keys() ^ weights.keys()
        assert not missing, missing
        for name, param in params.items():
            param.copy_(weights[name])
    holders = {
        type(module.experts).__name__
        for module in chunk.modules()
        if isinstance(getattr(module, "experts", None), torch.nn.Module)
    }
    return ", ".join(sorted(holders))


def under_our_names(params: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies on the host of MoELayer's parameters, the experts' stacked as ours are."""
    result: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, param in params.items():
        value = param.detach().cpu().clone()
        head, sequential, tail = name.partition(".local_experts.")
        if sequential:  # experts.local_experts.3.linear_fc1.weight
            which = tail.split(".")[1]
            stacks.setdefault(f"{head}.{which}", []).append(value)
        elif ".experts.linear_fc" in name:  # TEGroupedMLP: experts.linear_fc1.weight3
            stacks.setdefault(name.rpartition(".")[0], []).append(value)
        else:
            result[name] = value
    for path, parts in stacks.items():
        head, _, which = path.rpartition(".")
        result[f"{head}.{which.removeprefix('linear_')}_weight.weight"] = torch.stack(parts)
    return result


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
    code = main(sys.argv[1:])
    dist.destroy_process_group()
    sys.exit(code)
