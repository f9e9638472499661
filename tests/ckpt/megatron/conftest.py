"""Models with random weights, seen as open checkpoints, and what Megatron itself wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.model import expected_parameters
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.plugins import PluginHost, load_plugins

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101}
GPT = {"family": "gpt", **SHAPE, "max_position_embeddings": 16, "ffn_hidden_size": 48}
LLAMA = {"family": "llama", **SHAPE, "num_query_groups": 2, "ffn_hidden_size": 48}
LATENT = {
    "family": "deepseek",
    **SHAPE,
    "ffn_hidden_size": 48,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
MIXER = {"mamba_head_dim": 8, "mamba_state_dim": 6, "mamba_num_groups": 4}
HYBRID = {
    "family": "hybrid",
    "hidden_size": 32,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    **MIXER,
}
STREAMS = {"enable_mhc_connections": True, "mhc_num_residual_streams": 3, "mhc_init_gating_factor": 0.5}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_beta_fast": 16.0,
    "rope_beta_slow": 2.0,
    "rope_truncate": False,
    "max_position_embeddings": 512,
}
GPT_OSS = {
    "family": "gpt_oss",
    **SHAPE,
    "num_query_groups": 2,
    "kv_channels": 12,
    "ffn_hidden_size": 24,
    "sliding_window": 3,
    **YARN,
    "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": [0.9]},
}
PROBS_ON_INPUT = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt_untied_odd": {**GPT, "untie_embeddings_and_output_weights": True, "vocab_size": 77, "activation": "gelu_tanh"},
    "gpt_no_bias": {**GPT, "add_bias_linear": False, "activation": "squared_relu", "num_query_groups": 1},
    "gpt_partly_rotary": {
        **{key: value for key, value in GPT.items() if key != "max_position_embeddings"},
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "kv_channels": 12,
    },
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "untie_embeddings_and_output_weights": False, "make_vocab_size_divisible_by": 8},
    "llama_biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_scaled": {
        **LLAMA,
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 8.0,
        "original_max_position_embeddings": 8192,
    },
    "llama_yarn": {**LLAMA, **YARN, "rope_mscale": 0.8, "rope_mscale_all_dim": 0.5},
    "mistral": {**LLAMA, "family": "mistral", "sliding_window": 9},
    "qwen2": {**LLAMA, "family": "qwen", "add_qkv_bias": True, "qk_layernorm": False},
    "qwen2_windows": {
        **LLAMA,
        "family": "qwen",
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "sliding_window": 9,
        "max_window_layers": 3,
    },
    "qwen3": {**LLAMA, "family": "qwen", "kv_channels": 12},
    "bert": {"family": "bert", **SHAPE, "max_position_embeddings": 16},
    "bert_no_heads": {
        "family": "bert",
        **SHAPE,
        "max_position_embeddings": 16,
        "num_tokentypes": 0,
        "add_lm_head": False,
        "bert_binary_head": False,
    },
    "t5": {
        "family": "t5",
        **SHAPE,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 16,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "activation": "gelu",
        "add_bias_linear": True,
        "scale_attention_scores": True,
        "scale_output": False,
        "add_output_bias": True,
        "decoder_num_layers": 2,
    },
    "moe": {
        **LLAMA,
        "family": "mixtral",
        "moe": {
            "num_experts": 4,
            "moe_ffn_hidden_size": 24,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    },
    "moe_windowed": {**LLAMA, "family": "mixtral", "sliding_window": 9, "moe": {"num_experts": 4}},
    "moe_shared": {
        **LLAMA,
        "family": "qwen_moe",
        "qk_layernorm": False,
        "moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "qwen2_moe": {
        **LLAMA,
        "family": "qwen_moe",
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    },
    "qwen3_moe": {**LLAMA, "family": "qwen_moe", "moe": {"num_experts": 4, "moe_latent_size": 12}},
    "llama4": {
        **LLAMA,
        "family": "llama4",
        "attention_chunk_size": None,
        "no_rope_freq": None,
        "query_scaling_beta": 0.0,
        "moe": PROBS_ON_INPUT,
    },
    "llama4_no_rope": {
        **LLAMA,
        "family": "llama4",
        "attention_chunk_size": None,
        "no_rope_freq": "([0]*1+[1]*1+[0]*2)",
        "qk_l2_norm": False,
        "query_scaling_beta": 0.0,
        "moe": {**PROBS_ON_INPUT, "moe_layer_freq": "([0]*1+[1]*1)*2"},
    },
    "gpt_moe": {**GPT, "moe": {"num_experts": 4}},
    "gpt_moe_shared": {
        **GPT,
        "add_bias_linear": False,
        "moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16},
    },
    "deepseek_v2_lite": {
        **LATENT,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
        "rope_mscale": 0.707,
        "rope_mscale_all_dim": 0.707,
        "moe": {
            "num_experts": 4,
            "moe_layer_freq": "([0]*1+[1]*3)",
            "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 16,
        },
    },
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 20,
        "mtp_num_layers": 2,
        "mtp_loss_scaling_factor": 0.3,
        "moe": {
            "num_experts": 4,
            "moe_layer_freq": "([0]*1+[1]*3)",
            "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 16,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
        },
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss_pattern": {**GPT_OSS, "window_attn_skip_freq": "([1]*1+[0]*1+[1]*2)"},
    "latent_dense": {**LATENT, "untie_embeddings_and_output_weights": False, "mtp_num_layers": 1},
    "mamba": {
        "family": "mamba",
        "num_layers": 4,
        "hidden_size": 32,
        "vocab_size": 101,
        **MIXER,
        "untie_embeddings_and_output_weights": False,
        "fp32_residual_connection": True,
    },
    "hybrid": {**HYBRID, "hybrid_layer_pattern": "M-M*M*M-", "mamba_num_heads": 12, "num_query_groups": 2},
    "hybrid_rotary": {
        **HYBRID,
        "hybrid_layer_pattern": "M*E*MEM*",
        "normalization": "LayerNorm",
        "hidden_dropout": 0.1,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "swiglu",
        "add_bias_linear": True,
        "moe": {"num_experts": 4},
    },
    "gpt_streams": {**GPT, **STREAMS},
    "gpt_streams_predicting": {
        **{key: value for key, value in GPT.items() if key != "max_position_embeddings"},
        "position_embedding_type": "rope",
        **STREAMS,
        "mtp_num_layers": 2,
    },
    "hybrid_streams": {**HYBRID, **STREAMS, "hybrid_layer_pattern": "M-M*M*M-"},
}
UNCUT = ("t5",)
"""Models that are not cut into pipeline stages."""
MOE_MODELS = [name for name, model in MODELS.items() if "moe" in model]


class RandomCheckpoint:
    """A `CheckpointReader` whose tensors are random, and stay the same from the first look at it on."""

    def __init__(
        self, model: Mapping[str, Any], host: PluginHost, *, dtype: torch.dtype = torch.float32, optimizer: bool = False
    ) -> None:
        config = config_from_dict({"model": model}, host)
        layouts = expected_parameters(config, host)
        generator = torch.Generator().manual_seed(1)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, layout in layouts.items():
            value = torch.randn(layout.shape, generator=generator)
            if name.endswith("token_experts"):  # numbers of experts
                value = torch.randint(-256, -252, layout.shape, generator=generator).float()
            self.tensors[f"model.{name}"] = value.to(layout.dtype or dtype)
            for state in ("exp_avg", "exp_avg_sq") if optimizer and layout.trained else ():
                self.tensors[f"optimizer.{state}.{name}"] = torch.randn(layout.shape, generator=generator)
            if optimizer and layout.trained:
                self.tensors[f"optimizer.step.{name}"] = torch.tensor(7.0)
                if (layout.dtype or dtype) != torch.float32:
                    self.tensors[f"optimizer.main.{name}"] = value
                    self.tensors[f"model.{name}"] = value.to(dtype)
        train = {"train_iters": 20, "micro_batch_size": 2, "global_batch_size": 4}
        self.metadata = {
            "iteration": 7,
            "consumed_samples": 28,
            "config": {"model": dict(model), "train": train, "optimizer": {"optimizer": "adam", "lr": 1e-3}},
        }

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def files(self) -> Mapping[str, bytes]:
        return {}


def _without_made_padding(entries: Mapping[str, Any], expected: CheckpointReader) -> dict[str, Any]:
    there = expected.shapes()
    kept = {name: value for name, value in entries.items() if name in there or not name.startswith(PADDING)}
    return {name: _kept_rows(value, there[name]) if name.startswith(PADDING) else value for name, value in kept.items()}


def _kept_rows(value: Any, expected: tuple[int, ...]) -> Any:
    """A shape [rows, ...] with more rows than expected, as the expected one."""
    return (expected[0], *value[1:]) if isinstance(value, tuple) and value[0] > expected[0] else value


def assert_same_tensors(found: CheckpointReader, expected: CheckpointReader) -> None:
    """Names, shapes, dtypes and every bit. Rows of padding that the expected checkpoint does not have are left out: all
    of a source without padding, and those added for more tensor-parallel ranks behind the ones that were kept."""
    assert _without_made_padding(found.shapes(), expected) == dict(expected.shapes())
    assert _without_made_padding(found.dtypes(), expected) == dict(expected.dtypes())
    for name, shape in expected.shapes().items():
        read, wanted = found.read(name), expected.read(name)
        if name.startswith(PADDING):
            read = read[: shape[0]]
        assert read.is_contiguous(), name
        assert read.dtype == wanted.dtype, name
        assert torch.equal(read, wanted), name


@pytest.fixture(scope="session")
def host() -> PluginHost:
    torch.set_num_threads(1)
    return load_plugins()


@pytest.fixture(scope="session")
def golden() -> Path:
    if "MT_GOLDEN" not in os.environ:
        pytest.skip("MT_GOLDEN does not name the folder of golden files")
    return Path(os.environ["MT_GOLDEN"]) / "ckpt"


@pytest.fixture(autouse=True)
def no_waiting(without_waiting_for_the_disk: None) -> None:
    """Nothing in this folder is about what a power failure leaves."""
