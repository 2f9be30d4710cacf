"""Each finding where it should be, and not where it should not: built runs with one thing wrong."""

import pytest

import profiling
from profiling import FindingKind, Verdict
from profiling.ranges import Kind
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder

EXPERTS = "layers.0.mlp.experts"
NAME = f"{EXPERTS}.fc2_weight"


def step(
    trace,
    number,
    *,
    issue=10,
    wait=85,
    gather=(150, 650),
    stage=(100, 1100),
    launch=50,
    name=NAME,
    other=None,
    **args,
):
    """A step of 2,000 us on a device: one gather, one stage, all enqueued in its first 100 us.

    Args:
        issue, wait: When the CPU issues the gather, and when it waits for it.
        launch: When the stage's kernel is launched.
        other: When a kernel runs that belongs to stage 2 (name "stage2") or to no stage ("none").
    """
    start = 1e6 + 2000 * number
    trace.range(Kind.ITERATION, str(number), start, start + 2000)
    trace.range(Kind.PARAM_GATHER, name, start + issue, start + issue + 4)
    trace.kernel(
        ALL_GATHER,
        start + issue + 1,
        start + gather[0],
        start + gather[1],
        stream=COMMUNICATION,
        **args,
    )
    trace.range(Kind.STAGE1_FORWARD, EXPERTS, start + launch - 5, start + launch + 5)
    trace.kernel("gemm", start + launch, start + stage[0], start + stage[1])
    trace.range(Kind.PARAM_WAIT, name, start + wait, start + wait + 4)
    if other is not None:
        whose, begin, end = other
        if whose == "stage2":
            trace.range(Kind.STAGE2_FORWARD, EXPERTS, start + 91, start + 95)
        trace.kernel("gemm2", start + 92, start + begin, start + end)


def run(rank=0, size=1, count=4, **kwargs):
    trace = TraceBuilder(rank, size)
    for number in range(count):
        step(trace, number, **kwargs)
    return trace


def judge(tmp_path, *traces, **kwargs):
    for trace in traces:
        trace.write(tmp_path)
    (row,) = profiling.check(tmp_path, **kwargs).rows[:1]
    return row, [finding.kind for finding in row.findings]


def test_a_good_run_has_no_finding(tmp_path):
    row, kinds = judge(tmp_path, run())
    assert (row.verdict, kinds) == (Verdict.PASS, [])
    assert row.lead_ms == pytest.approx(0.04)  # issued at 10, the stage launched at 50


@pytest.mark.parametrize(("launch", "late"), [(20, True), (60, False)], ids=["after", "before"])
def test_late_issue(tmp_path, launch, late):
    """Issued at 40; who else is to blame where that was before the stage?"""
    row, kinds = judge(tmp_path, run(issue=40, wait=70, launch=launch, gather=(1150, 1350)))
    assert row.verdict is Verdict.FAIL
    assert kinds == ([FindingKind.LATE_ISSUE] if late else [FindingKind.NOT_HIDDEN]) or (
        late and kinds == [FindingKind.LATE_ISSUE, FindingKind.PREFETCH]
    )
    assert row.lead_ms == pytest.approx((launch - 40) / 1000)
    assert ("0.020 ms after the stage's work" in row.finding) is late
    assert ("issued 0.020 ms before the stage's work: look at" in row.finding) is not late


@pytest.mark.parametrize("between", [True, False])
def test_no_prefetch_is_issued_late_and_waited_for_at_once(tmp_path, between):
    trace = run(issue=70, wait=80, gather=(1150, 1350))
    if between:  # other work is enqueued before the wait
        for number in range(4):
            trace.kernel("dense", 1e6 + 2000 * number + 76, *(1e6 + 2000 * number + 1400,) * 2)
    _, kinds = judge(tmp_path, trace)
    assert (FindingKind.PREFETCH in kinds) is not between
    assert FindingKind.LATE_ISSUE in kinds


@pytest.mark.parametrize(("wait", "serialised"), [(20, True), (60, False)])
def test_waited_for_before_the_stage_is_enqueued(tmp_path, wait, serialised):
    row, kinds = judge(tmp_path, run(issue=10, wait=wait, gather=(20, 95)))
    assert row.verdict is Verdict.FAIL
    assert kinds == [FindingKind.SERIALISED if serialised else FindingKind.NOT_HIDDEN]


