"""Where a product's time goes: hardware counters of our kernel beside torch's grouped_mm.

    python benchmarks/counters.py [--products dsv3:d_w2 qwen3:fc1 ...]

Runs itself under Nsight Compute (`ncu`), one launch per kernel, clocks and caches left as they
are. For every product: ours as the stages launch it, ours on rows gathered beforehand where it
gathers (`rows`), and torch's. Above each table stand the times without a profiler, medians over
rounds in turns; the counters' own times have the profiler's clock. `tensor cycles` count the work
of the tensor pipes, padding included, so they tell more work from the same work done more slowly.
Stalls are shares of the time that warps were resident.

Where counters may not be read, the times are printed, and why.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere
if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit("Triton is not installed: pip install 'triton>=3.4,<4'")

import torch
import triton
from torch import Tensor

from benchmarks import output, stages
from benchmarks.stages import SHAPES, Inputs
from megamoe.backends.triton.gemm import rows_by_weight
from megamoe.backends.triton.schedule import grid_for
from megamoe.backends.triton.tables import build_tables
from megamoe.backends.triton.tuning import PRODUCTS, Shape, TileConfig, choose
from megamoe.backends.triton.weight_gemm import weight_grad
from megamoe.timing import in_turn

Run = Callable[[], Tensor]

# Where there is something to see: dW2 of DeepSeek-V3, the only one slower than torch's, and the
# short tiles of Qwen3.
DEFAULT = ["dsv3:d_w2", *(f"qwen3:{product}" for product in PRODUCTS)]

COUNTERS = {
    "time, us": ("gpu__time_duration.sum", 1e-3),
    "SM clock, GHz": ("smsp__cycles_elapsed.avg.per_second", 1e-9),
    "tensor pipe, %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "tensor cycles, M": ("sm__pipe_tensor_cycles_active.sum", 1e-6),
    "SMs active, %": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "DRAM, %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "DRAM read, MB": ("dram__bytes_read.sum", 1e-6),
    "L2, %": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed", 1.0),
    "L2 hits, %": ("lts__t_sector_hit_rate.pct", 1.0),
    "L1 data pipe, %": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1.0),
    "issue slots, %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "instructions, M": ("smsp__inst_executed.sum", 1e-6),
} | {
    f"stall {reason}, %": (f"smsp__warp_issue_stalled_{reason}_per_warp_active.pct", 1.0)
    for reason in (
        "barrier",
        "gmma",
        "lg_throttle",
        "long_scoreboard",
        "math_pipe_throttle",
        "mio_throttle",
        "short_scoreboard",
        "sleeping",
        "wait",
    )
}
_SHORTEST_US = 50.0  # what is below prepares a product


def ours(inputs: Inputs) -> dict[str, dict[str, Run]]:
    """Our six products, by variant; `rows` has its operand gathered beforehand."""
    shape, device = inputs.shape, inputs.x.device
    tables, _ = build_tables(inputs.ids, inputs.weights.detach(), shape.experts)
    count = tables.row_token.shape[0]
    token = tables.row_token[: int(tables.starts[-1])]
    x, dy, w1, w2 = (t.detach() for t in (inputs.x, inputs.dy, inputs.w1, inputs.w2))
    x_rows, dy_rows = (t.new_zeros(count, shape.hidden) for t in (x, dy))
    for rows, tokens in ((x_rows, x), (dy_rows, dy)):
        rows[: len(token)] = tokens[token] * (token >= 0)[:, None]  # padding is zeros
    act, d_l1 = (
        torch.randn(count, width, device=device).to(x.dtype) for width in (shape.ffn, 2 * shape.ffn)
    )
    for rows in (act, d_l1):
        rows[: len(token)] *= (token >= 0)[:, None]
    slots = triton.next_power_of_2(inputs.ids.numel())
    grid = grid_for(device)

    def config(product: str, m: int, n: int, k: int) -> TileConfig:
        return choose(Shape(product, m, n, k, shape.experts, slots, str(x.dtype)), device)

    def by_weight(product: str, a: Tensor, weight: Tensor, gather: bool, transposed: bool) -> Run:
        n, k = weight.shape[1:] if transposed else weight.shape[:0:-1]
        tile = config(product, 0, n, k)
        return lambda: rows_by_weight(
            a, weight, tables, gather=gather, transposed=transposed, config=tile, grid=grid
        )

    def summed(product: str, a: Tensor, b: Tensor, gather: bool) -> Run:
        tile = config(product, a.shape[1], b.shape[1], 0)
        return lambda: weight_grad(a, b, tables, gather=gather, config=tile, grid=grid)

    return {
        "fc1": {
            "ours": by_weight("fc1", x, w1, True, True),
            "rows": by_weight("fc1", x_rows, w1, False, True),
        },
        "fc2": {"ours": by_weight("fc2", act, w2, False, True)},
        "d_act": {
            "ours": by_weight("d_act", dy, w2, True, False),
            "rows": by_weight("d_act", dy_rows, w2, False, False),
        },
        "d_x": {"ours": by_weight("d_x", d_l1, w1, False, False)},
        "d_w1": {"ours": summed("d_w1", d_l1, x_rows, False)},
        "d_w2": {
            "ours": summed("d_w2", dy, act, True),
            "rows": summed("d_w2", dy_rows, act, False),
        },
    }


def variants(wanted: list[str]) -> dict[str, dict[str, Run]]:
    """What is compared, by `shape:product` and variant, in the order of ``wanted``."""
    found: dict[str, dict[str, Run]] = {}
    for name in dict.fromkeys(entry.split(":")[0] for entry in wanted):
        inputs = Inputs(SHAPES[name])
        own, others = ours(inputs), stages.products(inputs)
        for product in PRODUCTS:
            found[f"{name}:{product}"] = {**own[product], "torch": others[product]}
    return {entry: found[entry] for entry in wanted}


def launch_each(wanted: list[str]) -> None:
    """What runs under the profiler: every variant once, after all were warmed up."""
    runs = [run for by_variant in variants(wanted).values() for run in by_variant.values()]
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # ncu saves and restores what is allocated
    torch.cuda.profiler.start()
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(wanted: list[str]) -> tuple[list[dict[str, float]], str]:
    """Run this file under ncu; return the counters of each kernel, or none and why."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(ncu).exists():
        return [], "ncu is not installed"
    known = _known_counters(ncu)
    names = [name for name, _ in COUNTERS.values() if not known or name.split(".")[0] in known]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--profile-from-start", "off", "--launch-count", str(8 * len(wanted))]
        command += ["--clock-control", "none", "--cache-control", "none"]
        command += ["--metrics", ",".join(names), sys.executable, __file__, "--launch-each"]
        done = subprocess.run(
            [*command, "--products", *wanted], capture_output=True, text=True, check=False
        )
        text = log.read_text(encoding="utf-8") if log.exists() else ""
    return parse(text), _reason(text + done.stdout + done.stderr)


