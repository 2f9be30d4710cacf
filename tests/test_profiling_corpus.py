"""Verdicts against the truth, on generated runs: no false PASS and no false FAIL.

An INCONCLUSIVE is no error, but must have one of the reasons below, and few of the runs that can
be known may have one; a run that cannot be known must have it.
"""

import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

import profiling
from profiling import Verdict, classification, device, layering
from profiling.assume import read_assumptions
from profiling.classification import Work
from profiling.launches import Launches
from profiling.metrics import LATE_PEER
from profiling.peers import Transfers
from profiling.spans import BACKWARD
from tests.corpus import assume_lines, build, layer_name
from tests.corpus_runs import PLAIN, THRESHOLD, cases

CASES = int(os.environ.get("CORPUS_CASES", "300"))  # 2,000 take two minutes
# Why the verdict on a run that can be known may be withheld.
REASONS = (
    "lasted over",  # too many first occurrences of which no other rank says how long they were
    "could be measured",  # too few are left, for their stage ran while they waited for a late rank
)


def assumptions(case):
    if case.style != PLAIN:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(assume_lines(case)))
        file.flush()
        return read_assumptions(file.name)


def judge(case):
    """Return the truth and the report's rows by check and layer."""
    built = build(case)
    with tempfile.TemporaryDirectory() as folder:
        reading = profiling.read(built.write(Path(folder)), assumptions=assumptions(case))
    report = profiling.check(reading)
    index = {layer_name(case, layer): layer for layer in range(case.layers)}
    return built.truth, {(row.check, index.get(row.layer)): row for row in report.rows}


def errors(case, tally):
    """Return what is wrong with the verdicts on a case, and count them in ``tally``."""
    truth, rows = judge(case)
    wrong = []
    if not truth:
        known = [row for row in rows.values() if row.verdict is not Verdict.INCONCLUSIVE]
        tally["unknowable"] += len(rows)
        return [
            f"{row.check} of {row.layer} is {row.verdict}, and nobody can know" for row in known
        ]
    for (check, layer), what in truth.items():
        row = rows.get((check, layer)) or rows.get((check, None))
        if row is None:
            wrong.append(f"{check} of layer {layer} has no row")
            continue
        hidden = hidden_of(row, what)
        truly = Verdict.PASS if hidden >= THRESHOLD else Verdict.FAIL
        tally["turned"] += truly is not (Verdict.PASS if what.hidden >= THRESHOLD else Verdict.FAIL)
        tally[row.verdict, truly] += case.complete
        tally["even", row.verdict, truly] += case.complete and not case.straggler
        if LATE_PEER in row.set_aside and not (case.late or case.straggler):
            wrong.append(f"{check} of layer {layer}: nobody was late, yet {row.set_aside}")
        if row.verdict is Verdict.INCONCLUSIVE:
            tally[row.finding] += case.complete
            if case.complete and not any(reason in row.finding for reason in REASONS):
                wrong.append(f"{check} of layer {layer} is known, but: {row.finding}")
        elif row.verdict is not truly:
            wrong.append(f"false {row.verdict.value}: {check} of layer {layer}, {hidden:.3f}")
        elif case.complete and abs(row.hidden - hidden) > 1e-6:
            wrong.append(f"{check} of layer {layer} hides {hidden:.4f}, not {row.hidden:.4f}")
    return wrong


def hidden_of(row, what):
    """Return what was truly hidden of the occurrences that count; of all, if none is set aside."""
    if not row.set_aside:
        return what.hidden
    shares = [what.shares[int(one.rank.split()[-1]), one.iteration] for one in row.measured]
    return float(np.average(shares, weights=[one.transfer_ms for one in row.measured]))


def options(examples, **kwargs):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **kwargs,
    )


def test_no_false_verdict():
    tally = Counter()

    @options(CASES, print_blob=True)
    @given(cases())
    def judged_right(case):
        assert not errors(case, tally)

    judged_right()
    for truly in (Verdict.PASS, Verdict.FAIL):
        even = sum(tally["even", found, truly] for found in Verdict)
        assert tally["even", truly, truly] > 0.9 * even
        # How many of 300 random runs have a straggler, which may withhold a verdict, is chance.
        assert tally[truly, truly] > 0.7 * sum(tally[found, truly] for found in Verdict)
        assert tally[truly, truly] > CASES / 5
    assert tally["unknowable"] > CASES / 20
    assert tally["turned"] < CASES / 20  # what is set aside weighs little


def no_names(patch):
    """A reading that knows neither a kernel's name nor what launched it."""
    patch.setattr(classification, "is_communication_kernel", lambda name: "Generic" in name)
    patch.setattr(classification, "_mark_unnamed", lambda *given: None)


def any_compute(patch):
    """One that takes whatever computes for the stage, as a plain overlap figure does."""
    patch.setattr(
        device.Device,
        "stages",
        lambda self, runs: [np.flatnonzero(self._work == Work.COMPUTE)] * len(runs),
    )


def waiting_too(patch):
    """One that takes the time that ranks waited for the last one for the transfer."""
    patch.setattr(Transfers, "of", lambda self, subject: (subject.found.busy, True))


def one_each(patch):
    """One that knows no graphs: a correlation is one kernel's."""
    launched = Launches.inside
    patch.setattr(Launches, "inside", lambda self, *span: launched(self, *span)[:1])


def forward_only(patch):
    """One that counts the layers up in backward, too."""
    named = layering._Part.named
    patch.setattr(
        layering._Part,
        "named",
        lambda self, layers: [
            replace(span, name=layers[-1 - layers.index(span.name)])
            if span.kind in BACKWARD
            else span
            for span in named(self, layers)
        ],
    )


@pytest.mark.parametrize("broken", [no_names, any_compute, waiting_too, one_each, forward_only])
def test_a_broken_judge_is_caught(monkeypatch, broken):
    broken(monkeypatch)
    search = options(500, phases=[Phase.generate])
    assert find(cases(), lambda case: bool(errors(case, Counter())), settings=search)
