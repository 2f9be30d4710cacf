"""What overlap saves, on built profiles whose answer is known and on random ones with an oracle."""

import json
import statistics

import numpy as np
import pytest

import profiling
from profiling import NotComparableError, Verdict
from profiling.cli import main
from profiling.effectiveness import saved
from profiling.ranges import Kind
from profiling.steps import steps
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder, cpu_iteration

EXPERTS = "layers.0.mlp.experts"


def gpu_run(lengths, *, hidden, gather=200, lag=5000, rank=0, size=1, experts=EXPERTS, args=None):
    """A run on a device, whose steps of so many us all run long after they were launched."""
    trace = TraceBuilder(rank, size)
    begin = lag
    for number, length in enumerate(lengths):
        at = 100 * number
        trace.range(Kind.ITERATION, str(number), at, at + 99)
        trace.range(Kind.PARAM_GATHER, f"{experts}.fc2_weight", at + 10, at + 20)
        moved = (begin + 10, begin + 10 + gather) if hidden else (begin, begin + gather)
        trace.kernel(ALL_GATHER, at + 12, *moved, stream=COMMUNICATION, **(args or {}))
        trace.range(Kind.STAGE1_FORWARD, experts, at + 30, at + 40)
        first = begin if hidden else begin + gather
        trace.kernel("gemm", at + 32, first, begin + length - 50)
        trace.kernel("rest", at + 50, begin + length - 50, begin + length)
        begin += length
    return trace


def read(folder, *traces):
    folder.mkdir()
    for trace in traces:
        trace.write(folder)
    return profiling.read(folder)


def compare(tmp_path, serial, overlapped, **kwargs):
    ours = read(tmp_path / "serial", serial), read(tmp_path / "overlapped", overlapped)
    return profiling.effective(*ours, **kwargs)


@pytest.mark.parametrize(
    ("length", "value"), [(1000, 1.0), (1100, 0.5), (1200, 0.0), (1250, -0.25)]
)
def test_the_saved_share_of_the_communication(tmp_path, length, value):
    result = compare(
        tmp_path, gpu_run([1200] * 6, hidden=False), gpu_run([length] * 6, hidden=True)
    )
    assert result.value == pytest.approx(value)
    assert result.interval == pytest.approx((value, value))
    assert result.serial.step_ms == pytest.approx([1.2] * 6)
    assert result.serial.communication_ms == pytest.approx([0.2] * 6)
    assert (result.verdict, result.finding) == (None, "")


def test_hidden_on_the_timeline_yet_not_effective(tmp_path):
    slow = gpu_run([1190] * 6, hidden=True)
    result = compare(tmp_path, gpu_run([1200] * 6, hidden=False), slow, threshold=0.5)
    assert profiling.check(tmp_path / "overlapped").rows[0].verdict is Verdict.PASS
    assert result.value == pytest.approx(0.05)
    assert result.verdict is Verdict.FAIL


def test_a_step_is_timed_on_the_device_and_the_last_ends_with_its_last_kernel(tmp_path):
    lengths = [1000, 1300, 1100, 900]
    found = steps(read(tmp_path / "run", gpu_run(lengths, hidden=True)))
    assert found.step_ms == pytest.approx([length / 1000 for length in lengths])


def test_on_a_cpu_a_step_is_its_range(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
    trace.range(Kind.ITERATION, "3", 2e6, 2e6 + 10)  # the one that the recorder opened last
    found = steps(read(tmp_path / "run", trace))
    assert found.step_ms == pytest.approx([2.0] * 3)
    assert found.communication_ms == pytest.approx([0.5] * 3)


def test_too_few_steps_are_inconclusive_and_counted(tmp_path):
    result = compare(
        tmp_path,
        gpu_run([1200] * 6, hidden=False),
        gpu_run([1000] * 4, hidden=True),
        threshold=0.5,
    )
    assert (result.value, result.verdict) == (None, Verdict.INCONCLUSIVE)
    assert "has 4 measurable steps, at least 5" in result.finding


def test_a_wide_interval_is_inconclusive(tmp_path):
    noisy = gpu_run([900, 1300, 900, 1300, 900, 1300], hidden=True)
    result = compare(tmp_path, gpu_run([1200] * 6, hidden=False), noisy, threshold=0.1)
    assert result.interval[1] - result.interval[0] > 0.3
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "record more steps" in result.finding


def test_a_threshold_within_the_interval_is_inconclusive(tmp_path):
    serial = gpu_run([1200] * 6, hidden=False)
    ours = (
        read(tmp_path / "serial", serial),
        read(tmp_path / "fast", gpu_run([1000, 1005, 1010, 1015, 1020, 1025], hidden=True)),
    )
    low, high = profiling.effective(*ours).interval
    middle = (low + high) / 2
    assert profiling.effective(*ours, threshold=middle).verdict is Verdict.INCONCLUSIVE
    assert profiling.effective(*ours, threshold=low - 0.01).verdict is Verdict.PASS
    assert profiling.effective(*ours, threshold=high + 0.01).verdict is Verdict.FAIL


def test_one_step_with_a_hiccup_decides_nothing(tmp_path):
    serial = gpu_run([1200] * 8, hidden=False)
    result = compare(tmp_path, serial, gpu_run([1000] * 7 + [9000], hidden=True))
    assert result.value == pytest.approx(1.0)


def test_a_group_of_one_has_nothing_to_save(tmp_path):
    alone = {"Group size": 1, "Collective name": "_allgather_base"}
    result = compare(
        tmp_path,
        gpu_run([1200] * 6, hidden=False, args=alone),
        gpu_run([1000] * 6, hidden=True, args=alone),
    )
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "nothing to save" in result.finding


def test_steps_of_several_ranks_are_averaged(tmp_path):
    traces = [
        gpu_run([length] * 6, hidden=True, rank=rank, size=2)
        for rank, length in enumerate((1000, 1100))
    ]
    assert steps(read(tmp_path / "run", *traces)).step_ms == pytest.approx([1.05] * 6)


def test_iterations_can_be_chosen(tmp_path):
    serial = read(tmp_path / "serial", gpu_run([5000] + [1200] * 6, hidden=False))
    fast = read(tmp_path / "fast", gpu_run([1000] * 7, hidden=True))
    chosen = profiling.Iterations.parse("1-")
    result = profiling.effective(serial, fast, iterations=chosen)
    assert result.serial.step_ms == pytest.approx([1.2] * 6)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        pytest.param({"experts": "layers.1.mlp.experts"}, "layer layers.0", id="layer"),
        pytest.param({"rank": 1, "size": 2}, "rank 0 is only in", id="rank"),
    ],
)
def test_profiles_of_different_runs_are_refused(tmp_path, other, names):
    with pytest.raises(NotComparableError, match=names):
        compare(
            tmp_path, gpu_run([1200] * 6, hidden=False), gpu_run([1000] * 6, hidden=True, **other)
        )


