"""The command line, `moe-trace`: what it understands. `commands` does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from profiling.layout import WIDTH
from profiling.rules import THRESHOLD, Iterations

__all__ = ["main"]

PROFILE = "a trace (.json, .json.gz), a directory with one trace per rank, or a pattern"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 PASS, 1 FAIL, 2 cannot tell or bad input."""
    options = _parser().parse_args(arguments)
    from profiling import commands  # only now: --help should not wait for numpy

    return commands.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe-trace",
        description="Read profiles of MoE training and say whether its collectives are hidden.",
        epilog="example: moe-trace check runs/profile",
        formatter_class=_formatter,
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND", dest="command").add_parser
    _check(add)
    _effective(add)
    return parser


def _command(
    add: Callable[..., argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = add(
        name,
        help=summary,
        description=description,
        epilog=f"example: moe-trace {name} {example}",
        formatter_class=_formatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _check(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = _command(
        add,
        "check",
        "judge whether each layer's collectives run under its stages",
        "Judge, for every expert layer, whether the gather of fc2's weight runs under stage1's "
        "forward and the reduce-scatter of its gradient under stage1's backward. Exit code: 0 "
        "PASS, 1 FAIL, 2 cannot tell or bad input.",
        "runs/profile --threshold 0.95",
    )
    parser.add_argument("path", metavar="PATH", help=PROFILE)
    _rules(parser)
    _selection(parser)


def _effective(add: Callable[..., argparse.ArgumentParser]) -> None:
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
    _selection(parser)


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
        help="judge the rules of this TOML file instead of the two checks",
    )
    parser.add_argument(
        "--baseline",
        metavar="SERIAL",
        help="a profile of the same run with synchronous collectives: adds what the overlap saves",
    )


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank", type=_ranks, metavar="N,N", help="only these ranks (default: all)"
    )
    parser.add_argument(
        "--iterations",
        type=_iterations,
        metavar="N,N-N",
        help="only these iterations, as in 3,5-8,10- (default: all)",
    )
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


def _iterations(text: str) -> Iterations:
    try:
        return Iterations.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=WIDTH)
