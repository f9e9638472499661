"""What is written in Megatron's formats is read as it was, bit for bit, whatever the layout it was cut for."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.conftest import (
    GPT,
    LLAMA,
    MODELS,
    MOE_MODELS,
    UNCUT,
    YARN,
    RandomCheckpoint,
    assert_same_tensors,
)
from tests.covering import covering

from mt_ckpt.megatron.folder import detect, detect_legacy
from mt_core.checkpoint_lookup import open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError

NEVER_OLD = (
    *MOE_MODELS,
    "latent_dense",
    "mamba",
    "hybrid",
    "gpt_streams",
    "gpt_streams_predicting",
    "hybrid_streams",
    "t5",
    "qwen3",
    "bert_no_heads",
)
"""Models that Megatron had only after its names changed, or that the old names do not tell apart."""
GRIDS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 4, 1)]


def options(tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, **more) -> ConvertOptions:
    return ConvertOptions(
        target_tensor_parallel_size=tp,
        target_pipeline_parallel_size=pp,
        target_virtual_pipeline_parallel_size=vpp,
        target_expert_parallel_size=ep,
        **more,
    )


def through(name: str, source, asked: ConvertOptions, path: Path, host):
    """Written in the format `name` and opened again."""
    host[CHECKPOINT_SAVERS].get(name).convert.load()(path, source, asked, host)
    return open_with(host[CHECKPOINT_LOADERS].get(name), path, host)


@pytest.mark.parametrize(
    ("model", "grid"),
    [case for case in covering(list(MODELS), GRIDS) if case.values[0] not in UNCUT or case.values[1][1] == 1],
)
def test_every_model_over_grids_of_ranks(model, grid, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    tp, pp, vpp = grid
    path = tmp_path / "a"
    found = through("megatron", source, options(tp, pp, vpp), path, host)
    assert_same_tensors(found, source)
    assert detect(path)
    assert not detect_legacy(path)
    assert len(list(path.rglob("model_optim_rng.pt"))) == tp * pp


@pytest.mark.parametrize("model", MODELS)
def test_the_configuration_that_is_read_makes_the_same_parameters(model, tmp_path, host) -> None:
    """And the keys that were given come back, where the family is the same."""
    source = RandomCheckpoint(MODELS[model], host)
    for name in ("megatron", "megatron-dist"):
        section = through(name, source, options(), tmp_path / name, host).metadata["config"]["model"]
        read, given = (config_from_dict({"model": m}, host).model for m in (section, MODELS[model]))
        assert read.family == given.family
        for key in set(MODELS[model]) - {"moe"}:
            assert getattr(read, key) == getattr(given, key), key
        for key in set(MODELS[model].get("moe", {})) - {"moe_layer_freq"}:
            assert read.moe[key] == given.moe[key], key


EXPERT_GRIDS = [(2, 1, 1, 1), (4, None, 1, 2), (2, 1, 2, 1), (2, 2, 2, 2)]


@pytest.mark.parametrize(("model", "grid"), covering(MOE_MODELS, EXPERT_GRIDS))
def test_experts_over_ranks(model, grid, tmp_path, host) -> None:
    ep, etp, tp, pp = grid
    source = RandomCheckpoint(MODELS[model], host)
    asked = options(tp, pp, ep=ep, target_expert_tensor_parallel_size=etp)
    assert_same_tensors(through("megatron", source, asked, tmp_path / "a", host), source)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model_as_a_distributed_checkpoint(model, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host, optimizer=True)
    asked = options(2, max_shard_size=20_000)
    found = through("megatron-dist", source, asked, tmp_path / "a", host)
    assert_same_tensors(found, source)
    assert len(list((tmp_path / "a").rglob("*.distcp"))) > 1


@pytest.mark.parametrize(("model", "grid"), covering([name for name in MODELS if name not in NEVER_OLD], GRIDS[:6]))
def test_every_old_model_under_its_old_names(model, grid, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    assert_same_tensors(through("megatron-legacy", source, options(*grid), tmp_path / "a", host), source)
    assert detect_legacy(tmp_path / "a")
    assert not detect(tmp_path / "a")


OF_OPTIMIZER = ("gpt", "llama", "llama_tied", "moe", "gpt_oss", "deepseek_v3", "mamba", "hybrid_rotary")
WITH_OPTIMIZER = list(product(OF_OPTIMIZER, [torch.float32, torch.bfloat16]))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "grid"), covering(WITH_OPTIMIZER, GRIDS[:6]))
def test_the_optimizer_over_grids_of_ranks(case, grid, tmp_path, host) -> None:
    model, dtype = case
    source = RandomCheckpoint(MODELS[model], host, dtype=dtype, optimizer=True)
    found = through("megatron", source, options(*grid), tmp_path / "a", host)
    assert_same_tensors(found, source)
    assert found.metadata["iteration"] == 7
    assert found.metadata["consumed_samples"] == 28


@pytest.mark.parametrize("distributed", [False, True])
def test_groups_have_the_learning_rate_and_the_weight_decay_of_the_next_step(distributed, tmp_path, host) -> None:
    """Over 20 steps of 4 samples, 28 of which are done: 0.3 * 28 / 80. The learning rate's decay ends after 40 samples:
    1e-3 * (40 - 28) / 40."""
    source = RandomCheckpoint(GPT, host, optimizer=True)
    config = source.metadata["config"]
    rise = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.3}
    config["optimizer"] |= rise
    config["lr_schedule"] = {"lr_decay_style": "linear", "lr_decay_iters": 10}
    config["parallel"] = {"use_distributed_optimizer": distributed}
    found = through("megatron", source, options(), tmp_path, host)
    schedule = found.metadata["megatron"]["opt_param_scheduler"]
    kept = {"start_wd": 0.0, "end_wd": 0.3, "wd_incr_style": "linear", "wd_incr_steps": 80, "lr_decay_steps": 40}
    assert schedule | kept == schedule
    optimizer = torch.load(next(tmp_path.rglob("model_optim_rng.pt")), weights_only=False)["optimizer"]
    groups = optimizer.get("optimizer", optimizer)["param_groups"]
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.105, 0.0])
    assert [(group["lr"], group["max_lr"]) for group in groups] == [(pytest.approx(3e-4), 1e-3)] * 2
    assert_same_tensors(found, source)


@pytest.mark.slow
@pytest.mark.parametrize("model", OF_OPTIMIZER)
def test_the_optimizer_of_16_bits_as_a_distributed_checkpoint(model, tmp_path, host) -> None:
    """With the fp32 copies of the weights; that of fp32 weights is in the test of every model."""
    source = RandomCheckpoint(MODELS[model], host, dtype=torch.bfloat16, optimizer=True)
    assert_same_tensors(through("megatron-dist", source, options(2), tmp_path / "a", host), source)


SHARDED_GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "grid"), covering(WITH_OPTIMIZER, SHARDED_GRIDS))
def test_the_distributed_optimizer_over_grids_of_ranks(case, grid, tmp_path, host) -> None:
    """Flat buffers beside each rank's file, and nothing of the optimizer's state in it."""
    model, dtype = case
    source = RandomCheckpoint(MODELS[model], host, dtype=dtype, optimizer=True)
    source.metadata["config"]["parallel"] = {"use_distributed_optimizer": True}
    for ep in {1, 2 if model in MOE_MODELS else 1}:
        path = tmp_path / f"ep{ep}"
        found = through("megatron", source, options(*grid, ep), path, host)
        assert_same_tensors(found, source)
        assert len(list(path.rglob("distrib_optim.pt"))) == len(list(path.rglob("model_optim_rng.pt")))
        assert found.metadata["megatron"]["args"]["use_distributed_optimizer"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["moe_shared", "deepseek_v3"])
def test_the_optimizer_of_divided_experts(model, dtype, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host, dtype=dtype, optimizer=True)
    assert_same_tensors(through("megatron", source, options(2, 2, ep=2), tmp_path / "a", host), source)


def test_one_format_after_another(tmp_path, host) -> None:
    source = RandomCheckpoint(LLAMA, host, dtype=torch.bfloat16, optimizer=True)
    first = through("megatron", source, options(2, 2), tmp_path / "a", host)
    second = through("megatron-dist", first, options(), tmp_path / "b", host)
    third = through("megatron", second, options(4, 1), tmp_path / "c", host)
    assert_same_tensors(third, source)
    assert third.metadata["config"]["model"] == first.metadata["config"]["model"]


def test_more_tensor_parallel_ranks_than_key_value_groups(tmp_path, host) -> None:
    """A group's rows are cut through then, as Megatron does."""
    source = RandomCheckpoint({**GPT, "num_query_groups": 1, "kv_channels": 8}, host)
    found = through("megatron", source, options(4), tmp_path / "a", host)
    assert_same_tensors(found, source)


