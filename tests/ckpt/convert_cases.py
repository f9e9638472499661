"""Models of every family that conversion tests go over, and small helpers."""

from __future__ import annotations

from typing import Any

SHAPE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 101}
GROUPED = {**SHAPE, "num_query_groups": 2, "ffn_hidden_size": 48}
GPT2 = {"family": "gpt", **SHAPE, "activation": "gelu_tanh"}
LLAMA = {"family": "llama", **GROUPED}
MAMBA = {"hidden_size": 32, "mamba_head_dim": 8, "mamba_state_dim": 6, "mamba_num_groups": 2, "mamba_chunk_size": 8}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_chunk_size": 8}
DELTA_NET |= {"linear_value_head_dim": 10, "kv_channels": 16}
OLMO_DELTA_NET = {key: value for key, value in DELTA_NET.items() if key != "kv_channels"}
LATENT = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_head_dim": 12, "qk_pos_emb_head_dim": 6, "v_head_dim": 8}
INDEXER = {"dsa_indexer_n_heads": 13, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5}
"""Many heads: a key that none of them looks at has a score of exactly 0, as others have, and ties are broken by the
length of the sequence."""
SIGMOID_EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_layer_freq": "([0]*1+[1]*2)",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 12,
}
TOWER = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "img_h": 8, "img_w": 8, "patch_dim": 4}

COMPRESSED = {"kv_channels": 8, "qk_pos_emb_head_dim": 4, "q_lora_rank": 14, "o_groups": 4, "o_lora_rank": 6}
COMPRESSED |= {"sliding_window": 5, "indexed_compress_ratio": 2, "hyper_connection_streams": 3}

