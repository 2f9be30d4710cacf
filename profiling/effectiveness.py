"""How much of the communication's time an overlapped run really saves, against a serialised one.

    effective = (T_serial - T_overlap) / T_comm

T_serial and T_overlap are the medians of the two profiles' steps (see `steps`), T_comm the median
of what the serialised profile's collectives took per step. All are medians, so that one step with a
hiccup decides nothing. The interval is a percentile bootstrap over steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiling.rules import Iterations
from profiling.steps import Steps, same_run, steps
from profiling.understanding import Reading
from profiling.verdicts import Verdict

__all__ = ["Effective", "against", "effective", "saved"]

FEWEST_STEPS = 5  # in each profile; below, an interval over steps means little
WIDEST = 0.3  # of the communication's time; a wider interval says too little
CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Effective:
    """What overlap saved.

    Attributes:
        serial, overlapped: The steps of the two profiles.
        value: Share of the communication's time that was saved: 1 for all, below 0 where the
            overlapped run is slower. None where it cannot be told.
        interval: Its bounds at `CONFIDENCE`.
        threshold: What was asked for, or None.
        finding: One sentence: why it cannot be told; empty where it can.
        verdict: None where no threshold was asked for and the value can be told.
    """

    serial: Steps
    overlapped: Steps
    value: float | None
    interval: tuple[float, float] | None
    threshold: float | None
    finding: str
    verdict: Verdict | None


def effective(
    serial: Reading,
    overlapped: Reading,
    threshold: float | None = None,
    iterations: Iterations | None = None,
) -> Effective:
    """Compare two profiles of one run configuration, the first with synchronous collectives.

    Args:
        threshold: The share of the communication's time that has to be saved, in (0, 1].
        iterations: Which steps count; all by default.

    Raises:
        NotComparableError: They are not of one configuration.
        ValueError: The threshold is out of range.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}, but must be above 0 and at most 1")
    same_run(serial, overlapped)
    slow, fast = steps(serial, iterations), steps(overlapped, iterations)
    value, interval, finding = _compare(slow, fast)
    verdict = Verdict.INCONCLUSIVE if finding else None
    if interval is not None and threshold is not None and not finding:
        verdict = against(interval, threshold)
        if verdict is Verdict.INCONCLUSIVE:
            finding = (
                f"the threshold of {threshold:.1%} lies within the interval: record more steps"
            )
    return Effective(slow, fast, value, interval, threshold, finding, verdict)


def _compare(slow: Steps, fast: Steps) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return the value, its interval and why neither decides anything, if so."""
    for profile in (slow, fast):
        count = len(profile.step_ms)
        if count < FEWEST_STEPS:
            return (
                None,
                None,
                f"{profile.path} has {count} measurable steps, at least {FEWEST_STEPS} are needed: "
                "record more",
            )
    if not all(slow.communication_ms):
        return None, None, f"{slow.path} has a step without a collective: there is nothing to save"
    serial, overlapped = np.array(slow.step_ms), np.array(fast.step_ms)
    value, interval = saved(serial, overlapped, np.array(slow.communication_ms))
    width = interval[1] - interval[0]
    if width <= WIDEST:
        return value, interval, ""
    return (
        value,
        interval,
        f"the interval is {width:.0%} of the communication wide, at most {WIDEST:.0%} says enough: "
        "record more steps",
    )


def saved(
    serial: Times, overlapped: Times, communication: Times
) -> tuple[float, tuple[float, float]]:
    """Return the saved share of the communication and its interval.

    Args:
        serial, communication: [n] of the serialised run's steps; drawn together.
        overlapped: [m].
    """
    draw = np.random.default_rng(SEED)
    chosen = draw.integers(len(serial), size=(RESAMPLES, len(serial)))
    others = draw.integers(len(overlapped), size=(RESAMPLES, len(overlapped)))
    values = (
        np.median(serial[chosen], axis=1) - np.median(overlapped[others], axis=1)
    ) / np.median(communication[chosen], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    value = (np.median(serial) - np.median(overlapped)) / np.median(communication)
    return float(value), (float(low), float(high))


def against(interval: tuple[float, float], threshold: float) -> Verdict:
    """Return the verdict: the whole interval has to be on one side of the threshold."""
    low, high = interval
    if low >= threshold:
        return Verdict.PASS
    return Verdict.FAIL if high < threshold else Verdict.INCONCLUSIVE