def _known_counters(ncu: str) -> set[str]:
    """The counters that this ncu has for Hopper; one that it lacks would end the run."""
    query = [ncu, "--query-metrics", "--chip", "gh100"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in listed.splitlines() if "__" in line}


def parse(text: str) -> list[dict[str, float]]:
    """Return the counters of each product's kernel, in order, from ncu's raw CSV page."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return []
    kernels = []
    for row in csv.DictReader(line for line in lines[head:] if line.startswith('"')):
        if not row["ID"]:  # the units
            continue
        if any(word in row["Kernel Name"] for word in ("prepare", "elementwise")):
            continue
        counters = {
            label: float(row[name].replace(",", "")) * scale
            for label, (name, scale) in COUNTERS.items()
            if _is_number(row.get(name))
        }
        if counters.get("time, us", 0.0) >= _SHORTEST_US:
            kernels.append(counters)
    return kernels


def _is_number(text: str | None) -> bool:
    try:
        float((text or "").replace(",", ""))
    except ValueError:
        return False
    return True


def _reason(output: str) -> str:
    if "ERR_NVGPUCTRPERM" in output:
        return "the driver lets only root read them (ERR_NVGPUCTRPERM)"
    errors = [line for line in output.splitlines() if "==ERROR==" in line or "Error" in line]
    return errors[-1].strip() if errors else "ncu wrote none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = [f"{shape}:{product}" for shape in SHAPES for product in PRODUCTS]
    parser.add_argument("--products", nargs="+", choices=choices, default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launch-each", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch_each:
        launch_each(args.products)
        return
    output.need_gpu(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16", flush=True)
    compared = variants(args.products)
    ms = {name: in_turn(dict(runs), args.rounds) for name, runs in compared.items()}
    order = [(name, variant) for name, runs in compared.items() for variant in runs]
    del compared
    torch.cuda.empty_cache()
    kernels, why = profiled(args.products)
    if len(kernels) != len(order):
        print(f"no counters: {why} ({len(kernels)} kernels of {len(order)})")
        kernels = [{} for _ in order]
    counters = dict(zip(order, kernels, strict=True))
    for name, by_variant in ms.items():
        print(f"\n{name:20}" + "".join(f"{variant:>12}" for variant in by_variant))
        print(f"{'unprofiled, us':20}" + "".join(f"{1e3 * t:12.1f}" for t in by_variant.values()))
        for label in COUNTERS:
            values = [counters[name, variant].get(label) for variant in by_variant]
            if any(values):
                cells = ("" if value is None else f"{value:.2f}" for value in values)
                print(f"{label:20}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
