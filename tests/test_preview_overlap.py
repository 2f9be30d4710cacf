"""The preview of a cluster's overlap, on a CPU: what it prints, and its negative twin."""

from __future__ import annotations

from pathlib import Path

import pytest

import profiling
from examples import preview_overlap
from profiling import Verdict
from profiling.cli import main as moe_trace

TINY = (
    *("--device", "cpu", "--preset", "tiny", "--layers", "2", "--steps", "2"),
    *("--edp", "4", "--bandwidth", "0.5"),
)


def test_the_split_layer_hides_and_the_serialised_run_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert preview_overlap.main([*TINY, "--profile", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "EMULATION: rank 0 of 4, 0.5 GB/s, 10 us, 8 CTAs" in said
    assert "EMULATED collectives: 0.5 GB/s, 10 us, 8 CTAs" in said
    for words in ("step, ms", "effective, by the clock", "no schedule of this depth hides"):
        assert words in said
    split = profiling.check(tmp_path / "overlapped")
    # On busy cores an occurrence may be set aside, and single ones scatter.
    assert [row.occurrences + sum(row.set_aside.values()) for row in split.rows] == [6] * 4
    shares = preview_overlap.hidden(split)
    assert len(shares) == 2
    assert all(share is not None and share > 0.3 for share in shares.values())
    assert any("EMULATED" in note for note in split.notes)
    serialised = profiling.check(tmp_path / "serialised")
    assert [row.hidden for row in serialised.rows] == [0] * 4
    assert moe_trace(["check", str(tmp_path / "serialised")]) == 1


def test_the_fused_layer_hides_nothing(tmp_path: Path) -> None:
    assert preview_overlap.main([*TINY, "--fused", "--profile", str(tmp_path)]) == 0
    fused = profiling.check(tmp_path / "overlapped")
    assert fused.verdict is Verdict.FAIL
    assert [row.hidden for row in fused.rows] == [0] * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ctas", "6", "--clusters", "4"], "6 CTAs are no multiple of clusters 4"),
        (["--bandwidth", "0"], "bandwidth must be more than 0"),
        (["--edp", "1"], "--edp is 1: nothing to show"),
    ],
)
def test_what_cannot_be_previewed(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        preview_overlap.main([*TINY, *flags])
    assert message in capsys.readouterr().err
