"""Which backends this machine can use and, for each that it cannot, the one reason and remedy.

Reasons come in the order in which they are met: the torch build, the GPU and its architecture, the
package and its commit, the expert-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.backends import BACKENDS, get_backend
from megamoe.backends.primus_turbo import limits, package
from megamoe.errors import BackendUnavailableError

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """What is known of one backend; reason and remedy are None where it can be used."""

    backend: str
    usable: bool
    reason: str | None = None
    remedy: str | None = None


def examine(ranks: int | None = None) -> list[Finding]:
    """Return a finding for each backend.

    Args:
        ranks: The expert-parallel size to judge; as many as this machine has GPUs where left out.
    """
    if ranks is None:
        ranks = max(1, torch.cuda.device_count())
    problems = {"reference": None, "triton": _triton(ranks), "primus_turbo": _primus_turbo(ranks)}
    assert problems.keys() == BACKENDS.keys()
    return [Finding(name, problem is None, *(problem or ())) for name, problem in problems.items()]


_Problem = tuple[str, str] | None  # reason, remedy


def _triton(ranks: int) -> _Problem:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no CUDA build", "install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device", "run nvidia-smi: is the driver loaded, a GPU visible?"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"the GPU has compute capability {major}.{minor}, not 9.x", "use 'reference'"
    try:
        get_backend("triton")
    except BackendUnavailableError as error:
        return str(error), "pip install 'triton >=3.4, <4'"
    if ranks > 1:
        return (
            f"expert parallelism is not written, and the expert-parallel size is {ranks}",
            "use 'reference', or give one rank all experts",
        )
    return None


def _primus_turbo(ranks: int) -> _Problem:
    if torch.version.hip is None:
        return (
            f"torch {torch.__version__} is no ROCm build",
            "install a ROCm build of torch 2.6 or later, for ROCm 7.0 or later",
        )
    if not torch.cuda.is_available():
        return "torch sees no AMD GPU", "run rocminfo: is the driver loaded, a GPU visible?"
    problem = limits.device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        return problem, "use 'reference'"
    try:
        get_backend("primus_turbo")
    except BackendUnavailableError as error:
        return str(error), package.BUILD
    problem = limits.shape_problem(limits.HIDDEN_MULTIPLE, ranks)
    if problem is not None:
        few, most = limits.RANKS[0], limits.RANKS[-1]
        return problem, f"make the expert-parallel size {few} to {most}, within one node"
    return None
