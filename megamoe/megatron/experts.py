"""The two-stage experts in Megatron's world: its initialisation and its distributed checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn

from megamoe.errors import UnsupportedFeatureError
from megamoe.experts import MegaMoEExperts
from megamoe.megatron.options import MegaMoEOptions

__all__ = ["MegatronExperts"]

InitMethod = Callable[[Tensor], Any]

_CHECKPOINT_NAMES = {"fc1_weight": "linear_fc1", "fc2_weight": "linear_fc2"}
_EXTRA_STATE = re.compile(r"experts\.expert\d+\.linear_fc[12]\._extra_state\Z")


class MegatronExperts(MegaMoEExperts):
    """`MegaMoEExperts` built from a TransformerConfig.

    fc1 is drawn by config.init_method and fc2 by config.output_layer_init_method, as in Megatron's
    experts: with use_cpu_initialization from a seed per global expert (the same experts for any
    expert-parallel size), else on the device from Megatron's expert-parallel generator.
    """

    def __init__(self, config: Any, pg_collection: Any, options: MegaMoEOptions) -> None:
        super().__init__(
            config.hidden_size,
            config.moe_ffn_hidden_size,
            config.num_moe_experts,
            pg_collection.ep,
            clamp=getattr(config, "activation_func_clamp_value", None),
            fused=options.fused,
            backend=options.backend,
            dtype=config.params_dtype,
            device="meta",  # nothing is drawn there: Megatron's initialisation follows
        )
        self._edp_group = pg_collection.expt_dp
        self.register_load_state_dict_post_hook(_drop_extra_states)
        if not getattr(config, "init_model_with_meta_device", False):
            on_cpu = config.use_cpu_initialization
            self.to_empty(device="cpu" if on_cpu else torch.cuda.current_device())
            if config.perform_initialization:
                methods = config.init_method, config.output_layer_init_method
                (self._draw_on_cpu if on_cpu else self._draw_on_device)(*methods)

    @torch.no_grad()
    def _draw_on_cpu(self, init_fc1: InitMethod, init_fc2: InitMethod) -> None:
        layer_seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            for expert in range(self.fc1_weight.weight.shape[0]):
                torch.default_generator.manual_seed(layer_seed + self.first_expert + expert)
                for module, init in ((self.fc1_weight, init_fc1), (self.fc2_weight, init_fc2)):
                    part = module.weight.data[expert]
                    drawn = torch.empty(part.shape, dtype=torch.float32)
                    init(drawn)
                    part.copy_(drawn)

    @torch.no_grad()
    def _draw_on_device(self, init_fc1: InitMethod, init_fc2: InitMethod) -> None:
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for expert in range(self.fc1_weight.weight.shape[0]):
                init_fc1(self.fc1_weight.weight.data[expert])
                init_fc2(self.fc2_weight.weight.data[expert])

    def backward_dw(self) -> None:
        """Do nothing: the stages compute their weight gradients in their own backward."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe both weights as parts of [E, 2I, H] and [E, H, I] tensors of all experts.

        Under the keys and shapes of Megatron's own experts: a checkpoint of either layer loads into
        the other, at any expert-parallel size.

        Raises UnsupportedFeatureError for metadata["singleton_local_shards"].
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise UnsupportedFeatureError(
                "singleton_local_shards (one checkpoint key per expert) is not supported: save "
                "without it"
            )
        axis = len(sharded_offsets)
        local = self.fc1_weight.weight.shape[0]
        replica = (0, 0, self._edp_group.rank())
        found: dict[str, Any] = {}
        for name, theirs in _CHECKPOINT_NAMES.items():
            key = f"{prefix}experts.{theirs}"
            found[f"{prefix}{name}.weight"] = ShardedTensor.from_rank_offsets(
                f"{key}.weight",
                getattr(self, name).weight,
                *sharded_offsets,
                (axis, self.first_expert // local, self.num_experts // local),
                replica_id=replica,
                prepend_axis_num=axis,
            )
            # Megatron's linear layers ask for an extra state, which is empty outside fp8.
            for expert in range(self.first_expert, self.first_expert + local):
                offsets = (*sharded_offsets, (axis, expert, self.num_experts))
                found[f"{prefix}expert{expert}.{theirs}._extra_state"] = (
                    make_sharded_object_for_checkpoint(
                        None, f"{key}._extra_state", offsets, replica
                    )
                )
        return found


def _drop_extra_states(_: nn.Module, incompatible: Any) -> None:
    """Let a loaded state hold the extra states that only checkpoints know of."""
    incompatible.unexpected_keys[:] = [
        key for key in incompatible.unexpected_keys if not _EXTRA_STATE.search(key)
    ]