@pytest.mark.parametrize(
    ("other", "kinds", "words"),
    [
        (("stage2", 1150, 1350), [FindingKind.WRONG_STAGE], "100% of it ran under stage2.forward"),
        (("none", 1150, 1350), [FindingKind.WRONG_STAGE], "100% of it ran beside other compute"),
        (("stage2", 1150, 1200), [FindingKind.NOT_HIDDEN], "no part of it"),
    ],
    ids=["stage", "no stage", "little"],
)
def test_wrong_stage(tmp_path, other, kinds, words):
    row, found = judge(tmp_path, run(gather=(1150, 1350), other=other))
    assert (row.verdict, found) == (Verdict.FAIL, kinds)
    assert words in row.finding
    assert (EXPERTS in row.finding) is ("under" in words)


@pytest.mark.parametrize(
    ("gather", "stage", "words"),
    [
        ((700, 1500), (100, 1100), "most of the rest lies after it: begin it earlier"),
        ((200, 900), (500, 1500), "most of the rest lies before it: begin it later"),
        ((150, 1350), (100, 700), "only more tokens per expert"),
    ],
    ids=["began late", "began early", "too long"],
)
def test_half_hidden_says_whether_it_would_fit(tmp_path, gather, stage, words):
    row, kinds = judge(tmp_path, run(gather=gather, stage=stage))
    assert (row.verdict, kinds) == (Verdict.FAIL, [FindingKind.HALF_HIDDEN])
    assert words in row.finding


def test_half_hidden_by_a_stage_with_gaps(tmp_path):
    trace = TraceBuilder()
    for number in range(4):  # the stage's second kernel begins when the gather is nearly over
        step(trace, number, gather=(150, 1050), stage=(100, 500))
        start = 1e6 + 2000 * number
        trace.kernel("gemm", start + 52, start + 1000, start + 1600)
    row, kinds = judge(tmp_path, trace)
    assert kinds == [FindingKind.HALF_HIDDEN]
    assert "in gaps of its own work" in row.finding


@pytest.mark.parametrize("shared", [True, False])
def test_shared_bucket(tmp_path, shared):
    name = f"{EXPERTS}.fc1_weight,{NAME}" if shared else NAME
    _, kinds = judge(tmp_path, run(name=name))
    assert (kinds == [FindingKind.SHARED_BUCKET]) is shared


@pytest.mark.parametrize("bad", [[0], [2], [0, 1]], ids=["first", "third", "first two"])
def test_first_iteration(tmp_path, bad):
    trace = TraceBuilder()
    for number in range(4):
        step(trace, number, gather=(1000, 1500) if number in bad else (150, 650))
    row, kinds = judge(tmp_path, trace)
    assert row.verdict is Verdict.FAIL
    expected = FindingKind.FIRST_ITERATION if bad == [0] else FindingKind.SOMETIMES
    assert kinds == [expected]
    skipping = profiling.Iterations.parse("1-")
    later, _ = judge(tmp_path, trace, iterations=skipping)
    assert later.verdict is (Verdict.PASS if bad == [0] else Verdict.FAIL)


@pytest.mark.parametrize(("size", "finding"), [(1, FindingKind.NOTHING_TO_HIDE), (2, None)])
def test_nothing_to_hide(tmp_path, size, finding):
    group = {"Group size": size, "Collective name": "_allgather_base"}
    row, kinds = judge(tmp_path, run(**group))
    assert kinds == ([finding] if finding else [])
    assert row.verdict is (Verdict.INCONCLUSIVE if finding else Verdict.PASS)


# Several ranks


def ranks(tmp_path, bad, *, ranks=16, bad_steps=(0, 1, 2, 3)):
    for rank in range(ranks):
        trace = TraceBuilder(rank, ranks)
        for number in range(4):
            late = rank in bad and number in bad_steps
            step(trace, number, gather=(1000, 1200) if late else (150, 350))
        trace.write(tmp_path)


