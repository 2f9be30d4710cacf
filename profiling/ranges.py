"""The names of every profiler range that this library writes or reads; nobody else spells them.

A leaf, so that `overlap` and `megamoe` may both import it without importing each other. It imports
torch only when a range is opened: reading a trace should not wait for that.

A label is ``kind[name]``, or ``kind`` alone where there is nothing to name:

    megamoe::stage1.forward[layers.0.mlp.experts]
    overlap::param_gather[layers.0.mlp.experts.fc2_weight]
    overlap::optimizer_step
    overlap::iteration[12]

The name of a stage is the path of its experts module. The name of a collective is the path of the
weight module whose bucket it moves; an expert bucket that holds several weights lists them joined
by commas (which is how a trace shows that a bucket is shared), a bucket of dense parameters is
called ``dense.<index>``, and one of expert parameters outside weight modules ``expert.<index>``.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "EMULATED",
    "Kind",
    "Range",
    "emulated",
    "is_dense",
    "label",
    "name_modules",
    "parse",
    "span",
]


class Kind(str, Enum):
    """What a range covers. The value is the part of the label before the bracket."""

    STAGE1_FORWARD = "megamoe::stage1.forward"
    STAGE1_BACKWARD = "megamoe::stage1.backward"
    STAGE2_FORWARD = "megamoe::stage2.forward"
    STAGE2_BACKWARD = "megamoe::stage2.backward"
    PARAM_GATHER = "overlap::param_gather"  # issue of the all-gather, not its duration
    GRAD_REDUCE = "overlap::grad_reduce"  # issue of the reduce-scatter
    PARAM_WAIT = "overlap::param_wait"
    GRAD_WAIT = "overlap::grad_wait"
    OPTIMIZER_STEP = "overlap::optimizer_step"
    ITERATION = "overlap::iteration"


class Range(NamedTuple):
    """A parsed label."""

    kind: Kind
    name: str  # empty where the label has no bracket

    @property
    def modules(self) -> tuple[str, ...]:
        """The module paths that the name lists (several for a shared expert bucket)."""
        return tuple(self.name.split(",")) if self.name else ()


_LABEL = re.compile(r"(?P<kind>(?:megamoe|overlap)::[a-z0-9_.]+)(?:\[(?P<name>[^\[\]]*)\])?\Z")
_KINDS = {kind.value: kind for kind in Kind}


def label(kind: Kind, name: str = "") -> str:
    """Return the range label of ``kind`` for ``name``."""
    return f"{kind.value}[{name}]" if name else kind.value


def parse(text: str) -> Range | None:
    """Return the parts of a label, or None where ``text`` is not one of ours."""
    match = _LABEL.match(text)
    kind = _KINDS.get(match["kind"]) if match else None
    return None if match is None or kind is None else Range(kind, match["name"] or "")


def is_dense(name: str) -> bool:
    """Return whether a collective's name is that of a bucket of dense parameters."""
    return name.startswith("dense.")


EMULATED = "emulated"  # torch.distributed's name of the backend of `overlap.emulation`


def emulated(operation: str = "") -> str:
    """Return the name of an emulated collective's range ("all_gather", ...), or its beginning."""
    return f"{EMULATED}:{operation}"


_NOTHING = nullcontext()


def span(kind: Kind, name: str = "") -> AbstractContextManager[object]:
    """Return a context manager that marks its body in a running torch profiler.

    Without an active profiler on this thread it is one C call and a shared no-op object, so
    hooks may use it unconditionally. (The profiler state reaches autograd's threads with the
    thread-local state that autograd itself carries over.)
    """
    import torch

    if torch.compiler.is_compiling() or not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(label(kind, name))


def name_modules(root: nn.Module) -> None:
    """Tell each module of ``root`` that has a ``range_name`` attribute its own path.

    Whoever wraps a model calls this, so that a module can label its ranges with a path it has
    no other way to know.
    """
    for path, module in root.named_modules():
        if hasattr(module, "range_name"):
            module.range_name = path
