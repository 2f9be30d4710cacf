"""Rules from files: what they say is what is judged, and what is wrong in one is named."""

import textwrap
from pathlib import Path

import pytest

import profiling
from profiling import FindingKind, RuleError, Verdict, read_rules
from profiling.cli import main
from profiling.ranges import Kind
from profiling.rules import BUILT_IN, Iterations, Rule
from tests.kineto import AUTOGRAD, COMMUNICATION, TraceBuilder, gpu_iteration

EXPERTS = "layers.0.mlp.experts"
TRACES = Path(__file__).parents[2] / "shared" / "traces"
GATHER = {
    "name": "gather",
    "collective": "overlap::param_gather[*.fc2_weight]",
    "stage": "megamoe::stage1.forward",
}


def rule(**changes):
    return Rule(**(GATHER | {"min_hidden": 0.9} | changes))


def trace(gathers, **kwargs):
    built = TraceBuilder()
    for number, gather in enumerate(gathers):
        gpu_iteration(built, number, 1e6 + 2000 * number, gather=gather, **kwargs)
    return built


def judge(tmp_path, built, *rules, **kwargs):
    built.write(tmp_path)
    return profiling.check(tmp_path, rules=rules, **kwargs).rows


GOOD, HALF, BAD = (150, 650), (1000, 1200), (1150, 1350)


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [
        ({"min_hidden": 0.9}, Verdict.PASS),  # 1,600 of 1,700 us
        ({"min_hidden": 0.95}, Verdict.FAIL),
        ({"min_spread": 0.5}, Verdict.PASS),
        ({"min_spread": 0.51}, Verdict.FAIL),
        ({"max_exposed_ms": 0.025}, Verdict.PASS),
        ({"max_exposed_ms": 0.024}, Verdict.FAIL),
        ({"min_hidden": 0.9, "max_exposed_ms": 0.024}, Verdict.FAIL),
        ({"max_wait_ms": 0.0}, Verdict.PASS),
    ],
    ids=str,
)
def test_each_bound(tmp_path, bound, verdict):
    (row,) = judge(tmp_path, trace([GOOD, GOOD, GOOD, HALF]), Rule(**GATHER, **bound))
    assert row.verdict is verdict
    assert row.exposed_ms == pytest.approx(0.025)


@pytest.mark.parametrize(("bound", "verdict"), [(0.2, Verdict.PASS), (0.19, Verdict.FAIL)])
def test_the_bound_on_waiting(tmp_path, bound, verdict):
    built = trace([(1000, 1300)] * 3)
    for number in range(3):
        start = 1e6 + 2000 * number
        built.kernel("void gemm2(float*)", start + 85, start + 1310, start + 1500)
    (row,) = judge(tmp_path, built, Rule(**GATHER, max_wait_ms=bound))
    assert row.verdict is verdict


@pytest.mark.parametrize(
    ("choice", "occurrences", "verdict"),
    [
        ({}, 6, Verdict.FAIL),
        ({"skip_first": 2}, 4, Verdict.PASS),
        ({"iterations": Iterations.parse("2-")}, 4, Verdict.PASS),
        ({"iterations": Iterations.parse("0,1")}, 2, Verdict.FAIL),
        ({"iterations": Iterations.parse("1-3")}, 3, Verdict.FAIL),
        ({"iterations": Iterations.parse("7-")}, 0, Verdict.INCONCLUSIVE),
    ],
    ids=str,
)
def test_which_iterations(tmp_path, choice, occurrences, verdict):
    (row,) = judge(tmp_path, trace([BAD, BAD, GOOD, GOOD, GOOD, GOOD]), rule(**choice))
    assert (row.occurrences, row.verdict) == (occurrences, verdict)


def test_iterations_that_are_not_there_are_named_as_the_reason(tmp_path):
    (row,) = judge(tmp_path, trace([GOOD] * 3), rule(skip_first=3))
    assert row.finding == "all 3 that were recorded are outside of the iterations asked for"


def test_exposed_communication_is_of_the_chosen_iterations(tmp_path):
    trace([BAD, GOOD, GOOD]).write(tmp_path)
    chosen = Iterations.parse("1-")
    assert profiling.check(tmp_path).exposed_ms["rank 0"] == pytest.approx([0.2, 0, 0])
    assert profiling.check(tmp_path, iterations=chosen).exposed_ms["rank 0"] == [0, 0]


def two_layers(tmp_path):
    built = TraceBuilder()
    for number in range(3):
        start = 1e6 + 4000 * number
        gpu_iteration(built, number, start, gather=GOOD)
        gpu_iteration(built, number, start + 2000, gather=BAD, experts="layers.1.mlp.experts")
    built.write(tmp_path)


def test_which_layers(tmp_path):
    two_layers(tmp_path)
    rows = profiling.check(tmp_path, rules=[rule()]).rows
    assert [row.verdict for row in rows] == [Verdict.PASS, Verdict.FAIL]
    (row,) = profiling.check(tmp_path, rules=[rule(layers="layers.0.*")]).rows
    assert (row.layer, row.verdict) == (EXPERTS, Verdict.PASS)


