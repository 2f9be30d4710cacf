"""A program that compiles every kernel of the Triton backend for Hopper, on any machine.

    python -m tests.triton_compile {flattened,nested}

The host code runs as on a GPU, with the shapes of a real layer, but its launches only compile: what
the interpreter lets pass and the compiler does not shows here, and so does what decides the speed.
A product's two loops must be one, or the pipeline drains after every tile, and no register may
spill. `nested` compiles a product with a loop per tile in place of ours, for the check to find.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megamoe.backends.triton import add_sm_budget
from tests.triton_launches import launch_router, launch_stages

PRODUCTS = ("_rows_by_weight", "_weight_grad")
HOPPER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


def launches(run: Any) -> dict[str, Any]:
    """Return the compiled kernels of ``run()``, by name and hash."""
    compiled: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled[f"{kernel.metadata.name} {kernel.hash[:8]}"] = kernel
        return kernel

    triton.runtime.driver.set_active(HOPPER)
    with mock.patch.object(JITFunction, "run", compile_only):
        run()
    return compiled


def layer() -> None:
    """Launch what a layer of 8 experts launches, with and without a budget."""
    tokens, top_k, experts, hidden, ffn = 256, 2, 8, 512, 256
    bf16 = {"dtype": torch.bfloat16}
    x, dy = torch.zeros(tokens, hidden, **bf16), torch.zeros(tokens, hidden, **bf16)
    w1 = torch.zeros(experts, 2 * ffn, hidden, **bf16)
    w2 = torch.zeros(experts, hidden, ffn, **bf16)
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    weights = torch.zeros(tokens, top_k)
    for reserved in (0, 1):
        remove = add_sm_budget(lambda reserved=reserved: reserved)
        launch_stages(x, ids, weights, w1, w2, dy)
        remove()
    for groups in (1, 4):
        launch_router(tokens, 16, groups)


@triton.jit
def _weight_grad(out_ptr, a_ptr, counts_ptr, tiles, SIZE: tl.constexpr):
    within = tl.arange(0, SIZE)
    at = within[:, None] * SIZE + within[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        acc = tl.zeros([SIZE, SIZE], tl.float32)
        for _ in range(tl.load(counts_ptr + tile)):
            a = tl.load(a_ptr + at)
            acc = tl.dot(a, a, acc)
        tl.store(out_ptr + tile * SIZE * SIZE + at, acc)


def nested() -> None:
    a, counts = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    _weight_grad[(1,)](torch.zeros(3, 64, 64), a, counts, 3, SIZE=64, num_warps=4)


def faults(name: str, kernel: Any) -> list[str]:
    """Return what is wrong with a product; other kernels need to compile, no more."""
    found = []
    if name.split()[0] in PRODUCTS:
        if spilled := stack(kernel):
            found.append(f"{name}: {spilled} bytes of registers spilled")
        if kernel.asm["ttgir"].count("scf.for") != 1:
            found.append(f"{name}: not one loop over the steps of all tiles")
    return found


def stack(kernel: Any) -> int:
    """Return the bytes of stack that a thread needs."""
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]


if __name__ == "__main__":
    kernels = launches({"flattened": layer, "nested": nested}[sys.argv[1]])
    problems = [fault for name, kernel in kernels.items() for fault in faults(name, kernel)]
    print("\n".join(problems) or f"{len(kernels)} kernels, no fault")
    sys.exit(bool(problems))
