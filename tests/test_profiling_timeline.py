"""The timeline: what is drawn where, on built traces with a known answer, and how large it gets."""

import json
from pathlib import Path

import numpy as np
import pytest

import profiling
from profiling.drawing import draw
from profiling.lanes import Paint
from profiling.ranges import Kind
from profiling.timeline import PAINTS, encode
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder, cpu_iteration, gpu_iteration

DATA = Path(__file__).parent / "data"
EXPERTS = "layers.0.mlp.experts"


def built(tmp_path, make, count=2, **kwargs):
    trace = TraceBuilder()
    for number in range(count):
        make(trace, number, 1e6 + 2000 * number, **kwargs)
    return drawn(trace.write(tmp_path))


def drawn(path, **kwargs):
    return draw(profiling.read(path), **kwargs)


def painted(shown, paint):
    """(lane, start, end) of all slices of a paint, in nanoseconds after the first stage's start."""
    return [
        (row.title, int(start), int(start + length))
        for row in shown.rows
        for start, length, what in zip(row.start, row.length, row.paint, strict=True)
        if what == paint
    ]


def test_every_paint_has_its_label():
    assert [key.replace("-", "_") for key, _ in PAINTS] == [paint.name.lower() for paint in Paint]


def test_a_hidden_gather_has_no_exposed_part(tmp_path):
    shown = built(tmp_path, gpu_iteration, gather=(150, 650))
    assert [row.title for row in shown.rows] == ["stream 7", "stream 20"]
    assert painted(shown, Paint.STAGE1_FORWARD) == [
        ("stream 7", 0, 1_000_000),
        ("stream 7", 2_000_000, 3_000_000),
    ]
    assert painted(shown, Paint.GATHER) == [
        ("stream 20", 50_000, 550_000),
        ("stream 20", 2_050_000, 2_550_000),
    ]
    assert [len(row.exposed) for row in shown.rows] == [0, 0]
    one = shown.collectives[0]
    assert (one.name, one.transfer, one.exposed) == (f"{EXPERTS}.fc2_weight", 500_000, 0)
    assert one.under == ((f"stage1.forward of {EXPERTS}", 500_000),)
    assert (one.issue, one.start) == (-90_000, 50_000)
    assert not one.inferred


def test_the_exposed_part_is_marked_where_it_is(tmp_path):
    shown = built(tmp_path, gpu_iteration, gather=(1000, 1200))
    compute, communication = shown.rows
    assert len(compute.exposed) == 0
    assert communication.exposed.tolist() == [[1_000_000, 1_100_000], [3_000_000, 3_100_000]]
    one = shown.collectives[0]
    assert (one.transfer, one.exposed) == (200_000, 100_000)


def test_iterations_are_drawn_where_their_kernels_ran(tmp_path):
    shown = built(tmp_path, gpu_iteration, gather=(150, 650))
    assert [(each.name, each.start, each.end) for each in shown.iterations] == [
        ("0", 0, 1_000_000),
        ("1", 2_000_000, 3_000_000),
    ]
    assert shown.length == 3_000_000


def test_a_thread_that_waits(tmp_path):
    """On a CPU: a stage is one slice, gloo's ranges have a lane, a wait stands in its thread."""
    shown = built(tmp_path, cpu_iteration, gather=(1000, 1200))
    assert [row.title for row in shown.rows] == ["main thread", "gloo"]
    assert painted(shown, Paint.STAGE1_FORWARD)[0] == ("main thread", 100_000, 1_100_000)
    assert painted(shown, Paint.COMPUTE) == []  # the operators in the stage are the stage
    assert painted(shown, Paint.GATHER)[0] == ("gloo", 1_000_000, 1_200_000)
    assert painted(shown, Paint.WAIT)[0] == ("main thread", 1_100_000, 1_200_000)
    assert shown.rows[1].exposed.tolist()[0] == [1_100_000, 1_200_000]


def test_operators_outside_of_stages_are_drawn_and_their_children_are_not(tmp_path):
    trace = TraceBuilder()
    cpu_iteration(trace, 0, 1e6, gather=(150, 650))
    trace.op("aten::linear", 1e6 + 1300, 1e6 + 1500)
    trace.op("aten::mm", 1e6 + 1310, 1e6 + 1490)
    shown = drawn(trace.write(tmp_path))
    assert painted(shown, Paint.COMPUTE) == [("main thread", 1_300_000, 1_500_000)]
    assert "aten::linear" in shown.names