def test_a_stage_in_brackets_is_any_that_matches(tmp_path):
    built = TraceBuilder()
    other = "layers.1.mlp.experts"
    for number in range(3):  # layer 0's gather lies under layer 1's stage
        start = 1e6 + 4000 * number
        gpu_iteration(built, number, start, gather=(1300, 1600))
        built.range(Kind.STAGE1_FORWARD, other, start + 90, start + 99)
        built.kernel("gemm", start + 92, start + 1200, start + 1900)
    built.write(tmp_path)
    own, everywhere, named = (
        profiling.check(tmp_path, rules=[rule(stage=stage, layers=EXPERTS)]).rows[0].verdict
        for stage in (
            "megamoe::stage1.forward",
            "megamoe::*[*]",
            f"megamoe::stage1.forward[{other}]",
        )
    )
    assert (own, everywhere, named) == (Verdict.FAIL, Verdict.PASS, Verdict.PASS)


def test_any_compute(tmp_path):
    built = trace([BAD] * 3)
    (row,) = judge(tmp_path, built, rule(stage="any"))
    assert row.verdict is Verdict.FAIL
    for number in range(3):
        start = 1e6 + 2000 * number
        built.kernel("elementwise", start + 85, start + 1150, start + 1350)
    (row,) = judge(tmp_path, built, rule(stage="any"))
    assert row.verdict is Verdict.PASS
    (row,) = judge(tmp_path, built, rule())  # but not of the stage
    assert row.verdict is Verdict.FAIL
    assert row.findings[0].kind is FindingKind.WRONG_STAGE


def test_the_other_weight_under_the_other_stage(tmp_path):
    built = TraceBuilder()
    for number in range(3):
        start = 1e6 + 2000 * number
        built.range(Kind.ITERATION, str(number), start, start + 2000)
        built.range(Kind.GRAD_REDUCE, f"{EXPERTS}.fc1_weight", start + 5, start + 15, AUTOGRAD)
        moved = {"stream": COMMUNICATION, "tid": AUTOGRAD}
        built.kernel("ncclDevKernel_ReduceScatter", start + 8, start + 110, start + 500, **moved)
        built.range(Kind.STAGE2_BACKWARD, "layers.9.mlp.experts", start + 20, start + 40, AUTOGRAD)
        built.kernel("gemm", start + 25, start + 100, start + 900, tid=AUTOGRAD)
    reduction = rule(
        collective="overlap::grad_reduce[*.fc1_weight]", stage="megamoe::stage2.backward[*]"
    )
    first, other = judge(tmp_path, built, reduction)
    assert (first.verdict, first.occurrences, first.layer) == (Verdict.PASS, 3, EXPERTS)
    assert other.verdict is Verdict.INCONCLUSIVE  # a layer that should have one, and has none


def test_a_rule_that_matches_nothing_is_inconclusive(tmp_path):
    built = trace([GOOD] * 3)
    (row,) = judge(tmp_path, built, rule(collective="alltoall*"))
    assert (row.verdict, row.layer) == (Verdict.INCONCLUSIVE, "")
    assert row.findings[0].kind is FindingKind.NOT_RECORDED
    (row,) = judge(tmp_path, built, rule(stage="megamoe::stage2.backward"))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert "no megamoe::stage2.backward" in row.finding


@pytest.mark.parametrize(("gather", "verdict"), [(GOOD, Verdict.PASS), (BAD, Verdict.FAIL)])
def test_by_c10d_s_word_and_by_kernel(tmp_path, gather, verdict):
    built = trace([gather] * 3, **{"Collective name": "_allgather_base", "Group size": 2})
    for pattern in ("_allgather_base", "ncclDevKernel_AllGather*"):
        (row,) = judge(tmp_path, built, rule(collective=pattern))
        assert (row.verdict, row.occurrences, row.layer) == (verdict, 3, EXPERTS)


def test_an_effective_bound_needs_a_baseline(tmp_path):
    (row,) = judge(tmp_path, trace([GOOD] * 3), rule(min_effective=0.5))
    assert row.verdict is Verdict.INCONCLUSIVE
    assert row.findings[0].kind is FindingKind.NO_BASELINE


# Traces that are not ours


@pytest.mark.parametrize(
    ("threshold", "verdict"), [(0.15, Verdict.PASS), (0.16, Verdict.FAIL)], ids=["pass", "fail"]
)
def test_a_foreign_trace_gets_a_verdict_from_a_pattern(threshold, verdict):
    """15.61 % of all its communication runs beside other kernels."""
    path = TRACES / "a100_nccl_rank0.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here: public traces lie beside the checkout")
    rules = [Rule("reduce", "allreduce", "any", min_hidden=threshold)]
    (row,) = profiling.check(path, rules=rules).rows
    assert (row.occurrences, row.set_aside) == (15, {})
    assert row.hidden == pytest.approx(0.1565, abs=5e-5)  # broadcasts take the rest, all exposed
    assert row.verdict is verdict


