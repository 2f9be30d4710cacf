"""A report as JUnit XML: a test suite per rule, a test case per layer.

An inconclusive case is an ``error``, never ``skipped``: systems that read these files count what is
skipped as no reason to stop.
"""

from __future__ import annotations

import re
from itertools import groupby
from xml.etree import ElementTree

from profiling.layout import ms, percent
from profiling.results import Report, Row
from profiling.verdicts import Verdict

__all__ = ["to_junit"]

_TAG = {Verdict.FAIL: "failure", Verdict.INCONCLUSIVE: "error"}
# What XML 1.0 has no place for, escaped or not.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """Return the report as one XML document; figures are in each case's ``system-out``."""
    root = ElementTree.Element("testsuites", {"name": "moe-trace", **_counts(report.rows)})
    for title, group in groupby(report.rows, key=lambda row: row.check):
        rows = tuple(group)
        name = _text(title)
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(rows)})
        for row in rows:
            layer = _text(row.layer or "no layer")
            case = ElementTree.SubElement(
                suite, "testcase", {"classname": name, "name": layer, "time": "0"}
            )
            if row.verdict in _TAG:
                message = _text(row.finding or f"not within its bounds: {row.bounds}")
                kind = row.findings[0].kind.value if row.findings else row.verdict.value
                told = ElementTree.SubElement(
                    case, _TAG[row.verdict], {"message": message, "type": kind}
                )
                told.text = message
            ElementTree.SubElement(case, "system-out").text = _text(_figures(row))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode")


def _counts(rows: tuple[Row, ...]) -> dict[str, str]:
    verdicts = [row.verdict for row in rows]
    return {
        "tests": str(len(rows)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.INCONCLUSIVE)),
        "skipped": "0",
        "time": "0",
    }


def _figures(row: Row) -> str:
    how = " (parameter inferred)" if row.inferred else ""
    return (
        f"{row.bounds}{how}: hidden {percent(row.hidden)}, exposed {ms(row.exposed_ms)}, wait "
        f"{ms(row.wait_ms)}, {row.occurrences} occurrences"
    )


def _text(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
