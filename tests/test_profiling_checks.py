"""Verdicts on built traces: every pass has its negative twin, on a CPU and on a device."""

import json

import pytest

import profiling
from profiling import Verdict
from profiling.cli import main
from profiling.ranges import Kind
from tests.kineto import (
    AUTOGRAD,
    COMMUNICATION,
    COMPUTE,
    TraceBuilder,
    cpu_iteration,
    gpu_iteration,
)

EXPERTS = "layers.0.mlp.experts"
GATHER, REDUCE = 0, 1  # the built-in checks, in order


def rows(report, which=GATHER):
    title = ["fc2 gather overlaps stage1 forward", "dW2 reduce-scatter overlaps stage1 backward"]
    return [row for row in report.rows if row.check == title[which]]


def judge(tmp_path, *traces):
    for trace in traces:
        trace.write(tmp_path)
    return profiling.check(tmp_path)


def iterations(make, count=3, **kwargs):
    trace = TraceBuilder()
    for number in range(count):
        make(trace, number, 1e6 + 2000 * number, **kwargs)
    return trace


@pytest.mark.parametrize("make", [cpu_iteration, gpu_iteration], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("gather", "hidden", "exposed_ms", "verdict"),
    [
        ((150, 650), 1.0, 0.0, Verdict.PASS),
        ((1020, 1120), 0.8, 0.02, Verdict.FAIL),
        ((1000, 1200), 0.5, 0.1, Verdict.FAIL),
        ((1150, 1350), 0.0, 0.2, Verdict.FAIL),
        ((700, 1200), 0.8, 0.1, Verdict.FAIL),
        ((210, 1200), 890 / 990, 0.1, Verdict.FAIL),
        ((200, 1200), 0.9, 0.1, Verdict.PASS),
    ],
)
def test_share_exposed_time_and_verdict(tmp_path, make, gather, hidden, exposed_ms, verdict):
    (row,) = rows(judge(tmp_path, iterations(make, gather=gather)))
    assert row.occurrences == 3
    assert row.hidden == pytest.approx(hidden)
    assert row.spread == pytest.approx((hidden, hidden))
    assert row.exposed_ms == pytest.approx(exposed_ms)
    assert row.verdict is verdict


def test_the_share_is_weighed_by_time(tmp_path):
    trace = TraceBuilder()
    for number, gather in enumerate([(150, 650), (150, 650), (1000, 1200)]):
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=gather)
    (row,) = rows(judge(tmp_path, trace))
    assert row.hidden == pytest.approx(1100 / 1200)
    assert row.spread == pytest.approx((0.5, 1.0))
    assert row.verdict is Verdict.PASS


def test_issued_too_late_on_a_cpu(tmp_path):
    late = iterations(cpu_iteration, gather=(1130, 1400), issue=1110)
    (row,) = rows(judge(tmp_path, late))
    assert (row.hidden, row.verdict) == (0, Verdict.FAIL)
    assert row.wait_ms == pytest.approx(0.27)
    assert "issue it before the stage" in row.finding


def test_wait_of_a_device_ends_with_the_collective(tmp_path):
    trace = iterations(gpu_iteration, gather=(1000, 1300))
    for number in range(3):
        start = 1e6 + 2000 * number
        trace.kernel("void gemm2(float*)", start + 85, start + 1310, start + 1500)
    (row,) = rows(judge(tmp_path, trace))
    assert row.wait_ms == pytest.approx(0.2)