def test_a_collective_in_one_of_them_only_is_refused(tmp_path):
    more = gpu_run([1000] * 6, hidden=True)
    more.range(Kind.GRAD_REDUCE, f"{EXPERTS}.fc2_weight", 41, 44)
    with pytest.raises(NotComparableError, match=r"collective overlap::grad_reduce\["):
        compare(tmp_path, gpu_run([1200] * 6, hidden=False), more)


def foreign(lengths, *, hidden):
    trace = gpu_run(lengths, hidden=hidden)
    trace.events = [one for one in trace.events if "fc2_weight" not in one["name"]]
    return trace


def test_runs_that_are_not_ours_are_compared_by_all_that_they_communicate(tmp_path):
    result = compare(tmp_path, foreign([1200] * 6, hidden=False), foreign([1100] * 6, hidden=True))
    assert result.value == pytest.approx(0.5)
    assert result.serial.communication_ms == pytest.approx([0.2] * 6)


def test_a_run_that_communicates_nothing_has_nothing_to_save(tmp_path):
    silent = gpu_run([1200] * 6, hidden=False)
    silent.events = [one for one in silent.events if "gemm" in one["name"] or "iter" in one["name"]]
    for number in range(6):
        silent.kernel("gemm", 100 * number + 60, 5000 + 1200 * number, 5900 + 1200 * number)
    result = compare(tmp_path, silent, silent)
    assert (result.value, result.verdict) == (None, Verdict.INCONCLUSIVE)
    assert "nothing to save" in result.finding


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_covers_the_truth_of_random_runs(seed):
    """Against a plain-Python bootstrap with its own draws, and against the answer put in."""
    random = np.random.default_rng(seed)
    truth = random.uniform(-0.2, 1.0)
    comm = random.normal(5, 0.02, 12)
    serial = random.normal(30, 0.1, 12)
    overlapped = random.normal(30 - 5 * truth, 0.1, 12)
    value, (low, high) = saved(serial, overlapped, comm)
    assert abs(value - truth) < 0.1
    drawn = []
    for _ in range(4000):
        rows = random.integers(12, size=12)
        columns = random.integers(12, size=12)
        drawn.append(
            (
                statistics.median(serial[rows].tolist())
                - statistics.median(overlapped[columns].tolist())
            )
            / statistics.median(comm[rows].tolist())
        )
    drawn.sort()
    assert low == pytest.approx(drawn[100], abs=0.01)
    assert high == pytest.approx(drawn[3899], abs=0.01)


def test_the_command(tmp_path, capsys):
    serial = str(gpu_run([1200] * 6, hidden=False).write(tmp_path, "serial.json"))
    fast = str(gpu_run([1000] * 6, hidden=True).write(tmp_path, "fast.json"))
    assert main(["effective", serial, fast]) == 0
    assert "effective: 100.0%" in capsys.readouterr().out.splitlines()[-1]
    assert main(["effective", serial, fast, "--threshold", "0.9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: PASS"
    assert main(["effective", serial, serial, "--threshold", "0.9"]) == 1
    capsys.readouterr()
    assert main(["effective", serial, fast, "--iterations", "2-"]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: INCONCLUSIVE"
    assert main(["effective", serial, fast, "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["verdict"], entry["value"]) == (None, pytest.approx(1.0))
    assert main(["effective", serial, fast, "--threshold", "7"]) == 2
    assert "threshold is 7" in capsys.readouterr().err
