"""Every form of a result says the same, fits, and can be read by what reads such files."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

import profiling
from profiling import Verdict
from profiling.comparing import diff
from profiling.json_output import schema
from profiling.junit import to_junit
from profiling.listing import listing
from profiling.markdown import to_markdown
from profiling.ranges import Kind
from profiling.rules import Rule
from profiling.text import full_text
from tests.kineto import TraceBuilder, cpu_iteration, gpu_iteration

DATA = Path(__file__).parent / "data"
ODD = "layers.0|`*_<b>&\"'\x07\ud800.experts"  # markup, a control character, half a surrogate pair


@cache
def read(variant):
    return profiling.read(DATA / f"gpu_{variant}.pt.trace.json.gz")


@cache
def report(variant):
    baseline = read("serialised") if variant != "serialised" else None
    return profiling.check(read(variant), baseline=baseline)


def odd(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=(1150, 1350), experts=ODD)
    return profiling.read(trace.write(tmp_path))


def nothing(tmp_path):
    return profiling.read(TraceBuilder().write(tmp_path, "empty.json"))


# JSON


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def test_real_results_are_as_the_schema_says(validator, tmp_path):
    results = [
        report("split"),
        report("late"),
        report("serialised"),
        profiling.effective(read("serialised"), read("split")),
        profiling.effective(read("serialised"), read("split"), threshold=0.5),
        listing(read("split")),
        diff(read("late"), read("split")),
    ]
    strange = [odd(tmp_path), nothing(tmp_path)]
    results += [profiling.check(reading) for reading in strange]
    results += [listing(reading) for reading in strange]
    results += [diff(*strange)]
    cpu = TraceBuilder(0, 2, groups=((0, 1),))
    for number in range(3):
        cpu_iteration(cpu, number, 1e6 + 2000 * number, gather=(150, 650))
    results += [listing(profiling.read(cpu.write(tmp_path, "cpu.json")))]
    for result in results:
        validator.validate(json.loads(profiling.to_json(result)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.pop("verdict"),
        lambda entry: entry.update(schema=1),
        lambda entry: entry["rows"][0].update(extra=1),
        lambda entry: entry["rows"][0].update(hidden=1.5),
        lambda entry: entry["rows"][0].update(verdict="MAYBE"),
        lambda entry: entry["rows"][0].update(findings=[{"kind": "unheard of", "text": ""}]),
    ],
    ids=["field gone", "other schema", "unknown field", "share", "verdict", "kind"],
)
def test_the_schema_refuses_what_is_not(validator, spoil):
    entry = json.loads(profiling.to_json(report("late")))
    validator.validate(entry)
    spoil(entry)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(entry)


def test_the_schema_has_every_kind_of_finding():
    kinds = schema()["$defs"]["finding"]["properties"]["kind"]["enum"]
    assert set(kinds) == {kind.value for kind in profiling.FindingKind}


def test_json_has_the_figures():
    found = report("split")
    entry = json.loads(profiling.to_json(found))
    assert (entry["kind"], entry["verdict"], entry["exit_code"]) == ("report", "PASS", 0)
    assert [row["hidden"] for row in entry["rows"]] == [row.hidden for row in found.rows]
    assert entry["effective"]["value"] == found.effective.value
    for row in entry["rows"]:
        assert len(row["measured"]) == row["occurrences"]
        assert [one["iteration"] for one in row["measured"]] == list(range(2, 12))
        shares = [one["hidden"] for one in row["measured"]]
        assert [min(shares), max(shares)] == row["spread"]
        exposed = [one["exposed_ms"] for one in row["measured"]]
        assert sum(exposed) / len(exposed) == pytest.approx(row["exposed_ms"])
    assert entry["devices"]["rank 0"][0]["counts"]["communication"] == 40


# Text


@pytest.mark.parametrize("variant", ["split", "late", "fused", "serialised"])
def test_text_fits_and_ends_with_the_verdict(variant):
    for text in (profiling.to_text(report(variant)), full_text(report(variant))):
        lines = text.splitlines()
        assert lines[-1] == f"verdict: {report(variant).verdict.value}"
        assert max(map(len, lines)) <= 100
        for row in report(variant).rows:
            for finding in row.findings:
                assert finding.kind.value in text


def test_the_full_text_has_what_no_rule_bounds():
    text = full_text(report("split"))
    for words in (
        "device 0: 2 streams; compute 763",
        "overlap: 99.47% of 70.65 ms communication",
        "copies and memsets are no kernels",
        "stage slower",
        "forward, prefetch depth 1",
        "effective: 97.0%",
    ):
        assert words in text
    assert "all devices" not in text  # there is one


def test_clocks_are_shown_where_there_are_several_ranks(tmp_path):
    args = {
        "Collective name": "_allgather_base",
        "Process Group Ranks": "[0, 1]",
        "Group size": 2,
    }
    for rank in (0, 1):
        trace = TraceBuilder(rank, 2)
        for number in range(3):
            start = 1e6 + 2000 * number + 1500 * rank
            gpu_iteration(trace, number, start, gather=(150, 650), **args)
        trace.write(tmp_path)
    text = full_text(profiling.check(tmp_path))
    assert "rank 1: +1.500 ms (scatter 0.000 ms, 3 collectives)" in text
    assert "clocks against" not in profiling.to_text(profiling.check(tmp_path))


def test_the_listing(tmp_path):
    text = profiling.to_text(listing(read("split")))
    for words in (
        "iterations: 10, 2 to 11",
        "layer layers.*.experts (2 of them)",
        "overlap::param_gather[layers.*.experts.fc2_weight]: 20 issued, 2 names, by range",
        "without a launch in the trace: 37",
    ):
        assert words in text
    empty = profiling.to_text(listing(nothing(tmp_path)))
    for words in ("no device", "iterations: none", "no collective"):
        assert words in empty


def test_an_inferred_row_is_marked_in_every_form():
    found = report("split")
    rows = tuple(replace(row, inferred=True) for row in found.rows)
    marked = replace(found, rows=rows)
    for write in (profiling.to_text, full_text, to_markdown):
        assert write(marked).count("inferred") >= len(rows)
        assert "inferred" not in write(found)
    assert "inferred" in to_junit(marked)


# Markdown


@pytest.mark.parametrize("variant", ["split", "late"])
def test_markdown_has_a_table_per_rule_and_ends_with_the_verdict(variant):
    found = report(variant)
    text = to_markdown(found)
    assert text.splitlines()[-1] == f"**verdict: {found.verdict.value}**"
    lines = text.splitlines()
    assert lines.count("|---|---|---|---|---|---|---|") == 2
    assert sum(line.startswith("| layers.") for line in lines) == len(found.rows)


def test_names_cannot_break_a_table(tmp_path):
    text = to_markdown(profiling.check(odd(tmp_path)))
    (row,) = [line for line in text.splitlines() if line.startswith("| layers.0")][:1]
    assert row.replace("\\|", "").count("|") == 8
    assert "<b>" not in text


def test_markdown_of_the_others():
    text = to_markdown(profiling.effective(read("serialised"), read("split"), threshold=0.5))
    assert "97.0%" in text
    assert text.splitlines()[-1] == "**verdict: PASS**"
    changed = to_markdown(diff(read("late"), read("split")))
    assert "| step | step | 29." in changed
    assert "| better |" in changed


# JUnit


def parsed(found):
    """Check the document against what the common readers ask of one; return its cases."""
    root = ElementTree.fromstring(to_junit(found).encode())
    assert root.tag == "testsuites"
    cases = []
    for suite in root:
        assert suite.tag == "testsuite"
        assert suite.attrib["name"]
        own = list(suite)
        assert all(case.tag == "testcase" for case in own)
        assert int(suite.attrib["tests"]) == len(own)
        for attribute, tag in (
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{tag}"))
        for case in own:
            assert case.attrib["name"]
            assert case.attrib["classname"]
            float(case.attrib["time"])
            assert [part.tag for part in case] in (
                ["system-out"],
                ["failure", "system-out"],
                ["error", "system-out"],
            )
        cases += own
    for attribute in ("tests", "failures", "errors", "skipped"):
        assert int(root.attrib[attribute]) == sum(int(suite.attrib[attribute]) for suite in root)
    return cases


@pytest.mark.parametrize(("variant", "tag"), [("split", None), ("late", "failure")])
def test_junit_has_a_case_per_rule_and_layer(variant, tag):
    found = report(variant)
    cases = parsed(found)
    assert [(case.attrib["classname"], case.attrib["name"]) for case in cases] == [
        (row.check, row.layer) for row in found.rows
    ]
    for case, row in zip(cases, found.rows, strict=True):
        assert case[0].tag == (tag or "system-out")
        if tag is not None:
            assert case[0].attrib["type"] == row.findings[0].kind.value
            assert case[0].text == row.finding


def test_inconclusive_is_an_error_and_not_skipped(tmp_path):
    found = profiling.check(nothing(tmp_path))
    assert {row.verdict for row in found.rows} == {Verdict.INCONCLUSIVE}
    assert [case[0].tag for case in parsed(found)] == ["error", "error"]


def test_names_cannot_break_the_document(tmp_path):
    cases = parsed(profiling.check(odd(tmp_path)))
    assert cases[0].attrib["name"].startswith("layers.0|`*_<b>&\"'")


def test_a_failure_without_a_finding_has_its_bounds_as_message(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
        trace.range(Kind.ITERATION, str(number + 10), 9e6, 9e6 + 1)
    rule = Rule("wait", "*", "any", max_exposed_ms=0.0, min_spread=1.0)
    good = profiling.check(trace.write(tmp_path), rules=[rule])
    assert parsed(good)[0][0].tag == "system-out"
    bad = TraceBuilder()
    for number in range(3):
        gpu_iteration(bad, number, 1e6 + 2000 * number, gather=(1050, 1101))
    rule = Rule("wait", "*", "any", max_exposed_ms=0.0005)
    found = profiling.check(bad.write(tmp_path), rules=[rule])
    assert found.verdict is Verdict.FAIL
    (case,) = parsed(found)
    assert case[0].attrib["message"] == "not within its bounds: at most 0.0005 ms exposed"
