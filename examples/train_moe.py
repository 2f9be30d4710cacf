"""Train a small mixture-of-experts transformer on mock data, with its collectives hidden.

    python examples/train_moe.py --ranks 4 --ep 2 --steps 20            # spawns its own ranks (CPU)
    torchrun --nproc-per-node 8 examples/train_moe.py --ep 4 --device cuda
    python examples/train_moe.py --profile out/split    # then: moe-trace check out/split

`--fused` trains the unsplit twin: the same parameters and the same arithmetic, but each layer takes
both expert weights at one call site, so that neither collective can hide.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import profiling
from megamoe import MegaMoEConfig, MegaMoELayer
from megamoe.backends import AUTO, BACKENDS
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, S, H] -> [B, S, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """Attention and a MoE layer, each behind a norm and around a residual."""

    def __init__(
        self, config: MegaMoEConfig, heads: int, ep_group: dist.ProcessGroup, fused: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config.hidden_size, heads)
        self.mlp_norm = nn.RMSNorm(config.hidden_size)
        self.mlp = MegaMoELayer(config, ep_group, fused=fused)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, aux_loss = self.mlp(self.mlp_norm(x))
        return x + y, aux_loss


class Transformer(nn.Module):
    """A decoder-only language model; forward returns its training loss, a scalar."""

    def __init__(self, args: argparse.Namespace, ep_group: dist.ProcessGroup) -> None:
        super().__init__()
        config = MegaMoEConfig(
            hidden_size=args.hidden,
            moe_ffn_hidden_size=args.ffn,
            num_moe_experts=args.experts,
            moe_router_topk=args.topk,
            moe_aux_loss_coeff=args.aux_loss_coeff,
            mega_moe_backend=args.backend,
        )
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.position = nn.Embedding(args.sequence, args.hidden)
        self.layers = nn.ModuleList(
            Block(config, args.heads, ep_group, args.fused) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        aux_losses = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, aux_loss = layer(x)
            aux_losses = aux_losses + aux_loss
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + aux_losses


def share_cores(ranks: int) -> None:
    """Settle this rank among others on the same cores; gloo's threads inherit it."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if hasattr(os, "sched_setscheduler"):
        # On a cluster a network card moves the bytes; here threads of gloo do. A thread that it
        # wakes should not take the core from the one that woke it, which is about to begin the
        # stage that is to hide those bytes.
        with suppress(PermissionError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # glibc gives large tensors back to the system and faults them in again at every use.
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the highest it takes


def mock_tokens(vocab: int, shape: tuple[int, int], seed: int) -> Iterator[Tensor]:
    """Yield [B, S + 1] int64 token sequences that follow a rule a model can learn.

    Each token is an affine function of the one before it; one token in eight is noise.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(vocab, shape, generator=generator)
        noisy = torch.rand(shape, generator=generator) < 0.125
        for i in range(1, shape[1]):
            follow = (tokens[:, i - 1] * 5 + 7) % vocab
            tokens[:, i] = torch.where(noisy[:, i], tokens[:, i], follow)
        yield tokens


def mock_batches(args: argparse.Namespace, rank: int, device: torch.device) -> Iterator[Tensor]:
    """Yield a rank's own batches, [B, S + 1] int64."""
    shape = args.micro_batch, args.sequence + 1
    for tokens in mock_tokens(args.vocab, shape, args.seed * 1000 + rank):
        yield tokens.to(device)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; the default process group exists."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    groups = ProcessGroups.build(expert_parallel_size=args.ep)
    torch.manual_seed(args.seed)
    model = Transformer(args, groups.ep).to(device=device, dtype=DTYPES[args.dtype])
    config = OverlapConfig(
        serialize=args.serialize,
        prefetch_depth=args.prefetch_depth,
        share_expert_buckets=args.share_expert_buckets,
        measure_waits=True,
    )
    ddp = DistributedDataParallel(model, config, groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=args.lr)
    if rank == 0 and args.plan:
        print(ddp.plan(), flush=True)

    batches = mock_batches(args, rank, device)
    recording = nullcontext()
    if args.profile:
        active = args.steps - args.warmup
        recording = profiling.record(
            args.profile,
            wait=0,
            warmup=args.warmup,
            active=active,
            settle=ddp.finish_in_flight,
        )
    with recording as recorder:
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            loss = train_step(ddp, optimizer, batches, args)
            if recorder is not None:
                recorder.step()
            seconds = time.perf_counter() - start
            waited_ms = ddp.take_waited_ms()  # on every rank: it also empties the clock
            if rank == 0:
                tokens = args.microbatches * args.micro_batch * args.sequence * world_size
                print(
                    f"step {step:>3}/{args.steps}  loss {loss:7.4f}"
                    f"  {tokens / seconds:8.0f} tokens/s  {seconds * 1e3:7.1f} ms"
                    f"  exposed {waited_ms:6.1f} ms",
                    flush=True,
                )


def train_step(
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    batches: Iterator[Tensor],
    args: argparse.Namespace,
) -> float:
    """One optimizer step over ``args.microbatches``; returns the mean loss over ranks."""
    total = torch.zeros((), device=ddp.device)  # NCCL reduces no CPU tensors
    for index in range(args.microbatches):
        last = index == args.microbatches - 1
        with nullcontext() if last else ddp.no_sync():
            tokens = next(batches)
            loss = ddp(tokens[:, :-1], tokens[:, 1:]) / args.microbatches
            loss.backward()
            total += loss.detach()
    optimizer.clip_grad_norm(args.clip)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--hidden", type=int, default=256)
    model.add_argument("--ffn", type=int, default=1024, help="hidden size of one expert")
    model.add_argument("--experts", type=int, default=8, help="over all ranks")
    model.add_argument("--topk", type=int, default=2)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--vocab", type=int, default=256)
    model.add_argument("--aux-loss-coeff", type=float, default=0.01)
    model.add_argument("--fused", action="store_true", help="the unsplit twin: nothing can hide")
    model.add_argument("--backend", choices=[*BACKENDS, AUTO], default="reference")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=20)
    training.add_argument("--sequence", type=int, default=256, help="tokens of one sequence")
    training.add_argument("--micro-batch", type=int, default=4, help="sequences per rank")
    training.add_argument("--microbatches", type=int, default=1, help="per optimizer step")
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--clip", type=float, default=1.0, help="bound of the gradient norm")
    training.add_argument("--dtype", choices=DTYPES, default="bf16")
    training.add_argument("--seed", type=int, default=1)
    running = parser.add_argument_group("running")
    running.add_argument("--ranks", type=int, default=4, help="ranks to spawn without torchrun")
    running.add_argument("--ep", type=int, default=2, help="expert-parallel size")
    running.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    running.add_argument("--serialize", action="store_true", help="every collective synchronous")
    running.add_argument(
        "--prefetch-depth", type=int, default=1, help="buckets gathered ahead; 0 is too late"
    )
    running.add_argument(
        "--share-expert-buckets", action="store_true", help="one bucket a layer: nothing can hide"
    )
    running.add_argument("--plan", action="store_true", help="print buckets and schedule first")
    running.add_argument("--profile", metavar="DIR", type=Path, help="record each rank's profile")
    running.add_argument("--warmup", type=int, default=2, help="steps before recording")
    args = parser.parse_args(argv)
    for name in ("steps", "ranks", "ep", "micro_batch", "microbatches"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be 1 or more"
            )
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} does not divide by --heads {args.heads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU: give --device cpu")
    if "RANK" not in os.environ and args.ranks % args.ep:
        parser.error(f"--ranks {args.ranks} does not divide by --ep {args.ep}")
    if args.profile and args.steps <= args.warmup:
        parser.error(
            f"--steps {args.steps} leaves none to record after --warmup {args.warmup}: take more"
        )
    return args


def run_rank(rank: int, args: argparse.Namespace, store: str | None = None) -> None:
    """Train as one rank, started by torchrun or, with a ``store``, by this script."""
    if args.device == "cpu":
        share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)))
    backend = "nccl" if args.device == "cuda" else "gloo"
    spawned = {"init_method": f"file://{store}", "rank": rank, "world_size": args.ranks}
    dist.init_process_group(backend, **(spawned if store else {}))
    try:
        train(args)
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), args)
        return 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its notices would cut into the progress
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run_rank, (args, store), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
