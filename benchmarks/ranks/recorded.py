"""Profiles of a training's steps, cut down to what judging them takes."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import profiling
from benchmarks.ranks.here import Here
from overlap import DistributedDataParallel

__all__ = ["pack", "record"]

WAIT, WARMUP = 1, 1


class Steps(Protocol):
    ddp: DistributedDataParallel

    def step(self) -> None: ...


def record(
    here: Here, training: Steps, folder: Path, active: int, late_seconds: float = 0.0
) -> None:
    """Write every rank's profile of ``active`` steps into ``folder``, which is emptied first. Rank
    1 comes late to the first of them. A collective."""
    if here.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    here.barrier()
    here.synchronize()
    with profiling.record(
        folder,
        wait=WAIT,
        warmup=WARMUP,
        active=active,
        settle=training.ddp.finish_in_flight,
        record_shapes=not here.cuda,
    ) as recorder:
        for iteration in range(WAIT + WARMUP + active):
            if late_seconds and here.rank == 1 and iteration == WAIT + WARMUP:
                here.synchronize()
                time.sleep(late_seconds)
            training.step()
            recorder.step()
    here.barrier()


def pack(here: Here, folder: Path) -> list[int]:
    """Trim the files of a folder, and return the bytes of each. On one rank."""
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
    return sizes


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
