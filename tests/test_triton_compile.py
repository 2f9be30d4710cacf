"""Every kernel of the Triton backend compiles for Hopper, and no product drains its pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if not sys.platform.startswith("linux"):
    pytest.skip("Triton compiles on Linux", allow_module_level=True)


def compiled(what: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-m", "tests.triton_compile", what],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_kernel_compiles_and_every_product_is_one_loop() -> None:
    run = compiled("flattened")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(" kernels, no fault\n")


def test_a_product_with_a_loop_per_tile_is_found() -> None:
    run = compiled("nested")
    assert run.returncode == 1, run.stderr
    assert "not one loop over the steps of all tiles" in run.stdout
