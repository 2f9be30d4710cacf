"""The command line, `moe-trace`: what it understands. `commands` does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from profiling.layout import WIDTH
from profiling.rules import THRESHOLD, Iterations

__all__ = ["main"]

PROFILE = "a trace (.json, .json.gz, .json.zst), a directory with one per rank, or a pattern"
CODES = "Exit code: 0 PASS, 1 FAIL, 2 cannot tell or bad input."

_Add = Callable[..., argparse.ArgumentParser]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 PASS, 1 FAIL, 2 cannot tell or bad input."""
    options = _parser().parse_args(arguments)
    from profiling import commands  # only now: --help need not wait for what reads traces

    return commands.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe-trace",
        description="Read profiles of MoE training and say whether its collectives are hidden.",
        epilog="example: moe-trace check runs/profile",
        formatter_class=_formatter,
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND", dest="command").add_parser
    for build in (_ls, _check, _report, _diff, _effective, _annotate):
        build(add)
    return parser


def _command(
    add: _Add, name: str, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    return add(
        name,
        help=summary,
        description=description,
        epilog=f"example: moe-trace {name} {example}",
        formatter_class=_formatter,
    )


def _ls(add: _Add) -> None:
    parser = _command(
        add,
        "ls",
        "show what is in a profile",
        "Show what is in a profile: devices, streams, iterations, layers, stages, collectives, "
        "groups, and what could not be attributed. Exit code: 0, or 2 for bad input.",
        "runs/profile",
    )
    parser.add_argument("path", metavar="PATH", nargs="+", help=PROFILE)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    _reading(parser)


def _check(add: _Add) -> None:
    parser = _command(
        add,
        "check",
        "judge whether each layer's collectives run under its stages",
        "Judge, for every expert layer, whether the gather of fc2's weight runs under stage1's "
        "forward and the reduce-scatter of its gradient under stage1's backward; or judge your own "
        f"rules. {CODES}",
        "runs/profile --threshold 0.95",
    )
    _judging(parser)


def _report(add: _Add) -> None:
    parser = _command(
        add,
        "report",
        "everything: overlap per device, the checks, lead, skew, bounds, clocks",
        "Judge as check does, and show everything else that is known: overlap per device, issue "
        "lead, skew, slow-down of the stages, the least that an iteration can leave exposed and "
        f"the ranks' clocks. {CODES}",
        "runs/profile --baseline runs/serialised --html report.html",
    )
    _judging(parser)


def _judging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="+", help=PROFILE)
    _rules(parser)
    parser.add_argument(
        "--baseline",
        metavar="SERIAL",
        help="a profile of the same run with synchronous collectives: adds what the overlap saves",
    )
    _printing(parser)
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML, too")
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline, too")
    _selection(parser)


def _diff(add: _Add) -> None:
    parser = _command(
        add,
        "diff",
        "compare two profiles, collective by collective",
        "Compare two profiles: what of each collective changed, and whether by more than it "
        "scatters. Exit code: 0, 2 for bad input, and with --fail-on-worse 1 where anything got "
        "worse.",
        "runs/before runs/after",
    )
    parser.add_argument("before", metavar="BEFORE", help=PROFILE)
    parser.add_argument("after", metavar="AFTER", help="another")
    parser.add_argument(
        "--fail-on-worse", action="store_true", help="exit with 1 if a figure got worse"
    )
    _rules(parser)
    _printing(parser)
    _selection(parser)


def _effective(add: _Add) -> None:
    parser = _command(
        add,
        "effective",
        "say how much of the communication's time the overlap saves",
        "Compare a run whose collectives were forced synchronous with the overlapped one: the time "
        "that a step saves, as a share of what its collectives take alone. Exit code: 0 told (with "
        "--threshold: PASS), 1 FAIL, 2 cannot tell or bad input.",
        "runs/serialised runs/split --threshold 0.8",
    )
    parser.add_argument("serial", metavar="SERIAL", help=PROFILE)
    parser.add_argument("overlapped", metavar="OVERLAPPED", help="a profile of the same run")
    parser.add_argument(
        "--threshold", type=float, help="share of the communication's time that has to be saved"
    )
    _printing(parser)
    _selection(parser)


def _annotate(add: _Add) -> None:
    parser = _command(
        add,
        "annotate",
        "write the traces again with hidden, exposed and waiting time drawn in",
        "Write the traces again with tracks of hidden, exposed and waiting time and arrows from "
        "issue to kernel, for Perfetto. Exit code: 0, or 2 for bad input.",
        "runs/profile/rank0.json rank0.annotated.json.gz",
    )
    parser.add_argument("path", metavar="PATH", help=PROFILE)
    parser.add_argument(
        "output", metavar="OUTPUT", help="a file for one trace, a directory for several"
    )
    _assuming(parser)


def _rules(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help="share of a collective's time that has to be hidden (default: %(default)s)",
    )
    chosen.add_argument(
        "--rules",
        metavar="FILE",
        help="use the rules of this TOML file instead of the two built-in checks",
    )


def _printing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write Markdown, too; without FILE print it instead",
    )


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--iterations",
        type=_iterations,
        metavar="N,N-N",
        help="only these iterations, as in 3,5-8,10- (default: all)",
    )
    _reading(parser)


def _reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=_ranks, metavar="N,N", help="only these ranks")
    parser.add_argument(
        "--rank-of",
        type=_told,
        action="append",
        metavar="FILE=N",
        help="the rank of a file that does not say it; may be given again",
    )
    _assuming(parser)


def _assuming(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--assume",
        metavar="FILE",
        help="what you know of a trace without our ranges (TOML): layers, weights, sizes",
    )


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, as in 0,3") from None


def _told(text: str) -> tuple[str, int]:
    name, _, rank = text.rpartition("=")
    if not name or not rank.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file and its rank, as in a.json=3")
    return name, int(rank)


def _iterations(text: str) -> Iterations:
    try:
        return Iterations.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=WIDTH)