@pytest.mark.parametrize(("multiple", "rows"), [(None, 256), (1, 102), (64, 128)])
def test_the_vocabulary_is_padded_as_megatron_pads_it(multiple, rows, tmp_path, host) -> None:
    source = RandomCheckpoint(GPT, host)
    asked = options(2, make_vocab_size_divisible_by=multiple)
    assert_same_tensors(through("megatron", source, asked, tmp_path / "a", host), source)
    files = sorted((tmp_path / "a").rglob("model_optim_rng.pt"))
    with torch.serialization.safe_globals([argparse.Namespace]):
        models = [torch.load(file, weights_only=True)["model"] for file in files]
    table = torch.cat([model["embedding.word_embeddings.weight"] for model in models])
    assert len(table) == rows
    assert torch.equal(table[:101], source.tensors["model.embedding.word_embeddings.weight"])
    # Rows that were made, so that Megatron's softmax over all of them gives the loss of the model: never zeros.
    assert table[101:].abs().sum(dim=-1).min() > 0 or rows == 101


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("gpt", {"tp": 3}, "target_tensor_parallel_size=3 does not divide"),
        ("gpt", {"pp": 3}, "4 layers do not divide evenly into 3 pipeline stages"),
        ("gpt", {"vpp": 2}, "--target-virtual-pipeline-parallel-size 2 needs --target-pipeline-parallel-size"),
        ("gpt", {"ep": 2}, "the model has no experts; it can be 1"),
        ("moe", {"ep": 3}, "target_expert_parallel_size=3 does not divide"),
        ("moe", {"tp": 2, "target_expert_tensor_parallel_size": 4}, "expert_tensor_parallel_size=4 does not divide"),
        ("t5", {"pp": 2}, "a model of decoder and encoder is not cut into"),
    ],
)
def test_layouts_that_cannot_be(model, asked, words, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    with pytest.raises(ConfigError, match=words):
        through("megatron", source, options(**asked), tmp_path / "a", host)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({**GPT, "parallel_residual": True}, "model.parallel_residual=True cannot be written"),
        ({**GPT, "embedding_layernorm": True}, "model.embedding_layernorm=True cannot be written"),
        (
            {**GPT, "activation": "relu"},
            "model.activation=relu cannot be written as Megatron's arguments; it can be gelu",
        ),
        ({**LLAMA, "attention_bias": True}, "where all linear layers have biases or none"),
        (
            {**LLAMA, "rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
            "model.rope_scaling_type=dynamic cannot be written .* it can be none, linear, llama3, yarn",
        ),
        (
            {**LLAMA, **YARN, "rope_attention_factor": 1.5},
            "model.rope_attention_factor=1.5 cannot be written as Megatron's arguments; it can be None",
        ),
        ({**LLAMA, **YARN, "rope_mscale_all_dim": 0.5}, "rope_mscale_all_dim=0.5 without model.rope_mscale cannot be"),
        (
            {**MODELS["gpt_oss"], "moe": {"num_experts": 4, "moe_router_bias": False}},
            "model.moe.moe_router_bias=False cannot be written as Megatron's arguments, which mean True; leave it out",
        ),
        (
            {**MODELS["llama_scaled"], "original_max_position_embeddings": 64},
            "model.original_max_position_embeddings=64 cannot be written as Megatron's arguments, which fix it at 8192",
        ),
        ({**MODELS["bert"], "layernorm_placement": "post"}, "model.layernorm_placement=post cannot be written"),
        (
            {**LLAMA, "family": "gemma"},
            "model.family=gemma cannot be written as Megatron's arguments: Megatron has its zero-centered norms "
            ".*, but no norms behind attention and feed-forward, .*; these can: gpt, llama",
        ),
        (
            {**LLAMA, "family": "olmoe", "moe": {"num_experts": 4}},
            "model.family=olmoe cannot .* normalizes queries and keys head by head, this family over all heads",
        ),
        (
            {**LLAMA, "family": "granite_moe", "moe": {"num_experts": 4}, "residual_multiplier": 0.22},
            "model.residual_multiplier=0.22 cannot be written as Megatron's arguments; it can be 1.0",
        ),
        (
            {**MODELS["deepseek_v2_lite"], "original_max_position_embeddings": 64},
            "model.original_max_position_embeddings=64 cannot be .*, which fix it at 4096 for latent attention",
        ),
        (
            {**GPT, "moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16}},
            "moe_shared_expert_intermediate_size=16 of a model with biases in its linear layers: Megatron refuses",
        ),
        ({**MODELS["mamba"], "mamba_conv_kernel": 3}, "model.mamba_conv_kernel=3 cannot be written"),
        ({**MODELS["mamba"], "norm_epsilon": 1e-6}, "model.norm_epsilon=1e-06 cannot be written .* can be 1e-05"),
        (
            {**GPT, "moe": {"num_experts": 4, "moe_router_bias": False}},
            "model.moe.moe_router_bias=False cannot be written as Megatron's arguments, which mean True; leave it out",
        ),
    ],
)
def test_models_that_megatron_does_not_have(model, words, tmp_path, host) -> None:
    source = RandomCheckpoint(model, host)
    with pytest.raises(ConfigError, match=words):
        through("megatron", source, options(), tmp_path / "a", host)


def test_a_granite_whose_factors_change_nothing_is_a_mixtral(tmp_path, host) -> None:
    source = RandomCheckpoint({**LLAMA, "family": "granite_moe", "moe": {"num_experts": 4}}, host)
    found = through("megatron", source, options(2, ep=2), tmp_path / "a", host)
    assert_same_tensors(found, source)
    assert found.metadata["config"]["model"]["family"] == "mixtral"


def test_old_names_do_not_have_experts(tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["moe"], host)
    with pytest.raises(CheckpointError, match="router.weight: Megatron's models from before Megatron-Core"):
        through("megatron-legacy", source, options(), tmp_path / "a", host)


def test_old_names_are_the_same_for_a_bert_without_heads_and_a_gpt(tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS["bert_no_heads"], host)
    with pytest.raises(ConfigError, match="has the names of a GPT in the format megatron-legacy; use megatron"):
        through("megatron-legacy", source, options(), tmp_path / "a", host)


def test_half_an_optimizer_is_not_left_out_silently(tmp_path, host) -> None:
    source = RandomCheckpoint(GPT, host, optimizer=True)
    del source.tensors["optimizer.exp_avg.decoder.layers.1.mlp.linear_fc1.bias"]
    with pytest.raises(CheckpointError, match="an optimizer without optimizer.exp_avg.decoder.layers.1.mlp.linear_fc1"):
        through("megatron", source, options(), tmp_path / "a", host)
