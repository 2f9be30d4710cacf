"""The flags of the pretraining script: names, defaults, presets in YAML, and what contradicts what.

Names are Megatron's and Primus's; `--num_layers` and `--num-layers` are the same flag. Values come
from the files of `--config` in their order, then from the command line.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from overlap.nccl import PRESETS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class FlagError(ValueError):
    """A flag whose value is wrong in itself or contradicts another."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the settings of a run.

    Raises FlagError; SystemExit for what argparse refuses itself.
    """
    parser = build_parser()
    argv = [_underscores(word) for word in argv]
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config", action="append", default=[])
    names = first.parse_known_args(argv)[0].config
    for name in names:
        parser.set_defaults(**read_config(name, parser))
    args = parser.parse_args(argv)
    validate(args)
    return args


def read_config(name: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read a preset by name, or any YAML file: a flat mapping of flags to values."""
    path = CONFIGS / f"{name}.yaml"
    path = path if path.exists() else Path(name)
    if not path.exists():
        presets = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        raise FlagError(f"--config {name} is no file and none of the presets {presets}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise FlagError(f"{path} must hold a mapping of flags to values")
    actions = {action.dest: action for action in parser._actions}
    values = {}
    for flag, value in content.items():
        if flag not in actions:
            near = difflib.get_close_matches(str(flag), actions, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else "see --help"
            raise FlagError(f"{path}: unknown flag {flag!r}; {hint}")
        convert = actions[flag].type
        try:
            values[flag] = convert(str(value)) if convert and value is not None else value
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise FlagError(f"{path}: {flag} is {value!r}: {error}") from error
        choices = actions[flag].choices
        if choices is not None and value is not None and values[flag] not in choices:
            raise FlagError(f"{path}: {flag} is {value!r}; choose one of {list(choices)}")
    return values


def _underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    return f"--{flag.replace('-', '_')}{equals}{value}"


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return values[text.lower()]


def layer_freq(text: str) -> int | list[int]:
    """An interval, or a pattern of 0 (dense) and 1 (experts) such as ``[0]*3+[1]*58``."""
    try:
        return _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a pattern like [0]*3+[1]*58"
        ) from error


def _pattern(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_pattern(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _pattern(node.left), _pattern(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError("not a pattern")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config PRESET [flags]; --help lists them",
        description="Pretrain a GPT with mixture-of-experts layers on Megatron-core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=None,
    )
    parser.add_argument(
        "--config", action="append", default=[], help="a preset or a YAML file; may be repeated"
    )

    def add(group: Any, flag: str, default: Any = None, kind: Any = int, **more: Any) -> None:
        if kind is bool:
            more.update(nargs="?", const=True, metavar="BOOL")
            kind = boolean
        more.setdefault("help", " ")
        group.add_argument(f"--{flag}", default=default, type=kind, **more)

    model = parser.add_argument_group("model")
    add(model, "num_layers", 2)
    add(model, "hidden_size", 128)
    add(model, "ffn_hidden_size", 256, help="of dense layers")
    add(model, "num_attention_heads", 4)
    add(model, "seq_length", 64)
    add(model, "vocab_size", 256)
    add(model, "multi_latent_attention", True, bool)
    add(model, "q_lora_rank", help="none: queries are projected in one step")
    add(model, "kv_lora_rank", 32)
    add(model, "qk_head_dim", 16)
    add(model, "qk_pos_emb_head_dim", 8)
    add(model, "v_head_dim", 16)
    add(model, "rope_type", "rope", str, choices=["rope", "yarn"])
    add(model, "rotary_base", 10000.0, float)
    add(model, "rotary_scaling_factor", 40.0, float, help="of yarn")
    add(model, "init_method_std", 0.02, float)
    add(model, "mtp_num_layers")
    add(model, "mtp_loss_scaling_factor", 0.1, float)
    add(model, "transformer_impl", "auto", str, choices=["auto", "local", "transformer_engine"])

    moe = parser.add_argument_group("experts")
    add(moe, "num_experts", 8)
    add(moe, "moe_layer_freq", 1, layer_freq, help="every n-th layer, or a pattern [0]*3+[1]*58")
    add(moe, "moe_ffn_hidden_size", 64, help="of one expert")
    add(moe, "moe_shared_expert_intermediate_size")
    add(moe, "moe_router_topk", 2)
    add(moe, "moe_router_num_groups")
    add(moe, "moe_router_group_topk")
    add(moe, "moe_router_score_function", "softmax", str, choices=["softmax", "sigmoid"])
    add(moe, "moe_router_pre_softmax", False, bool)
    add(moe, "moe_router_topk_scaling_factor", None, float)
    add(moe, "moe_router_dtype", "fp32", str, choices=["fp32", "fp64"])
    add(moe, "moe_router_enable_expert_bias", False, bool)
    add(
        moe,
        "moe_router_load_balancing_type",
        "aux_loss",
        str,
        choices=["aux_loss", "seq_aux_loss", "global_aux_loss", "none"],
    )
    add(moe, "moe_aux_loss_coeff", 0.001, float)
    add(moe, "moe_router_force_load_balancing", False, bool, help="for benchmarks")
    add(
        moe,
        "moe_router_force_load_balancing_type",
        "uniform",
        str,
        choices=["uniform", "even"],
        help="random logits, or experts dealt out in turn",
    )
    add(moe, "enable_primus_turbo", False, bool, help="the first switch of the split layer")
    add(moe, "use_turbo_mega_moe", False, bool, help="the second switch of the split layer")
    add(
        moe,
        "mega_moe_backend",
        "auto",
        str,
        choices=["auto", "reference", "triton", "primus_turbo"],
    )
    add(moe, "mega_moe_router", "megatron", str, choices=["megatron", "fused"])
    add(moe, "mega_moe_fused", False, bool, help="the unsplit twin: nothing can hide")

    training = parser.add_argument_group("training")
    add(training, "micro_batch_size", 1, help="sequences per rank and microbatch")
    add(training, "global_batch_size", 8, help="sequences per step")
    add(training, "train_iters", 20)
    add(training, "lr", 1e-3, float)
    add(training, "min_lr", None, float, help="end of the cosine; lr where left out")
    add(training, "lr_warmup_iters", 0)
    add(training, "weight_decay", 0.1, float)
    add(training, "clip_grad", 1.0, float)
    add(training, "bf16", True, bool)
    add(training, "seed", 1234)
    add(training, "mock_data", False, bool, help="sequences that follow a rule")
    add(training, "data_path", None, str, help="prefix of an indexed dataset (.bin and .idx)")
    add(training, "save", None, str, help="folder of checkpoints")
    add(training, "save_interval", help="in steps; at the end only where left out")
    add(training, "load", None, str, help="folder to resume from, at any expert-parallel size")

    parallel = parser.add_argument_group("parallelism")
    add(parallel, "tensor_model_parallel_size", 1)
    add(parallel, "pipeline_model_parallel_size", 1)
    add(parallel, "pipeline_model_parallel_layout", None, str, help="such as Et*4|t*4|t*4|t*4L")
    add(parallel, "expert_model_parallel_size", 1)
    add(parallel, "engine", "megatron", str, choices=["megatron", "native"])
    add(parallel, "overlap_param_gather", True, bool)
    add(parallel, "overlap_grad_reduce", True, bool)
    add(parallel, "ddp_bucket_size", help="elements; Megatron's default where left out")
    add(parallel, "own_expert_buckets", True, bool, help="a bucket per expert weight")
    add(
        parallel,
        "nccl_preset",
        "balanced",
        str,
        choices=sorted(PRESETS),
        help="how NCCL runs the collectives that are to hide",
    )
    add(
        parallel,
        "nccl_communicator_config_path",
        None,
        str,
        help="Megatron's own file of NCCL options; wins over nccl_preset",
    )
    add(parallel, "strict_overlap", False, bool, help="refuse a set-up in which nothing can hide")

    memory = parser.add_argument_group("recomputation and graphs")
    add(memory, "recompute_granularity", None, str, choices=["full", "selective"])
    add(memory, "recompute_method", None, str, choices=["uniform", "block"])
    add(memory, "recompute_num_layers")
    add(memory, "recompute_layer_ids", None, numbers, help="whole layers, from 0: 0,3,5")
    add(memory, "recompute_modules", None, lambda text: text.split(","), help="moe,shared_experts")
    add(memory, "external_cuda_graph", False, bool, help="graphs per layer; transformer-engine's")
    add(memory, "cuda_graph_scope", "full", str, help="parts of a layer; full is the whole layer")
    add(memory, "cuda_graph_warmup_steps", 3)

    running = parser.add_argument_group("running")
    add(running, "device", "cuda", str, choices=["cuda", "cpu"], help="cpu: a trial without GPUs")
    add(running, "profile", None, str, help="folder to record every rank's profile into")
    add(running, "profile_start", 3, help="step at which recording begins, from 0")
    add(running, "profile_steps", 3)
    add(running, "dry_run", False, bool, help="check every flag, print the geometry, and stop")
    add(running, "world_size", help="ranks of a dry run or on a CPU; of the launch where left out")
    return parser


def validate(args: argparse.Namespace) -> None:
    """Check the flags against one another, as far as that needs no world size."""
    for name in (
        "num_layers",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
    ):
        if getattr(args, name) < 1:
            raise FlagError(f"{name} is {getattr(args, name)}; it must be 1 or more")
    split = args.enable_primus_turbo and args.use_turbo_mega_moe
    refusals = [
        (
            args.tensor_model_parallel_size > 1,
            f"tensor_model_parallel_size is {args.tensor_model_parallel_size}; this script trains "
            "with 1 only (the split layer needs it)",
        ),
        (
            args.num_experts % args.expert_model_parallel_size > 0,
            f"num_experts {args.num_experts} does not divide by expert_model_parallel_size "
            f"{args.expert_model_parallel_size}",
        ),
        (
            isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) != args.num_layers,
            f"moe_layer_freq names {_length(args.moe_layer_freq)} layers, num_layers is "
            f"{args.num_layers}",
        ),
        (
            args.engine == "native" and args.pipeline_model_parallel_size > 1,
            "engine native has no pipeline: set pipeline_model_parallel_size 1, or engine megatron",
        ),
        (
            bool(args.nccl_communicator_config_path)
            and not Path(args.nccl_communicator_config_path).is_file(),
            f"nccl_communicator_config_path {args.nccl_communicator_config_path} is no file",
        ),
        (
            bool(args.nccl_communicator_config_path) and args.engine == "native",
            "nccl_communicator_config_path is for Megatron's groups: with engine native choose an "
            "nccl_preset",
        ),
        (
            args.mock_data == bool(args.data_path) and not args.dry_run,
            "give either mock_data or data_path",
        ),
        (
            bool(args.recompute_layer_ids) and args.recompute_granularity != "full",
            "recompute_layer_ids needs recompute_granularity full",
        ),
        (
            bool(args.recompute_layer_ids)
            and bool(args.recompute_method or args.recompute_num_layers),
            "recompute_layer_ids says which layers: leave recompute_method and "
            "recompute_num_layers out",
        ),
        (
            any(not 0 <= i < args.num_layers for i in args.recompute_layer_ids or []),
            f"recompute_layer_ids {args.recompute_layer_ids}: layers go from 0 to "
            f"{args.num_layers - 1}",
        ),
        (
            args.external_cuda_graph and args.engine == "native",
            "external_cuda_graph needs engine megatron",
        ),
        (
            args.external_cuda_graph and not args.dry_run and not has_transformer_engine(),
            "external_cuda_graph captures with transformer-engine, which is not installed: install "
            "it, or leave the flag out",
        ),
        (
            args.external_cuda_graph and split and args.mega_moe_backend == "reference",
            "external_cuda_graph cannot capture mega_moe_backend reference, which waits for the "
            "device: choose triton",
        ),
        (
            split and args.mega_moe_backend == "triton" and args.expert_model_parallel_size > 1,
            "mega_moe_backend triton needs all experts on one rank and expert_model_parallel_size "
            f"is {args.expert_model_parallel_size}: set it to 1, or take another backend",
        ),
        (
            bool(args.data_path) and not Path(f"{args.data_path}.idx").is_file(),
            f"data_path {args.data_path} is no indexed dataset: there is no {args.data_path}.idx",
        ),
        (
            bool(args.profile) and args.profile_start + args.profile_steps > args.train_iters,
            f"profile_start {args.profile_start} and profile_steps {args.profile_steps} end after "
            f"train_iters {args.train_iters}",
        ),
    ]
    for wrong, text in refusals:
        if wrong:
            raise FlagError(text)


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _length(pattern: Any) -> int:
    return len(pattern) if isinstance(pattern, list) else 0
