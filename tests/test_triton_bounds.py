"""No kernel of the Triton backend reads or writes outside of its operands."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.programs import run_module
from tests.triton_cases import ON_GPU

if ON_GPU:
    pytest.skip("for Triton's interpreter; a GPU has compute-sanitizer", allow_module_level=True)
if not sys.platform.startswith("linux"):
    pytest.skip("protects pages by Linux's mprotect", allow_module_level=True)


def bounds(side: str, what: str) -> subprocess.CompletedProcess[str]:
    return run_module("tests.triton_bounds", side, what, TRITON_INTERPRET="1")


@pytest.mark.parametrize("side", ["end", "start"])
def test_kernels_stay_inside_their_operands(side: str) -> None:
    run = bounds(side, "kernels")
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


@pytest.mark.parametrize("side", ["end", "start"])
def test_an_access_past_an_operand_is_fatal(side: str) -> None:
    run = bounds(side, "past")
    assert (run.returncode, run.stdout) == (-signal.SIGSEGV, "still here\n"), run.stderr
