#!/usr/bin/env bash
# one_node.sh with every layer captured in a CUDA graph. It needs transformer-engine, whose graphs
# Megatron-core uses, and the triton backend: the reference backend waits for the device. That one
# needs all experts on one rank, so there are 32 of them and EP is 1.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/one_node.sh" \
    --external_cuda_graph --cuda_graph_scope full --cuda_graph_warmup_steps 3 \
    --mega_moe_backend triton --expert_model_parallel_size 1 --num_experts 32 "$@"