def test_one_bad_rank_among_many_is_not_diluted(tmp_path):
    ranks(tmp_path, bad={11})
    row, kinds = judge(tmp_path)
    assert row.hidden > 0.95
    assert row.verdict is Verdict.FAIL
    assert kinds == [FindingKind.ONE_RANK]
    assert row.finding.startswith("rank 11 alone: rank 11 hides 50%, the other ranks 100%")


def test_one_bad_step_of_a_rank_is(tmp_path):
    ranks(tmp_path, bad={11}, bad_steps=(2,))
    row, kinds = judge(tmp_path)
    assert (row.verdict, kinds) == (Verdict.PASS, [])


def test_most_ranks_bad_is_no_finding_about_one(tmp_path):
    ranks(tmp_path, bad=set(range(9)), ranks=12)
    row, kinds = judge(tmp_path)
    assert row.verdict is Verdict.FAIL
    assert FindingKind.ONE_RANK not in kinds


@pytest.mark.parametrize("bad", [(3,), (1, 3, 4)])
def test_a_few_bad_iterations_are_named(tmp_path, bad):
    """Not the first alone, and no rank's: nobody would know where to look."""
    trace = TraceBuilder()
    for number in range(6):
        step(trace, number, **({"gather": (1050, 1550)} if number in bad else {}))
    trace.write(tmp_path)
    row, kinds = judge(tmp_path)
    assert row.verdict is Verdict.FAIL
    assert kinds == [FindingKind.SOMETIMES]
    assert row.finding.startswith(f"{len(bad)} of 6 hide 10%, the others 100%: ")
    assert row.finding.endswith(", ".join(f"rank 0 in {number}" for number in bad))


def test_what_passes_names_no_iterations(tmp_path):
    trace = TraceBuilder()
    for number in range(6):
        step(trace, number, **({"gather": (800, 1300)} if number == 3 else {}))
    trace.write(tmp_path)
    assert judge(tmp_path)[1] == []


# Against a baseline


def timed(length, *, beside, count=6):
    """Steps of one gather of 200 us and one stage; serialised, or with the gather beside it."""
    trace = TraceBuilder()
    for number in range(count):
        start = 2000 * number
        trace.range(Kind.ITERATION, str(number), start, start + 2000)
        trace.range(Kind.PARAM_GATHER, NAME, start + 10, start + 14)
        first = start + (110 if beside else 100)
        trace.kernel(ALL_GATHER, start + 11, first, first + 200, stream=COMMUNICATION)
        trace.range(Kind.STAGE1_FORWARD, EXPERTS, start + 45, start + 55)
        begin = start + 100 if beside else first + 200
        trace.kernel("gemm", start + 50, begin, begin + length)
    return trace


@pytest.mark.parametrize(
    ("beside", "saved", "slowdown", "found"),
    [
        pytest.param(1150, 0.25, 1.15, [FindingKind.NOT_EFFECTIVE], id="competes"),
        pytest.param(1020, 0.9, 1.02, [], id="pays"),
    ],
)
def test_hidden_but_not_effective(tmp_path, beside, saved, slowdown, found):
    # Each step is as long as its work: 200 + 1000 serialised, the stage alone where it hides it.
    (tmp_path / "serial").mkdir()
    serial = stretched(timed(1000, beside=False), 1200)
    serial.write(tmp_path / "serial")
    overlapped = stretched(timed(beside, beside=True), beside)
    overlapped.write(tmp_path)
    baseline = profiling.read(tmp_path / "serial")
    report = profiling.check(tmp_path, baseline=baseline)
    row = report.rows[0]
    assert (row.verdict, [one.kind for one in row.findings]) == (Verdict.PASS, found)
    assert report.effective.value == pytest.approx(saved)
    assert row.slowdown == pytest.approx(slowdown)
    if found:
        assert "1.15 times as long" in row.finding
    asked = profiling.Rule(
        "pays",
        "overlap::param_gather[*.fc2_weight]",
        "megamoe::stage1.forward",
        min_hidden=0.9,
        min_effective=0.8,
    )
    (bounded,) = profiling.check(tmp_path, baseline=baseline, rules=[asked]).rows
    assert bounded.verdict is (Verdict.FAIL if found else Verdict.PASS)


