"""Seconds and memory of loading a large trace and computing its overlap, beside two other tools.

    python benchmarks/trace_speed.py [--peers-venv DIR] [--rounds 3] [--huge]

A trace of one rank is made by repeating a real one until it is ~380 MB of JSON with 1.7 million
events or more: one of the public A100 traces where they are beside this checkout, else the one
that the tests record. The repeats follow one another in time, with correlations of their own;
nothing is random. Then whole processes (import, load, the share of communication that overlaps
computation) take turns:

    ours         the library: load, then profiling.overview
    ours check   the command: python -m profiling check
    hta          HolisticTraceAnalysis: TraceAnalysis.get_comm_comp_overlap
    tb plugin    torch-tb-profiler: RunLoader and the overview of a run

The others run in a virtual environment of their own, which is made where DIR does not exist. The
figures need not agree: torch-tb-profiler counts per step, and each has its own idea of what
communicates. --huge adds a 5 GB trace, for ours only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SOURCES = (
    ROOT.parent / "shared" / "traces" / "a100_nccl_rank0.json.gz",
    ROOT / "tests" / "data" / "gpu_split.pt.trace.json.gz",
)
LARGE, HUGE = 376e6, 5e9  # bytes
PEERS = ("HolisticTraceAnalysis", "torch-tb-profiler")

# What each process runs; the directory of the trace is its only argument, and it prints a figure.
OURS = """
import sys
from profiling.loading import load
from profiling.overview import overview
(trace,) = load(sys.argv[1]).traces
print(f"{overview(trace)[-1].overlap:.2%}")
"""
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
overlap = TraceAnalysis(trace_dir=sys.argv[1]).get_comm_comp_overlap(visualize=False)
print(f"{overlap.iloc[0, 1]:.2f}%")
"""
PLUGIN = """
import multiprocessing, sys
from torch_tb_profiler import io
from torch_tb_profiler.profiler import RunLoader
run = RunLoader("run", sys.argv[1], io.Cache()).load()
for process in multiprocessing.active_children():
    process.join()  # so that its memory counts
for profile in run.profiles.values():
    steps = getattr(profile, "steps_to_overlap", None)
    if steps:
        ((_, both, communication, _),) = steps["data"]["all"].values()
        print(f"{both / (both + communication):.2%} of a step's mean")
"""


class Cost(NamedTuple):
    """What a process took."""

    seconds: float
    megabytes: float  # its peak in memory
    figure: str


def repeated(source: Path, size: float, encode: Any) -> Iterator[bytes]:
    """Yield the text of ``source`` with its events repeated until that is ``size`` bytes."""
    with gzip.open(source) as file:
        trace = json.load(file)
    events = trace.pop("traceEvents")
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    begin = min(event["ts"] for event in timed)
    period = max(event["ts"] + event["dur"] for event in timed) - begin + 100
    numbers = [event["id"] for event in events if isinstance(event.get("id"), int)]
    for key in ("correlation", "External id"):
        numbers += [event.get("args", {}).get(key, 0) for event in events]
    stride = max(numbers) + 1
    text = encode(trace)[:-1] + b',"traceEvents":['
    written, turn, separator = len(text), 0, b""
    yield text
    while written < size:
        parts = [
            encode(moved(event, turn, turn * period, turn * stride))
            for event in events
            if turn == 0 or event.get("ph") != "M"
        ]
        text = separator + b",".join(parts)
        yield text
        written, turn, separator = written + len(text), turn + 1, b","
    yield b"]}"


def moved(event: dict[str, Any], turn: int, later: float, ids: int) -> dict[str, Any]:
    """Return the event as it is in repeat ``turn``."""
    event = dict(event)
    if "ts" in event:
        event["ts"] = round(event["ts"] + later, 3)
    if isinstance(event.get("id"), int):
        event["id"] += ids
    args = event.get("args")
    if args:
        same = ("correlation", "External id")
        event["args"] = args | {key: args[key] + ids for key in same if args.get(key, 0) > 0}
    name, _, step = str(event.get("name", "")).partition("#")
    if name == "ProfilerStep":
        event["name"] = f"ProfilerStep#{int(step) + 100 * turn}"
    return event


def write(source: Path, size: float, folder: Path) -> Path:
    """Write the trace into ``folder``, and say how large it is."""
    import msgspec

    folder.mkdir()
    path = folder / "rank0.pt.trace.json"
    with path.open("wb") as file:
        for text in repeated(source, size, msgspec.json.Encoder().encode):
            file.write(text)
    return path


def cost(command: list[str]) -> Cost:
    """Run a process to its end."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines = out.read().split("\n")
        # A check of a trace without our ranges cannot tell, which is 2.
        if process.returncode not in (0, 2):
            raise SystemExit(f"{command[0]} failed ({process.returncode}):\n{err.read()[-2000:]}")
    figure = next((line for line in reversed(lines) if line.strip()), "")
    return Cost(seconds, usage.ru_maxrss / 1000, figure.strip())


def subjects(peers: Path | None) -> dict[str, list[str]]:
    """Return what runs, without the argument."""
    ours = {
        "ours": [sys.executable, "-c", OURS],
        "ours check": [sys.executable, "-m", "profiling", "check"],
    }
    if peers is None:
        return ours
    python = str(peers / "bin" / "python")
    return ours | {"hta": [python, "-c", HTA], "tb plugin": [python, "-c", PLUGIN]}


def make_venv(folder: Path) -> None:
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *PEERS], check=True)


def compare(trace: Path, rounds: int, subjects: dict[str, list[str]]) -> None:
    """Print a row for each subject."""
    costs: dict[str, list[Cost]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, command in subjects.items():
            costs[name].append(cost([*command, str(trace.parent)]))
    first = next(iter(costs.values()))
    base = median(one.seconds for one in first), median(one.megabytes for one in first)
    print(f"{'':12}{'s':>8}{'ratio':>8}{'peak MB':>10}{'ratio':>8}  it says")
    for name, all_of in costs.items():
        seconds = median(one.seconds for one in all_of)
        megabytes = median(one.megabytes for one in all_of)
        print(
            f"{name:12}{seconds:8.1f}{seconds / base[0]:8.1f}"
            f"{megabytes:10.0f}{megabytes / base[1]:8.1f}  {all_of[0].figure[:60]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-venv", type=Path, help="their environment; without it, only ours")
    parser.add_argument("--rounds", type=int, default=3, help="times each runs (default: 3)")
    parser.add_argument("--huge", action="store_true", help="also a 5 GB trace, ours only")
    options = parser.parse_args()
    source = next(path for path in SOURCES if path.exists())
    if options.peers_venv is not None:
        make_venv(options.peers_venv)
    folder = Path(tempfile.mkdtemp(prefix="trace_speed_"))
    try:
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
        cases = [("large", LARGE, options.rounds, subjects(options.peers_venv))]
        if options.huge:
            cases.append(("huge", HUGE, 1, subjects(None)))
        for name, size, rounds, who in cases:
            trace = write(source, size, folder / name)
            print(f"\n{source.name} repeated: {trace.stat().st_size / 1e6:,.0f} MB", end=", ")
            print(f"median of {rounds} whole processes")
            compare(trace, rounds, who)
            shutil.rmtree(trace.parent)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
