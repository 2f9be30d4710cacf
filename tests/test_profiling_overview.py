"""Overlap of whole traces: on public ones against a naive oracle, on built ones by hand."""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from profiling.classification import Work
from profiling.loading import load
from profiling.overview import overview
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder

TRACES = Path(__file__).parents[2] / "shared" / "traces"
# file -> communication kernels, overlap in percent of communication, and where memsets count too
PUBLIC = {
    "a100_nccl_rank0": (21, 15.61, 15.67),
    "a100_dp_control": (60, 46.24, 46.64),
    "sampled_rank-0": (10, 14.95, 14.95),
    "sampled_rank-1": (10, 19.93, 19.93),
    "mi300_resnet_rccl": (17, 22.22, 22.58),
}
SILENT = ["mi250_minitoy", "mi300_compile_triton", "a100_multi_stream_event_sync"]


def public(name):
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here: it is public test data that this project does not hold")
    return path


@cache
def work_in(path):
    """The kernels and memsets in the file's own text: category, device, name, start and end."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [
        (event["cat"], event["args"]["device"], event["name"], start, start + length)
        for event in events
        if event.get("cat") in ("kernel", "gpu_memset")
        for start, length in [(round(event["ts"] * 1000), round(event["dur"] * 1000))]
    ]


def naive(path, device, *, memset=False):
    """Overlap in percent, by sweeping over every start and end."""
    edges = []
    for category, where, name, start, end in work_in(path):
        if (category == "kernel" or memset) and device in (None, where):
            communicates = "nccl" in name or "rccl" in name
            edges += [(start, 1, communicates), (end, -1, communicates)]
    running, since, both, communication = [0, 0], 0, 0, 0
    for at, step, communicates in sorted(edges):
        if running[True]:
            communication += at - since
            both += (at - since) * bool(running[False])
        running[communicates] += step
        since = at
    return 100 * both / communication


@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces_have_their_known_overlap(name):
    path = public(name)
    (trace,) = load(path).traces
    *devices, whole = overview(trace)
    kernels, percent, with_memset = PUBLIC[name]
    assert whole.device is None
    assert whole.counts[Work.COMMUNICATION] == kernels
    assert 100 * whole.overlap == pytest.approx(percent, abs=0.05)
    assert 100 * whole.overlap_with_memset == pytest.approx(with_memset, abs=0.05)
    assert len(devices) == 1
    for one in (*devices, whole):
        assert 100 * one.overlap == pytest.approx(naive(path, one.device), abs=0.01)
        assert 100 * one.overlap_with_memset == pytest.approx(
            naive(path, one.device, memset=True), abs=0.01
        )


@pytest.mark.parametrize("name", SILENT)
def test_without_communication_there_is_no_overlap_to_speak_of(name):
    (trace,) = load(public(name)).traces
    found = overview(trace)
    assert found
    assert all(one.overlap is None and one.overlap_with_memset is None for one in found)
    assert all(one.counts[Work.COMPUTE] > 0 for one in found)


def test_a_trace_without_a_device_has_no_overview():
    (trace,) = load(public("cpu_only_rank-34")).traces
    assert overview(trace) == ()


def built(tmp_path):
    """Two devices: a gather of 100 us beside 40 us of compute, and one beside nothing."""
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 1100, stream=COMMUNICATION)
    trace.kernel("gemm", 3, 1060, 1160)
    trace.kernel("Memset (Device)", 6, 1000, 1010, category="gpu_memset")
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 9, 1000, 1100, category="gpu_memcpy")
    trace.kernel(ALL_GATHER, 12, 1000, 1100, stream=COMMUNICATION, device=1)
    return load(trace.write(tmp_path)).traces[0]


def test_devices_are_apart_and_all_together(tmp_path):
    first, second, whole = overview(built(tmp_path))
    assert (first.device, second.device, whole.device) == (0, 1, None)
    assert (first.overlap, first.overlap_with_memset) == (pytest.approx(0.4), pytest.approx(0.5))
    assert second.overlap == 0  # the other device's work does not count
    assert whole.overlap == pytest.approx(0.2)
    assert (first.streams, second.streams, whole.streams) == (2, 1, 3)
    assert first.counts == {kind: 1 for kind in Work if kind is not Work.NONE}
    assert first.times[Work.COPY] == 100_000