def test_what_is_not_hidden_is_not_called_ineffective(tmp_path):
    for name, period in (("serial", 1200), ("slower", 1500)):
        (tmp_path / name).mkdir()
        stretched(timed(1000, beside=False), period).write(tmp_path / name)
    baseline = profiling.read(tmp_path / "serial")
    report = profiling.check(tmp_path / "slower", baseline=baseline)
    assert report.effective.value < 0
    kinds = [one.kind for one in report.rows[0].findings]
    assert kinds
    assert FindingKind.NOT_EFFECTIVE not in kinds


def stretched(trace, period):
    """The same run whose steps on the device follow each other without a pause."""
    for event in trace.events:
        if event.get("cat") == "kernel":
            number = int(event["ts"] // 2000)
            event["ts"] += number * (period - 2000) + 50_000
    return trace


def test_slowdown_without_a_baseline_needs_runs_without_a_collective(tmp_path):
    row, _ = judge(tmp_path, run())
    assert row.slowdown is None
    trace = run(stage=(100, 1100))
    for number in range(4, 8):  # the gather is over before these begin
        step(trace, number, gather=(20, 90), stage=(100, 900))
    row, _ = judge(tmp_path, trace)
    assert row.slowdown == pytest.approx(1000 / 800)


@pytest.mark.parametrize(
    ("device", "verdict"), [(0, Verdict.PASS), (1, Verdict.FAIL)], ids=["same", "other"]
)
def test_a_stage_hides_nothing_on_another_device(tmp_path, device, verdict):
    trace = run()
    for event in trace.events:
        if event["name"] == "gemm":
            event["args"]["device"] = event["pid"] = device
    trace.write(tmp_path)
    row = profiling.check(tmp_path).rows[0]
    assert (row.verdict, row.hidden) == (verdict, 1.0 if verdict is Verdict.PASS else 0.0)


@pytest.mark.parametrize("names", [NAME, f"{EXPERTS}.fc1_weight,{NAME}"], ids=["kernel", "bucket"])
def test_a_comma_in_a_kernels_name_shares_no_bucket(tmp_path, names):
    trace = run(name=names)
    if names == NAME:  # then it is foreign, called what its kernel is
        trace.events = [one for one in trace.events if "overlap::param" not in one["name"]]
        for event in trace.events:
            event["name"] = (
                "ncclKernel_SendRecv(ncclDevComm*, unsigned long)"
                if (event["name"] == ALL_GATHER)
                else event["name"]
            )
    trace.write(tmp_path)
    rule = profiling.Rule("any", "*", "any", min_hidden=0.5)
    kinds = {
        one.kind for row in profiling.check(tmp_path, rules=[rule]).rows for one in row.findings
    }
    assert (FindingKind.SHARED_BUCKET in kinds) == (names != NAME)


@pytest.mark.parametrize(("correlation", "known"), [(None, True), (0, False)])
def test_a_correlation_of_0_links_nothing(tmp_path, correlation, known):
    # Were all launches and kernels linked by it, the gather would be under its own stage.
    trace = run(gather=(1200, 1700), other=("stage2", 1150, 1800))
    for event in trace.events:
        if correlation is not None and "correlation" in event["args"]:
            event["args"]["correlation"] = correlation
    trace.write(tmp_path)
    row = profiling.check(tmp_path).rows[0]
    assert row.verdict is (Verdict.FAIL if known else Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(("stream", "known"), [(7, True), (8, False)], ids=["ordered", "open"])
def test_what_may_be_two_stages_is_neithers(tmp_path, stream, known):
    # The gather is under stage 2, whose kernel shares a correlation with stage 1's.
    trace = run(gather=(1200, 1700), other=("stage2", 1150, 1800))
    launches = [event for event in trace.events if event["cat"] == "cuda_runtime"]
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    for launch, kernel in zip(launches, kernels, strict=True):
        if kernel["name"].startswith("gemm"):
            number = 100 + int(launch["ts"] - 1e6) // 2000
            launch["args"]["correlation"] = kernel["args"]["correlation"] = number
            launch["name"] = "hipLaunchKernel"
        if kernel["name"] == "gemm2":
            kernel["tid"] = kernel["args"]["stream"] = stream
    trace.write(tmp_path)
    row = profiling.check(tmp_path).rows[0]
    assert row.verdict is (Verdict.FAIL if known else Verdict.INCONCLUSIVE)
