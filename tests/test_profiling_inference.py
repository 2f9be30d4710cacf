"""Traces that are not ours: layers from the order of calls, weights from sizes, doubt where neither
tells."""

import gzip
import json
import re
import textwrap
from pathlib import Path

import pytest

import profiling
from profiling import Verdict
from profiling.assume import AssumeError, read_assumptions
from profiling.attribution import Source, attribute
from profiling.loading import load
from profiling.ranges import Kind
from tests.kineto import ALL_GATHER, AUTOGRAD, COMMUNICATION, MAIN, TraceBuilder

FC1, FC2 = 8192, 4096  # elements
LAYERS = ["decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.experts"]


class Foreign:
    """Writes iterations of a model without our ranges, call by call; one call takes 10 us."""

    def __init__(self, stage=lambda stage, way: f"fused_mega_moe_stage{stage}_{way}", layers=2):
        self.trace = TraceBuilder()
        self.layers = layers
        self._stage = stage
        self._now = 1e6

    def iteration(self, number, body):
        start = self._now
        body()
        self._now += 1000
        self.trace.add("user_annotation", f"ProfilerStep#{number}", start, self._now, MAIN)

    def stage(self, stage, way, tid=None):
        tid = tid or (AUTOGRAD if way == "backward" else MAIN)
        at = self._at()
        self.trace.add("user_annotation", self._stage(stage, way), at, at + 8, tid)
        self.trace.kernel("gemm", at + 2, at + 100, at + 105, tid=tid)

    def collective(self, elements, *, reduce=False, ranks=2, name=None, kernel=ALL_GATHER):
        at = self._at()
        says = {
            "Collective name": name or ("_reduce_scatter_base" if reduce else "_allgather_base"),
            "In msg nelems": elements if reduce else elements // ranks,
            "Out msg nelems": elements // ranks if reduce else elements,
            "Group size": ranks,
            "dtype": "BFloat16",
            "Comms Id": int(at),
        }
        self.trace.add("cpu_op", "record_param_comms", at, at + 8, MAIN, **says)
        self.trace.kernel(kernel, at + 2, at + 100, at + 105, stream=COMMUNICATION)

    def forward(self, gather=True):
        for _ in range(self.layers):
            if gather:
                self.collective(FC1)
                self.collective(FC2)
            self.stage(1, "forward")
            self.stage(2, "forward")

    def backward(self, reduce=True, again=False):
        for _ in range(self.layers):
            if again:
                self.stage(1, "forward", AUTOGRAD)
            self.stage(2, "backward")
            if reduce:
                self.collective(FC2, reduce=True)
            self.stage(1, "backward")
            if reduce:
                self.collective(FC1, reduce=True)

    def step(self):
        self.forward()
        self.backward()

    def _at(self):
        self._now += 10
        return self._now

    def read(self, tmp_path, assumptions=None):
        return attribute(load(self.trace.write(tmp_path)).traces[0], assumptions)


def assumed(tmp_path, *, fc1=FC1, fc2=FC2, stages=(), group=2):
    text = f"layers = {LAYERS}\n"
    for name, elements in (("fc1_weight", fc1), ("fc2_weight", fc2)):
        text += f'[[weight]]\nname = "{name}"\nelements = {elements}\ngroup_size = {group}\n'
    text += "[stage]\n" + "".join(f'"{key}" = "{pattern}"\n' for key, pattern in stages)
    path = tmp_path / "assume.toml"
    path.write_text(text)
    return read_assumptions(path)


def run_of(found, kind):
    runs = [stage for stage in found.stages if stage.span.kind is kind]
    return [(run.iteration, run.span.name, run.microbatch) for run in runs]


def issued(found, kind):
    return [
        (one.iteration, one.issue.name, one.microbatch)
        for one in found.collectives
        if one.issue.kind is kind
    ]


def test_layers_of_primus_turbo_s_stages_follow_from_the_order(tmp_path):
    foreign = Foreign()
    for number in (7, 8):
        foreign.iteration(number, foreign.step)
    found = foreign.read(tmp_path)
    assert run_of(found, Kind.STAGE1_FORWARD) == [
        (number, f"layers.{layer}", 0) for number in (7, 8) for layer in (0, 1)
    ]
    assert run_of(found, Kind.STAGE2_BACKWARD) == [
        (number, f"layers.{layer}", 0) for number in (7, 8) for layer in (1, 0)
    ]
    assert all(len(stage.events) == 1 for stage in found.stages)


