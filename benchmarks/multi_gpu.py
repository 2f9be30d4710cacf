"""The engine on real collectives between GPUs: right, effective, end to end, and its profiles.

    python benchmarks/multi_gpu.py --out out/multi_gpu [--ranks 2] [--only effective]
    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py --out out/multi_gpu

One process per GPU. Started without torchrun it runs every part in processes of its own, so that a
part that fails or hangs is reported and the others still run (under torchrun it ends the run); each
part has a time budget. Tables are printed, facts go to OUT/results.json.

    correct      losses against one process, equal bits, single collectives of random sizes
    effective    collectives beside stage 1, DeepSeek-V3's shape per rank, every transport
    staging      how large a pulled reduction's pieces should be
    step         whole steps of four layers, every schedule, beside the bound
    profiles     a profile of each schedule on every rank, and the verdicts on them

`--only correct --ranks 4` also runs where four ranks share fewer GPUs, over gloo.

`--device cpu` runs the same code on gloo at toy sizes: a test, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch
import torch.distributed as dist

from benchmarks.ranks.here import Here

# Part: seconds it may take.
PARTS = {"correct": 90, "effective": 100, "staging": 20, "step": 200, "profiles": 60}


def join(rank: int, args: argparse.Namespace, store: str | None) -> torch.device:
    """Join the default process group, by a file or as torchrun says; return this rank's device."""
    device = torch.device(args.device)
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    place = {"init_method": f"file://{store}", "rank": rank, "world_size": args.ranks}
    dist.init_process_group(
        "nccl" if device.type == "cuda" and not _share_gpus(args) else "gloo",
        timeout=timedelta(seconds=120),
        **(place if store else {}),
    )
    return device


def _share_gpus(args: argparse.Namespace) -> bool:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    return args.device == "cuda" and here > torch.cuda.device_count()


def run_part(part: str, args: argparse.Namespace, device: torch.device) -> None:
    """Run one part as one rank."""
    here = Here(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=device,
        toy=device.type == "cpu",
        out=args.out,
        notes=args.out / f"{part}.jsonl",
        deadline=time.monotonic() + args.seconds.get(part, PARTS[part]),
    )
    here.say(f"\n=== {part} ===")
    importlib.import_module(f"benchmarks.ranks.{part}").run(here)
    here.barrier()
    here.synchronize()


def _rank_process(part: str, rank: int, args: argparse.Namespace, store: str) -> None:
    code = 1
    try:
        run_part(part, args, join(rank, args, store))
        code = 0
    except BaseException:
        print(f"rank {rank} of part {part} failed:\n{traceback.format_exc()}", flush=True)
    sys.stdout.flush()
    # A proper exit would wait for communicators whose peer is gone, and for gloo's threads.
    os._exit(code)


def spawn_part(part: str, args: argparse.Namespace) -> str:
    """Run one part in processes of its own; return what became of it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as folder:
        ranks = [
            context.Process(target=_rank_process, args=(part, rank, args, f"{folder}/store"))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        # What follows the budget is for start-up and for the last thing begun within it.
        limit = time.monotonic() + args.seconds.get(part, PARTS[part]) + 30
        outcome = "done"
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks):
                outcome = "failed"
                limit = min(limit, time.monotonic() + 3)
            if time.monotonic() > limit:
                outcome = outcome if outcome == "failed" else "out of time"
                for process in ranks:
                    process.kill()
            for process in ranks:
                process.join(0.2)
        if outcome == "done" and any(process.exitcode for process in ranks):
            outcome = "failed"
    return outcome


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        facts["gpus"] = torch.cuda.device_count()
        facts["gpu"] = torch.cuda.get_device_name()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def collect(args: argparse.Namespace, outcomes: dict[str, str], seconds: dict[str, float]) -> None:
    """Write everything that was noted into one file."""
    notes = {}
    for part in outcomes:
        file = args.out / f"{part}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        notes[part] = [json.loads(line) for line in lines]
    results = {"machine": machine(), "outcome": outcomes, "seconds": seconds, "notes": notes}
    text = json.dumps(results, indent=1)
    (args.out / "results.json").write_text(text + "\n", encoding="utf-8")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where results and profiles go")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, help="processes to start (default: one per GPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--seconds", nargs="+", default=[], metavar="PART=S", help="another time budget of a part"
    )
    args = parser.parse_args(argv)
    try:
        args.seconds = {part: float(s) for part, s in (item.split("=") for item in args.seconds)}
    except ValueError:
        parser.error(f"--seconds takes PART=SECONDS, got {args.seconds}")
    if unknown := sorted(set(args.seconds) - set(PARTS)):
        parser.error(f"--seconds: there is no part {', '.join(unknown)}; choose from {list(PARTS)}")
    if args.ranks is None:
        args.ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    if args.ranks < 2:
        parser.error(f"{args.ranks} rank(s) exchange nothing: it takes 2 GPUs, or --device cpu")
    if _share_gpus(args) and args.only != ["correct"]:
        parser.error(
            f"{args.ranks} ranks share {torch.cuda.device_count()} GPU(s), over gloo, whose times "
            "mean nothing: give --only correct, or a rank per GPU"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 0 where all of them came to their end."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    first = int(os.environ.get("RANK", 0)) == 0
    device = join(int(os.environ["RANK"]), args, None) if "RANK" in os.environ else None
    if first:
        print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
        for part in args.only:
            (args.out / f"{part}.jsonl").unlink(missing_ok=True)
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for part in args.only:
        start = time.monotonic()
        if device is not None:
            run_part(part, args, device)
            outcomes[part] = "done"
        else:
            outcomes[part] = spawn_part(part, args)
        seconds[part] = round(time.monotonic() - start, 1)
        if first:
            collect(args, outcomes, seconds)
            print(f"--- {part}: {outcomes[part]} after {seconds[part]:.0f} s", flush=True)
    if device is not None:
        dist.destroy_process_group()
    return 0 if set(outcomes.values()) == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
