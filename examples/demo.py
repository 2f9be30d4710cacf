"""The library's main claim, tried on this machine: what `make demo` runs.

Trains a small MoE model on 4 CPU ranks (expert parallelism 2, so each expert weight is gathered and
its gradient reduced over 2 ranks), once split in two stages and once fused, profiles both, and
judges both. Exit code 0 only if every check passes for the split model and fails for the fused one.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import profiling
from profiling import Report, Verdict

# Sizes at which stage1 lasts long beside the collectives and beside a time slice of the scheduler.
# fp32, since bf16 products are emulated, slowly, on many CPUs.
TRAIN = (
    *("--ranks", "4", "--ep", "2", "--layers", "2", "--dtype", "fp32"),
    *("--hidden", "256", "--ffn", "8192", "--experts", "8", "--topk", "2"),
    *("--sequence", "256", "--micro-batch", "2", "--steps", "6", "--warmup", "2"),
)


def train(out: Path, *flags: str) -> Report:
    """Train and profile in processes of their own; return what the profile says."""
    script = Path(__file__).with_name("train_moe.py")
    command = [sys.executable, str(script), *TRAIN, *flags, "--profile", str(out)]
    shown = f"$ train_moe.py {' '.join((*TRAIN, *flags))}"
    print(textwrap.fill(shown, 100, subsequent_indent="    "), flush=True)
    subprocess.run(command, check=True)
    return profiling.check(out)


def as_expected(split: Report, fused: Report) -> bool:
    """Whether every row of the split run passes and every row of the fused run fails, near 0."""
    return (
        split.verdict is Verdict.PASS
        and bool(fused.rows)
        and all(row.verdict is Verdict.FAIL and (row.hidden or 0) < 0.1 for row in fused.rows)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where profiles go")
    args = parser.parse_args(argv)
    start = time.monotonic()
    reports = {}
    for name, flags in (("split", ()), ("fused", ("--fused",))):
        shutil.rmtree(args.out / name, ignore_errors=True)
        reports[name] = train(args.out / name, *flags)
    for name, report in reports.items():
        print(f"\n=== {name} ===\n{profiling.to_text(report)}")
    good = as_expected(**reports)
    seconds = time.monotonic() - start
    print(
        f"\nsplit {reports['split'].verdict.value}, fused {reports['fused'].verdict.value} after "
        f"{seconds:.0f} s: {'as it should be' if good else 'NOT as it should be (PASS, FAIL)'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
