"""Recording: files, ranges and metadata of real profiles, and that every collective is found."""

import gzip
import json
import re

import pytest
import torch
import torch.distributed as dist

import profiling
from profiling.attribution import attribute
from profiling.intervals import total
from profiling.ranges import Kind, span
from profiling.recording import record
from profiling.trace import Category

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
EXPERTS = "layers.{}.mlp.experts"


def step(groups, weights):
    """The collectives of one step of two layers, as the engine issues them, with little between."""
    x = torch.ones(64, 64)
    for layer in (0, 1):
        name = EXPERTS.format(layer) + ".fc2_weight"
        full = weights[layer]
        shard = full[: len(full) // 2]
        with span(Kind.PARAM_GATHER, name):
            work = gather(full, shard.clone(), group=groups["edp"], async_op=True)
        with span(Kind.STAGE1_FORWARD, EXPERTS.format(layer)):
            dist.all_to_all_single(torch.empty_like(x), x, group=groups["ep"])
            x = x @ x / 64
        with span(Kind.PARAM_WAIT, name):
            work.wait()
    works = {}
    for layer in (1, 0):
        for kind, group in (("fc2_weight", "edp"), ("dense", "dp")):
            name = EXPERTS.format(layer) + ".fc2_weight" if group == "edp" else f"dense.{layer}"
            full = torch.ones(len(weights[layer]) if group == "edp" else 800 * (layer + 1))
            with span(Kind.GRAD_REDUCE, name):
                shard = torch.empty(len(full) // dist.get_world_size(groups[group]))
                works[kind, name] = scatter(shard, full, group=groups[group], async_op=True), full
        with span(Kind.STAGE1_BACKWARD, EXPERTS.format(layer)):
            x = x @ x / 64
    for (_, name), (work, _) in works.items():
        with span(Kind.GRAD_WAIT, name):
            work.wait()
    with span(Kind.OPTIMIZER_STEP):
        dist.all_reduce(torch.ones(1))


def make_groups():
    """4 ranks as 2 x 2: pairs of neighbours and pairs across, and all."""
    rank = dist.get_rank()
    found = {"dp": dist.new_group()}
    for word, pairs in (("ep", [[0, 1], [2, 3]]), ("edp", [[0, 2], [1, 3]])):
        for ranks in pairs:
            group = dist.new_group(ranks)
            if rank in ranks:
                found[word] = group
    return found


def record_four_ranks(folder):
    groups = make_groups()
    weights = [torch.ones(4000), torch.ones(4000)]
    with record(folder, wait=1, warmup=1, active=3) as recorder:
        for _ in range(7):  # two more than are recorded
            step(groups, weights)
            recorder.step()


def test_four_ranks_are_recorded_and_every_collective_is_found(ranks, tmp_path):
    ranks.run(4, record_four_ranks, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    for rank, name in enumerate(names):
        # What TensorBoard's profiler plugin takes: worker, time, suffix.
        assert re.fullmatch(rf"rank{rank}-of-4\.\d+\.pt\.trace\.json\.gz", name)
    profile = profiling.load(tmp_path)
    assert [(trace.rank, trace.world_size) for trace in profile.traces] == [
        (r, 4) for r in range(4)
    ]
    for trace in profile.traces:
        found = attribute(trace)
        assert [span.name for span in found.iterations] == ["2", "3", "4"]
        assert len(found.stages) == 3 * 4
        assert len(found.collectives) == 3 * 6
        for collective in found.collectives:
            assert collective.found.doubt == ""
            assert total(collective.found.busy) > 0, collective.issue
            assert collective.found.group_size == (4 if "dense" in collective.issue.name else 2)
            (start, end), *more = collective.found.busy.tolist()
            assert not more
            assert collective.issue.start < start < end
        for layer in (0, 1):
            gathers = [c for c in found.collectives if c.issue.kind is Kind.PARAM_GATHER]
            here = [c for c in gathers if c.issue.name.startswith(EXPERTS.format(layer))]
            assert [c.iteration for c in here] == [2, 3, 4]
    report = profiling.check(profile)
    assert [row.occurrences + sum(row.set_aside.values()) for row in report.rows] == [12] * 4


def test_without_a_process_group(tmp_path):
    with record(tmp_path / "new", wait=0, warmup=1, active=2) as recorder:
        for _ in range(3):
            torch.ones(8, 8) @ torch.ones(8, 8)
            recorder.step()
    (path,) = (tmp_path / "new").iterdir()
    with gzip.open(path) as file:
        assert json.load(file)["distributedInfo"] == {"rank": 0, "world_size": 1}
    (trace,) = profiling.load(path).traces
    assert (trace.rank, trace.world_size) == (0, 1)
    assert "aten::mm" in trace.names
    assert (trace.category == Category.CPU_OP).any()
    assert [span.name for span in attribute(trace).iterations] == ["1", "2"]


def test_too_few_iterations_warn(tmp_path):
    message = r"nothing was recorded .* takes wait \+ warmup = 2"
    with pytest.warns(UserWarning, match=message), record(tmp_path) as recorder:
        recorder.step()
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_gets_out_and_leaves_no_range_open(tmp_path):
    with pytest.raises(ZeroDivisionError), record(tmp_path, wait=0):
        1 / 0  # noqa: B018
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize("bad", [{"wait": -1}, {"warmup": -1}, {"active": 0}])
def test_an_impossible_schedule_is_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="at least"), record(tmp_path, **bad):
        pass


def test_one_hardware_queue_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiling.recording, "profile", _Raises)
    warned = pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1")
    with warned, pytest.raises(_Stop), record(tmp_path):
        pass


class _Stop(Exception):
    pass


class _Raises:
    def __init__(self, **kwargs):
        raise _Stop


@pytest.mark.parametrize("made", [2, 3, 5], ids=["cut short", "as planned", "gone on"])
def test_the_run_is_settled_once_while_the_profiler_still_runs(tmp_path, made):
    running = []

    def settle():
        running.append(torch._C._autograd._profiler_enabled())

    with record(tmp_path, wait=0, warmup=1, active=2, settle=settle) as recorder:
        for _ in range(made):
            recorder.step()
    assert running == [True]
