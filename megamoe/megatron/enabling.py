"""Putting our layer where Megatron's spec builders put MoELayer, and taking it away again."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import moe_module_specs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from megamoe import conditions
from megamoe.megatron.layer import MegaMoEMegatronLayer
from megamoe.megatron.options import MegaMoEOptions

__all__ = ["Decision", "disable", "enable", "split_spec"]

_BUILDER = "get_moe_module_spec_for_backend"  # every spec of a GPT takes its MoE layers from it
_log = logging.getLogger("megamoe")


@dataclass(frozen=True)
class Decision:
    """What `enable` did; true where the layer is replaced. ``str()`` lists the five conditions."""

    conditions: dict[str, bool]
    text: str

    def __bool__(self) -> bool:
        return all(self.conditions.values())

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Installed:
    original: Callable[..., Any]
    ours: Callable[..., Any]
    options: MegaMoEOptions


_installed: _Installed | None = None


def enable(config_or_args: Any, options: MegaMoEOptions | None = None) -> Decision:
    """Have Megatron's spec builders place our layer, if all five conditions hold.

    Afterwards the specs that Megatron builds (get_gpt_decoder_block_spec and its kin) have
    `MegaMoEMegatronLayer` where they had MoELayer; models that exist stay as they are. If a
    condition does not hold the builders are Megatron's own, and the "megamoe" log says why. Call it
    after Megatron's process groups are set up; again, if the settings change.

    Args:
        config_or_args: A TransformerConfig or training arguments; see `megamoe.conditions`.
        options: By default those that config_or_args has; see `MegaMoEOptions.from_args`.
    """
    ep_group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    decision = Decision(
        conditions.check(config_or_args, ep_group), conditions.explain(config_or_args, ep_group)
    )
    if decision:
        _install(options or MegaMoEOptions.from_args(config_or_args))
        _log.info("%s", decision)
    else:
        disable()
        _log.warning("%s", decision)
    return decision


def disable() -> None:
    """Give Megatron its spec builders back. Without `enable` before, it does nothing."""
    global _installed
    if _installed is not None:
        _rebind(_installed.ours, _installed.original)
        _installed = None


def _install(options: MegaMoEOptions) -> None:
    global _installed
    if _installed is not None and _installed.options == options:
        return
    disable()
    original = getattr(moe_module_specs, _BUILDER)

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        return split_spec(original(*args, **kwargs), options)

    _installed = _Installed(original, build, options)
    _rebind(original, build)


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace a spec builder in every module of Megatron that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get(_BUILDER) is old:
            setattr(module, _BUILDER, new)


def split_spec(spec: Any, options: MegaMoEOptions | None = None) -> Any:
    """Return a spec with our layer wherever ``spec`` has MoELayer; ``spec`` stays as it is.

    It takes the spec of a MoE layer, of a transformer layer, or of a transformer block.
    """
    options = options or MegaMoEOptions()
    if isinstance(spec, functools.partial):
        if spec.func in (MoELayer, MegaMoEMegatronLayer):
            return functools.partial(
                MegaMoEMegatronLayer, *spec.args, **{**spec.keywords, "options": options}
            )
        return spec
    if isinstance(spec, ModuleSpec):
        if spec.module in (MoELayer, MegaMoEMegatronLayer):
            return dataclasses.replace(
                spec, module=MegaMoEMegatronLayer, params={**spec.params, "options": options}
            )
        if hasattr(spec.submodules, "mlp"):
            mlp = split_spec(spec.submodules.mlp, options)
            return dataclasses.replace(
                spec, submodules=dataclasses.replace(spec.submodules, mlp=mlp)
            )
        return spec
    if hasattr(spec, "layer_specs"):
        layers = [split_spec(layer, options) for layer in spec.layer_specs]
        return dataclasses.replace(spec, layer_specs=layers)
    return spec