def test_weights_of_a_gated_layer_follow_from_their_sizes(tmp_path):
    foreign = Foreign()
    for number in range(3):
        foreign.iteration(number, foreign.step)
    found = foreign.read(tmp_path)
    assert {(one.source, one.inferred) for one in found.collectives} == {(Source.METADATA, True)}
    assert issued(found, Kind.PARAM_GATHER) == [
        (number, f"layers.{layer}.{weight}", 0)
        for number in range(3)
        for layer in (0, 1)
        for weight in ("fc1_weight", "fc2_weight")
    ]
    assert issued(found, Kind.GRAD_REDUCE) == [
        (number, f"layers.{layer}.{weight}", 0)
        for number in range(3)
        for layer in (1, 0)
        for weight in ("fc2_weight", "fc1_weight")
    ]
    assert all(len(one.found.events) == 1 for one in found.collectives)
    assert {one.found.group_size for one in found.collectives} == {2}
    assert len({one.found.comms_id for one in found.collectives}) == len(found.collectives)


def test_microbatches_gather_once_and_reduce_in_the_last(tmp_path):
    foreign = Foreign()

    def body():
        foreign.forward()
        foreign.backward(reduce=False, again=True)
        foreign.forward(gather=False)
        foreign.backward(again=True)

    for number in range(2):
        foreign.iteration(number, body)
    found = foreign.read(tmp_path)
    up, down = ("layers.0", "layers.1"), ("layers.1", "layers.0")
    assert run_of(found, Kind.STAGE1_FORWARD)[:8] == [
        (0, layer, microbatch)
        for order, microbatch in ((up, 0), (down, None), (up, 1), (down, None))
        for layer in order
    ]
    assert {number for *_, number in issued(found, Kind.PARAM_GATHER)} == {0}
    assert {number for *_, number in issued(found, Kind.GRAD_REDUCE)} == {1}


def test_without_iterations_the_order_counts_over_the_whole_trace(tmp_path):
    foreign = Foreign()
    for _ in range(4):
        foreign.step()
    found = foreign.read(tmp_path)
    assert run_of(found, Kind.STAGE1_FORWARD) == [
        (None, f"layers.{layer}", microbatch) for microbatch in range(4) for layer in (0, 1)
    ]
    gathers = [name for _, name, _ in issued(found, Kind.PARAM_GATHER)]
    assert gathers == [f"layers.{i}.fc{n}_weight" for _ in range(4) for i in (0, 1) for n in (1, 2)]


def test_a_recording_that_begins_in_the_middle_does_not_tell_layers(tmp_path):
    foreign = Foreign()
    foreign.stage(1, "forward")
    for _ in range(3):
        foreign.backward()
        foreign.forward()
    found = foreign.read(tmp_path)
    assert not [one for one in found.stages if one.span.kind is Kind.STAGE1_FORWARD]
    assert any("1 of 1 iterations do not run megamoe::stage1.forward" in n for n in found.notes)


def test_a_gather_after_the_last_stage_is_for_the_next_iteration(tmp_path):
    foreign = Foreign()
    foreign.iteration(0, lambda: (foreign.step(), foreign.collective(FC1), foreign.collective(FC2)))

    def prefetched():
        foreign.stage(1, "forward")
        foreign.stage(2, "forward")
        foreign.collective(FC1)
        foreign.collective(FC2)
        foreign.stage(1, "forward")
        foreign.stage(2, "forward")
        foreign.backward()

    foreign.iteration(1, prefetched)
    found = foreign.read(tmp_path)
    gathers = [name for number, name, _ in issued(found, Kind.PARAM_GATHER) if number == 1]
    assert gathers == [f"layers.{i}.fc{n}_weight" for i in (0, 1) for n in (1, 2)]


