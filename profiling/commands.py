"""What each command does: read, judge, print, and the exit code."""

from __future__ import annotations

import sys
from argparse import Namespace

from profiling.assume import read_assumptions
from profiling.checks import Report, check
from profiling.effectiveness import effective
from profiling.output import effective_text, to_json, to_text
from profiling.rules import built_in, read_rules
from profiling.understanding import Reading, read
from profiling.verdicts import Verdict

__all__ = ["run"]

BAD_INPUT = Verdict.INCONCLUSIVE.exit_code


def run(options: Namespace) -> int:
    """Do what the command line asks for and return the exit code."""
    try:
        return _COMMANDS[options.command](options)
    except ValueError as error:
        print(f"moe-trace: {error}", file=sys.stderr)
        return BAD_INPUT


def _read(path: str, options: Namespace) -> Reading:
    assumptions = None if options.assume is None else read_assumptions(options.assume)
    return read(path, assumptions=assumptions, only=options.rank)


def _judge(options: Namespace) -> Report:
    # Small things first: a wrong rule should not wait for a long load.
    rules = built_in(options.threshold) if options.rules is None else read_rules(options.rules)
    baseline = None if options.baseline is None else _read(options.baseline, options)
    return check(
        _read(options.path, options),
        rules=rules,
        iterations=options.iterations,
        baseline=baseline,
    )


def _check(options: Namespace) -> int:
    report = _judge(options)
    print(to_json(report) if options.json else to_text(report))
    return report.verdict.exit_code


def _effective(options: Namespace) -> int:
    serial, overlapped = (_read(path, options) for path in (options.serial, options.overlapped))
    result = effective(serial, overlapped, options.threshold, options.iterations)
    print(to_json(result) if options.json else effective_text(result))
    return 0 if result.verdict is None else result.verdict.exit_code


_COMMANDS = {"check": _check, "effective": _effective}
