"""Programs of the tests that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_module(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name`` from the repository's root."""
    return subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
