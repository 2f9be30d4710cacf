"""What real traces do that leads a reading astray: each case with its right value.

Damaged files and odd values are in test_profiling_loading_traps.py.
"""

import numpy as np
import pytest

import profiling
from profiling import Verdict
from profiling.attribution import attribute
from profiling.classification import Work
from profiling.intervals import total
from profiling.loading import load
from profiling.names import KERNELS
from profiling.overview import overview
from profiling.ranges import Kind
from tests.kineto import (
    ALL_GATHER,
    AUTOGRAD,
    COMMUNICATION,
    COMPUTE,
    MAIN,
    TraceBuilder,
    gpu_iteration,
)

EXPERTS = "layers.0.mlp.experts"
ISSUE, STAGE = f"overlap::param_gather[{EXPERTS}.fc2_weight]", f"megamoe::stage1.forward[{EXPERTS}]"


def read(trace, tmp_path):
    return load(trace.write(tmp_path)).traces[0]


def whole(trace, tmp_path):
    return overview(read(trace, tmp_path))[-1]


def iterations(count=3, **kwargs):
    trace = TraceBuilder()
    for number in range(count):
        gpu_iteration(trace, number, 1e6 + 2000 * number, **kwargs)
    return trace


def gathers(tmp_path, *traces):
    """Return the row of layer 0's gather."""
    for trace in traces:
        trace.write(tmp_path)
    (row,) = [row for row in profiling.check(tmp_path).rows if row.layer == EXPERTS]
    return row


# Overlap of a whole trace


def test_the_last_step_counts(tmp_path):
    trace = TraceBuilder()
    for step in range(3):
        at = 1000 * step
        trace.add("user_annotation", f"ProfilerStep#{step}", at, at + 1000, MAIN)
        trace.kernel(ALL_GATHER, at, at + 100, at + 200, stream=COMMUNICATION)
    trace.kernel("gemm", 2003, 2100, 2200)  # only the last step hides its gather
    assert whole(trace, tmp_path).overlap == pytest.approx(1 / 3)


def test_499_kernels_below_a_microsecond_are_44_9_percent(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 2000, stream=COMMUNICATION)
    for index in range(499):
        trace.kernel("tiny", 1, 1001 + 2 * index, 1001.9 + 2 * index)
    assert 100 * whole(trace, tmp_path).overlap == pytest.approx(44.91)


def test_work_on_another_device_hides_nothing(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 2000, stream=COMMUNICATION)
    trace.kernel("gemm", 3, 1000, 2000, device=1)
    first, second, both = overview(read(trace, tmp_path))
    assert (first.overlap, second.overlap, both.overlap) == (0, None, 0)


def test_kernels_of_one_stream_that_overlap_count_once(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 2000, stream=COMMUNICATION)
    trace.kernel(ALL_GATHER, 3, 1500, 2500, stream=COMMUNICATION)
    trace.kernel("gemm", 6, 1000, 1600)
    trace.kernel("gemm", 9, 1100, 1750)
    found = whole(trace, tmp_path)
    assert found.communication == 1_500_000
    assert found.overlap == pytest.approx(750 / 1500)


def test_spans_of_annotations_are_neither_communication_nor_work(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 1100, stream=COMMUNICATION)
    trace.add("gpu_user_annotation", "nccl:_all_gather_base", 0, 5000, COMMUNICATION)
    trace.add("gpu_user_annotation", STAGE, 0, 5000, COMPUTE)
    trace.add("user_annotation", "nccl:_all_gather_base", 0, 5000, MAIN)
    found = whole(trace, tmp_path)
    assert (found.communication, found.overlap) == (100_000, 0)
    assert found.counts == {Work.COMMUNICATION: 1}


def test_kernels_without_a_launch_are_kept_and_counted(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 0, 1000, 1100, stream=COMMUNICATION)
    trace.kernel("gemm", 3, 1050, 1200)
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    found = attribute(read(trace, tmp_path))
    assert len(found.unattributed) == 2
    assert "2 of 2 device events are unattributed" in found.notes[0]
    assert overview(found.trace, found.work)[-1].overlap == pytest.approx(0.5)


# The stage of a kernel


def stage_of(trace, tmp_path):
    (stage,) = attribute(read(trace, tmp_path)).stages
    return stage