@pytest.mark.parametrize("kernel", [ALL_GATHER, "any_name"])
def test_sizes_that_the_user_gives_name_a_plain_trace(tmp_path, kernel):
    """Megatron-core's own ranges are none of ours: the user's patterns say which are stages."""
    foreign = Foreign(stage=lambda stage, way: f"TEGroupedMLP.fc{stage}/{way}")

    def body():
        for _ in range(2):
            foreign.collective(3 * FC2, kernel=kernel)
            foreign.collective(FC2, kernel=kernel)
            foreign.stage(1, "forward")
            foreign.stage(2, "forward")
        foreign.backward(reduce=False)
        foreign.collective(640, name="allreduce", kernel=kernel)

    for number in range(2):
        foreign.iteration(number, body)
    stages = [(f"stage{n}.{way}", f"TEGroupedMLP.fc{n}/{way}") for n in (1, 2)
              for way in ("forward", "backward")]  # fmt: skip
    found = foreign.read(tmp_path, assumed(tmp_path, fc1=3 * FC2, stages=stages))
    assert {(one.source, one.inferred) for one in found.collectives} == {(Source.ASSUMED, True)}
    assert issued(found, Kind.PARAM_GATHER) == [
        (number, f"{layer}.{weight}", 0)
        for number in range(2)
        for layer in LAYERS
        for weight in ("fc1_weight", "fc2_weight")
    ]
    assert not issued(found, Kind.GRAD_REDUCE)
    assert run_of(found, Kind.STAGE1_BACKWARD)[0] == (0, LAYERS[1], 0)


def doubts(found):
    return {one.found.doubt for one in found.collectives}


def test_two_weights_of_one_size_are_in_doubt(tmp_path):
    foreign = Foreign()
    foreign.iteration(0, foreign.step)
    found = foreign.read(tmp_path, assumed(tmp_path, fc1=FC2))
    (doubt,) = doubts(found)
    assert "2 weights have buckets of 4,096 elements over 2 ranks" in doubt
    assert {name for _, name, _ in issued(found, Kind.PARAM_GATHER)} == {
        f"{layer}.{weight}" for layer in LAYERS for weight in ("fc1_weight", "fc2_weight")
    }


def test_too_many_of_a_size_are_in_doubt(tmp_path):
    foreign = Foreign()
    foreign.iteration(0, lambda: (foreign.collective(FC2), foreign.step()))
    found = foreign.read(tmp_path, assumed(tmp_path))
    assert "not one for each of the 2 layers" in max(doubts(found))


def test_an_order_that_cannot_be_is_in_doubt(tmp_path):
    """Both gathers come when the first layer is over: one cannot be for it."""
    foreign = Foreign()

    def body():
        foreign.stage(1, "forward")
        foreign.stage(2, "forward")
        foreign.collective(FC2)
        foreign.collective(FC2)
        foreign.stage(1, "forward")
        foreign.stage(2, "forward")
        foreign.backward(reduce=False)

    foreign.iteration(0, body)
    (doubt,) = doubts(foreign.read(tmp_path, assumed(tmp_path)))
    assert "not the order in which the layers run" in doubt


def test_an_iteration_that_does_not_fit_is_left_out_and_noted(tmp_path):
    foreign = Foreign()
    for number in range(3):
        foreign.iteration(number, foreign.step)
    foreign.iteration(3, lambda: (foreign.collective(FC2), foreign.step()))
    found = foreign.read(tmp_path, assumed(tmp_path))
    gathers = [place for place in issued(found, Kind.PARAM_GATHER) if "fc2" in place[1]]
    assert [number for number, *_ in gathers] == [0, 0, 1, 1, 2, 2]
    assert any("3 overlap::param_gather of fc2_weight's size" in note for note in found.notes)


def test_stages_that_do_not_fit_the_layers_are_left_out_and_noted(tmp_path):
    foreign = Foreign()
    foreign.iteration(0, lambda: (foreign.forward(), foreign.stage(1, "forward")))
    foreign.iteration(1, foreign.step)
    found = foreign.read(tmp_path, assumed(tmp_path))
    assert [number for number, *_ in run_of(found, Kind.STAGE1_FORWARD)] == [1, 1]
    assert any("1 of 2 iterations do not run megamoe::stage1.forward" in n for n in found.notes)


def test_runs_of_uneven_length_do_not_tell_the_number_of_layers(tmp_path):
    foreign = Foreign()

    def body():
        foreign.forward()
        foreign.stage(1, "backward")
        foreign.forward()
        foreign.stage(1, "forward")

    foreign.iteration(0, body)
    found = foreign.read(tmp_path)
    assert not [one for one in found.stages if one.span.kind is Kind.STAGE1_FORWARD]
    assert any("does not tell how many layers" in note for note in found.notes)


