"""The parameters of a model before there is one: names and sizes, in the order of registration.

The order and the names are those of Megatron-core's local specs with our layer; with
transformer-engine the norms have other names inside the linear layers, and the same sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from overlap.megatron import Parameter

EMBEDDING, DECODER, MTP, LOSS = "embedding", "decoder", "mtp", "loss"


def is_split(args: argparse.Namespace) -> bool:
    """Whether the flags get our layer: tensor parallelism, which it does not have, is refused."""
    return bool(args.enable_primus_turbo and args.use_turbo_mega_moe and args.bf16)


def moe_pattern(args: argparse.Namespace) -> list[bool]:
    """Which layers have experts."""
    freq = args.moe_layer_freq
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(args.num_layers)]
    return [bool(entry) for entry in freq]


def stage_parameters(
    args: argparse.Namespace, layers: Sequence[int], parts: Sequence[str]
) -> list[Parameter]:
    """Return the parameters of a pipeline stage.

    Args:
        layers: Its layers, numbered from 0 over all stages.
        parts: What of EMBEDDING, MTP and LOSS it holds besides.
    """
    hidden = args.hidden_size
    moe = moe_pattern(args)
    found: list[Parameter] = []
    if EMBEDDING in parts or MTP in parts:
        # Multi-token prediction embeds again on the last stage, with the first one's weight.
        shared = bool(args.mtp_num_layers) and args.pipeline_model_parallel_size > 1
        numel = args.vocab_size * hidden
        found.append(Parameter("embedding.word_embeddings.weight", numel, shared_embedding=shared))
    for layer in layers:
        found += _layer(args, f"decoder.layers.{layer}", moe[layer])
    if layers and (LOSS in parts or MTP in parts):
        found.append(Parameter("decoder.final_layernorm.weight", hidden))
    for index in range(args.mtp_num_layers or 0) if MTP in parts else ():
        path = f"mtp.layers.{index}"
        found += [
            Parameter(f"{path}.enorm.weight", hidden),
            Parameter(f"{path}.hnorm.weight", hidden),
            Parameter(f"{path}.eh_proj.weight", 2 * hidden * hidden),
            *_layer(args, f"{path}.{_mtp_layer()}", moe[-1]),
            Parameter(f"{path}.final_layernorm.weight", hidden),
        ]
    if LOSS in parts:
        found.append(Parameter("output_layer.weight", args.vocab_size * hidden))
    return found


def _mtp_layer() -> str:
    """What this megatron-core calls the layer inside multi-token prediction."""
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionLayerSubmodules,
    )

    names = {field.name for field in dataclasses.fields(MultiTokenPredictionLayerSubmodules)}
    return "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"


def _layer(args: argparse.Namespace, path: str, moe: bool) -> Iterator[Parameter]:
    hidden = args.hidden_size
    yield Parameter(f"{path}.input_layernorm.weight", hidden)
    for name, numel in _attention(args).items():
        yield Parameter(f"{path}.self_attention.{name}.weight", numel)
    yield Parameter(f"{path}.pre_mlp_layernorm.weight", hidden)
    if not moe:
        yield Parameter(f"{path}.mlp.linear_fc1.weight", 2 * args.ffn_hidden_size * hidden)
        yield Parameter(f"{path}.mlp.linear_fc2.weight", args.ffn_hidden_size * hidden)
        return
    yield Parameter(f"{path}.mlp.router.weight", args.num_experts * hidden)
    yield from _experts(args, f"{path}.mlp.experts")
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None:
        yield Parameter(f"{path}.mlp.shared_experts.linear_fc1.weight", 2 * shared * hidden)
        yield Parameter(f"{path}.mlp.shared_experts.linear_fc2.weight", shared * hidden)


def _experts(args: argparse.Namespace, path: str) -> Iterator[Parameter]:
    local = args.num_experts // args.expert_model_parallel_size
    expert = args.expert_model_parallel_size > 1
    weight = args.moe_ffn_hidden_size * args.hidden_size
    if is_split(args):
        for name, rows in (("fc1_weight", 2), ("fc2_weight", 1)):
            module = f"{path}.{name}"
            yield Parameter(f"{module}.weight", local * rows * weight, expert, module)
        return
    for index in range(local):
        for name, rows in (("linear_fc1", 2), ("linear_fc2", 1)):
            yield Parameter(f"{path}.local_experts.{index}.{name}.weight", rows * weight, expert)


def _attention(args: argparse.Namespace) -> dict[str, int]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        return {"linear_proj": hidden * hidden, "linear_qkv": 3 * hidden * hidden}
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    found = {"linear_proj": heads * args.v_head_dim * hidden}
    if args.q_lora_rank is None:
        found["linear_q_proj"] = query * hidden
    else:
        found["linear_q_down_proj"] = args.q_lora_rank * hidden
        found["linear_q_up_proj"] = query * args.q_lora_rank
    found["linear_kv_down_proj"] = (args.kv_lora_rank + args.qk_pos_emb_head_dim) * hidden
    found["linear_kv_up_proj"] = heads * (args.qk_head_dim + args.v_head_dim) * args.kv_lora_rank
    if args.q_lora_rank is not None:
        found["q_layernorm"] = args.q_lora_rank
    found["kv_layernorm"] = args.kv_lora_rank
    return found


def flops_per_token(args: argparse.Namespace) -> float:
    """Floating-point operations of forward and backward per token, nothing recomputed.

    Two per weight and token forward and four backward, of the weights that a token meets; attention
    over half of the sequence, being causal.
    """
    parts = (EMBEDDING, LOSS, *((MTP,) if args.mtp_num_layers else ()))
    everything = stage_parameters(args, range(args.num_layers), parts)
    active = 0.0
    for parameter in everything:
        if parameter.name.startswith("embedding") or "norm" in parameter.name:
            continue
        share = 1.0
        if ".experts." in parameter.name:
            local = args.num_experts // args.expert_model_parallel_size
            share = args.moe_router_topk / local
        elif parameter.name.startswith("output_layer"):
            share = 1 + (args.mtp_num_layers or 0)
        active += parameter.numel * share
    if args.multi_latent_attention:
        width = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
    else:
        width = 2 * args.hidden_size // args.num_attention_heads
    layers = args.num_layers + (args.mtp_num_layers or 0)
    attention = layers * args.num_attention_heads * width * args.seq_length / 2
    return 6 * (active + attention)
