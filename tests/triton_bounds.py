"""A program that runs every kernel of the Triton backend on memory between forbidden pages.

    python -m tests.triton_bounds {end,start} {kernels,past}

Every tensor ends (or begins) where a page begins (or ends) that may not be touched, so an access
past it kills the process: what compute-sanitizer's memcheck looks for on a GPU, for Triton's
interpreter. `past` runs a kernel that does it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.triton_cases import make_case  # isort: skip  (fills the interpreter's gaps first)

from megamoe.backends.triton import add_sm_budget
from tests.triton_launches import launch_router, launch_stages

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class BetweenPages(TorchDispatchMode):
    """Moves every new CPU tensor to memory of its own beside a page that may not be touched."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self._at_end = side == "end"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known: set[int] = set()
        tree_map_only(Tensor, lambda t: known.add(t.untyped_storage().data_ptr()), args)

        def move(tensor: Tensor) -> Tensor:
            new = tensor.untyped_storage().data_ptr() not in known and tensor.is_contiguous()
            return self._moved(tensor) if new and tensor.numel() else tensor

        return tree_map_only(Tensor, move, result)

    def _moved(self, tensor: Tensor) -> Tensor:
        pages = -(-tensor.nbytes // _PAGE) * _PAGE
        memory = mmap.mmap(-1, pages + _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        forbidden, first = (
            (start + pages, pages - tensor.nbytes) if self._at_end else (start, _PAGE)
        )
        if _libc.mprotect(ctypes.c_void_p(forbidden), _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        place = torch.frombuffer(memory, dtype=tensor.dtype, offset=first, count=tensor.numel())
        return place.view(tensor.shape).copy_(tensor)


@triton.jit
def _past(ptr, at):
    tl.store(ptr, tl.load(ptr + at))


def past(side: str) -> None:
    with BetweenPages(side):
        inside = torch.zeros(5)
    _past[(1,)](inside, 4)  # its last element
    print("still here", flush=True)
    _past[(1,)](inside, 5 if side == "end" else -1)


def kernels(side: str) -> None:
    for reserved, shape in ((0, (100, 2, 3, 64, 48)), (1, (20, 3, 9, 40, 24))):
        remove = add_sm_budget(lambda reserved=reserved: reserved)
        with BetweenPages(side), torch.no_grad():
            _stages(*shape)
        remove()
    for tokens, experts, groups in ((5, 8, 4), (33, 12, 1)):
        with BetweenPages(side):
            _router(tokens, experts, groups)


def _stages(tokens: int, top_k: int, experts: int, hidden: int, ffn: int) -> None:
    case = make_case(tokens, top_k, experts, hidden, ffn)
    results, gradients = launch_stages(*(tensor.detach().clone() for tensor in case))
    for gradient, total in gradients:
        assert torch.allclose(total, 2 * gradient, atol=1e-4)
    assert all(bool(torch.isfinite(t).all()) for t in results)


def _router(tokens: int, experts: int, groups: int) -> None:
    assert bool(torch.isfinite(launch_router(tokens, experts, groups)).all())


if __name__ == "__main__":
    _, side, what = sys.argv
    work: dict[str, Callable[[str], None]] = {"kernels": kernels, "past": past}
    work[what](side)
    print("done")