def test_sizes_that_are_no_gated_pair_are_not_guessed_at(tmp_path):
    foreign = Foreign()

    def body():
        for _ in range(2):
            foreign.collective(FC2)
            foreign.collective(3 * FC2)
            foreign.stage(1, "forward")
            foreign.stage(2, "forward")
        foreign.backward(reduce=False)

    foreign.iteration(0, body)
    found = foreign.read(tmp_path)
    assert found.stages
    assert not found.collectives
    assert any("give the weights in an --assume file" in note for note in found.notes)


NCCL = Path(__file__).parent / "data" / "nccl"


def nameless(variant, folder):
    """Two ranks' real traces as primus_turbo's stages would have left them: no layer, no weight."""
    for path in (NCCL / variant).iterdir():
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceEvents"] = [
            event | {"name": re.sub(r"megamoe::(.*)\.(.*)\[.*", r"fused_mega_moe_\1_\2", name)}
            for event in trace["traceEvents"]
            if not (name := event.get("name", "")).startswith("overlap::")
        ]
        (folder / path.stem).write_text(json.dumps(trace))
    return folder


@pytest.mark.parametrize("variant", ["split", "late", "serialised"])
def test_a_real_run_is_judged_the_same_without_its_names(tmp_path, variant):
    known = profiling.check(NCCL / variant).rows
    inferred = profiling.check(nameless(variant, tmp_path)).rows
    assert [row.layer for row in known] == [f"{row.layer}.experts" for row in inferred]
    for ours, theirs in zip(known, inferred, strict=True):
        assert theirs.inferred
        assert not ours.inferred
        for what in ("check", "verdict", "hidden", "spread", "occurrences", "set_aside"):
            assert getattr(ours, what) == getattr(theirs, what), what


def test_a_real_run_whose_weights_share_a_bucket_is_not_guessed_at(tmp_path):
    report = profiling.check(nameless("fused", tmp_path))
    assert {row.verdict for row in report.rows} == {Verdict.INCONCLUSIVE}
    assert any("give the weights in an --assume file" in note for note in report.notes)


def test_the_documented_file_can_be_read(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "profiling.md").read_text(encoding="utf-8")
    block = page.split("holds what the user knows:\n")[1].split("\n## ")[0]
    (tmp_path / "assume.toml").write_text(textwrap.dedent(block))
    found = read_assumptions(tmp_path / "assume.toml")
    assert found.layers == tuple(LAYERS)
    assert [weight.name for weight in found.weights] == ["fc1_weight", "fc2_weight"]
    assert found.stages[Kind.STAGE1_FORWARD].fullmatch("TEGroupedMLP.fc1 forward")


WEIGHT = "[[weight]]\nname = 'fc2'\nelements = 8\ngroup_size = 2\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = 3", "layers must list"),
        ("layers = ['a', 'a']", "each once"),
        ("layer = ['a']", "has no 'layer', only layers, stage, weight"),
        ("layers = ['a']\nweight = 3", "[[weight]] tables"),
        ("layers = ['a']\n" + WEIGHT * 2, "two [[weight]] tables have the same name"),
        ("layers = ['a']\n" + WEIGHT.replace("8", "9"), "9 elements, which do not divide"),
        ("layers = ['a']\n" + WEIGHT.replace("8", "-8"), "whole numbers of at least 1"),
        ("layers = ['a']\n" + WEIGHT.replace("name = 'fc2'", ""), "needs a name"),
        ("layers = ['a']\n" + WEIGHT + "size = 1", "[[weight]] has no 'size'"),
        ("layers = ['a']\nstage = 1", "[stage] table"),
        ("layers = ['a']\n[stage]\n'stage3.forward' = 'x'", "[stage] has no 'stage3.forward'"),
        ("layers = ['a']\n[stage]\n'stage1.forward' = '('", "no regular expression"),
        ("layers = [", "assume.toml: "),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, said):
    path = tmp_path / "assume.toml"
    path.write_text(text)
    with pytest.raises(AssumeError, match=r"assume\.toml") as error:
        read_assumptions(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(AssumeError, match="No such file"):
        read_assumptions(tmp_path / "nowhere.toml")