def test_a_device_that_waits(tmp_path):
    trace = TraceBuilder()
    for number in range(2):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=(1000, 1200))
        at = 1e6 + 2000 * number
        trace.kernel("void next()", at + 60, at + 1210, at + 1300)
    shown = drawn(trace.write(tmp_path))
    assert painted(shown, Paint.WAIT)[0] == ("stream 7", 1_000_000, 1_100_000)
    hidden = TraceBuilder()
    gpu_iteration(hidden, 0, 1e6, gather=(150, 650))
    hidden.kernel("void next()", 1e6 + 60, 1e6 + 1210, 1e6 + 1300)
    assert painted(drawn(hidden.write(tmp_path)), Paint.WAIT) == []


def test_communication_that_is_nobodys(tmp_path):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(150, 650))
    trace.kernel("ncclDevKernel_AllReduce_Sum", 1e6 + 60, 1e6 + 1050, 1e6 + 1150, stream=21)
    trace.kernel("Memcpy DtoH", 1e6 + 61, 1e6 + 700, 1e6 + 710, category="gpu_memcpy")
    shown = drawn(trace.write(tmp_path))
    assert painted(shown, Paint.COMMUNICATION) == [("stream 21", 950_000, 1_050_000)]
    assert shown.rows[-1].exposed.tolist() == [[1_000_000, 1_050_000]]
    assert [lane for lane, *_ in painted(shown, Paint.COPY)] == ["stream 7"]
    (one,) = [one for one in shown.collectives if one.name == "ncclDevKernel_AllReduce_Sum"]
    assert (one.transfer, one.beside, one.exposed) == (100_000, 0, 50_000)
    assert one.under == ((f"stage1.forward of {EXPERTS}", 50_000),)


@pytest.mark.parametrize("seed", range(20))
def test_exposed_parts_against_sets_of_microseconds(tmp_path, seed):
    """Random kernels on two devices, against sets of the microseconds in which they ran."""
    random = np.random.default_rng(seed)
    trace, ran = TraceBuilder(), {}
    for _ in range(60):
        device, stream = int(random.integers(2)), int(random.integers(3))
        start, length = int(random.integers(300)), int(random.integers(1, 30))
        sends = stream == 2
        name = "ncclDevKernel_AllReduce" if sends else "void gemm()"
        at = 1e6 + 1000 + start
        trace.kernel(name, 1e6 + start, at, at + length, stream=stream, device=device)
        key = device, "sends" if sends else "computes"
        ran.setdefault(key, set()).update(range(start, start + length))
    trace.kernel("void first()", 1e6, 1e6 + 1000, 1e6 + 1001, stream=0)  # the begin is known
    ran.setdefault((0, "computes"), set()).add(0)
    shown = drawn(trace.write(tmp_path))
    for device in range(2):
        marked = {
            at
            for row in shown.rows
            if row.place == f"GPU {device}"
            for start, end in row.exposed.tolist()
            for at in range(start // 1000, end // 1000)
        }
        alone = ran.get((device, "sends"), set()) - ran.get((device, "computes"), set())
        assert marked == alone


def many_kernels(seed, count):
    random = np.random.default_rng(seed)
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(1000, 1200))
    at = 1e6 + 1300
    for number in range(count):
        length = float(random.integers(1, 40)) / 10
        trace.kernel(f"kernel_{number % 7}", 1e6 + 85, at, at + length)
        at += length + float(random.integers(0, 20)) / 10
    return trace


def test_merging_keeps_where_work_was_and_what_is_long(tmp_path):
    path = many_kernels(5, 4000).write(tmp_path)
    whole, merged = drawn(path), drawn(path, slices=500)
    assert sum(len(row.start) for row in whole.rows) == 4002 + 1  # compute waits for the gather
    assert sum(len(row.start) for row in merged.rows) <= 500
    assert not whole.notes
    assert "drawn as one" in merged.notes[0]
    for before, after in zip(whole.rows, merged.rows, strict=True):
        assert after.count.sum() == len(before.start)
        assert (after.start[1:] >= after.start[:-1]).all()
        single = after.count == 1
        assert set(after.start[single].tolist()) <= set(before.start.tolist())
        assert after.start[-1] + after.length[-1] == before.start[-1] + before.length[-1]
    # What is long stays as it was: the stage, the gather and its exposed part.
    assert painted(merged, Paint.STAGE1_FORWARD) == painted(whole, Paint.STAGE1_FORWARD)
    assert painted(merged, Paint.GATHER) == painted(whole, Paint.GATHER)
    assert merged.rows[1].exposed.tolist() == whole.rows[1].exposed.tolist() != []


def test_a_profile_of_many_events_stays_small(tmp_path):
    """The page's bound holds whatever the number of events; here a lower one for speed."""
    shown = drawn(many_kernels(6, 20_000).write(tmp_path), slices=2_000)
    assert sum(len(row.start) for row in shown.rows) <= 2_000
    assert len(encode(shown)) < 100_000


