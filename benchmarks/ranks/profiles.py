"""Profiles of every schedule, and what `moe-trace check` says of them: with expert buckets split it
has to PASS, fused, late or serialised to FAIL. Rank 1 comes late to the first recorded iteration.

Each schedule's files go to OUT/profiles/SCHEDULE, the unprofiled step times to clock.json there.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from typing import Any

import torch

import profiling
from benchmarks.ranks.here import Here
from benchmarks.ranks.step import BY_NCCL, Tower, Training, Variant, steps
from benchmarks.stages import Shape

LAYERS = 2
SHAPE = Shape(8192, 8, 4096, 1536, 16)
TOY = Shape(256, 2, 64, 512, 4)
LATE_SECONDS = 0.3
WAIT, WARMUP, ACTIVE = 1, 1, 9
# Schedule: its variant and the verdict that it must get.
SCHEDULES = {
    "serialised": (Variant(config={"serialize": True, **BY_NCCL}), "FAIL"),
    "split": (Variant(config=BY_NCCL), "PASS"),
    "late": (Variant(config={"prefetch_depth": 0, **BY_NCCL}), "FAIL"),
    "fused": (Variant(fused=True, config={"share_expert_buckets": True, **BY_NCCL}), "FAIL"),
    "pulled": (Variant(), "PASS"),
    "pulled_serialised": (Variant(config={"serialize": True}), "FAIL"),
}


def run(here: Here) -> None:
    shape = TOY if here.toy else SHAPE
    backend = "triton" if here.cuda else "reference"
    torch.manual_seed(1)
    model = Tower(here, shape, backend, LAYERS)
    clock: dict[str, float] = {}
    for name, (variant, expected) in SCHEDULES.items():
        if here.seconds_left() < 10:
            here.say(f"no time left for {name} and after")
            return
        training = Training(here, model, shape, variant)
        clock[name], _ = steps(here, training.step)
        _record(here, training, name)
        training.close()
        del training
        if here.rank == 0:
            _judge(here, name, expected, clock[name])
        here.barrier()
    if here.rank == 0:
        text = json.dumps({"shape": str(shape), "layers": LAYERS, "step_ms": clock}, indent=1)
        (here.out / "profiles" / "clock.json").write_text(text + "\n", encoding="utf-8")


def _record(here: Here, training: Training, name: str) -> None:
    folder = here.out / "profiles" / name
    if here.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    here.barrier()
    here.synchronize()
    with profiling.record(
        folder,
        wait=WAIT,
        warmup=WARMUP,
        active=ACTIVE,
        settle=training.ddp.finish_in_flight,
        record_shapes=not here.cuda,
    ) as recorder:
        for iteration in range(WAIT + WARMUP + ACTIVE):
            if here.rank == 1 and iteration == WAIT + WARMUP:
                here.synchronize()
                time.sleep(LATE_SECONDS)
            training.step()
            recorder.step()
    here.barrier()


def _judge(here: Here, name: str, expected: str, step_ms: float) -> None:
    """Trim the schedule's files, pack them and check them."""
    folder = here.out / "profiles" / name
    sizes = []
    for path in sorted(folder.iterdir()):
        packed = folder / f"{path.name.split('.')[0]}.pt.trace.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))
        path.unlink()
        if here.cuda:
            trace["traceEvents"] = [event for event in trace["traceEvents"] if _needed(event)]
        content = json.dumps(trace, separators=(",", ":")).encode()
        packed.write_bytes(gzip.compress(content, 9, mtime=0))
        sizes.append(packed.stat().st_size)
    report = profiling.check(folder)
    verdict = report.verdict.value
    here.say(
        f"{name:12}{verdict:14}expected {expected}  step {step_ms:.2f} ms  "
        f"files {[f'{size / 1e3:.0f} kB' for size in sizes]}"
        + ("" if verdict == expected else "   NOT as it should be")
    )
    here.say(profiling.to_text(report))
    here.note(
        schedule=name,
        verdict=verdict,
        expected=expected,
        step_ms=step_ms,
        bytes=sizes,
        report=json.loads(profiling.to_json(report)),
    )


# What only the profiler's own viewers read.
_VIEWERS = {
    "External id",
    "Record function id",
    "Ev Idx",
    "cbid",
    "queued",
    "context",
    "blocks per SM",
    "warps per SM",
    "est. achieved occupancy %",
    "registers per thread",
    "Fwd thread id",
    "Sequence number",
}


def _needed(event: dict[str, Any]) -> bool:
    """Return whether a GPU trace needs the event to be judged; one that it does loses arguments."""
    category, name = event.get("cat", ""), event["name"]
    if category in ("cuda_runtime", "cuda_driver"):
        keep = any(word in name for word in ("Launch", "Memcpy", "Memset"))
    else:
        keep = (
            category in ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation")
            or event["ph"] == "M"
            or name == "record_param_comms"
        )
    for argument in [key for key in event.get("args", {}) if key in _VIEWERS]:
        del event["args"][argument]
    return keep
