"""Models and layouts that Megatron-Core can hold on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101}
GPT = {"family": "gpt", **SHAPE, "max_position_embeddings": 16, "ffn_hidden_size": 48}
LLAMA = {"family": "llama", **SHAPE, "num_query_groups": 2, "ffn_hidden_size": 48, "max_position_embeddings": 64}
T5 = {
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
}
HYBRID = {
    "family": "hybrid",
    "hybrid_layer_pattern": "M-M*",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "ffn_hidden_size": 48,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 4,
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 8.0,
    "original_max_position_embeddings": 8,
    "rope_beta_fast": 1.0,
    "rope_beta_slow": 0.2,
    "rope_truncate": False,
    "max_position_embeddings": 64,
}
LATENT = {
    "family": "deepseek",
    **SHAPE,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 64,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
LLAMA4 = {
    **LLAMA,
    "family": "llama4",
    "attention_chunk_size": None,
    "query_scaling_beta": 0.0,
    "original_max_position_embeddings": 8192,
}
ON_INPUT = {
    **EXPERTS,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
    "moe_shared_expert_intermediate_size": 16,
}
GPT_OSS = {
    "family": "gpt_oss",
    **SHAPE,
    "num_query_groups": 2,
    "kv_channels": 12,
    "ffn_hidden_size": 24,
    "sliding_window": 3,
    **YARN,
    "moe": {"num_experts": 4, "moe_router_topk": 2},
}


@dataclass(frozen=True)
class Case:
    """family: what `Megatron.ask` calls it. exact: whether padding has a row whose logit is low for every hidden state;
    other models have rows whose logits are the mean. transformer_impl: of the peer's layers."""

    model: dict[str, Any]
    family: str = "gpt"
    exact: bool = False
    transformer_impl: str = "local"

    @property
    def tolerance(self) -> float:
        """Of logits in fp64. Scores of experts are fp32 there too."""
        return 1e-6 if "moe" in self.model else 1e-10

    @property
    def tolerance_fp32(self) -> float:
        """Of logits in fp32. Recurrences in chunks and position by position are rounded in another order."""
        return 1.5e-5 if self.family == "hybrid" else 5e-6


CASES = {
    "gpt": Case(GPT, exact=True),
    "gpt untied": Case({**GPT, "untie_embeddings_and_output_weights": True, "num_query_groups": 1}, exact=True),
    "gpt without biases": Case({**GPT, "add_bias_linear": False, "activation": "squared_relu"}, exact=True),
    "gpt, maximal update parametrization": Case(
        {**GPT, "mup_base_hidden_size": 8, "embedding_multiplier": 3.0, "untie_embeddings_and_output_weights": True},
        exact=True,
    ),
    "llama": Case(LLAMA),
    "llama with biases": Case({**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": Case({**LLAMA, "family": "mistral", "sliding_window": 9}),
    "qwen2": Case({**LLAMA, "family": "qwen", "add_qkv_bias": True, "qk_layernorm": False}),
    "qwen3": Case({**LLAMA, "family": "qwen", "kv_channels": 12}),
    "bert": Case({"family": "bert", **SHAPE, "max_position_embeddings": 16}, "bert", exact=True),
    "t5": Case(T5, "t5", exact=True),
    "hybrid": Case(HYBRID, "hybrid", transformer_impl="transformer_engine"),
    "hybrid, local layers": Case(HYBRID, "local_hybrid"),
    "hybrid, LayerNorm and learned positions, local layers": Case(
        {
            **HYBRID,
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": 16,
            "activation": "gelu",
            "add_bias_linear": True,
        },
        "local_hybrid",
        exact=True,
    ),
    "hybrid with experts, local layers": Case(
        {**HYBRID, "hybrid_layer_pattern": "M*E", "moe": EXPERTS}, "local_hybrid"
    ),
    "hybrid, rotary and gated, local layers": Case(
        {
            **HYBRID,
            "hybrid_layer_pattern": "M*E-",
            "mamba_num_heads": 12,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
            "rotary_percent": 0.5,
            "activation": "swiglu",
            "moe": {**EXPERTS, "moe_shared_expert_intermediate_size": 16},
        },
        "local_hybrid",
    ),
    "gpt, partly rotary": Case(
        {
            **SHAPE,
            "family": "gpt",
            "ffn_hidden_size": 48,
            "position_embedding_type": "rope",
            "rotary_percent": 0.5,
            "kv_channels": 12,
        },
        exact=True,
    ),
    "qwen2, windows in some layers": Case(
        {
            **LLAMA,
            "family": "qwen",
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "sliding_window": 9,
            "max_window_layers": 2,
        }
    ),
    "shared experts with a gate": Case(
        {
            **LLAMA,
            "family": "qwen_moe",
            "add_qkv_bias": True,
            "qk_layernorm": False,
            "moe": {**EXPERTS, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        }
    ),
    "llama, rope scaling": Case(
        {**LLAMA, "rope_scaling_type": "llama3", "rope_scaling_factor": 8.0, "original_max_position_embeddings": 8192}
    ),
    "llama, YaRN": Case({**LLAMA, **YARN}),
    "gpt_oss": Case(GPT_OSS),
    "experts": Case({**GPT, "moe": EXPERTS}, exact=True),
    "mixtral": Case({**LLAMA, "family": "mixtral", "moe": EXPERTS}),
    "experts, sigmoid router": Case(
        {
            **LLAMA,
            "family": "mixtral",
            "moe": {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        }
    ),
    "shared experts": Case(
        {
            **LLAMA,
            "family": "qwen_moe",
            "qk_layernorm": False,
            "moe": {**EXPERTS, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": "([0]*1+[1]*3)"},
        }
    ),
    "llama4, queries and keys normalized": Case(
        {**LLAMA4, "no_rope_freq": None, "rope_scaling_type": "llama3", "rope_scaling_factor": 8.0, "moe": ON_INPUT}
    ),
    "llama4, layers without positions": Case(
        {**LLAMA4, "no_rope_freq": 2, "qk_l2_norm": False, "moe": {**ON_INPUT, "moe_layer_freq": "([0]*1+[1]*1)*2"}}
    ),
    "latent attention": Case(LATENT),
    "latent attention, LayerNorm": Case({**LATENT, "normalization": "LayerNorm"}, exact=True),
    "latent attention, YaRN, groups of experts": Case(
        {
            **LATENT,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 40.0,
            "original_max_position_embeddings": 4096,
            "rope_mscale": 0.707,
            "rope_mscale_all_dim": 0.707,
            "moe": {
                **EXPERTS,
                "moe_layer_freq": "([0]*1+[1]*3)",
                "moe_shared_expert_intermediate_size": 16,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
                "moe_router_topk_scaling_factor": 2.5,
            },
        }
    ),
}


@dataclass(frozen=True)
class Layout:
    """options: of ConvertOptions, without `target_`. arguments: of Megatron's."""

    world_size: int
    options: dict[str, int]
    arguments: tuple[str, ...]


ONE_RANK = Layout(1, {}, ())
TENSOR = Layout(2, {"tensor_parallel_size": 2}, ("--tensor-model-parallel-size=2", "--sequence-parallel"))
PIPELINE = Layout(2, {"pipeline_parallel_size": 2}, ("--pipeline-model-parallel-size=2",))
INTERLEAVED = Layout(
    2,
    {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    ("--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"),
)
EXPERT = Layout(2, {"expert_parallel_size": 2, "expert_tensor_parallel_size": 1}, ("--expert-model-parallel-size=2",))
DATA = Layout(2, {}, ())
