#!/usr/bin/env bash
# Four layers of DeepSeek-V3 on one node of 8 GPUs, EP 8.
#   examples/launch/one_node.sh              train on mock data
#   examples/launch/one_node.sh --dry-run    check the flags and print the geometry, without GPUs
# Further flags are handed on to the script, and win over those here.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
gpus=8

flags=(
    --config deepseek_v3
    --num_layers 4 --moe_layer_freq "[0]*1+[1]*3" --mtp_num_layers 0
    --expert_model_parallel_size 8
    --micro_batch_size 1 --global_batch_size 64 --train_iters 50
    --enable_primus_turbo --use_turbo_mega_moe --mega_moe_backend auto
    --moe_router_force_load_balancing --moe_router_force_load_balancing_type even
    --mock_data
)

if [[ " $* " == *" --dry-run "* ]]; then
    exec "${PYTHON:-python}" "$root/examples/pretrain_megatron.py" "${flags[@]}" \
        --world_size "$gpus" "$@"
fi
"$root/scripts/rebuild_primus_turbo.sh"  # does nothing unless REBUILD_PRIMUS_TURBO=1
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    "$root/examples/pretrain_megatron.py" "${flags[@]}" "$@"
