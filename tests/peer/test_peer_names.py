"""Every tensor that Megatron's strict load wants, and no other: our files of each family, in each format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.megatron.conftest import assert_same_tensors
from tests.ckpt.scaled_weights import ScaledWeights
from tests.peer.megatron import Megatron
from tests.peer.our_outputs import inputs_of, logits_of

from mt_ckpt.megatron_dist.reader import open_checkpoint as open_torch_dist
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.plugins import PluginHost

VOCAB = 101
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB, "ffn_hidden_size": 48}
LLAMA = {**SHAPE, "family": "llama", "num_query_groups": 2, "max_position_embeddings": 16}
MIXER = {"mamba_head_dim": 8, "mamba_state_dim": 6, "mamba_num_groups": 4}
T5 = {
    **SHAPE,
    "family": "t5",
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 16,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "activation": "gelu",
    "add_bias_linear": True,
    "scale_attention_scores": True,
    "scale_output": False,
    "add_output_bias": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {**SHAPE, "family": "gpt", "max_position_embeddings": 16}),
    "llama": ("gpt", LLAMA),
    "bert": ("bert", {**SHAPE, "family": "bert", "max_position_embeddings": 16}),
    "t5": ("t5", T5),
    "mixed_experts": (
        "gpt",
        {
            **LLAMA,
            "family": "qwen_moe",
            "qk_layernorm": False,
            "moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": "([0]*1+[1]*1)"},
        },
    ),
    "experts_with_prediction": (
        "gpt",
        {
            **LLAMA,
            "family": "gpt",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "moe": {"num_experts": 4, "moe_layer_freq": "([0]*1+[1]*1)"},
            "mtp_num_layers": 1,
        },
    ),
    "latent_with_prediction": (
        "gpt",
        {
            **SHAPE,
            "family": "deepseek",
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "max_position_embeddings": 16,
            "mtp_num_layers": 1,
        },
    ),
    "mamba": (
        "hybrid",
        {"family": "mamba", "num_layers": 2, "hidden_size": 32, "vocab_size": VOCAB, **MIXER},
    ),
    "hybrid": (
        "hybrid",
        {
            "family": "hybrid",
            "hidden_size": 32,
            "vocab_size": VOCAB,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "hybrid_layer_pattern": "M*M-",
            **MIXER,
        },
    ),
}
MODELS["local_hybrid"] = ("local_hybrid", MODELS["hybrid"][1])
"""Name -> (Megatron's model, our configuration)."""
STRICT = {"torch": [], "torch_dist": ["--dist-ckpt-strictness=raise_all"]}
SAVERS = {"torch": "megatron", "torch_dist": "megatron-dist"}


def convert(source: Any, path: Path, load_format: str, host: PluginHost, **options: Any) -> None:
    host[CHECKPOINT_SAVERS].get(SAVERS[load_format]).convert.load()(path, source, ConvertOptions(**options), host)


@pytest.mark.parametrize("load_format", SAVERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_strict_load_takes_what_is_written(
    name: str, load_format: str, megatron: Megatron, host: PluginHost, tmp_path: Path
) -> None:
    family, model = MODELS[name]
    source = ScaledWeights(model, host)
    impl = "transformer_engine" if family == "hybrid" else "local"  # the names of the layers that run on a CPU
    convert(source, tmp_path / "written", load_format, host, target_transformer_impl=impl)
    inputs = inputs_of(model["family"], VOCAB)
    arguments = STRICT[load_format]
    answer = megatron.ask(
        family, arguments=arguments, load=tmp_path / "written", load_format=load_format, inputs=inputs, double=True
    )
    assert answer.logits is not None
    logits = logits_of(source, inputs, host, double=True)
    atol = 1e-6 if "moe" in model else 1e-10  # scores of experts are fp32
    torch.testing.assert_close(answer.logits[..., :VOCAB], logits, rtol=0, atol=atol)


TRAINED = [
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--max-position-embeddings=16",
    "--padded-vocab-size=128",
    f"--vocab-size={VOCAB}",
]
LENGTHS = {"gpt": ["--seq-length=16"], "t5": ["--seq-length=16", "--decoder-seq-length=16"]}
LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "data": ({}, []),
    "tensor": (
        {"target_tensor_parallel_size": 2, "make_vocab_size_divisible_by": 64},
        ["--tensor-model-parallel-size=2"],
    ),
    "pipeline": ({"target_pipeline_parallel_size": 2}, ["--pipeline-model-parallel-size=2"]),
}


@pytest.mark.parametrize(
    ("family", "optimizer_format", "layout"),
    [
        ("gpt", "dp_reshardable", "data"),
        ("gpt", "dp_reshardable", "tensor"),
        ("gpt", "dp_reshardable", "pipeline"),
        ("t5", "dp_reshardable", "data"),
        ("t5", "fully_reshardable", "data"),
    ],
)
def test_training_goes_on_from_the_written_optimizer(
    family: str, optimizer_format: str, layout: str, megatron: Megatron, host: PluginHost, tmp_path: Path
) -> None:
    """Three steps on two ranks, as in the run that was not disturbed."""
    inputs = inputs_of(family, VOCAB)
    one = ["--use-distributed-optimizer", "--global-batch-size=4"]
    arguments = [*TRAINED, *LENGTHS[family], *one]
    undisturbed = megatron.ask(family, arguments=arguments, inputs=inputs, num_steps=4)
    megatron.ask(family, arguments=arguments, inputs=inputs, num_steps=1, save=tmp_path / "run")
    source = open_checkpoint(tmp_path / "run", host)
    sizes, more = LAYOUTS[layout]
    convert(source, tmp_path / "written", "torch_dist", host, target_optimizer_format=optimizer_format, **sizes)
    resumed = megatron.ask(
        family,
        world_size=2,
        arguments=[*one, *more],
        load=tmp_path / "written",
        load_optimizer=True,
        inputs=inputs,
        num_steps=3,
    )
    torch.testing.assert_close(resumed.step_losses, undisturbed.step_losses[1:], rtol=0, atol=1e-6)


MIXTRAL = [
    *TRAINED,
    *LENGTHS["gpt"],
    *("--normalization=RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type=rope"),
    *("--group-query-attention", "--num-query-groups=2", "--untie-embeddings-and-output-weights"),
    *("--num-experts=4", "--moe-ffn-hidden-size=24"),
]
SECOND_LAYER = ["--moe-layer-freq=([0]*1+[1]*1)"]
EXPERT_LAYOUTS: dict[str, tuple[list[str], dict[str, int], list[str]]] = {
    "data": ([], *LAYOUTS["data"]),
    "tensor": ([], LAYOUTS["tensor"][0], [*LAYOUTS["tensor"][1], "--sequence-parallel"]),
    "pipeline": (SECOND_LAYER, *LAYOUTS["pipeline"]),
    "expert": ([], {"target_expert_parallel_size": 2}, ["--expert-model-parallel-size=2"]),
    "tensor, experts apart": (
        SECOND_LAYER,
        {
            "target_tensor_parallel_size": 2,
            "target_expert_parallel_size": 2,
            "target_expert_tensor_parallel_size": 1,
            "make_vocab_size_divisible_by": 64,
        },
        [
            *("--tensor-model-parallel-size=2", "--sequence-parallel"),
            *("--expert-model-parallel-size=2", "--expert-tensor-parallel-size=1"),
        ],
    ),
}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_training_goes_on_from_the_buckets_of_experts(
    layout: str, megatron: Megatron, host: PluginHost, tmp_path: Path
) -> None:
    """As above; and what Megatron writes in buckets of its own is what it was given."""
    inputs = inputs_of("gpt", VOCAB)
    one = ["--use-distributed-optimizer", "--global-batch-size=4"]
    model, sizes, more = EXPERT_LAYOUTS[layout]
    arguments = [*MIXTRAL, *one, *model]
    undisturbed = megatron.ask("gpt", arguments=arguments, inputs=inputs, num_steps=4)
    megatron.ask("gpt", arguments=arguments, inputs=inputs, num_steps=1, save=tmp_path / "run")
    source = open_torch_dist(tmp_path / "run", host, VOCAB)
    convert(source, tmp_path / "written", "torch_dist", host, target_optimizer_format="dp_reshardable", **sizes)
    load: dict[str, Any] = {"load": tmp_path / "written", "load_optimizer": True, "inputs": inputs, "world_size": 2}
    megatron.ask("gpt", arguments=[*one, *more], **load, num_steps=0, save=tmp_path / "again")
    assert_same_tensors(open_torch_dist(tmp_path / "again", host, VOCAB), source)
    resumed = megatron.ask("gpt", arguments=[*one, *more], **load, num_steps=3)
    torch.testing.assert_close(resumed.step_losses, undisturbed.step_losses[1:], rtol=0, atol=1e-6)