def test_one_correlation_of_a_graph_carries_all_of_the_stage(tmp_path):
    trace = iterations(1, gather=(150, 650))
    *_, gemm = [event for event in trace.events if event["cat"] == "kernel"]
    for launch in trace.events:
        if launch["args"].get("correlation") == gemm["args"]["correlation"]:
            launch["name"] = launch["name"].replace("cudaLaunchKernel", "cudaGraphLaunch")
    for index in range(3):
        trace.events.append(gemm | {"ts": 1e6 + 1200 + 100 * index, "dur": 50})
    stage = stage_of(trace, tmp_path)
    assert len(stage.events) == 4
    assert total(stage.busy) == 1_150_000


def test_a_graph_over_whole_layers_does_not_tell_its_stages(tmp_path):
    trace = iterations(gather=(150, 650))
    for event in trace.events:
        if "gemm" in event["name"]:  # launched by one graph, before all stages
            event["args"]["correlation"] = 999
    trace.add("cuda_runtime", "cudaGraphLaunch", 1e6, 1e6 + 5, MAIN, correlation=999)
    row = gathers(tmp_path, trace)
    assert row.verdict is Verdict.INCONCLUSIVE
    assert "no launch says whether they are the stage's" in row.finding
    notes = profiling.check(tmp_path).notes
    assert any("3 kernels were launched by graphs outside of any stage's range" in n for n in notes)


@pytest.mark.parametrize(("gather", "verdict"), [((150, 650), "PASS"), ((1150, 1350), "FAIL")])
def test_two_streams_that_share_a_correlation_are_told_apart(tmp_path, gather, verdict):
    trace = iterations(gather=gather)
    for index in range(60):  # many launches do not share one: else the file holds two ranks
        trace.kernel("norm", 1e6 + 1400 + index, 1e6 + 1500 + index, 1e6 + 1501 + index)
    for number in range(3):  # the gather's launch and the stage's get the same
        for event in trace.events:
            if event["args"].get("correlation") in (2 * number + 1, 2 * number + 2):
                event["args"]["correlation"] = 100 + number
    row = gathers(tmp_path, trace)
    assert (row.verdict.value, row.occurrences) == (verdict, 3)


def test_a_kernel_may_start_before_its_launch(tmp_path):
    early = iterations(gather=(14, 514), stage=(47, 1047))  # launched at 15 and 50
    row = gathers(tmp_path, early)
    assert row.hidden == pytest.approx((514 - 47) / 500)


def test_a_stage_is_its_kernels_not_their_annotation(tmp_path):
    """In backward an annotation on the device covers less than the kernels of its range."""
    trace = iterations(gather=(150, 650))
    for number in range(3):
        at = 1e6 + 2000 * number
        trace.add("gpu_user_annotation", STAGE, at + 100, at + 300, COMPUTE)
    assert gathers(tmp_path, trace).hidden == 1


@pytest.mark.parametrize("thread", [MAIN, AUTOGRAD])
def test_a_stage_is_what_its_own_thread_launched(tmp_path, thread):
    trace = TraceBuilder()
    trace.range(Kind.STAGE1_BACKWARD, EXPERTS, 0, 100, AUTOGRAD)
    trace.kernel("gemm", 50, 200, 300, tid=thread)
    assert len(stage_of(trace, tmp_path).events) == (thread == AUTOGRAD)


def test_a_range_inside_its_like_is_one_run_and_a_repeated_one_is_two(tmp_path):
    trace = TraceBuilder()
    for at in (0, 1000):
        trace.range(Kind.STAGE1_FORWARD, EXPERTS, at, at + 100)
        trace.range(Kind.STAGE1_FORWARD, EXPERTS, at + 5, at + 95)
        trace.range(Kind.STAGE1_FORWARD, EXPERTS, at + 5, at + 95, AUTOGRAD)  # another thread's
        trace.kernel("gemm", at + 50, at + 200, at + 300)
    found = attribute(read(trace, tmp_path)).stages
    assert [(stage.span.start, len(stage.events)) for stage in found] == [
        (0, 1),
        (5_000, 0),
        (1_000_000, 1),
        (1_005_000, 0),
    ]


def test_microbatches_count_runs_and_leave_out_what_backward_runs_again(tmp_path):
    trace = TraceBuilder()
    trace.range(Kind.ITERATION, "5", 0, 10_000)
    for microbatch in range(2):
        at = 4000 * microbatch
        for layer in ("a", "b"):
            trace.range(Kind.STAGE1_FORWARD, layer, at, at + 10)
        for layer in ("b", "a"):
            trace.range(Kind.STAGE1_FORWARD, layer, at + 1000, at + 1010, AUTOGRAD)
            trace.range(Kind.STAGE1_BACKWARD, layer, at + 1010, at + 1020, AUTOGRAD)
    trace.kernel("gemm", 5, 200, 300)
    found = attribute(read(trace, tmp_path)).stages
    assert {stage.iteration for stage in found} == {5}
    for layer in ("a", "b"):
        for kind, numbers in [
            (Kind.STAGE1_FORWARD, [0, None, 1, None]),
            (Kind.STAGE1_BACKWARD, [0, 1]),
        ]:
            runs = [one for one in found if (one.span.kind, one.span.name) == (kind, layer)]
            assert [run.microbatch for run in runs] == numbers