def test_only_the_last_iterations_and_the_worst_ranks(tmp_path):
    groups = (tuple(range(10)),)
    for rank in range(10):
        trace = TraceBuilder(rank, 10, groups)
        exposed = 100 + rank if rank != 3 else 0
        for number in range(5):
            gather = (1100 - 200 + exposed, 1100 + exposed)
            gpu_iteration(
                trace, number, 1e6 + 2000 * number, gather=gather,
                **{"Process Group Ranks": f"[{rank}]"},
            )  # fmt: skip
        trace.write(tmp_path)
    shown = drawn(tmp_path)
    assert {row.rank for row in shown.rows} == {f"rank {n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)}
    assert {each.name for each in shown.iterations} == {"2", "3", "4"}
    assert shown.notes == (
        "the 8 of 10 ranks that expose most are drawn",
        "the last 3 of 5 iterations are drawn",
    )


def test_ranks_whose_clocks_have_nothing_in_common(tmp_path):
    for rank in range(2):
        trace = TraceBuilder(rank, 2)
        gpu_iteration(trace, 0, 1e6 + 1e9 * rank, gather=(150, 650))
        trace.write(tmp_path)
    shown = drawn(tmp_path)
    assert shown.length == 1_000_000
    assert [int(row.start[0]) for row in shown.rows] == [0, 50_000] * 2
    assert "clocks" in shown.notes[0]


@pytest.mark.parametrize("variant", ["split", "late", "fused", "serialised"])
def test_exposed_parts_of_real_traces_add_up_to_the_figures(variant):
    """Per layer and check: the mean of what the page says is what the verdict rests on."""
    path = DATA / f"gpu_{variant}.pt.trace.json.gz"
    reading = profiling.read(path)
    shown, report = draw(reading), profiling.check(reading)
    assert len(shown.iterations) == 3
    for row in report.rows[:2]:
        own = [one for one in shown.collectives if one.name == f"{row.layer}.fc2_weight"]
        gathers = [one for one in own if any("forward" in stage for stage, _ in one.under)]
        if variant == "split":
            assert len(gathers) == 3
            for one in gathers:
                ((stage, length),) = one.under
                assert stage == f"stage1.forward of {row.layer}"
                assert row.spread[0] <= length / one.transfer <= row.spread[1]
        else:
            assert not any(f"stage1.forward of {row.layer}" == s for o in own for s, _ in o.under)


def test_as_json(tmp_path):
    shown = built(tmp_path, gpu_iteration, gather=(1000, 1200))
    read = json.loads(encode(shown))
    assert read["length"] == shown.length
    assert read["rows"][1]["exposed"] == shown.rows[1].exposed.tolist()
    assert read["rows"][1]["start"] == shown.rows[1].start.tolist()
    assert read["paints"][Paint.GATHER] == ["gather", "parameter gather"]
    assert read["collectives"][0]["name"] == f"{EXPERTS}.fc2_weight"


@pytest.mark.parametrize("ahead", [0, 700])
def test_ranks_are_drawn_by_one_clock(tmp_path, ahead):
    """One rank's clock is ahead; a collective ends on both ranks at once, so they are drawn so."""
    group = {"Collective name": "_allgather_base", "Process Group Ranks": "[0, 1]"}
    for rank in range(2):
        trace = TraceBuilder(rank, 2)
        for number in range(3):
            at = 1e6 + 2000 * number + ahead * rank
            gpu_iteration(trace, number, at, gather=(200 - 50 * rank, 650), **group)
        trace.write(tmp_path)
    shown = drawn(tmp_path)
    ends = [(row.start + row.length)[row.paint == Paint.GATHER].tolist() for row in shown.rows]
    assert ends[1] == ends[3] == [550_000, 2_550_000, 4_550_000]
    assert any("clocks" in note for note in shown.notes) is bool(ahead)


def test_nothing_that_works(tmp_path):
    trace = TraceBuilder()
    trace.range(Kind.ITERATION, "0", 1e6, 2e6)
    shown = drawn(trace.write(tmp_path))
    assert shown.rows == ()
    assert json.loads(encode(shown))["rows"] == []


def test_one_kernel_alone(tmp_path):
    trace = TraceBuilder()
    trace.kernel(ALL_GATHER, 1e6, 1e6 + 10, 1e6 + 30, stream=COMMUNICATION)
    shown = drawn(trace.write(tmp_path))
    assert painted(shown, Paint.COMMUNICATION) == [("stream 20", 0, 20_000)]
    assert shown.rows[0].exposed.tolist() == [[0, 20_000]]
