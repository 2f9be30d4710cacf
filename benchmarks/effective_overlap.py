"""Does a collective beside a stage save time? One GPU, copies in the collective's place: emulation.

    python benchmarks/effective_overlap.py [--ctas 4 8 16 32] [--rounds 9]

A copy kernel of c CTAs on a high-priority stream, each on an SM of its own (shared memory sees to
that) and together paced to the rate that NCCL reached with as many CTAs, stands in for the gather
of w2 beside stage 1 forward, and for the reduce-scatter of dW2 beside stage 1 backward; `engine` is
a copy from pinned host memory, which the copy engine does without an SM. The copy is issued before
the stage, as the engine does. It takes about `--share` of the stage's time.

    effective = (T_serial - T_together) / T_copy

T_serial is stage and copy one after the other on the same stream. A copy that owns c of n SMs for
its whole time cannot do better than about 1 - c / n beside a product that uses them all. Variants:
the reference backend, ours without a budget, with a budget of c SMs, and with the same budget but
no programs of one draw, so that the SMs stay idle before and after the copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere
if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit("Triton is not installed: pip install 'triton>=3.4,<4'")

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from benchmarks import output
from benchmarks.stages import SHAPES, Inputs
from megamoe import mega_moe_stage1
from megamoe.backends.triton import add_sm_budget
from megamoe.backends.triton.schedule import Grid
from megamoe.timing import in_turn

# GB/s that NCCL's all-gather between two H200 reached with that many CTAs (docs/kernels.md).
NCCL_RATE = {4: 77.0, 8: 154.0, 16: 247.0, 32: 290.0}
_PART = 1 << 19  # bytes between two looks at the clock


@triton.jit
def _copy(source, target, parts, part_ns, CTAS: tl.constexpr, PART: tl.constexpr):
    """Copy ``parts`` parts of PART int32, each CTA one part per ``part_ns``."""
    begin = globaltimer()
    done = 0  # enumerate() is not Triton
    for part in range(tl.program_id(0), parts, CTAS):
        # Pipelined through shared memory, so that no product fits on the same SM.
        for first in tl.range(0, PART, 8192, num_stages=4):
            at = part.to(tl.int64) * PART + first + tl.arange(0, 8192)
            tl.store(target + at, tl.load(source + at))
        done += 1  # noqa: SIM113
        while globaltimer() - begin < done * part_ns:
            pass


def stage1(inputs: Inputs, backend: str) -> dict[str, Callable[[], object]]:
    """The two windows: stage 1 forward, and stage 1 backward."""
    l1, dispatch_weights, _ = mega_moe_stage1(
        inputs.x, inputs.ids, inputs.weights, inputs.w1, None, backend=backend
    )
    d_l1, d_weights = torch.randn_like(l1), torch.randn_like(dispatch_weights)

    def forward() -> None:
        with torch.no_grad():
            mega_moe_stage1(inputs.x, inputs.ids, inputs.weights, inputs.w1, None, backend=backend)

    def backward() -> None:
        torch.autograd.grad(
            (l1, dispatch_weights),
            (inputs.x, inputs.weights, inputs.w1),
            (d_l1, d_weights),
            retain_graph=True,
        )

    return {"forward": forward, "backward": backward}


def copies(ctas: int, target_ms: float) -> Callable[[], None]:
    """A copy that takes about ``target_ms`` with ``ctas`` CTAs, or by the copy engine where 0."""
    trial = _copy_of(ctas, 1 << 28)
    ms = in_turn({"trial": trial}, 3)["trial"]
    return _copy_of(ctas, int((1 << 28) * target_ms / ms))


def _copy_of(ctas: int, num_bytes: int) -> Callable[[], None]:
    if not ctas:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty_like(host, device="cuda")

        def by_engine() -> None:
            device.copy_(host, non_blocking=True)

        return by_engine
    parts = max(num_bytes // _PART, 1)
    source: Tensor = torch.randint(0, 9, (parts * _PART // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    part_ns = int(_PART * ctas / NCCL_RATE[ctas])

    def by_kernel() -> None:
        _copy[(ctas,)](source, target, parts, part_ns, CTAS=ctas, PART=_PART // 4, num_warps=16)

    return by_kernel


def together(stage: Callable[[], object], copy: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream(priority=-1)

    def run() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            copy()
        stage()
        main.wait_stream(side)

    return run


def budgeted(reserved: int, run: Callable[[], object]) -> Callable[[], None]:
    def inner() -> None:
        remove = add_sm_budget(lambda: reserved)
        run()
        remove()

    return inner


def resident_only(run: Callable[[], object]) -> Callable[[], None]:
    def inner() -> None:
        whole, Grid.programs = Grid.programs, lambda grid, tiles, most: grid.resident
        try:
            run()
        finally:
            Grid.programs = whole

    return inner


def in_turn_with(stage: Callable[[], object], copy: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        copy()
        stage()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ctas", nargs="+", type=int, choices=[*NCCL_RATE, 0], default=[*NCCL_RATE, 0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--share", type=float, default=0.75, help="copy time / stage time")
    parser.add_argument("--shape", choices=SHAPES, default="dsv3")
    args = parser.parse_args()
    output.need_gpu(parser)
    inputs = Inputs(SHAPES[args.shape])
    windows = {backend: stage1(inputs, backend) for backend in ("triton", "reference")}
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}: {inputs.shape}"
    )
    print("emulated collectives (copies); times in ms, effective in brackets")
    for window in ("forward", "backward"):
        ours, theirs = windows["triton"][window], windows["reference"][window]
        alone = in_turn({"triton": ours, "reference": theirs}, args.rounds)
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in alone.items())
        print(f"\nstage 1 {window} alone: {times}")
        names = ("reference", "no budget", "budget c", "resident only")
        print(f"{'copy':>8}{'alone':>8}{'serial':>8}" + "".join(f"{n:>16}" for n in names))
        for ctas in args.ctas:
            copy = copies(ctas, alone["triton"] * args.share)
            shared = together(ours, copy)
            variants: dict[str, Callable[[], object]] = {
                "copy": copy,
                "serial": in_turn_with(ours, copy),
                "serial reference": in_turn_with(theirs, copy),
                "reference": together(theirs, copy),
                "no budget": shared,
            }
            if ctas:
                variants["budget c"] = budgeted(ctas, shared)
                variants["resident only"] = resident_only(variants["budget c"])
            else:
                variants["budget c"] = budgeted(1, shared)
            ms = in_turn(variants, args.rounds)
            cells = []
            for name in names:
                if name not in ms:
                    cells.append(f"{'':>16}")
                    continue
                serial = ms["serial reference" if name == "reference" else "serial"]
                effective = (serial - ms[name]) / ms["copy"]
                cells.append(f"{f'{ms[name]:.2f} ({effective:.2f})':>16}")
            label = str(ctas) if ctas else "engine"
            print(f"{label:>8}{ms['copy']:8.2f}{ms['serial']:8.2f}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