# What communicates


@pytest.mark.parametrize(
    "name", [row.example for row in KERNELS], ids=[row.what for row in KERNELS]
)
def test_every_name_of_a_communication_kernel_is_judged(tmp_path, name):
    """Even on the stages' own stream, where only its name can tell."""
    trace = iterations(gather=(1200, 1700), kernel=name, stream=COMPUTE)
    row = gathers(tmp_path, trace)
    assert (row.occurrences, row.hidden, row.verdict) == (3, 0, Verdict.FAIL)


@pytest.mark.parametrize(
    ("copy", "stream", "found"),
    [
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION, 3),
        ("Memcpy PtoP (Device -> Device)", COMPUTE, 3),
        ("Memcpy DtoD (Device -> Device)", COMMUNICATION, 3),
        ("Memcpy DtoD (Device -> Device)", COMPUTE, 0),  # it packs
        ("Memcpy HtoD (Pinned -> Device)", COMMUNICATION, 0),
    ],
)
@pytest.mark.parametrize(("gather", "hidden"), [((150, 650), 1), ((1200, 1700), 0)])
def test_a_gather_by_copy_engines(tmp_path, copy, stream, found, gather, hidden):
    trace = iterations(gather=gather, kernel=copy, stream=stream, category="gpu_memcpy")
    row = gathers(tmp_path, trace)
    assert row.occurrences == found
    assert row.hidden == (hidden if found else None)
    assert (row.verdict is Verdict.INCONCLUSIVE) == (not found)


def test_a_copy_that_no_collective_launched_is_a_copy(tmp_path):
    trace = iterations(gather=(150, 650))
    trace.kernel("Memcpy PtoP (Device -> Device)", 1e6 + 90, 1e6 + 1200, 1e6 + 1300, stream=30,
                 category="gpu_memcpy")  # fmt: skip
    found = attribute(read(trace, tmp_path))
    assert np.count_nonzero(found.work == Work.COPY) == 1
    assert np.count_nonzero(found.work == Work.COMMUNICATION) == 3


@pytest.mark.parametrize("call", ["record_param_comms", "c10d::_allgather_base_", "aten::copy_"])
def test_a_kernel_of_any_name_that_c10d_launched_communicates(tmp_path, call):
    trace = TraceBuilder()
    trace.op(call, 0, 20)
    trace.kernel("my_ring", 10, 100, 200, stream=COMMUNICATION)
    trace.kernel("gemm", 30, 100, 300)
    found = whole(trace, tmp_path)
    assert found.communication == (0 if call == "aten::copy_" else 100_000)


# Ranks


def rank(number, clock, first, **kwargs):
    """Two iterations of a rank whose first gather lasts ``first`` us; all gathers end together."""
    trace = TraceBuilder(number, world_size=2)
    says = {"Process Group Ranks": "[0, 1]", "Group size": 2}
    for index in range(6):
        start = 1e6 * (index + 2) + clock
        begins = 650 - (first if index == 0 else 500)
        gpu_iteration(trace, index, start, gather=(begins, 650), **kwargs, **says)
    return trace


@pytest.mark.parametrize("clock", [0, 3e5, -7e5])
def test_a_first_gather_of_654_ms_beside_1_5_ms_on_the_other_rank(tmp_path, clock):
    """Rank 1 started its profiler later; its figure is the transfer's, whatever its clock says."""
    waited = rank(0, 0, 654_000)
    late = rank(1, clock, 500)
    row = gathers(tmp_path, waited, late)
    assert row.hidden == 1
    assert row.verdict is Verdict.PASS
    assert row.occurrences + sum(row.set_aside.values()) == 12


@pytest.mark.parametrize("clock", [0, 3e5, -7e5])
def test_clocks_that_differ_change_no_figure(tmp_path, clock):
    row = gathers(tmp_path, rank(0, 0, 500), rank(1, clock, 500, stage=(400, 1100)))
    assert row.hidden == pytest.approx((500 + 250) / 1000)
    assert row.occurrences == 12