GEMMA4 = {**GROUPED, "kv_channels": 10, "global_kv_channels": 12, "sliding_window": 5, "sliding_window_pattern": 2}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2_gelu": {**GPT2, "activation": "gelu", "ffn_hidden_size": 40},
    "gpt_bigcode": {**GPT2, "num_query_groups": 1},
    "gpt_neox": {
        "family": "gpt",
        **{key: value for key, value in SHAPE.items() if key != "max_position_embeddings"},
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
    "bloom": {
        "family": "gpt",
        **{key: value for key, value in SHAPE.items() if key != "max_position_embeddings"},
        "position_embedding_type": "alibi",
        "embedding_layernorm": True,
        "activation": "gelu_tanh",
    },
    "llama": LLAMA,
    "llama_tied_biased": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "attention_bias": True,
        "mlp_bias": True,
        "kv_channels": 12,
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "llama_multi_head": {**LLAMA, "num_query_groups": 4},
    "mistral": {"family": "mistral", **GROUPED, "sliding_window": 5},
    "qwen2": {"family": "qwen", **GROUPED, "add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"family": "qwen", **GROUPED, "add_qkv_bias": False, "qk_layernorm": True, "kv_channels": 12},
    "gemma2": {
        "family": "gemma",
        **GROUPED,
        "qk_layernorm": False,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "attention_backend": "eager",
        "rotary_base": 10000.0,
        "rotary_base_local": 10000.0,
    },
    "gemma3": {"family": "gemma", **GROUPED, "qk_layernorm": True, "sliding_window": 5, "sliding_window_pattern": 2},
    "gemma4": {
        "family": "gemma4",
        **GEMMA4,
        "num_layers": 4,
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "muse_glimmer": {"family": "muse_glimmer", **GROUPED, "sliding_window": 5, "global_layer_freq": 2},
    "gemma4_experts": {
        "family": "gemma4",
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_query_groups": 4,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_router_expert_scale": True,
            "moe_router_load_balancing_type": ["none"],
        },
    },
    "phi3": {
        "family": "phi3",
        **GROUPED,
        "rotary_percent": 0.75,
        "sliding_window": 5,
        "rope_scaling_type": "longrope",
        "original_max_position_embeddings": 16,
        "rope_short_factor": [1.0, 1.5, 2.0],
        "rope_long_factor": [2.0, 4.0, 8.0],
    },
    "smollm3": {"family": "smollm3", **GROUPED, "no_rope_freq": 2},
    "ministral3": {
        "family": "ministral3",
        **GROUPED,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 6,
    },
    "olmo": {
        "family": "olmo",
        **GROUPED,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "exaone4": {"family": "exaone4", **GROUPED, "sliding_window": 5, "sliding_window_pattern": 3},
    "seed_oss": {"family": "seed_oss", **GROUPED, "kv_channels": 12},
    "granite": {"family": "granite", **GROUPED, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "ernie4_5": {"family": "ernie4_5", **GROUPED, "kv_channels": 12},
    "hunyuan": {"family": "hunyuan", **GROUPED, "rope_scaling_type": "ntk", "rope_ntk_alpha": 50.0},
    "mixtral": {"family": "mixtral", **GROUPED, "moe": {"num_experts": 3, "moe_router_topk": 2}},
    "qwen_moe": {
        "family": "qwen_moe",
        **GROUPED,
        "qk_layernorm": True,
        "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": "[0]+[1]*2"},
    },
    "olmoe": {"family": "olmoe", **GROUPED, "moe": {"num_experts": 5, "moe_router_topk": 3}},
    "llama4": {
        "family": "llama4",
        **GROUPED,
        "attention_chunk_size": 5,
        "no_rope_freq": 3,
        "query_scaling_length": 4,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_ffn_hidden_size": 12,
            "moe_shared_expert_intermediate_size": 12,
        },
    },
    "lfm2": {"family": "lfm2", **GROUPED, "conv_layer_pattern": "[1]*2+[0]*1"},
    "lfm3": {
        "family": "lfm3",
        **GROUPED,
        "kv_channels": 10,
        "layer_pattern": "CWG",
        "sliding_window": 5,
        "conv_kernel": 4,
    },
    "ernie4_5_moe": {
        "family": "ernie4_5",
        **GROUPED,
        "moe": {
            **{key: value for key, value in SIGMOID_EXPERTS.items() if key != "moe_router_score_function"},
            "moe_router_weight_in_fp32": True,
        },
    },
    "hunyuan_v1_moe": {
        "family": "hunyuan",
        **GROUPED,
        "rope_scaling_type": "ntk",
        "rope_ntk_alpha": 50.0,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 48,
            "moe_shared_expert_intermediate_size": 48,
        },
    },
    "dots1": {"family": "dots1", **SHAPE, "ffn_hidden_size": 48, "moe": SIGMOID_EXPERTS},
    "solar_open": {
        "family": "dots1",
        **GROUPED,
        "qk_layernorm": False,
        "moe": {key: value for key, value in SIGMOID_EXPERTS.items() if key != "moe_layer_freq"},
    },
    "exaone_moe": {"family": "exaone4", **GROUPED, "sliding_window": 5, "moe": SIGMOID_EXPERTS},
    "lfm2_moe": {
        "family": "lfm2",
        **GROUPED,
        "conv_layer_pattern": "[1]*2+[0]*1",
        "moe": {
            **{key: value for key, value in SIGMOID_EXPERTS.items() if "shared" not in key},
            "moe_router_weight_epsilon": 1e-6,
        },
    },
    "minimax_m2": {
        "family": "minimax_m2",
        **GROUPED,
        "rotary_percent": 0.5,
        "moe": {
            "num_experts": 5,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    },
    "minimax_m3": {
        "family": "minimax_m3",
        **GROUPED,
        "sparse_attention_freq": "([0]*1+[1]*2)",
        "sparse_index_dim": 8,
        "sparse_block_size": 2,
        "sparse_topk_blocks": 3,
        "moe": {**SIGMOID_EXPERTS, "moe_router_topk_scaling_factor": 2.0},
    },
    "afmoe": {
        "family": "afmoe",
        **GROUPED,
        "sliding_window": 5,
        "window_attn_skip_freq": 2,
        "moe": {**SIGMOID_EXPERTS, "moe_router_load_balancing_type": ["none"]},
    },
    "granite_moe": {"family": "granite_moe", **GROUPED, "moe": {"num_experts": 5, "moe_router_topk": 3}},
    "deepseek": {
        "family": "deepseek",
        **SHAPE,
        **LATENT,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_shared_expert_intermediate_size": 24,
            "moe_router_pre_softmax": True,
        },
    },
    "deepseek_v32": {
        "family": "deepseek_v32",
        **SHAPE,
        **LATENT,
        **INDEXER,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "moe": SIGMOID_EXPERTS,
    },
    "glm_5": {
        "family": "deepseek_v32",
        **SHAPE,
        **LATENT,
        **INDEXER,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_topk_freq": 2,
        "moe": SIGMOID_EXPERTS,
    },
    "deepseek_v4": {
        "family": "deepseek_v4",
        **SHAPE,
        **COMPRESSED,
        **INDEXER,
        # A norm is behind every sum of streams, and common factors of their weights change next to nothing: gradients
        # would be differences of large terms.
        "norm_epsilon": 0.1,
        "init_method_std": 0.2,
        "compress_ratios": [0, 2, 3],
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "mtp_num_layers": 1,
        "moe": {
            **{key: value for key, value in SIGMOID_EXPERTS.items() if key != "moe_layer_freq"},
            "moe_router_score_function": "sqrtsoftplus",
            "moe_router_hash_layers": 1,
        },
    },
    "glm4_moe_lite": {"family": "glm4_moe_lite", **SHAPE, **LATENT, "moe": SIGMOID_EXPERTS},
    "hy_v3": {"family": "hy_v3", **GROUPED, "moe": SIGMOID_EXPERTS},
    "kimi_linear": {
        "family": "kimi_linear",
        **SHAPE,
        **LATENT,
        "q_lora_rank": None,
        "linear_attention_freq": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 6,
        "linear_chunk_size": 8,
        "moe": SIGMOID_EXPERTS,
    },
    "qwen_next": {"family": "qwen_next", **GROUPED, "num_layers": 4, **DELTA_NET},
    "qwen4_exp": {
        "family": "qwen4_exp",
        **GROUPED,
        **DELTA_NET,
        "num_layers": 4,
        "rotary_percent": 0.5,
        "linear_attention_freq": 2,
        "linear_output_gate": "sigmoid",
        "residual_streams": 3,
        "residual_mix_rank": 6,
        "qsa_indexer_n_heads": 13,
        "qsa_indexer_head_dim": 8,
        "qsa_budget": 4,
        "qsa_compress_ratio": 2,
        "ngram_layers": [1, 3],
        "ngram_end_of_text_id": 3,
        "ngram_embed_dim": 24,
        "ngram_heads": 3,
        "ngram_vocab_size_base": 20,
        "ngram_rows_divisible_by": 8,
        "ngram_file_parts": 2,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_shared_expert_intermediate_size": 12,
            "moe_shared_expert_gate": True,
        },
    },
    "qwen_next_experts": {
        "family": "qwen_next",
        **GROUPED,
        **DELTA_NET,
        "linear_attention_freq": "[1,0,1]",
        "mtp_num_layers": 1,
        # The output of a head may be nearly 0, and its norm would make rounding errors of it larger than those of
        # logits.
        "norm_epsilon": 1e-3,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
        },
    },
    "olmo_hybrid": {"family": "olmo_hybrid", **GROUPED, "num_layers": 4, **OLMO_DELTA_NET},
    "mamba": {"family": "mamba", "num_layers": 3, "vocab_size": 101, **MAMBA},
    "hybrid": {
        "family": "hybrid",
        "hybrid_layer_pattern": "M-*-M*",
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "vocab_size": 101,
        **MAMBA,
    },
    "nemotron_3": {
        "family": "hybrid",
        "hybrid_layer_pattern": "ME*E",
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "vocab_size": 101,
        **MAMBA,
        "mtp_num_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
        "moe": {
            **{key: value for key, value in SIGMOID_EXPERTS.items() if key != "moe_layer_freq"},
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 12,
        },
    },
    "granite_hybrid": {
        "family": "hybrid",
        "hybrid_layer_pattern": "ME*EME",
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "activation": "swiglu",
        "vocab_size": 101,
        **MAMBA,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_shared_expert_intermediate_size": 20,
        },
    },
    "falcon_h1": {
        "family": "falcon_h1",
        "num_layers": 3,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "vocab_size": 101,
        **MAMBA,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.5, 0.7, 1.5, 1.25, 0.8],
        "mlp_multipliers": [0.9, 0.6],
    },
    "mistral4": {
        "family": "mistral4",
        **SHAPE,
        **LATENT,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 6,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_layer_freq": "([0]*1+[1]*2)",
            "moe_shared_expert_intermediate_size": 12,
        },
    },
    "jamba": {
        "family": "jamba",
        **GROUPED,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_state_dim": 6,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_router_pre_softmax": True,
            "moe_layer_freq": "([0]*1+[1]*1+[0]*1)",
        },
    },
    "rwkv7": {
        "family": "rwkv7",
        **{key: SHAPE[key] for key in ("num_layers", "hidden_size", "vocab_size")},
        "head_size": 8,
        "ffn_hidden_size": 48,
        **{f"{name}_lora_rank": 6 for name in ("decay", "rate", "value", "gate")},
        "chunk_size": 8,
    },
    "mistral_large4": {
        "family": "mistral_large4",
        **SHAPE,
        **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
        **INDEXER,
        "num_layers": 4,
        "no_rope_freq": 2,
        "kv_source_layers": [0, 1, 0, 3],
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "final_logit_softcapping": 5.0,
        "moe": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_layer_freq": "([0]*1+[1]*3)",
            "moe_shared_expert_intermediate_size": 12,
        },
    },
    "longcat_flash": {
        "family": "longcat_flash",
        **SHAPE,
        **LATENT,
        "num_layers": 2,
        "norm_epsilon": 1e-5,
        "latent_norm_epsilon": 1e-6,
        "moe": {
            "num_experts": 4,
            "moe_num_zero_experts": 2,
            "moe_router_topk": 3,
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_ffn_hidden_size": 12,
            "moe_router_load_balancing_type": ["none"],
        },
    },
    "bert": {"family": "bert", **SHAPE},
    "modernbert": {
        "family": "modernbert",
        **SHAPE,
        "ffn_hidden_size": 48,
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
    },
    "t5": {"family": "t5", **{k: v for k, v in SHAPE.items() if k != "max_position_embeddings"}},
    "bart": {"family": "bart", **SHAPE, "decoder_num_layers": 2},
    "vision": {"family": "vision", **TOWER, "num_classes": 3},
    "llava": {
        "family": "llava",
        "vision_model": TOWER,
        "language_model": {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        "image_token_index": 100,
        "vocab_size": 101,
    },
}
QWEN_VL: dict[str, Any] = {
    "family": "qwen_vl",
    "vision_model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
        "window_size": 8, "full_attention_layers": [1],
    },
    "language_model": {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "max_position_embeddings": 64, "mrope_section": [2, 1, 1],
    },
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
"""Cells of 4 pixels, windows of 2 x 2 cells."""
QWEN3_VL: dict[str, Any] = {
    "family": "qwen3_vl",
    "vision_model": {
        "num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
        "num_position_embeddings": 16, "deepstack_layers": [0],
    },
    "language_model": {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
        "max_position_embeddings": 64, "mrope_section": [2, 1, 1],
    },
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
QWEN_NEXT_VL: dict[str, Any] = {
    **QWEN3_VL,
    "family": "qwen_next_vl",
    "vision_model": {key: value for key, value in QWEN3_VL["vision_model"].items() if key != "deepstack_layers"},
    "language_model": {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
        "max_position_embeddings": 64, "mrope_section": [2, 1, 1], "linear_attention_freq": 2, **DELTA_NET,
        "rotary_percent": 0.5, "norm_epsilon": 1e-2,
    },
}  # fmt: skip
GEMMA4_VL: dict[str, Any] = {
    "family": "gemma4_vl",
    "vision_model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
        "spatial_merge_size": 2, "num_position_embeddings": 16, "clipped_linears": True,
    },
    "language_model": {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
        "max_position_embeddings": 64, "kv_channels": 8, "global_kv_channels": 12, "sliding_window": 5,
        "sliding_window_pattern": 2, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2,
    },
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
MISTRAL3: dict[str, Any] = {
    "family": "mistral3",
    "vision_model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
    },
    "language_model": {
        "family": "ministral3", "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "ffn_hidden_size": 48, "max_position_embeddings": 64,
    },
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
KIMI_K25: dict[str, Any] = {
    "family": "kimi_k25",
    "vision_model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
        "num_position_embeddings": 9,
    },
    "language_model": {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "max_position_embeddings": 64,
        "moe": {
            "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": "([0]*1+[1]*3)",
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 12, "moe_router_topk_scaling_factor": 2.5,
            "moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.0001],
        },
    },
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
MINIMAX_M3_VL: dict[str, Any] = {
    "family": "minimax_m3_vl",
    "vision_model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "patch_dim": 2,
    },
    "language_model": {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
        "sparse_attention_freq": "([0]*1+[1]*3)", "sparse_index_dim": 8, "sparse_block_size": 2,
        "sparse_topk_blocks": 3, "max_position_embeddings": 64,
        "moe": {
            "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": "([0]*1+[1]*3)",
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 12, "moe_router_topk_scaling_factor": 2.0,
        },
    },
    "projection_hidden_size": 24,
    "image_token_index": 100,
    "vocab_size": 101,
}  # fmt: skip
GEMMA4_VL_EXPERTS: dict[str, Any] = {
    **GEMMA4_VL,
    "vision_model": {**GEMMA4_VL["vision_model"], "clipped_linears": False, "standardized": True},
    "language_model": {
        **GEMMA4_VL["language_model"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "attention_k_eq_v": True, "bidirectional_images": True,
        "moe": {
            "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_router_expert_scale": True,
            "moe_router_load_balancing_type": ["none"],
        },
    },
}  # fmt: skip
QWEN3_VL_EXPERTS: dict[str, Any] = {
    **QWEN3_VL,
    "language_model": {
        **QWEN3_VL["language_model"],
        "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12},
    },
}
