"""The three answers a check can give, and their exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

__all__ = ["Verdict"]


class Verdict(str, Enum):
    """What a check says; the value is what reports print."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}[self]

    @classmethod
    def of_all(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Return FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
        found = set(verdicts)
        if cls.FAIL in found:
            return cls.FAIL
        return cls.PASS if found == {cls.PASS} else cls.INCONCLUSIVE
