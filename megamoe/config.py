"""MegaMoEConfig: the options of a MoE layer under the names that training configurations use.

It takes options that the layer cannot build (they are legal in a configuration whose layer is
not replaced); `require_supported` refuses them when a layer is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from megamoe import conditions
from megamoe.errors import ConfigError, ExpertBiasError, UnsupportedFeatureError

__all__ = ["MegaMoEConfig"]

_CHOICES = {
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_router_load_balancing_type": (
        "aux_loss",
        "none",
        "seq_aux_loss",
        "global_aux_loss",
        "sinkhorn",
    ),
    "moe_router_force_load_balancing_type": ("even", "uniform"),
}

_SIZES = (
    "hidden_size",
    "moe_ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "expert_model_parallel_size",
    "tensor_model_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class MegaMoEConfig:
    """The options of one MoE layer, with the names and meanings of Megatron-core and Primus.

    Defaults are theirs too, but for moe_router_dtype (fp32: selection is never made in bf16) and
    add_bias_linear (False: the experts have no bias).

    Raises ConfigError for a value that is wrong in itself or contradicts another.
    """

    hidden_size: int
    moe_ffn_hidden_size: int
    num_moe_experts: int
    moe_shared_expert_intermediate_size: int | None = None

    moe_router_topk: int = 2
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str = "fp32"
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_router_force_load_balancing: bool = False
    moe_router_force_load_balancing_type: str = "uniform"
    """`even`: slot k of token t goes to (t * K + k) % E; `uniform`: random logits."""

    activation_func_clamp_value: float | None = None
    init_method_std: float = 0.02
    bf16: bool = False
    expert_model_parallel_size: int | None = None
    """Checked against the group's size where it is given."""

    enable_primus_turbo: bool = False
    use_turbo_mega_moe: bool = False
    mega_moe_backend: str = "reference"

    # Options that the layer refuses to build with anything but these values.
    tensor_model_parallel_size: int = 1
    swiglu: bool = True
    add_bias_linear: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; choose one of {list(choices)}"
                )
        self._check_types()
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self._check_topk()
        if self.moe_aux_loss_coeff < 0:
            raise ConfigError(f"moe_aux_loss_coeff is {self.moe_aux_loss_coeff}; it cannot be < 0")
        if self.init_method_std <= 0:
            raise ConfigError(f"init_method_std is {self.init_method_std}; it must be > 0")
        if self.activation_func_clamp_value is not None and self.activation_func_clamp_value <= 0:
            raise ConfigError(
                f"activation_func_clamp_value is {self.activation_func_clamp_value}; it must be "
                "> 0, or left out for no clamp"
            )

    @classmethod
    def from_yaml(cls, path: str | Path) -> MegaMoEConfig:
        """Load a flat mapping of option names to values.

        Raises ConfigError for a file that is no mapping, an unknown name (with the nearest valid
        ones) or a missing one; OSError where the file cannot be read.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} must hold a mapping of option names to values")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in content:
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else "see MegaMoEConfig"
                raise ConfigError(f"{path}: unknown option {name!r}; {hint}")
        missing = [
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and name not in content
        ]
        if missing:
            raise ConfigError(f"{path}: missing {', '.join(missing)}")
        hints = typing.get_type_hints(cls)
        return cls(**{name: _from_yaml(value, hints[name]) for name, value in content.items()})

    def conditions(self, ep_group: dist.ProcessGroup | None) -> dict[str, bool]:
        """Return the five conditions for replacing a model's MoE layer, and whether each holds."""
        return conditions.check(self, ep_group)

    def replaces_layer(self, ep_group: dist.ProcessGroup | None) -> bool:
        """Whether a model's MoE layer is to be replaced by a MegaMoELayer: all conditions hold."""
        return all(self.conditions(ep_group).values())

    def explain(self, ep_group: dist.ProcessGroup | None) -> str:
        """Say in a few lines whether the layer is replaced, and which condition does not hold."""
        return conditions.explain(self, ep_group)

    def require_supported(self) -> None:
        """Raise UnsupportedFeatureError or ExpertBiasError if the layer cannot be built."""
        if self.moe_router_enable_expert_bias:
            raise ExpertBiasError(
                "moe_router_enable_expert_bias is set; the expert bias is not implemented: balance "
                "with moe_aux_loss_coeff instead"
            )
        balancing = self.moe_router_load_balancing_type
        refused = {
            f"tensor_model_parallel_size {self.tensor_model_parallel_size} (it must be 1)": (
                self.tensor_model_parallel_size > 1
            ),
            "swiglu false (the experts are SwiGLU)": not self.swiglu,
            "add_bias_linear (the experts have no bias)": self.add_bias_linear,
            f"moe_router_load_balancing_type {balancing} (use aux_loss or none)": (
                balancing not in ("aux_loss", "none")
            ),
            f"moe_z_loss_coeff {self.moe_z_loss_coeff}": bool(self.moe_z_loss_coeff),
            f"moe_input_jitter_eps {self.moe_input_jitter_eps}": bool(self.moe_input_jitter_eps),
            f"moe_expert_capacity_factor {self.moe_expert_capacity_factor} (no token is dropped)": (
                self.moe_expert_capacity_factor is not None
            ),
        }
        found = [text for text, wrong in refused.items() if wrong]
        if found:
            raise UnsupportedFeatureError(f"MegaMoE does not support {'; '.join(found)}")

    def _check_topk(self) -> None:
        experts, k = self.num_moe_experts, self.moe_router_topk
        groups, group_topk = self.moe_router_num_groups, self.moe_router_group_topk
        if k > experts:
            raise ConfigError(f"moe_router_topk is {k}, but num_moe_experts is {experts}")
        if (
            k == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
        ):
            raise ConfigError(
                "moe_router_topk is 1 and softmax is taken after the top-k, so every weight would "
                "be 1 and the router would not learn; set moe_router_pre_softmax"
            )
        if (groups is None) != (group_topk is None):
            raise ConfigError(
                f"moe_router_num_groups is {groups} and moe_router_group_topk is {group_topk}; "
                "set both or neither"
            )
        if groups is None or group_topk is None:
            return
        if experts % groups:
            raise ConfigError(
                f"num_moe_experts {experts} does not divide by moe_router_num_groups {groups}"
            )
        if group_topk > groups:
            raise ConfigError(
                f"moe_router_group_topk is {group_topk}, but moe_router_num_groups is {groups}"
            )
        if k % group_topk:
            raise ConfigError(
                f"moe_router_topk {k} does not divide by moe_router_group_topk {group_topk}"
            )
        if k // group_topk > experts // groups:
            raise ConfigError(
                f"moe_router_topk {k} from {group_topk} groups needs {k // group_topk} experts per "
                f"group, but a group has {experts // groups}"
            )

    def _check_types(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            allowed = _members(hint)
            # bool is an int to Python, not to a reader of a configuration; an int is a fine float.
            fits = type(value) in allowed or (float in allowed and type(value) is int)
            if not fits:
                wanted = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
                raise ConfigError(
                    f"{name} is {value!r} ({type(value).__name__}); expected {wanted}"
                )


def _members(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _from_yaml(value: Any, hint: Any) -> Any:
    """YAML 1.1 reads 1e-3 as a string: make it the number that was meant."""
    if isinstance(value, str) and float in _members(hint):
        try:
            return float(value)
        except ValueError:
            return value
    return value
