"""Every kernel of the Triton backend compiles for Hopper, and no product drains its pipeline."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs import run_module

pytest.importorskip("triton")
if not sys.platform.startswith("linux"):
    pytest.skip("Triton compiles on Linux", allow_module_level=True)


def compiled(what: str) -> subprocess.CompletedProcess[str]:
    return run_module("tests.triton_compile", what, TRITON_INTERPRET="0")


def test_every_kernel_compiles_and_every_product_is_one_loop() -> None:
    run = compiled("flattened")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(" kernels, no fault\n")


def test_a_product_with_a_loop_per_tile_is_found() -> None:
    run = compiled("nested")
    assert run.returncode == 1, run.stderr
    assert "not one loop over the steps of all tiles" in run.stdout
