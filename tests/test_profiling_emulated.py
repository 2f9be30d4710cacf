"""Profiles of emulated collectives: they say so, and whatever stands in for a collective is one.

On a CPU the tests of the preview record and judge them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import profiling
from profiling import ranges
from tests.kineto import MAIN, TraceBuilder, gpu_iteration

COPY = "Memcpy HtoD (Pinned -> Device)"


def profile(folder: Path, *, announced: bool) -> Path:
    """Two iterations whose gather is a copy from the host: the copy engine, keeping time."""
    trace = TraceBuilder()
    for number in range(2):
        start = 3000.0 * number
        gpu_iteration(trace, number, start, gather=(100, 900), kernel=COPY, category="gpu_memcpy")
        if announced:
            trace.add(
                "user_annotation", ranges.emulated("all_gather"), start + 12, start + 28, MAIN
            )
    trace.write(folder)
    return folder


def test_what_an_emulated_range_launched_is_its_collective(tmp_path: Path) -> None:
    row = profiling.check(profile(tmp_path, announced=True)).rows[0]
    assert (row.hidden, row.occurrences) == (1.0, 2)


def test_a_copy_from_the_host_is_none_otherwise(tmp_path: Path) -> None:
    row = profiling.check(profile(tmp_path, announced=False)).rows[0]
    assert row.hidden is None


@pytest.mark.parametrize("backend", ["emulated", "nccl"])
def test_the_report_says_emulated(tmp_path: Path, backend: str) -> None:
    trace = TraceBuilder()
    trace.metadata["distributedInfo"]["backend"] = backend
    gpu_iteration(trace, 0, 0.0, gather=(100, 900))
    notes = profiling.check(trace.write(tmp_path)).notes
    assert any("EMULATED" in note for note in notes) == (backend == "emulated")
