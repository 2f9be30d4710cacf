"""The dry run: flags, presets and launch scripts, and a geometry that is Megatron-core's own."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import pretrain_megatron
from examples.pretraining import flags
from overlap.megatron import Reason, default_bucket_size, plan_buckets
from tests import megatron_shim
from tests.ranks import Ranks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

ROOT = Path(__file__).resolve().parents[1]
SPLIT = ["--enable_primus_turbo", "--use_turbo_mega_moe"]


def geometry_of(*argv: str) -> Any:
    from examples.pretraining.geometry import geometry

    return geometry(flags.parse([*argv, "--dry_run"]))


@needs_megatron
def test_default_buckets_lose_the_split_at_scale() -> None:
    run = ["--config", "deepseek_v3", "--world_size", "64", "--global_batch_size", "64", *SPLIT]
    at_scale = [*run, "--expert_model_parallel_size", "64"]
    merged = geometry_of(*at_scale, "--own_expert_buckets", "false")
    shared, alone = merged.findings
    assert shared.reason is Reason.SHARED_BUCKET
    assert "layers.3.mlp.experts.fc1_weight, decoder.layers.3.mlp.experts.fc2_weight" in shared.text
    assert "64,000,000 elements" in shared.text  # the default, and the w2 that is smaller
    assert "at most 58,720,256" in shared.text
    assert alone.reason is Reason.GROUP_OF_ONE
    assert "--own_expert_buckets true" in str(merged)
    assert [f.reason for f in geometry_of(*at_scale).findings] == [Reason.GROUP_OF_ONE]
    # What it says to set does help.
    small = geometry_of(*at_scale, "--own_expert_buckets", "false", "--ddp_bucket_size", "58720256")
    assert [f.reason for f in small.findings] == [Reason.GROUP_OF_ONE]
    # At EP 8 the default is enough, and there are peers to hide from.
    wide = [*run, "--expert_model_parallel_size", "8", "--own_expert_buckets", "false"]
    assert geometry_of(*wide).findings == ()


@needs_megatron
def test_later_stages_do_not_bucket() -> None:
    run = [*SPLIT, "--world_size", "4", "--pipeline_model_parallel_size", "2"]
    (finding,) = geometry_of(*run, "--own_expert_buckets", "false").stages[1].findings
    assert finding.reason is Reason.SHARED_BUCKET
    assert "does not bucket on pipeline stage 1" in finding.text
    assert geometry_of(*run).findings == ()
    off = geometry_of(*run, "--overlap_grad_reduce", "false", "--overlap_param_gather", "false")
    assert [f.reason for f in off.findings] == [Reason.GATHERS_OFF, Reason.REDUCTIONS_OFF]


@needs_megatron
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("one_node.sh", ["ranks 8 = PP 1 x DP 8", "EP 8 x EDP 1, 32 of 256", "group of one"]),
        (
            "one_node_cuda_graphs.sh",
            ["CUDA graphs of whole layers after 3 steps", "triton", "EP 1 x EDP 8, 32 of 32"],
        ),
        (
            "eight_nodes.sbatch",
            ["ranks 64 = PP 8 x DP 8", "stage 7: layers 55-60 (6 with experts), mtp, loss"],
        ),
    ],
)
def test_launch_script(
    script: str, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's own command line, run in this process: starting Python anew takes seconds."""
    words = tmp_path / "words"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done > {words}\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "examples" / "launch" / script), "--dry-run"]
    subprocess.run(command, check=True, env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)})
    program, *argv = words.read_text().splitlines()
    assert program == str(ROOT / "examples" / "pretrain_megatron.py")
    assert pretrain_megatron.main(argv) == 0
    printed = capsys.readouterr().out
    for text in says:
        assert text in printed