def test_hidden_under_another_layer_is_not_hidden(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        start = 1e6 + 4000 * number
        cpu_iteration(trace, number, start, gather=(150, 650))
        other = "layers.1.mlp.experts"
        # Layer 1's gather runs under layer 0's stage1: all beside compute, none under its own.
        cpu_iteration(
            trace,
            number,
            start + 2000,
            gather=(-1500, -1000),
            issue=-1950,
            experts=other,
            stage=(100, 900),
            elements=64,
        )
    first, second = rows(judge(tmp_path, trace))
    assert (first.layer, first.verdict) == (EXPERTS, Verdict.PASS)
    assert (second.layer, second.hidden, second.verdict) == (other, 0, Verdict.FAIL)
    assert second.exposed_ms == 0


def backward(trace, start, *, reduce, stage, issue_tid=AUTOGRAD):
    trace.range(Kind.GRAD_REDUCE, f"{EXPERTS}.fc2_weight", start + 5, start + 15, issue_tid)
    trace.kernel(
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        start + 8,
        start + reduce[0],
        start + reduce[1],
        stream=COMMUNICATION,
        tid=issue_tid,
    )
    trace.range(Kind.STAGE1_BACKWARD, EXPERTS, start + 20, start + 40, AUTOGRAD)
    trace.kernel("gemm", start + 25, start + stage[0], start + stage[1], tid=AUTOGRAD)


@pytest.mark.parametrize(
    ("reduce", "verdict"), [((110, 500), Verdict.PASS), ((910, 1000), Verdict.FAIL)]
)
def test_backward_on_the_autograd_thread(tmp_path, reduce, verdict):
    trace = TraceBuilder()
    for number in range(3):
        backward(trace, 1e6 + 2000 * number, reduce=reduce, stage=(100, 900))
    (row,) = rows(judge(tmp_path, trace), REDUCE)
    assert (row.occurrences, row.verdict) == (3, verdict)


@pytest.mark.parametrize(
    ("gather", "hidden", "exposed_ms"), [((150, 650), 1.0, 0.0), ((1150, 1350), 0.0, 0.2)]
)
def test_a_collective_may_have_any_name_on_a_stream_of_its_own(
    tmp_path, gather, hidden, exposed_ms
):
    (row,) = rows(judge(tmp_path, iterations(gpu_iteration, gather=gather, kernel="my_copy")))
    assert (row.occurrences, row.hidden) == (3, hidden)
    assert row.exposed_ms == pytest.approx(exposed_ms)  # it is no compute that could hide it


def test_an_unknown_kernel_on_a_stream_of_stages_is_no_collective(tmp_path):
    trace = iterations(gpu_iteration, gather=(150, 650), kernel="my_copy", stream=COMPUTE)
    (row,) = rows(judge(tmp_path, trace))
    assert (row.occurrences, row.verdict) == (0, Verdict.INCONCLUSIVE)


def test_what_is_launched_beside_a_known_collective_is_not_part_of_it(tmp_path):
    trace = iterations(gpu_iteration, gather=(150, 650))
    for number in range(3):
        start = 1e6 + 2000 * number
        trace.kernel("pack", start + 20, start + 1200, start + 1400, stream=COMMUNICATION)
    (row,) = rows(judge(tmp_path, trace))
    assert (row.hidden, row.verdict) == (1.0, Verdict.PASS)


def test_compute_on_another_device_hides_nothing(tmp_path):
    trace = iterations(gpu_iteration, gather=(1200, 1400))
    for number in range(3):
        start = 1e6 + 2000 * number
        trace.kernel("gemm", start + 85, start + 1200, start + 1400, device=1)
    (row,) = rows(judge(tmp_path, trace))
    assert row.exposed_ms == pytest.approx(0.2)


def test_both_weights_fetched_before_the_stage_fails(tmp_path):
    (row,) = rows(judge(tmp_path, iterations(cpu_iteration, gather=(10, 60), issue=0, wait=21)))
    assert (row.hidden, row.verdict) == (0, Verdict.FAIL)


def test_a_shared_bucket_is_judged_and_named(tmp_path):
    name = f"{EXPERTS}.fc1_weight,{EXPERTS}.fc2_weight"
    trace = iterations(cpu_iteration, gather=(10, 60), issue=0, wait=21, name=name)
    (row,) = rows(judge(tmp_path, trace))
    assert row.verdict is Verdict.FAIL
    assert "bucket is shared" in row.finding


@pytest.mark.parametrize("make", [cpu_iteration, gpu_iteration], ids=["cpu", "gpu"])
def test_one_occurrence_decides_nothing(tmp_path, make):
    (row,) = rows(judge(tmp_path, iterations(make, count=1, gather=(150, 650))))
    assert (row.occurrences, row.verdict) == (1, Verdict.INCONCLUSIVE)
    assert "at least 2 iterations" in row.finding


def test_an_empty_trace_is_inconclusive(tmp_path):
    report = judge(tmp_path, TraceBuilder())
    assert [row.verdict for row in report.rows] == [Verdict.INCONCLUSIVE] * 2
    assert report.verdict is Verdict.INCONCLUSIVE


def test_stages_without_collectives_are_inconclusive(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        trace.range(Kind.STAGE1_FORWARD, EXPERTS, 1000 * number, 1000 * number + 500)
    (row,) = rows(judge(tmp_path, trace))
    assert (row.verdict, row.hidden) == (Verdict.INCONCLUSIVE, None)
    assert "a group of one rank" in row.finding


def test_a_group_of_one_is_inconclusive_even_where_it_calls_nccl(tmp_path):
    size = {"Group size": 1, "Collective name": "_allgather_base"}
    (row,) = rows(judge(tmp_path, iterations(gpu_iteration, gather=(150, 160), **size)))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert "nothing to hide" in row.finding


def test_collectives_without_stages_are_inconclusive(tmp_path):
    trace = iterations(cpu_iteration, gather=(150, 650))
    trace.events = [event for event in trace.events if "stage1" not in event["name"]]
    (row,) = rows(judge(tmp_path, trace))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert "no megamoe::stage1.forward" in row.finding


def test_a_gather_that_the_recording_cuts_off_is_left_out(tmp_path):
    trace = iterations(cpu_iteration, gather=(150, 650))
    trace.range(Kind.PARAM_GATHER, f"{EXPERTS}.fc2_weight", 2e6, 2e6 + 20)
    trace.op("c10d::_allgather_base_", 2e6 + 2, 2e6 + 18, dims=[[8192], [4096]])
    (row,) = rows(judge(tmp_path, trace))
    assert (row.occurrences, row.verdict) == (3, Verdict.PASS)


def test_what_cannot_be_attributed_is_inconclusive_and_says_why(tmp_path):
    trace = iterations(cpu_iteration, gather=(150, 650))
    for number in range(3):  # a dense gather of the same size in the same window
        start = 1e6 + 2000 * number
        trace.range(Kind.PARAM_GATHER, "dense.0", start + 60, start + 75)
        trace.op("c10d::_allgather_base_", start + 61, start + 70, dims=[[8192], [4096]])
        trace.gloo("all_gather", start + 140, start + 600, 202, dims=[[4096]])
        trace.range(Kind.PARAM_WAIT, "dense.0", start + 1102, start + 1103)
    (row,) = rows(judge(tmp_path, trace))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert "2 process groups" in row.finding


def test_a_wait_inside_the_stage_hides_nothing(tmp_path):
    trace = iterations(cpu_iteration, gather=(150, 650), stage=(100, 1100))
    for number in range(3):
        start = 1e6 + 2000 * number
        trace.range(Kind.PARAM_WAIT, f"{EXPERTS}.fc2_weight", start + 150, start + 650)
    (row,) = rows(judge(tmp_path, trace))
    assert (row.hidden, row.verdict) == (0, Verdict.FAIL)


# Several ranks


def pair(gathers, stages=((100, 1100), (100, 1100)), **kwargs):
    """Two ranks of one group, with ``gathers[rank]`` in each of three iterations."""
    built = []
    for rank in (0, 1):
        trace = TraceBuilder(rank, 2, groups=((0, 1),))
        for number in range(3):
            start = 1e6 + 2000 * number
            cpu_iteration(trace, number, start, gather=gathers[rank], stage=stages[rank], **kwargs)
        built.append(trace)
    return built


def test_waiting_for_a_late_rank_is_not_the_transfer(tmp_path):
    # Rank 0 issues before its stage and waits; both transfer from 1000 to 1200.
    traces = pair([(85, 1200), (1000, 1200)], stages=((1000, 1900), (950, 1190)), issue=60)
    (row,) = rows(judge(tmp_path, *traces))
    assert row.occurrences == 6
    assert row.hidden == pytest.approx((200 + 190) / 400)


def test_a_rank_whose_stage_ran_while_it_waited_is_set_aside(tmp_path):
    # Rank 1 is a whole stage later. Rank 0 transfers after its stage, which is not its fault.
    report = judge(tmp_path, *pair([(150, 1400), (1200, 1400)], stages=((100, 1100), (1190, 1900))))
    (row,) = rows(report)
    assert row.verdict is Verdict.PASS
    assert (row.occurrences, list(row.set_aside.values())) == (3, [3])
    assert "late rank" in next(iter(row.set_aside))


def test_late_on_one_rank_alone_still_fails(tmp_path):
    # Rank 1 issues after its stage: there the transfer is bare, and rank 0 waits for it.
    (row,) = rows(judge(tmp_path, *pair([(150, 1400), (1200, 1400)])))
    assert row.verdict is Verdict.FAIL


def test_three_ranks_in_two_groups_are_told_apart_by_time(tmp_path):
    # 0 and 2 work together, 1 and 3 do; each rank is also in a pair with its neighbour.
    for rank in range(4):
        neighbours, partners = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        trace = TraceBuilder(rank, 4, groups=((0, 1, 2, 3), neighbours, partners))
        for number in range(3):
            late = 500 * (rank % 2)
            waits = 90 if rank < 2 else 0  # ranks 0 and 1 begin early and wait
            gather = (350 + late - waits, 450 + late)
            cpu_iteration(trace, number, 1e6 + 2000 * number, gather=gather, stage=(250, 1500))
        trace.write(tmp_path)
    (row,) = rows(profiling.check(tmp_path))
    # Ranks 0 and 1 waited while their stage ran, so theirs are set aside.
    assert (row.occurrences, sum(row.set_aside.values())) == (6, 6)


def test_an_occurrence_far_longer_than_the_others_is_set_aside(tmp_path):
    trace = TraceBuilder()
    for number in range(6):
        gather = (150, 1900) if number == 0 else (150, 250)
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=gather)
    (row,) = rows(judge(tmp_path, trace))
    assert row.verdict is Verdict.PASS
    assert (row.occurrences, list(row.set_aside.values())) == (5, [1])


def starved(trace, number, start):
    """The gather begins 6 ms after its call, and its thread had nothing else to do until then."""
    cpu_iteration(trace, number, start + 8000 * number, gather=(6090, 6990), stage=(100, 6100))


def queued(trace, number, start):
    """The same, but behind another collective on its thread."""
    starved(trace, number, start)
    trace.gloo("broadcast", start + 8000 * number + 85, start + 8000 * number + 6085, dims=[[4]])


def test_a_gloo_thread_that_got_no_core_says_nothing(tmp_path):
    (row,) = rows(judge(tmp_path, iterations(starved)))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert (row.occurrences, list(row.set_aside.values())) == (0, [3])


def test_a_collective_that_queues_behind_another_is_judged(tmp_path):
    (row,) = rows(judge(tmp_path, iterations(queued)))
    assert (row.occurrences, row.verdict) == (3, Verdict.FAIL)


def test_over_before_the_thread_went_on_says_nothing(tmp_path):
    (row,) = rows(judge(tmp_path, iterations(cpu_iteration, gather=(82, 95))))
    assert (row.occurrences, row.verdict) == (0, Verdict.INCONCLUSIVE)
    assert list(row.set_aside.values()) == [3]


# Reports and the command line


def test_exposed_communication_per_iteration(tmp_path):
    report = judge(tmp_path, iterations(cpu_iteration, gather=(1000, 1200)))
    assert report.exposed_ms == {"rank 0": pytest.approx([0.1, 0.1, 0.1])}


def test_exposed_communication_is_the_iteration_s_that_launched_it(tmp_path):
    # The device lags by more than an iteration, and two of three gathers end after the last one.
    trace = TraceBuilder()
    for number, exposed in enumerate([100, 200, 300]):
        late = 3000
        gpu_iteration(
            trace,
            number,
            1e6 + 2000 * number,
            gather=(late + 1000, late + 1100 + exposed),
            stage=(late + 100, late + 1100),
        )
    assert judge(tmp_path, trace).exposed_ms == {"rank 0": pytest.approx([0.1, 0.2, 0.3])}


@pytest.mark.parametrize(
    ("gather", "code", "word"),
    [((150, 650), 0, "PASS"), ((1150, 1350), 1, "FAIL")],
    ids=["pass", "fail"],
)
def test_command_line_exit_codes_text_and_json(tmp_path, capsys, gather, code, word):
    trace = iterations(gpu_iteration, gather=gather)
    for number in range(3):
        backward(trace, 2e6 + 2000 * number, reduce=(110, 500), stage=(100, 900))
    path = str(trace.write(tmp_path))
    assert main(["check", path]) == code
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"verdict: {word}"
    assert max(map(len, text.splitlines())) <= 100
    assert main(["check", path, "--json"]) == code
    entry = json.loads(capsys.readouterr().out)
    assert (entry["verdict"], entry["exit_code"]) == (word, code)
    assert [row["layer"] for row in entry["rows"]] == [EXPERTS] * 2
    assert main(["check", path, "--threshold", "0.01"]) == code


def test_a_long_layer_name_fits(tmp_path, capsys):
    experts = ".".join(["module"] * 12) + ".experts"
    path = iterations(cpu_iteration, gather=(150, 650), experts=experts).write(tmp_path)
    main(["check", str(path)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100 + len(str(path))


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    path = TraceBuilder().write(tmp_path)
    assert main(["check", str(path), "--threshold", "90"]) == 2
    assert "threshold is 90" in capsys.readouterr().err
    assert main(["check", str(path)]) == 2


@pytest.mark.parametrize("command", [["--help"], ["check", "--help"]])
def test_help_fits_and_holds_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "example: moe-trace check" in text
    assert max(map(len, text.splitlines())) <= 100
