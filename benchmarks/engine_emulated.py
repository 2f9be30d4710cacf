"""Does overlap through the engine save the step's communication? EMULATED collectives.

    python benchmarks/engine_emulated.py --edp 8 --bandwidth 50 --ctas 8 --clusters 4
    python benchmarks/engine_emulated.py --device cpu --bandwidth 0.5     # a toy

A stack of MoE layers takes whole steps (forward, backward, optimizer) through the engine, on a
group whose collectives a paced copy stands in for. Three variants, which take turns for `--rounds`
rounds, each time timed without a profiler and then profiled:

serialised  every collective waited for where it is issued
split       overlapped, all SMs for the products
budget      overlapped, and the products leave the link's CTAs free while a collective is under way

    effective   = (step serialised - step) / communication, the latter by the link's arithmetic
    by profiles   the same from the profiles alone
    bound       = serialised - communication + what no schedule of this depth hides, which the
                  serialised profile says

The claim: with the budget the step is near the bound, and the profiles agree with the clock.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

import torch

import profiling
from benchmarks import output
from examples.preview_overlap import (
    PRESETS,
    Run,
    add_link_arguments,
    build,
    effective,
    emulated,
    exposed,
    hidden,
    least,
    link_from,
    measure,
)
from profiling import Report

VARIANTS = {
    "serialised": {"serialize": True},
    "split": {"serialize": False, "budget": False},
    "budget": {"serialize": False, "budget": True},
}


def pooled(runs: list[Run]) -> Run:
    """All rounds of a variant: their steps together, the rest of the last round."""
    steps = tuple(ms for run in runs for ms in run.steps)
    waited = sum(run.waited for run in runs) / len(runs)
    return replace(runs[-1], steps=steps, waited=waited)


def to_figures(serial: Run, run: Run, report: Report) -> dict[str, object]:
    """What is printed and written of one variant."""
    gather, reduce = hidden(report).values()
    saved = report.effective
    return {
        "step_ms": run.step,
        "effective": effective(serial, run),
        "by profiles": None if saved is None else saved.value,
        "stood_still_ms": run.waited,
        "exposed_ms": exposed(report),
        "gather_hidden": gather,
        "reduce_hidden": reduce,
        "verdict": report.verdict.value,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_link_arguments(parser)
    output.add_arguments(parser)
    parser.add_argument("--preset", choices=PRESETS, help="default: deepseek-v3, tiny on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="timed ones of a variant and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", metavar="DIR", type=Path, help="keep the profiles here")
    args = parser.parse_args(argv)
    device, link = torch.device(args.device), link_from(args)
    name = args.preset or ("deepseek-v3" if device.type == "cuda" else "tiny")
    preset = PRESETS[name]
    torch.manual_seed(1)
    model = build(preset, args.layers, device)
    x = torch.randn(preset.tokens, preset.hidden, device=device)
    x = x.to(next(model.parameters()).dtype)
    print(output.environment(device))
    print(f"EMULATED collectives: {link}; rank 0 of {args.edp}")
    print(f"{args.layers} layers of {name}: {preset}")
    print(f"medians of {args.rounds} x {args.steps} steps", flush=True)
    rounds: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch, emulated(link, args.edp):
        for index in range(args.rounds):
            for variant in order.sample(list(VARIANTS), len(VARIANTS)):
                folder = (args.profile or Path(scratch)) / f"{variant}.{index}"
                options = VARIANTS[variant]
                run = measure(model, x, link, folder, steps=args.steps, **options)
                rounds[variant].append(run)
    runs = {variant: pooled(several) for variant, several in rounds.items()}
    serial = runs["serialised"]
    baseline = profiling.check(serial.profile)
    figures = {"serialised": to_figures(serial, serial, baseline)}
    for variant in ("split", "budget"):
        report = profiling.check(runs[variant].profile, baseline=serial.profile)
        figures[variant] = to_figures(serial, runs[variant], report)
    columns = list(figures["serialised"])
    print(f"{'':12}" + "".join(f"{column:>15}" for column in columns))
    for variant, row in figures.items():
        cells = (f"{v:>15.3f}" if isinstance(v, float) else f"{v or '-':>15}" for v in row.values())
        print(f"{variant:12}" + "".join(cells))
    exposed_at_least = least(baseline)
    print(
        f"communication {serial.communication:.2f} ms (gathers {serial.gathers:.2f}, reductions "
        f"{serial.reduces:.2f})"
    )
    bound = None
    if exposed_at_least is not None:
        bound = serial.step - serial.communication + exposed_at_least
        print(
            f"not to be hidden {exposed_at_least:.2f} ms; bound {bound:.2f} ms a step, effective "
            f"{1 - exposed_at_least / serial.communication:.3f}; step over bound: "
            + ", ".join(f"{variant} {run.step / bound:.3f}" for variant, run in runs.items())
        )
    output.write_json(
        args.json,
        device,
        {
            "emulated": str(link),
            "ranks": args.edp,
            "preset": name,
            "layers": args.layers,
            "communication_ms": serial.communication,
            "bound_ms": bound,
            "variants": figures,
        },
    )


if __name__ == "__main__":
    main()