@needs_megatron
def test_strict_dry_run_fails(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--dry_run", "--strict_overlap", "--world_size", "2", *SPLIT]
    assert pretrain_megatron.main([*argv, "--expert_model_parallel_size", "2"]) == 1
    assert "PROBLEM group of one" in capsys.readouterr().out
    assert pretrain_megatron.main(argv) == 0
    assert "every expert weight's collectives can hide" in capsys.readouterr().out


@needs_megatron
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num_layers", "0"], "num_layers is 0"),
        (["--tensor_model_parallel_size", "2"], "tensor_model_parallel_size is 2"),
        (["--expert_model_parallel_size", "3"], "does not divide by expert_model_parallel_size 3"),
        (["--moe_layer_freq", "[0]*1+[1]*4"], "names 5 layers, num_layers is 2"),
        (["--recompute_layer_ids", "0"], "needs recompute_granularity full"),
        (
            ["--recompute_granularity", "full", "--recompute_layer_ids", "7"],
            "layers go from 0 to 1",
        ),
        (["--engine", "native", "--pipeline_model_parallel_size", "2"], "native has no pipeline"),
        (
            [*SPLIT, "--external_cuda_graph", "--mega_moe_backend", "reference"],
            "cannot capture mega_moe_backend reference",
        ),
        (
            [*SPLIT, "--mega_moe_backend", "triton", "--expert_model_parallel_size", "2"],
            "expert_model_parallel_size is 2: set it to 1",
        ),
        (["--data_path", "no/such"], "there is no no/such.idx"),
        (
            ["--external_cuda_graph", "--cuda_graph_scope", "banana"],
            "Megatron-core refuses the flags: it knows no 'banana'",
        ),
        (
            [
                *(*SPLIT, "--mega_moe_backend", "triton"),
                *("--external_cuda_graph", "--cuda_graph_scope", "moe_router"),
            ],
            "does not support CUDA graphs of moe_router (capture the whole layer instead)",
        ),
        (
            [
                *(*SPLIT, "--mega_moe_router", "fused", "--moe_router_enable_expert_bias"),
                *("--moe_router_score_function", "sigmoid"),
            ],
            "router='megatron' has it",
        ),
        (["--nccl_communicator_config_path", "no/such.yaml"], "no/such.yaml is no file"),
        (
            ["--nccl_communicator_config_path", __file__, "--engine", "native"],
            "choose an nccl_preset",
        ),
        (["--config", "deepseek_v4"], "none of the presets ['deepseek_v2_lite', 'deepseek_v3'"),
        (["--world_size", "3", "--pipeline_model_parallel_size", "2"], "world_size 3 does not"),
        (["--global_batch_size", "3"], "global_batch_size 3 does not divide"),
        (
            ["--num_layers", "3", "--pipeline_model_parallel_size", "2"],
            "say which stage has which with pipeline_model_parallel_layout",
        ),
        (
            ["--pipeline_model_parallel_layout", "Et|tL", "--pipeline_model_parallel_size", "1"],
            "no interleaved schedule",
        ),
        (["--moe_router_num_groups", "3", "--moe_router_group_topk", "1"], "Megatron-core refuses"),
    ],
)
def test_wrong_flags(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_megatron.main(["--dry_run", "--world_size", "2", *argv]) == 2
    assert says in capsys.readouterr().err


@needs_megatron
def test_training_needs_a_gpu_and_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for there, says in ((False, "sees no GPU"), (True, "use torchrun or srun")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert pretrain_megatron.main(["--mock_data"]) == 2
        assert says in capsys.readouterr().err


def test_without_megatron_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain_megatron.importlib.util, "find_spec", lambda name: None)
    assert pretrain_megatron.main(["--dry_run", "--world_size", "2"]) == 2
    assert "pip install -e '.[megatron]'" in capsys.readouterr().err


@needs_megatron
def test_graphs_need_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--external_cuda_graph", "--mock_data", "--world_size", "2"]
    monkeypatch.setattr(flags, "has_transformer_engine", lambda: False)
    assert pretrain_megatron.main(argv) == 2
    assert "external_cuda_graph captures with transformer-engine" in capsys.readouterr().err
    assert flags.parse([*argv, "--dry_run"]).external_cuda_graph  # it may run elsewhere
    monkeypatch.setattr(flags, "has_transformer_engine", lambda: True)
    assert flags.parse(argv).external_cuda_graph


@needs_megatron
def test_dry_run_tells_how_nccl_runs(tmp_path: Path) -> None:
    run = [*SPLIT, "--world_size", "2"]
    assert "preset balanced, at most 16 CTAs, and as many SMs left free" in str(geometry_of(*run))
    chosen = str(geometry_of(*run, "--nccl_preset", "nccl"))
    assert "preset nccl, its own choice of CTAs" in chosen
    file = tmp_path / "nccl.yaml"
    file.write_text("{}")
    given = str(geometry_of(*run, "--nccl_communicator_config_path", str(file)))
    assert f"NCCL of gathers and reductions: as {file} says" in given


@needs_megatron
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "MoELayer\n"),
        ([*SPLIT, "--bf16", "false"], "MoELayer, since bf16 is not set\n"),
        (SPLIT, "split, backend auto\n"),
        ([*SPLIT, "--mega_moe_fused"], "unsplit, backend auto\n"),
    ],
    ids=["not asked for", "fp32", "split", "unsplit"],
)
def test_dry_run_tells_which_layer_there_will_be(argv: list[str], says: str) -> None:
    found = geometry_of(*argv, "--world_size", "2")
    assert f"MoE layer: {says}" in str(found)
    reasons = [finding.reason for finding in found.findings]
    assert reasons == ([] if says.startswith("split") else [Reason.NOT_SPLIT])


