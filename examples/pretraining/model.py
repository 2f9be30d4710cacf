"""From flags to a Megatron-core model: its configuration, its specs, its chunks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from examples.pretraining.attention import with_causal_attention
from examples.pretraining.flags import FlagError, has_transformer_engine


def uses_transformer_engine(args: argparse.Namespace) -> bool:
    if args.transformer_impl == "auto":
        return has_transformer_engine()
    return args.transformer_impl == "transformer_engine"


def transformer_config(args: argparse.Namespace) -> Any:
    """Return the (MLA)TransformerConfig; Megatron-core checks it in itself."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    on_cpu = args.device == "cpu"
    fused = uses_transformer_engine(args)
    options: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "init_method_std",
            "mtp_loss_scaling_factor",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_router_topk",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_router_topk_scaling_factor",
            "moe_router_dtype",
            "moe_router_enable_expert_bias",
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_router_force_load_balancing",
            "bf16",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "expert_model_parallel_size",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
        )
    }
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    options.update(
        num_moe_experts=args.num_experts,
        mtp_num_layers=args.mtp_num_layers or None,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=fused,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Single layers are recomputed by `recompute_layers`.
        recompute_granularity=None if args.recompute_layer_ids else args.recompute_granularity,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=fused,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=on_cpu,
        persist_layer_norm=False,
    )
    if args.external_cuda_graph:
        fields = {field.name for field in dataclasses.fields(TransformerConfig)}
        scope = "cuda_graph_modules" if "cuda_graph_modules" in fields else "cuda_graph_scope"
        options.update(
            cuda_graph_impl="transformer_engine",
            cuda_graph_warmup_steps=args.cuda_graph_warmup_steps,
            **{scope: [] if args.cuda_graph_scope == "full" else args.cuda_graph_scope.split(",")},
        )
    if not args.multi_latent_attention:
        return TransformerConfig(**options)
    options.update(
        {
            name: getattr(args, name)
            for name in (
                "q_lora_rank",
                "kv_lora_rank",
                "qk_head_dim",
                "qk_pos_emb_head_dim",
                "v_head_dim",
                "rope_type",
                "rotary_base",
                "rotary_scaling_factor",
            )
        },
        qk_layernorm=True,
    )
    return MLATransformerConfig(**options)


def build_chunks(
    args: argparse.Namespace, config: Any, change_spec: Callable[[Any], Any] = lambda spec: spec
) -> list[nn.Module]:
    """Return this rank's model chunks, in the run's precision.

    ``change_spec`` is given the decoder's block spec before it is built.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.module import Float16Module

    fused = uses_transformer_engine(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization=config.normalization
    )
    spec = change_spec(spec)
    if not fused:
        _require_query_norm(args)
        spec = with_causal_attention(spec)
    mtp_spec = (
        get_gpt_mtp_block_spec(config, spec, use_transformer_engine=fused)
        if args.mtp_num_layers
        else None
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(args.rotary_base),
        mtp_block_spec=mtp_spec,
    )
    recompute_layers(model, args.recompute_layer_ids or [])
    if args.device == "cuda":
        model = model.cuda()
    return [Float16Module(config, model) if args.bf16 else model]


def _require_query_norm(args: argparse.Namespace) -> None:
    """Raise FlagError for a model that Megatron-core 0.19 builds with transformer-engine only."""
    resolver = importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config")
    if args.multi_latent_attention and args.q_lora_rank is None and resolver is not None:
        raise FlagError(
            "q_lora_rank is not set: this megatron-core then builds multi-latent attention with "
            "transformer-engine only; install it, or set q_lora_rank"
        )


def recompute_layers(model: Any, layer_ids: list[int]) -> None:
    """Have whole layers, numbered from 0 over all pipeline stages, run again in backward."""
    from megatron.core import tensor_parallel

    for layer in model.decoder.layers:
        if layer.layer_number - 1 not in layer_ids:
            continue

        def forward(
            hidden_states: Any, *args: Any, _run: Any = layer.forward, **kwargs: Any
        ) -> Any:
            return tensor_parallel.checkpoint(
                lambda hidden: _run(hidden, *args, **kwargs), False, hidden_states
            )

        layer.forward = forward
