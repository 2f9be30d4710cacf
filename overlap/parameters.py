"""What the engine reads off a model's parameters: which it trains, and where each belongs."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from overlap.errors import WrapError
from overlap.layout import ParamSpec

__all__ = ["describe", "is_expert", "is_weight_module", "takes_main_grad", "trainable"]

_DTYPES = (torch.float32, torch.bfloat16)


def is_expert(param: Tensor) -> bool:
    """Megatron's mark of a parameter that is not replicated over all data-parallel ranks."""
    return getattr(param, "allreduce", True) is False


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, checked; tied ones once, under their first name."""
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise WrapError("the model has no trainable parameter")
    device = next(iter(found.values())).device
    for name, param in found.items():
        if hasattr(param, "main_grad"):
            raise WrapError(
                f"{name} belongs to a wrapped model already (it has a main_grad); call remove() "
                "on the first wrapper before wrapping again"
            )
        if param.dtype not in _DTYPES:
            raise WrapError(f"{name} is {param.dtype}; trainable parameters are fp32 or bf16")
        if param.device != device or param.is_meta:
            raise WrapError(f"{name} is on {param.device}; all parameters must be on one device")
    return found


def describe(module: nn.Module, params: dict[str, nn.Parameter]) -> list[ParamSpec]:
    """The layout's view of ``params``, which are those of `trainable`."""
    weight_modules = {path for path, child in module.named_modules() if is_weight_module(child)}
    specs = []
    for name, param in params.items():
        owner = name.rpartition(".")[0]
        specs.append(
            ParamSpec(
                name=name,
                shape=tuple(param.shape),
                dtype=param.dtype,
                expert=is_expert(param),
                weight_module=owner if owner in weight_modules else None,
            )
        )
    return specs


def is_weight_module(module: nn.Module) -> bool:
    """A leaf that holds one parameter and hands it out: it speaks Megatron's protocol of delayed
    weight gradients, and its forward takes no input, as a linear layer's does. The expert weight
    modules of `megamoe`, which this package does not import, are such modules."""
    return (
        callable(getattr(module, "backward_dw", None))
        and not any(True for _ in module.children())
        and sum(1 for _ in module.parameters(recurse=False)) == 1
        and not inspect.signature(module.forward).parameters
    )


def takes_main_grad(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of the weight modules that say, by a true attribute of this name, that who
    computes their gradients knows the rules of `overlap.main_grad`."""
    return {
        param
        for child in module.modules()
        if getattr(child, "takes_main_grad", False) and is_weight_module(child)
        for param in child.parameters(recurse=False)
    }
