"""Profiles of every schedule, and what `moe-trace check` says of them: with expert buckets split it
has to PASS, fused, late or serialised to FAIL. Rank 1 comes late to the first recorded iteration.

Each schedule's files go to OUT/profiles/SCHEDULE, the unprofiled step times to clock.json there.
"""

from __future__ import annotations

import json

import torch

import profiling
from benchmarks.ranks.here import Here
from benchmarks.ranks.recorded import pack, record
from benchmarks.ranks.step import steps
from benchmarks.ranks.training import BY_NCCL, Tower, Training, Variant
from benchmarks.stages import Shape

LAYERS = 2
SHAPE = Shape(8192, 8, 4096, 1536, 16)
TOY = Shape(256, 2, 64, 512, 4)
LATE_SECONDS = 0.3
ACTIVE = 9
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
        record(here, training, here.out / "profiles" / name, ACTIVE, LATE_SECONDS)
        training.close()
        del training
        if here.rank == 0:
            _judge(here, name, expected, clock[name])
        here.barrier()
    if here.rank == 0:
        text = json.dumps({"shape": str(shape), "layers": LAYERS, "step_ms": clock}, indent=1)
        (here.out / "profiles" / "clock.json").write_text(text + "\n", encoding="utf-8")


def _judge(here: Here, name: str, expected: str, step_ms: float) -> None:
    """Trim the schedule's files, pack them and check them."""
    folder = here.out / "profiles" / name
    sizes = pack(here, folder)
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
