"""Launch scripts in the shapes found in the wild become configurations that training takes.

Expected values follow from the text of the scripts by Megatron's rules, worked out by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.import_.conftest import SCRIPTS

from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.entry_scripts import entry_of_file
from mt_import.megatron_arguments.translation import dotted
from mt_import.output import launch_line
from mt_import.readers.megatron import MegatronOptions, import_script, import_words
from mt_import.result import ImportResult, check_configuration, check_result


@dataclass(frozen=True)
class Script:
    """keys: some of the configuration, None for what is not in it. parameters: of the model, beside the vocabulary's.

    world: processes. refused, idle: options that cannot be done, and that have no effect here.
    """

    keys: Mapping[str, Any]
    world: int
    launch: str
    arguments: tuple[str, ...] = ()
    define: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    name: str = ""


BLENDED = [{"prefix": "data/wiki_text_document", "weight": 0.7}, {"prefix": "data/books_text_document", "weight": 0.3}]
CASES: Mapping[str, Script] = {
    "gpt3_175b": Script(
        {
            "model.family": "gpt",
            "model.ffn_hidden_size": 4 * 12288,
            "model.hidden_dropout": 0.1,
            "model.activation": "gelu_tanh",  # the fused kernel of bias and GELU is the tanh approximation
            "model.max_position_embeddings": 2048,
            "tokenizer.merge_file": "merges.txt",
            "data.data_path": ["pile_text_document"],
            "train.rampup_batch_size": [16, 16, 5859375],
            "train.train_samples": 146484375,
            "lr_schedule.lr_warmup_fraction": 0.001,
            "lr_schedule.lr_decay_samples": 126953125,
            "precision.dtype": "fp16",
            "precision.accumulate_allreduce_grads_in_fp32": False,
            "parallel.pipeline_schedule": "interleaved_1f1b",
            "parallel.virtual_pipeline_model_parallel_size": 96 // 16 // 3,
            "parallel.sequence_parallel": True,
            "checkpoint.save": "ckpt",
            "optimizer.weight_decay": 0.1,
            "train.sample_prompt": "",
            "logging.trackers": ["tensorboard"],
            "tensorboard.dir": "tb",
        },
        world=1024,
        launch="--nproc 8 --nnodes 128 --node-rank RANK --master-addr node0 --master-port 6000",
        arguments=("ckpt", "tb", "vocab.json", "merges.txt", "pile_text_document"),
        idle=("--attention-backend",),
    ),
    "gpt2_345m": Script(
        {
            "data.data_path": BLENDED,
            "recompute.recompute_granularity": "selective",
            "recompute.recompute_modules": None,  # core_attn, the default of both
            "lr_schedule.lr_decay_iters": 320000,
            "model.num_query_groups": None,
            "train.train_iters": 500000,
        },
        world=8,
        launch="--nproc 8",
        idle=("--data-impl", "--distributed-backend"),
    ),
    "llama2_7b": Script(
        {
            "model.family": "llama",
            "model.ffn_hidden_size": 10880,  # 4 x 4096 x 2 / 3 = 10922, and 170 x 64 = 10880
            "model.norm_epsilon": 1e-5,
            "model.make_vocab_size_divisible_by": 1,
            "parallel.tensor_model_parallel_size": 2,
            "parallel.sequence_parallel": True,
            "parallel.overlap_param_gather": True,
            "train.global_batch_size": 2 * (8 * 4 // 2) * 4,
            "data.data_path": ["/data/corpus_text_document"],
            "lr_schedule.lr_warmup_iters": 2000,
            "precision.accumulate_allreduce_grads_in_fp32": None,  # bf16 has it, as here
            "logging.trackers": ["wandb"],
            "wandb.project": "llama",
        },
        world=32,
        launch="--nproc 8 --nnodes 4 --node-rank RANK --master-addr ADDRESS --master-port PORT",
        define={"WANDB_PROJECT": "llama"},
        idle=("--no-rope-fusion", "--use-flash-attn"),
    ),
    "llama2_70b_slurm": Script(
        {
            "model.num_query_groups": 8,
            "model.ffn_hidden_size": 28672,
            "parallel.virtual_pipeline_model_parallel_size": 80 // 8 // 5,
            "recompute.recompute_granularity": "full",
            "recompute.recompute_method": None,  # block is our default
            "recompute.recompute_num_layers": 2,
            "data.data_path": ["/data/c4_text_document"],
            "train.seed": 7,  # what the script is called with stands before its own options
        },
        world=256,
        launch="--nproc 8 --nnodes 32 --node-rank RANK --master-addr ADDRESS --master-port PORT",
        arguments=("--seed", "7"),
        define={"DATA": "/data/c4_text_document", "DATETIME": "now"},
    ),
    "llama3_8b": Script(
        {
            "data.dataset_type": "mock",
            "data.split": "'99,1,0'",  # quotes within quotes stay, as bash has it
            "tokenizer.vocab_size": 128256,
            "parallel.sequence_parallel": None,  # off, as one rank has each matrix
            "parallel.context_parallel_size": 2,
            "precision.fp8_format": "hybrid",
            "precision.fp8_recipe": "delayed",
            "precision.fp8_amax_history_len": 1024,
            "precision.grad_reduce_in_bf16": True,
            "precision.accumulate_allreduce_grads_in_fp32": False,
            "optimizer.decoupled_lr": 5e-4,
            # Megatron's fourth step, counted from 0, is the fifth.
            "train.callbacks": ["profile"],
            "profile.first_step": 5,
            "profile.last_step": 6,
        },
        world=8,
        launch="--nproc 8",
        idle=(
            "--fp8-param-gather",
            "--apply-layernorm-1p",
            "--calculate-per-token-loss",
            "--data-cache-path",
        ),
    ),
    "llava_7b": Script(
        {
            "model.family": "llava",
            "model.vision_model.vision_model_type": "clip",
            "model.vision_model.num_layers": 24,
            "model.vision_model.patch_dim": 14,
            "model.language_model.family": "llama",
            "model.language_model.ffn_hidden_size": 14336,
            "model.language_model.num_query_groups": 8,
            "model.projection_ffn_hidden_size": 14336,
            "model.projection_normalization": None,  # none, which is our default
            "model.projection_bias": False,
            "model.freeze": ["language_model", "vision_model"],
            "model.vision_feature_layers": [-1],
            "data.dataset_type": "image_text",
            "data.data_path": ["shards.tar"],
            "data.image_seq_length": 24 * 24,
            "data.seq_length": 1024,
            "data.chat_template": "tokenizer",
            "data.eod_mask_loss": None,
            "tokenizer.tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer.tokenizer_model": "mistral",
            "parallel.sequence_parallel": True,
        },
        world=8,
        launch="--nproc 8 --set train.eval_interval=null",
        define={"DATA_TRAIN": "shards.tar"},
        idle=("--prompt-path", "--eod-mask-loss"),
    ),
    "llama3_70b": Script(
        {
            "model.rope_scaling_type": "llama3",
            "model.rope_scaling_factor": 8.0,
            "model.original_max_position_embeddings": 8192,
            "parallel.tensor_model_parallel_size": 4,
            "parallel.context_parallel_size": 2,
            "lr_schedule.lr_decay_style": "WSD",
            "lr_schedule.lr_wsd_decay_style": "minus_sqrt",
            "recompute.recompute_modules": ["core_attn", "mlp"],
            "data.train_data_path": [
                {"prefix": "a_text_document", "weight": 0.5},
                {"prefix": "b_text_document", "weight": 0.5},
            ],
            "checkpoint.load": "/models/llama3_70b",
            "checkpoint.keep_last": 1,
            "checkpoint.keep_every": 1000,
            "checkpoint.async_save": True,
            "tokenizer.tokenizer_model": "meta-llama/Llama-3.1-70B",
        },
        world=64,
        launch="--nproc 8 --nnodes 8 --node-rank RANK --master-addr ADDRESS --master-port PORT",
        define={"EXTRA": "--tensorboard-queue-size 5 --log-throughput"},
        idle=("--no-masked-softmax-fusion", "--tensorboard-queue-size", "--log-throughput"),
    ),
    "mixtral_8x7b": Script(
        {
            "model.family": "mixtral",
            "model.moe.num_experts": 8,
            "model.moe.moe_ffn_hidden_size": 14336,
            "model.moe.moe_aux_loss_coeff": [0.01],
            "model.moe.moe_token_dispatcher_type": None,  # alltoall is our default
            "model.rotary_base": 1000000.0,
            "parallel.expert_model_parallel_size": 8,
            "parallel.expert_tensor_parallel_size": None,
            "checkpoint.load": "ckpt",
            "checkpoint.save": None,
        },
        world=32,
        launch="--nproc 8 --nnodes 4 --node-rank 0 --master-addr localhost --master-port 6000",
        arguments=("ckpt", "tokenizer.model", "data_text_document"),
        idle=("--use-mcore-models", "--moe-grouped-gemm"),
    ),
    "deepseek_like": Script(
        {
            "model.family": "deepseek",
            "model.num_layers": 27,
            "model.q_lora_rank": None,
            "model.kv_lora_rank": None,  # 512 is our default; Megatron's is 32
            "model.rope_scaling_type": "yarn",
            "model.rope_scaling_factor": 40.0,
            "model.mtp_num_layers": 1,
            "model.moe.moe_layer_freq": "([0]*1+[1]*26)",
            "model.moe.moe_shared_expert_intermediate_size": 2816,
            "model.moe.moe_router_load_balancing_type": ["seq_aux_loss"],
            "parallel.expert_tensor_parallel_size": 1,
            "recompute.recompute_modules": ["mla_up_proj", "moe"],
        },
        world=16,
        launch="--nproc 8 --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500",
        idle=("--moe-grouped-gemm", "--moe-permute-fusion"),
    ),
    "deepseek_like of 671B": Script(
        {
            "model.num_layers": 61,
            "model.q_lora_rank": 1536,
            "model.moe.num_experts": 256,
            "model.moe.moe_layer_freq": "([0]*1+[1]*60)",
        },
        world=16,
        launch="--nproc 8 --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500",
        define={"MODEL_SIZE": "full"},
        name="deepseek_like",
    ),
    "t5_220m": Script(
        {
            "model.family": "t5",
            "model.num_layers": 12,
            "model.position_embedding_type": "learned_absolute",
            "model.scale_output": False,
            "model.add_output_bias": True,
            "data.dataset_type": "t5",
            "data.seq_length": 512,
            "data.decoder_seq_length": None,  # 128 is our default
            "tokenizer.tokenizer_type": "BertWordPieceCase",
            "tokenizer.vocab_extra_ids": 100,
        },
        world=8,
        launch="--nproc 8",
        arguments=("ckpt", "vocab.txt", "sentences"),
        idle=("--transformer-impl", "--distributed-backend"),
    ),
    "bert_340m": Script(
        {
            "model.family": "bert",
            "model.bert_binary_head": False,
            "data.bert_binary_head": False,
            "model.add_pooler": False,
            "train.loss": None,  # the family's own
            "tokenizer.tokenizer_type": "BertWordPieceLowerCase",
            "precision.initial_loss_scale": 65536.0,
            "precision.loss_scale_window": 500,
            "data.mask_prob": 0.2,
        },
        world=8,
        launch="--nproc 8",
        define={"DATA_PATH": "sentences"},
    ),
    "retro_353m": Script(
        {
            "model.family": "retro",
            "model.rotary_percent": 0.5,
            "model.activation": "swiglu",
            "model.ffn_hidden_size": 2048,  # 4 x 768 x 2 / 3 = 2048
            "model.retro_encoder_num_layers": None,
            "model.retro_encoder_hidden_dropout": 0.1,
            "data.dataset_type": "retro",
            "checkpoint.save_interval": None,
        },
        world=8,
        launch="--nproc 8 --set checkpoint.save_interval=null",
        define={"RETRO_PROJECT_DIR": "/retro"},
        refused=("--retro-project-dir",),
        idle=("--no-async-tensor-model-parallel-allreduce", "--no-data-sharding"),
    ),
    "mamba_hybrid_8b": Script(
        {
            "model.family": "hybrid",
            "model.hybrid_layer_pattern": "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",
            "model.activation": None,  # squared ReLU is our default
            "model.ffn_hidden_size": 4 * 4096,
            "parallel.tensor_model_parallel_size": 4,
            "train.train_samples": 73242188,
        },
        world=8,
        launch="--nproc 8",
        arguments=("data_text_document", "tokenizer.model"),
        idle=("--use-mcore-models", "--transformer-impl"),
    ),
    "gpt_fsdp_batch": Script(
        {
            "parallel.use_torch_fsdp2": True,
            "parallel.fsdp_reshard_after_forward": None,
            "parallel.use_distributed_optimizer": None,
            "data.dataset_type": "mock",
            "train.eval_interval": None,
        },
        world=16,
        launch="--nproc 8 --nnodes 2 --node-rank RANK --master-addr ADDRESS --master-port PORT "
        "--set train.eval_interval=null --set checkpoint.save_interval=null",
        idle=("--ckpt-format", "--no-gradient-accumulation-fusion"),
    ),
    "gpt_fsdp_batch with ZeRO-2": Script(
        {"parallel.use_torch_fsdp2": True, "parallel.fsdp_reshard_after_forward": False, "precision.dtype": None},
        world=16,
        launch="--nproc 8 --nnodes 2 --node-rank RANK --master-addr ADDRESS --master-port PORT "
        "--set train.eval_interval=null --set checkpoint.save_interval=null",
        define={"SHARDING": "optim_grads", "PRECISION": "manual-gc"},
        name="gpt_fsdp_batch",
    ),
    "tiny": Script(
        {"data.dataset_type": "mock", "train.global_batch_size": 4, "checkpoint.save": "here"},
        world=1,
        launch="",
        define={"OUT": "here"},
    ),
}


def imported(case: str, host: PluginHost) -> ImportResult:
    script = CASES[case]
    path = SCRIPTS / f"{script.name or case}.sh"
    return import_script(path, host, define=script.define, arguments=script.arguments)


@pytest.mark.parametrize("case", CASES)
def test_a_launch_script_becomes_a_configuration(case: str, host: PluginHost) -> None:
    script, result = CASES[case], imported(case, host)
    found = dotted(result.sections)
    assert {key: found.get(key) for key in script.keys} == script.keys
    assert result.processes.world_size == script.world
    assert launch_line(result, None) == f"mt train CONFIG.toml {script.launch}".rstrip()
    assert [one.words.split()[0] for one in result.of_status("refused")] == list(script.refused)
    assert set(script.idle) <= {one.words.split()[0] for one in result.of_status("no effect")}
    assert all(one.keys or one.reason for one in result.accounts)
    check_configuration(result.sections, script.world, host)


@dataclass(frozen=True)
class PartScript:
    """A script that has sections in its code: those that are not there, keys of the others, what cannot be done."""

    fixed: tuple[str, ...]
    keys: Mapping[str, Any]
    refused: tuple[str, ...]
    words: str


PARTS: Mapping[str, PartScript] = {
    "vit_base": PartScript(
        ("model", "tokenizer", "data"),
        {"train.train_iters": 93750, "optimizer.weight_decay": 0.05, "precision.dtype": "fp16"},
        ("--hidden-size", "--num-classes", "--data-path"),
        "model.family=vision",
    ),
    "grpo_8b": PartScript(
        ("data",),
        {"model.num_query_groups": 8, "tokenizer.tokenizer_model": "llama", "optimizer.lr": 1e-6},
        ("--perform-rl-step", "--grpo-group-size", "--langrl-env-config", "--mock-data"),
        "reinforcement learning",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_the_arguments_say_is_translated_and_what_the_script_fixes_is_named(name: str, host: PluginHost) -> None:
    part, result = PARTS[name], import_script(SCRIPTS / f"{name}.sh", host)
    found = dotted(result.sections)
    assert {key: found.get(key) for key in part.keys} == part.keys
    assert not {key.partition(".")[0] for key in found} & set(part.fixed)
    refused = {one.words.split()[0]: one.reason for one in result.of_status("refused")}
    assert set(part.refused) <= refused.keys()
    assert all(one.keys or one.reason for one in result.accounts)
    assert not result.complete
    assert part.words in " ".join(result.notes)
    check_result(result, host)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "pretrain.yaml lists data sets of Megatron-Energon"),
        ({"LANGUAGE_MODEL": "nemotron5-hybrid-8b"}, "--language-model-type nemotron5-hybrid-8b: this decoder"),
    ],
)
def test_what_no_model_of_pictures_has_is_refused(changes: Mapping[str, str], words: str, host: PluginHost) -> None:
    result = import_script(SCRIPTS / "llava_7b.sh", host, define=changes)
    assert words in "; ".join(f"{one.words}: {one.reason}" for one in result.of_status("refused"))


def test_a_script_with_its_model_in_python_says_so(tmp_path: Path, host: PluginHost) -> None:
    (tmp_path / "run.sh").write_text("torchrun examples/mimo/train.py --model-provider mock --lr 1e-3\n")
    with pytest.raises(ConfigError, match=r"run.sh, line 1: examples/mimo/train.py: .* are Python functions"):
        import_script(tmp_path / "run.sh", host)


PICTURES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --train-iters 5 --lr 1e-3 "
PICTURES += "--seq-length 64 --max-position-embeddings 64 --img-h 32 --img-w 48 --patch-dim 8 --mock-data "
PICTURES += "--tokenizer-type NullTokenizer --vocab-size 127"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("", {"model.projection_normalization": "LayerNorm", "data.image_seq_length": 25, "data.seq_length": 89}),
        (
            "--transformer-impl local --disable-vision-class-token --dataloader-seq-length 40 --freeze-LM",
            {"data.image_seq_length": 24, "data.seq_length": 64, "model.freeze": ["language_model"]},
        ),
    ],
)
def test_pretrain_vlm_has_a_tower_as_its_decoder(words: str, keys: Mapping[str, Any], host: PluginHost) -> None:
    result = import_words([*PICTURES.split(), *words.split()], host, MegatronOptions(entry="vlm", world_size=1))
    flat = dotted(result.sections)
    wanted = {
        "model.vision_model.hidden_size": 64,
        "model.vision_model.activation": "gelu_tanh",
        "model.projection_ffn_hidden_size": 256,
        "data.dataset_type": "captioned_shapes",
        **keys,
    }
    assert {key: flat.get(key) for key in wanted} == wanted
    check_configuration(result.sections, 1, host)


@pytest.mark.parametrize(
    ("tower", "tiles", "keys"),
    [
        ("internvit300M", "--use-tiling --max-num-tiles 6 --use-thumbnail --pixel-shuffle", ("internvit", 6, 2, 6)),
        ("clip", "--max-num-tiles 6", ("clip", None, None, 24)),  # tiles count only with --use-tiling
        ("internvit", "", "RMSNorm"),
        ("radio", "", "eight class tokens"),
        ("siglip", "", "behind the norm"),
        ("hf://x", "", "a tower of transformers"),
    ],
)
def test_towers_of_the_example(tower: str, tiles: str, keys: Any, host: PluginHost) -> None:
    words = f"{PICTURES} {tiles} --language-model-type qwen2.5_7B --vision-model-type {tower}".split()
    words += ["--disable-vision-class-token", "--decoder-seq-length", "64", "--tokenizer-prompt-format", "qwen2p5"]
    words.remove("--mock-data")
    options = MegatronOptions(entry="vlm", world_size=1)
    result = import_words([*words, "--data-path", "a.jsonl"], host, options)
    if isinstance(keys, str):
        assert keys in " ".join(account.reason for account in result.of_status("refused"))
        return
    assert result.of_status("refused") == []
    flat = dotted(result.sections)
    names = (
        "model.vision_model.vision_model_type",
        "data.max_num_tiles",
        "model.scale_factor",
        "data.image_seq_length",
    )
    assert tuple(flat.get(name) for name in names) == keys
    assert flat["data.chat_template"] == "chatml"
    assert flat["model.language_model.add_qkv_bias"] is True


PARAMETERS: Mapping[str, tuple[int, int]] = {
    # case -> ids of the vocabulary, parameters: as published, or by hand
    "gpt3_175b": (50304, 96 * (12 * 12288**2 + 13 * 12288) + (50304 + 2048 + 2) * 12288),
    "llama3_70b": (128256, 70_553_706_496),
    "mixtral_8x7b": (32000, 46_702_792_704),
    "bert_340m": (30592, 24 * (12 * 1024**2 + 13 * 1024) + (30592 + 512 + 2 + 2) * 1024 + 1024**2 + 3 * 1024 + 30592),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_the_model_has_the_parameters_that_it_should_have(case: str, host: PluginHost) -> None:
    """The shapes are right: built as it would be on each rank, without memory."""
    from mt_tools.plan.layouts import Planner
    from mt_tools.plan.machines import get_machine
    from mt_tools.plan.report import plan_values

    result, machine = imported(case, host), get_machine("h100")
    vocabulary, parameters = PARAMETERS[case]
    sections = {
        **result.sections,
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": vocabulary},
        "model": {**result.sections["model"], "vocab_size": vocabulary},
    }
    config = check_configuration(sections, CASES[case].world, host).config
    values = plan_values(Planner(config, host, machine).plan(config, CASES[case].world), machine)
    assert values["parameters"]["total"] == parameters


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("examples/multimodal/train.py", "vlm"),
        ("train.py", None),
        ("my/train.py", None),
        ("/opt/megatron/pretrain_gpt.py", "gpt"),
    ],
)
def test_a_script_of_another_program_is_none_of_megatrons(path: str, name: str | None) -> None:
    found = entry_of_file(path)
    assert (None if found is None else found.name) == name
