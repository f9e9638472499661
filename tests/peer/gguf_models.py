"""Small models of every architecture that is written as GGUF, with the keys of [model]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mt_ckpt.model import build_model
from mt_ckpt.native.save import save_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.plugins import PluginHost

VOCAB = 128
SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
SHAPE |= {"vocab_size": VOCAB}
GROUPED = {**SHAPE, "num_query_groups": 2, "ffn_hidden_size": 96}
UNNUMBERED = {key: value for key, value in GROUPED.items() if key != "num_layers"}
GPT = {"family": "gpt", **SHAPE}
WITHOUT_TABLE = {key: value for key, value in GPT.items() if key != "max_position_embeddings"}
MOE = {"num_experts": 4, "moe_router_topk": 2}
NARROW = {**MOE, "moe_ffn_hidden_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
LATENT |= {"family": "deepseek", **SHAPE, "ffn_hidden_size": 96}
WINDOW = {"sliding_window": 8, "kv_channels": 16, "query_pre_attn_scalar": 16.0}
GEMMA4 = {"kv_channels": 16, "global_kv_channels": 32, "sliding_window": 8, "sliding_window_pattern": 2}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "original_max_position_embeddings": 16}

BIASED = {
    **NARROW,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_layer_freq": "[0]+[1]*3",
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_attention_freq": 2,
    "linear_chunk_size": 8,
}
MIXERS = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
}

ENCODERS: dict[str, dict[str, Any]] = {
    "modern-bert": {
        "family": "modernbert",
        **SHAPE,
        "ffn_hidden_size": 96,
        "local_attention": 6,
        "add_lm_head": False,
    },
    "bert": {
        "family": "bert",
        **SHAPE,
        "layernorm_placement": "post",
        "add_lm_head": False,
        "bert_binary_head": False,
        "add_pooler": True,
    },
}

TOWER = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "patch_dim": 2}
INSIDE = {key: value for key, value in GROUPED.items() if key != "vocab_size"}
BESIDE_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2vl": {
        "family": "qwen_vl",
        "vision_model": {**TOWER, "full_attention_layers": [1], "window_size": 8},
        "language_model": {**INSIDE, "mrope_section": [4, 2, 2]},
    },
    "qwen3vl": {
        "family": "qwen3_vl",
        "vision_model": {**TOWER, "num_position_embeddings": 16, "deepstack_layers": [0]},
        "language_model": {**INSIDE, "kv_channels": 32, "mrope_section": [6, 5, 5]},
    },
    "qwen3vlmoe": {
        "family": "qwen3_vl",
        "vision_model": {**TOWER, "num_position_embeddings": 16, "deepstack_layers": [0]},
        "language_model": {**INSIDE, "kv_channels": 32, "mrope_section": [6, 5, 5], "moe": NARROW},
    },
}
BESIDE_TOWERS = {name: {**keys, "vocab_size": VOCAB, "image_token_index": 500} for name, keys in BESIDE_TOWERS.items()}

T5 = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings"}
T5 |= {"family": "t5", "decoder_num_layers": 3, "kv_channels": 32, "ffn_hidden_size": 96}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "t5 1.1": {**T5, "activation": "geglu_tanh", "untie_embeddings_and_output_weights": True},
    "umt5": {**T5, "activation": "geglu_tanh", "relative_attention_bias_per_layer": True},
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **GROUPED},
    "llama_tied": {
        "family": "llama",
        **GROUPED,
        "untie_embeddings_and_output_weights": False,
        "attention_bias": True,
        "kv_channels": 32,
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "llama_yarn": {"family": "llama", **GROUPED, "kv_channels": 32, **YARN},
    "mistral": {"family": "mistral", **GROUPED, "sliding_window": 64},
    "mixtral": {"family": "mixtral", **GROUPED, "moe": MOE},
    "qwen2": {"family": "qwen", **GROUPED, "add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"family": "qwen", **GROUPED, "kv_channels": 32},
    "qwen2moe": {
        "family": "qwen_moe",
        **GROUPED,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "moe": {
            **NARROW,
            "moe_shared_expert_intermediate_size": 48,
            "moe_shared_expert_gate": True,
            "moe_router_pre_softmax": True,
        },
    },
    "qwen3moe": {"family": "qwen_moe", **GROUPED, "moe": NARROW},
    "glm4moe": {
        "family": "qwen_moe",
        **GROUPED,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "rotary_percent": 0.5,
        "moe": {
            **NARROW,
            "moe_shared_expert_intermediate_size": 32,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_layer_freq": "[0]+[1]*3",
        },
        "mtp_num_layers": 1,
    },
    "gemma2": {
        "family": "gemma",
        **GROUPED,
        **WINDOW,
        "qk_layernorm": False,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention_backend": "eager",
        "rotary_base": 10000.0,
        "rotary_base_local": 10000.0,
    },
    "gemma3": {"family": "gemma", **GROUPED, **WINDOW, "num_layers": 6, "sliding_window_pattern": 6},
    "gemma4": {
        "family": "gemma4",
        **GROUPED,
        **GEMMA4,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_experts": {
        "family": "gemma4",
        **GROUPED,
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_query_groups": 1,
        "final_logit_softcapping": 3.0,
        "moe": {**NARROW, "moe_router_expert_scale": True, "moe_router_load_balancing_type": ["none"]},
    },
    "gpt-oss": {
        "family": "gpt_oss",
        **GROUPED,
        "kv_channels": 32,
        "sliding_window": 8,
        "rope_truncate": True,
        **YARN,
        "moe": MOE,
    },
    "olmoe": {"family": "olmoe", **GROUPED, "num_query_groups": 4, "moe": {**MOE, "moe_router_pre_softmax": True}},
    "granite": {
        "family": "granite",
        **GROUPED,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "granitemoe": {"family": "granite_moe", **GROUPED, "moe": MOE},
    "deepseek2": {
        **LATENT,
        "moe": {**NARROW, "moe_shared_expert_intermediate_size": 64, "moe_router_pre_softmax": True},
    },
    "deepseek3": {
        **LATENT,
        "moe": {
            **NARROW,
            "moe_shared_expert_intermediate_size": 32,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_layer_freq": "[0]+[1]*3",
            "moe_router_topk_scaling_factor": 2.5,
        },
    },
    "gpt2": {**GPT, "activation": "gelu_tanh"},
    "starcoder": {**GPT, "activation": "gelu_tanh", "num_query_groups": 1},
    "bloom": {
        **WITHOUT_TABLE,
        "position_embedding_type": "alibi",
        "embedding_layernorm": True,
        "activation": "gelu_tanh",
    },
    "gptneox": {
        **WITHOUT_TABLE,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
    "nemotron": {
        **GPT,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "squared_relu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "phi3": {"family": "phi3", **GROUPED, "sliding_window": 64, "rotary_percent": 0.5},
    "phi3_long": {
        "family": "phi3",
        **GROUPED,
        "untie_embeddings_and_output_weights": False,
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 256,
        "rope_scaling_type": "longrope",
        "rope_short_factor": [1.0, 1.1, 1.25, 1.5, 1.5, 2.0, 2.0, 3.0],
        "rope_long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    },
    "smollm3": {"family": "smollm3", **GROUPED, "untie_embeddings_and_output_weights": False},
    "mistral3": {
        "family": "ministral3",
        **GROUPED,
        "kv_channels": 32,
        **YARN,
        "original_max_position_embeddings": 4,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 1.0,
    },
    "olmo2": {"family": "olmo", **GROUPED},
    "olmo3": {"family": "olmo", **GROUPED, "sliding_window": 4, **YARN, "rotary_base": 500000.0},
    "exaone4": {
        "family": "exaone4",
        **GROUPED,
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 16.0,
        "original_max_position_embeddings": 32,
    },
    "exaone-moe": {
        "family": "exaone4",
        **GROUPED,
        "kv_channels": 32,
        "sliding_window": 8,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.5},
        "mtp_num_layers": 1,
    },
    "seed_oss": {"family": "seed_oss", **GROUPED, "kv_channels": 32},
    "ernie4_5": {"family": "ernie4_5", **GROUPED, "kv_channels": 32},
    "hunyuan-dense": {
        "family": "hunyuan",
        **GROUPED,
        "kv_channels": 32,
        "rope_scaling_type": "ntk",
        "rope_ntk_alpha": 50.0,
    },
    "ernie4_5-moe": {
        "family": "ernie4_5",
        **GROUPED,
        "moe": {key: value for key, value in BIASED.items() if key != "moe_router_score_function"},
    },
    "hunyuan-moe": {
        "family": "hunyuan",
        **GROUPED,
        "rope_scaling_type": "ntk",
        "rope_ntk_alpha": 50.0,
        "moe": {**MOE, "moe_shared_expert_intermediate_size": 96},
    },
    "dots1": {
        "family": "dots1",
        **SHAPE,
        "ffn_hidden_size": 96,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.5},
    },
    "afmoe": {
        "family": "afmoe",
        **GROUPED,
        "kv_channels": 32,
        "sliding_window": 4,
        **YARN,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.826},
    },
    "mimo2": {
        "family": "mimo_v2_flash",
        **GROUPED,
        "kv_channels": 32,
        "v_head_dim": 16,
        "sliding_window": 4,
        "window_attn_skip_freq": "[0,1,1,0]",
        "moe": {key: value for key, value in BIASED.items() if "shared" not in key},
        "mtp_num_layers": 2,
    },
    "hy_v3": {
        "family": "hy_v3",
        **GROUPED,
        "kv_channels": 32,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.826},
        "mtp_num_layers": 1,
    },
    "step35": {
        "family": "step3p7",
        **GROUPED,
        "kv_channels": 32,
        "num_window_attention_heads": 6,
        "sliding_window": 4,
        "window_attn_skip_freq": "[0,1,1,0]",
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 2.0,
        "rope_high_freq_factor": 32.0,
        "original_max_position_embeddings": 32,
        "expert_swiglu_limits": [0.0, 0.2, 0.0, 0.3],
        "shared_expert_swiglu_limits": [0.3, 0.0, 0.2, 0.25],
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 3.0},
    },
    "lfm2moe": {
        "family": "lfm2",
        **GROUPED,
        "conv_layer_pattern": "[1,1,0,1]",
        "moe": {
            **{key: value for key, value in BIASED.items() if "shared" not in key},
            "moe_router_weight_epsilon": 1e-6,
        },
    },
    "minimax-m2": {
        "family": "minimax_m2",
        **GROUPED,
        "kv_channels": 32,
        "rotary_percent": 0.5,
        "moe": {**MOE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    },
    "lfm2": {"family": "lfm2", **GROUPED, "conv_layer_pattern": "[1,1,0,1]"},
    "llama4": {
        "family": "llama4",
        **GROUPED,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_ffn_hidden_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "moe_layer_freq": "[0,1]*2",
        },
    },
    "deepseek32": {
        **LATENT,
        "family": "deepseek_v32",
        "dsa_indexer_n_heads": 16,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 4,
        "moe": BIASED,
    },
    "deepseek4": {
        "family": "deepseek_v4",
        **SHAPE,
        "kv_channels": 32,
        "qk_pos_emb_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 4,
        "compress_ratios": [0, 4, 128, 4],
        "dsa_indexer_n_heads": 16,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 2,
        **YARN,
        "rope_attention_factor": 1.0,
        "moe": {
            **{key: value for key, value in BIASED.items() if key != "moe_layer_freq"},
            "moe_router_score_function": "sqrtsoftplus",
            "moe_router_hash_layers": 1,
            "moe_router_topk_scaling_factor": 1.5,
        },
    },
    "glm-dsa": {
        **LATENT,
        "family": "deepseek_v32",
        "dsa_indexer_n_heads": 16,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 4,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 1,
        "moe": BIASED,
    },
    "glm4_moe_lite": {**LATENT, "family": "glm4_moe_lite", "moe": {**BIASED, "moe_router_topk_scaling_factor": 1.8}},
    "mistral4": {
        **LATENT,
        "family": "mistral4",
        **YARN,
        "original_max_position_embeddings": 4,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 1.0,
        "moe": {**NARROW, "moe_shared_expert_intermediate_size": 32},
    },
    "kimi-linear": {
        **LATENT,
        "family": "kimi_linear",
        "q_lora_rank": None,
        "norm_epsilon": 1e-6,
        **DELTA,
        "linear_num_key_heads": 4,
        "moe": BIASED,
    },
    "kimi-k3": {
        **LATENT,
        "family": "kimi_k3",
        "norm_epsilon": 1e-6,
        **DELTA,
        "linear_num_key_heads": 4,
        "linear_decay_lower_bound": -5.0,
        "residual_block_size": 3,
        "situ_beta": 0.5,
        "situ_linear_beta": 0.7,
        "moe": {**BIASED, "moe_latent_size": 32, "moe_router_topk_scaling_factor": 1.5},
    },
    "bailingmoe3": {
        **LATENT,
        "family": "bailing_hybrid",
        "norm_epsilon": 1e-6,
        **DELTA,
        "linear_num_key_heads": 4,
        "linear_decay_lower_bound": -5.0,
        "expert_swiglu_limits": [0.0, 0.2, 0.0, 0.3],
        "shared_expert_swiglu_limits": [0.0, 0.3, 0.2, 0.25],
        "moe": {
            **BIASED,
            "num_experts": 8,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_group_score_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
        "mtp_num_layers": 1,
    },
    "minimax-m3": {
        "family": "minimax_m3",
        **GROUPED,
        "kv_channels": 32,
        "rotary_percent": 0.5,
        "sparse_attention_freq": "[0]+[1]*3",
        "sparse_index_dim": 32,
        "sparse_block_size": 2,
        "sparse_topk_blocks": 3,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.0},
    },
    "glm5-next": {
        **LATENT,
        "family": "glm5_next",
        "qk_pos_emb_head_dim": 0,
        "norm_epsilon": 1e-6,
        **DELTA,
        "linear_num_key_heads": 4,
        "linear_decay_lower_bound": -5.0,
        "swiglu_limit": 0.3,
        "dsa_indexer_n_heads": 16,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 4,
        "dsa_indexer_pool_size": 2,
        "moe": {**BIASED, "moe_router_topk_scaling_factor": 2.5},
        "mtp_num_layers": 1,
    },
    "qwen3next": {
        "family": "qwen_next",
        "generation": "qwen3_next",
        **GROUPED,
        **DELTA,
        "moe": {**NARROW, "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    },
    "qwen35": {"family": "qwen_next", **GROUPED, **DELTA},
    "qwen35moe": {
        "family": "qwen_next",
        **GROUPED,
        **DELTA,
        "ffn_hidden_size": 32,
        "moe": {**NARROW, "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    },
    "jamba": {
        "family": "jamba",
        **GROUPED,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "moe": {**MOE, "moe_router_pre_softmax": True, "moe_layer_freq": "[0,1]*2"},
    },
    "falcon-h1": {
        "family": "falcon_h1",
        **GROUPED,
        **MIXERS,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 0.7,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 1.3,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.6, 1.4],
    },
    "granitehybrid": {
        "family": "hybrid",
        **UNNUMBERED,
        **MIXERS,
        "hybrid_layer_pattern": "M-M-*-M-",
        "activation": "swiglu",
        "position_embedding_type": "none",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "granitehybrid_experts": {
        "family": "hybrid",
        **UNNUMBERED,
        **MIXERS,
        "hybrid_layer_pattern": "MEME*E",
        "activation": "swiglu",
        "position_embedding_type": "none",
        "moe": {**NARROW, "moe_shared_expert_intermediate_size": 48},
    },
    "nemotron_h": {
        "family": "hybrid",
        **UNNUMBERED,
        **MIXERS,
        "hybrid_layer_pattern": "M-*-",
        "activation": "squared_relu",
        "position_embedding_type": "none",
    },
    "nemotron_h_moe": {
        "family": "hybrid",
        **UNNUMBERED,
        **MIXERS,
        "hybrid_layer_pattern": "ME*E",
        "activation": "squared_relu",
        "position_embedding_type": "none",
        "moe": {
            **NARROW,
            "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
        },
    },
    "rwkv7": {
        "family": "rwkv7",
        "num_layers": 3,
        "hidden_size": 128,
        "ffn_hidden_size": 192,
        "vocab_size": VOCAB,
        "decay_lora_rank": 16,
        "rate_lora_rank": 24,
        "value_lora_rank": 8,
        "gate_lora_rank": 32,
    },
    "mamba2": {
        "family": "mamba",
        "num_layers": 3,
        "hidden_size": 64,
        "vocab_size": VOCAB,
        "mamba_head_dim": 16,
        "mamba_state_dim": 16,
        "mamba_num_groups": 2,
        "mamba_chunk_size": 8,
    },
}


def save_model(path: Path, keys: dict[str, Any], host: PluginHost, scale: float = 0.08) -> Path:
    """A checkpoint of mt's with random weights; norms around 1, or 0 where 1 is added to them."""
    config = config_from_dict({"model": keys}, host)
    generator = torch.Generator().manual_seed(1)
    state = {
        f"model.{name}": torch.randn(parameter.shape, generator=generator) * scale
        + float("norm" in name and name.endswith("weight") and keys["family"] not in ("gemma", "step3p7", "minimax_m3"))
        for name, parameter in build_model(config, host).named_parameters()
    }
    if keys["family"] == "gemma4":
        # Its scores are not divided by the root of the head size; trained norms of queries are as small. Without it
        # attention is as sharp as no model's, and magnifies that llama.cpp keeps keys in fp16.
        state = {name: tensor / 5 if "q_layernorm" in name else tensor for name, tensor in state.items()}
    for name, table in state.items():
        if name.endswith("token_experts"):  # [vocabulary, k] numbers of experts, less 256
            orders = torch.rand(len(table), keys["moe"]["num_experts"], generator=generator).argsort(1)
            state[name] = orders[:, : table.shape[1]].float() - 256
    if keys["family"] == "kimi_k3":
        # As unlike plain means as those of a trained model.
        residuals = {name: x for name, x in state.items() if "residual" in name}
        state |= {name: 0.4 * torch.randn(x.shape, generator=generator) for name, x in residuals.items()}
    sections = {
        "model": config.model.model_dump(mode="json"),
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": keys["vocab_size"]},
    }
    save_checkpoint(path, state.items(), {"iteration": 0, "config": sections}, {})
    return path
