"""`python -m megamoe doctor`: which backends this machine can use, and why not the others."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megamoe.doctor import examine

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 1 if a backend asked for by name cannot
    be used."""
    parser = argparse.ArgumentParser(prog="python -m megamoe")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say which backends this machine can use")
    doctor.add_argument("--json", action="store_true", help="print a list of objects")
    doctor.add_argument("--ep", type=int, metavar="N", help="expert-parallel size to judge")
    doctor.add_argument("--backend", metavar="NAME", help="this one only; exit code 1 if it cannot")
    options = parser.parse_args(arguments)
    found = examine(options.ep)
    if options.backend is not None:
        names = [finding.backend for finding in found]
        if options.backend not in names:
            doctor.error(f"--backend {options.backend} is none of {names}")
        found = [finding for finding in found if finding.backend == options.backend]
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    for finding in () if options.json else found:
        print(f"{finding.backend:14}{'usable' if finding.usable else 'not usable'}")
        if not finding.usable:
            print(f"{'':14}{finding.reason}\n{'':14}remedy: {finding.remedy}")
    return int(options.backend is not None and not found[0].usable)


if __name__ == "__main__":
    sys.exit(main())