# Files


def write(tmp_path, text):
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="utf-8")
    return path


FULL = """
[[rule]]
name = "everything"
collective = "overlap::param_gather[*.fc1_weight]"
stage = "any"
min_hidden = 0.5
min_spread = 0.1
max_exposed_ms = 3
max_wait_ms = 1.5
min_effective = 0.25
iterations = "3,5-8,10-"
skip_first = 1
layers = "layers.1?.*"

[[rule]]
name = "list"
collective = "*"
stage = "megamoe::stage1.forward"
max_wait_ms = 0
iterations = [4, 5]
"""


def test_a_file_with_every_key(tmp_path):
    first, second = read_rules(write(tmp_path, FULL))
    assert first == Rule(
        name="everything",
        collective="overlap::param_gather[*.fc1_weight]",
        stage="any",
        min_hidden=0.5,
        min_spread=0.1,
        max_exposed_ms=3,
        max_wait_ms=1.5,
        min_effective=0.25,
        iterations=Iterations("3,5-8,10-", ((3, 3), (5, 8), (10, None))),
        skip_first=1,
        layers="layers.1?.*",
    )
    assert [number in second.iterations for number in (3, 4, 5, 6, None)] == [0, 1, 1, 0, 0]


ONE = '[[rule]]\nname = "r"\ncollective = "*"\nstage = "any"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("[[rule", "is not TOML", id="no TOML"),
        pytest.param("", "has no [[rule]] table", id="empty"),
        pytest.param('[rule]\nname = "r"', "use double brackets", id="one table"),
        pytest.param(ONE + "min_hidden = 0.5\n[other]\n", "'other'", id="other table"),
        pytest.param(ONE + "min_hiden = 0.5", "min_hiden is unknown, allowed are name", id="key"),
        pytest.param(ONE + "min_hidden = 90", "min_hidden is 90, but must be a share", id="share"),
        pytest.param(ONE + 'min_hidden = "a"', "min_hidden is 'a'", id="text for share"),
        pytest.param(ONE + "min_hidden = true", "min_hidden is True", id="bool for share"),
        pytest.param(ONE + "max_wait_ms = nan", "max_wait_ms is nan", id="nan"),
        pytest.param(ONE + "max_wait_ms = -1", "a number of milliseconds", id="negative"),
        pytest.param(ONE + "max_wait_ms = 1\nskip_first = 1.5", "skip_first is 1.5", id="skip"),
        pytest.param(ONE + "max_wait_ms = 1\niterations = []", "iterations is []", id="none"),
        pytest.param(ONE + 'max_wait_ms = 1\niterations = "5-3"', "rising ranges", id="falling"),
        pytest.param(ONE, "it bounds nothing, give one of min_hidden", id="no bound"),
        pytest.param('[[rule]]\nname = "r"\nstage = "any"', "collective is missing", id="missing"),
        pytest.param(2 * (ONE + "max_wait_ms = 1\n"), "2 rules named 'r'", id="same name"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, capsys, text, says):
    path = write(tmp_path, text)
    with pytest.raises(RuleError) as raised:
        read_rules(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert main(["check", str(tmp_path), "--rules", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_rule_is_named_by_number_and_name(tmp_path):
    path = write(tmp_path, ONE + "max_wait_ms = 1\n" + ONE.replace('"r"', '"second"') + "x = 1")
    with pytest.raises(RuleError, match=r"rule 2 \('second'\): x is unknown"):
        read_rules(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RuleError, match="cannot be read: No such file"):
        read_rules(tmp_path / "none.toml")


def test_the_command_judges_the_file_s_rules_only(tmp_path, capsys):
    two_layers(tmp_path)
    path = tmp_path / "rules" / "mine.toml"
    path.parent.mkdir()
    path.write_text(ONE + 'min_hidden = 0.9\nlayers = "layers.0*"', encoding="utf-8")
    assert main(["check", str(tmp_path), "--rules", str(path)]) == 0
    out = capsys.readouterr().out
    assert "r (at least 90% hidden)" in out
    assert BUILT_IN[0].name not in out
    assert main(["check", str(tmp_path)]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["check", str(tmp_path), "--rules", str(path), "--threshold", "0.5"])
    assert stop.value.code == 2
    assert "--threshold" in capsys.readouterr().err


def test_the_example_in_the_docs_is_a_rule_file(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "profiling.md").read_text(encoding="utf-8")
    block = page.split("## Rules\n")[1].split("\n\n")[0]
    (shown,) = read_rules(write(tmp_path, textwrap.dedent(block)))
    assert shown.iterations is not None
    assert all(getattr(shown, key) for key in ("min_spread", "max_wait_ms", "skip_first"))
