"""The command line, `moe-trace`: a thin shell around `load`, `check` and the output formats."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from profiling.checks import THRESHOLD, Verdict, check
from profiling.loading import LoadError
from profiling.output import WIDTH, to_json, to_text

__all__ = ["main"]

BAD_INPUT = Verdict.INCONCLUSIVE.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 PASS, 1 FAIL, 2 cannot tell or bad input."""
    options = _parser().parse_args(arguments)
    try:
        report = check(options.path, threshold=options.threshold)
    except (LoadError, ValueError) as error:
        print(f"moe-trace: {error}", file=sys.stderr)
        return BAD_INPUT
    print(to_json(report) if options.json else to_text(report))
    return report.verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-trace",
        description="Read profiles of MoE training and say whether its collectives are hidden.",
        epilog="example: moe-trace check runs/profile",
        formatter_class=_formatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checker = commands.add_parser(
        "check",
        help="judge whether each layer's collectives run under its stages",
        description=(
            "Judge, for every expert layer, whether the gather of fc2's weight runs under stage1's "
            "forward and the reduce-scatter of its gradient under stage1's backward. Exit code: 0 "
            "PASS, 1 FAIL, 2 cannot tell or bad input."
        ),
        epilog="example: moe-trace check runs/profile --threshold 0.95",
        formatter_class=_formatter,
    )
    checker.add_argument(
        "path",
        metavar="PATH",
        help="a trace (.json, .json.gz), a directory with one trace per rank, or a pattern",
    )
    checker.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help="share of a collective's time that has to be hidden (default: %(default)s)",
    )
    checker.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=WIDTH)
