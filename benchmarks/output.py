"""What the benchmarks share: what they need, where they ran, and their figures as a file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["add_arguments", "environment", "need_gpu", "need_triton", "write_json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here, too")


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 and one sentence where torch sees no GPU, or Triton is not installed."""
    if not torch.cuda.is_available():
        parser.error(f"this needs a CUDA GPU, and torch {torch.__version__} sees none")
    need_triton(parser)


def need_triton(parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 and one sentence where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed: pip install 'triton>=3.4,<4'")


def environment(device: torch.device) -> str:
    """The device and the versions that the figures depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return f"{name or 'CPU'}, torch {torch.__version__}, Python {platform.python_version()}"


def write_json(path: Path | None, device: torch.device, figures: dict[str, Any]) -> None:
    """Write ``figures`` with the environment; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(device), **figures}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
