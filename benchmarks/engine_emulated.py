"""Does overlap through the engine save the step's communication? EMULATED collectives.

    PYTHONPATH=. python benchmarks/engine_emulated.py --edp 8 --bandwidth 50 --ctas 8 --clusters 4
    PYTHONPATH=. python benchmarks/engine_emulated.py --device cpu --bandwidth 0.5     # a toy

A stack of MoE layers takes whole steps (forward, backward, optimizer) through the engine, on a
group whose collectives a paced copy stands in for. Three variants, which take turns for `--rounds`
rounds, each time timed without a profiler and then profiled:

serialised  every collective waited for where it is issued
split       overlapped, all SMs for the products
budget      overlapped, and the products leave the link's CTAs free while a collective is under way

    effective = (step serialised - step) / communication, by the link's arithmetic
    bound     = serialised - communication + what no schedule of this depth can hide

The claim: with the budget the step is near the bound, and the profile's verdicts agree with the
clock: a PASS comes with a step that is shorter, a FAIL of the serialised run with one that is not.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

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
    link_from,
    measure,
)

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


def to_figures(serial: Run, run: Run) -> dict[str, object]:
    """What is printed and written of one variant."""
    gather, reduce = hidden(run.report).values()
    return {
        "step_ms": run.step,
        "effective": effective(serial, run),
        "stood_still_ms": run.waited,
        "exposed_ms": exposed(run.report),
        "gather_hidden": gather,
        "reduce_hidden": reduce,
        "verdict": run.report.verdict.value,
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
    assert serial.bound is not None
    communication = serial.gathers + serial.reduces
    bound = serial.step - communication + sum(serial.bound)
    figures = {variant: to_figures(serial, run) for variant, run in runs.items()}
    columns = list(figures["serialised"])
    print(f"{'':14}" + "".join(f"{column:>16}" for column in columns))
    for variant, row in figures.items():
        cells = (f"{v:>16.3f}" if isinstance(v, float) else f"{v!s:>16}" for v in row.values())
        print(f"{variant:14}" + "".join(cells))
    print(
        f"communication {communication:.2f} ms (gathers {serial.gathers:.2f}, reductions "
        f"{serial.reduces:.2f}); not to be hidden: forward {serial.bound[0]:.2f}, backward "
        f"{serial.bound[1]:.2f}"
    )
    print(
        f"bound: {bound:.2f} ms a step, effective {1 - sum(serial.bound) / communication:.3f}; "
        f"budget / bound {runs['budget'].step / bound:.3f}, split / bound "
        f"{runs['split'].step / bound:.3f}, serialised / bound {serial.step / bound:.3f}"
    )
    output.write_json(
        args.json,
        device,
        {
            "emulated": str(link),
            "ranks": args.edp,
            "preset": name,
            "layers": args.layers,
            "communication_ms": communication,
            "bound_ms": bound,
            "variants": figures,
        },
    )


if __name__ == "__main__":
    main()
