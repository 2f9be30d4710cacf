"""What each command does: read, judge, write and print, and the exit code."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from profiling.annotate import annotate
from profiling.assume import read_assumptions
from profiling.checks import check
from profiling.comparing import diff
from profiling.effectiveness import effective
from profiling.html import write_html
from profiling.json_output import to_json
from profiling.junit import to_junit
from profiling.listing import listing
from profiling.loading import load
from profiling.markdown import to_markdown
from profiling.progress import progress_bar
from profiling.results import Report
from profiling.rules import Rule, built_in, read_rules
from profiling.text import full_text, to_text
from profiling.understanding import Reading, read
from profiling.verdicts import Verdict
from profiling.writing import replacing, write

__all__ = ["run"]

BAD_INPUT = Verdict.INCONCLUSIVE.exit_code
INTERRUPTED = 130  # as shells say it: 128 + SIGINT


def run(options: Namespace) -> int:
    """Do what the command line asks for and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a trace may hold any name
    try:
        code = _COMMANDS[options.command](options)
        if sys.stdout is not None:  # as where the shell closed it: >&-
            sys.stdout.flush()
    except KeyboardInterrupt:
        _refuse("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _refuse("standard output was closed before everything was written")
    except OSError as error:
        return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
    except ValueError as error:
        return _refuse(str(error))
    return code


def _refuse(why: str) -> int:
    print(f"moe-trace: {' '.join(why.split())}", file=sys.stderr)
    return BAD_INPUT


def _read(paths: list[str], options: Namespace) -> Reading:
    assumptions = None if options.assume is None else read_assumptions(options.assume)
    path = paths[0] if len(paths) == 1 else paths
    with progress_bar() as progress:
        profile = load(path, ranks=dict(options.rank_of or ()), progress=progress, jobs=None)
    return read(profile, assumptions=assumptions, only=options.rank)


def _rules(options: Namespace) -> tuple[Rule, ...]:
    return built_in(options.threshold) if options.rules is None else read_rules(options.rules)


def _judge(options: Namespace) -> tuple[Report, Reading]:
    rules = _rules(options)  # first: a wrong rule should not wait for a long load
    baseline = None if options.baseline is None else _read([options.baseline], options)
    reading = _read(options.path, options)
    return check(reading, rules=rules, iterations=options.iterations, baseline=baseline), reading


def _check(options: Namespace, text: Callable[[Report], str] = to_text) -> int:
    report, reading = _judge(options)
    if options.junit is not None:
        write(options.junit, to_junit(report))
    if options.html is not None:
        with replacing(options.html) as path:
            write_html(report, reading, path)
    _print(options, report, text)
    return report.verdict.exit_code


def _report(options: Namespace) -> int:
    return _check(options, full_text)


def _effective(options: Namespace) -> int:
    serial, overlapped = (_read([path], options) for path in (options.serial, options.overlapped))
    result = effective(serial, overlapped, options.threshold, options.iterations)
    _print(options, result, to_text)
    return 0 if result.verdict is None else result.verdict.exit_code


def _diff(options: Namespace) -> int:
    rules = _rules(options)
    before, after = (_read([path], options) for path in (options.before, options.after))
    result = diff(before, after, rules=rules, iterations=options.iterations)
    _print(options, result, to_text)
    return 1 if options.fail_on_worse and result.worse else 0


def _ls(options: Namespace) -> int:
    found = listing(_read(options.path, options))
    print(to_json(found) if options.json else to_text(found))
    return 0


def _annotate(options: Namespace) -> int:
    assumptions = None if options.assume is None else read_assumptions(options.assume)
    for one in annotate(options.path, options.output, assumptions=assumptions):
        print(f"{one.path}: {one.slices} slices and {one.arrows} arrows added")
        for note in one.notes:
            print(f"  note: {note}")
    return 0


def _print(options: Namespace, result: Any, text: Callable[[Any], str]) -> None:
    """Write the Markdown file that was asked for, and print what was."""
    if options.markdown not in (None, "-"):
        write(options.markdown, to_markdown(result))
    if options.json:
        print(to_json(result))
    elif options.markdown == "-":
        print(to_markdown(result))
    else:
        print(text(result))


_COMMANDS = {
    "annotate": _annotate,
    "check": _check,
    "diff": _diff,
    "effective": _effective,
    "ls": _ls,
    "report": _report,
}