def test_config_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("num_layers: 3\nlr: 1e-4\nmoe_layer_freq: '[0]+[1]*2'\n")
    args = flags.parse(["--config", "tiny", "--config", str(file), "--lr=0.5", "--mock-data"])
    assert (args.num_layers, args.lr, args.moe_layer_freq) == (3, 0.5, [0, 1, 1])
    assert args.hidden_size == 64  # of the preset
    assert args.mock_data is True
    file.write_text("num_layer: 3\n")
    with pytest.raises(flags.FlagError, match="unknown flag 'num_layer'; did you mean num_layers"):
        flags.parse(["--config", str(file)])
    file.write_text("num_layers: many\n")
    with pytest.raises(flags.FlagError, match="num_layers is 'many'"):
        flags.parse(["--config", str(file)])
    file.write_text("engine: diesel\n")
    with pytest.raises(flags.FlagError, match="engine is 'diesel'; choose one of"):
        flags.parse(["--config", str(file)])
    file.write_text("- 1\n")
    with pytest.raises(flags.FlagError, match="mapping"):
        flags.parse(["--config", str(file)])


VARIANTS = [
    ["--enable_primus_turbo", "false", "--q_lora_rank", "32"],
    ["--q_lora_rank", "32", "--moe_layer_freq", "[0]+[1]", "--mega_moe_fused"],
    ["--q_lora_rank", "32", "--mtp_num_layers", "1", "--moe_shared_expert_intermediate_size", "48"],
    ["--multi_latent_attention", "false", "--bf16", "false"],
]


def real_layouts(ep: int, pp: int) -> list[tuple[int, int]]:
    """Compare what was planned with what Megatron does: every parameter, bucket and finding of this
    rank's stage. Returns the stage and its number of buckets, for each variant."""
    import overlap.megatron
    from examples.pretraining import model
    from examples.pretraining.geometry import geometry
    from examples.pretraining.shapes import is_split
    from megamoe.megatron import MegaMoEOptions, split_spec
    from overlap.megatron.explain import describe

    def split(spec: Any) -> Any:
        return split_spec(spec, options) if is_split(args) else spec

    found = []
    for variant in VARIANTS:
        argv = [*SPLIT, *variant, "--device", "cpu", "--dry_run", "--world_size", "4"]
        argv += ["--expert_model_parallel_size", str(ep), "--pipeline_model_parallel_size", str(pp)]
        args = flags.parse(argv)
        options = MegaMoEOptions(backend="reference", fused=args.mega_moe_fused)
        with megatron_shim.on_cpu():
            megatron_shim.initialize(ep, pp)
            config = model.transformer_config(args)
            (chunk,) = model.build_chunks(args, config, split)
            for own, size in ((True, 20_000), (False, 20_000), (False, None)):
                (ddp,) = overlap.megatron.wrap(
                    chunk,
                    overlap.megatron.ddp_config(bucket_size=size),
                    config=config,
                    own_buckets=own,
                )
                more = ["--own_expert_buckets", str(own).lower()]
                more += [] if size is None else ["--ddp_bucket_size", str(size)]
                planned = geometry(flags.parse([*argv, *more]))
                real = describe(ddp)
                stage = planned.stages[real.stage]
                assert stage.chunk == real, (variant, own, size, stage.chunk, real)
                assert stage.findings == overlap.megatron.explain(ddp).findings
                chunk = ddp.module
        found.append((real.stage, len(real.buckets)))
    return found


@needs_megatron
@pytest.mark.parametrize(("ep", "pp"), [(2, 1), (2, 2), (1, 1)])
def test_geometry_is_the_real_one(ranks: Ranks, ep: int, pp: int) -> None:
    found = ranks.run(4, real_layouts, ep, pp)
    assert {stage for rank in found for stage, _ in rank} == set(range(pp))
    assert all(buckets > 0 for rank in found for _, buckets in rank)


def test_bucket_rule() -> None:
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000
    assert (
        plan_buckets([], bucket_size=1, dense_group_size=1, expert_group_size=1, own_buckets=True)
        == ()
    )
