"""The config.json files of families of 2025: keys and values as their publishers wrote them."""

from __future__ import annotations

from typing import Any

from mt_models.phi3.config import PHI4_MINI_LONG

SLIDING, FULL = "sliding_attention", "full_attention"
COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "use_cache": True,
}  # fmt: skip

PHI4 = {
    **COMMON, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "auto_map": {}, "bos_token_id": 100257,
    "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
    "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 40,
    "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.47.0", "vocab_size": 100352,
}  # fmt: skip
PHI4_MINI = {
    **PHI4, "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_size": 3072,
    "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": PHI4_MINI_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
SMOLLM3 = {
    **COMMON, "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_size": 2048, "intermediate_size": 11008, "layer_types": [FULL] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "transformers_version": "4.54.0.dev0", "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
MINISTRAL3_8B = {
    **COMMON, "architectures": ["Ministral3ForCausalLM"], "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
    "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip
OLMO2_7B = {
    **COMMON, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257,
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
    "transformers_version": "4.47.0", "vocab_size": 100352,
}  # fmt: skip
OLMO3_32B = {
    **OLMO2_7B, "architectures": ["Olmo3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 16, "max_position_embeddings": 65536, "model_type": "olmo3",
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "sliding_window": 4096, "transformers_version": "4.57.1", "vocab_size": 100278,
}  # fmt: skip
EXAONE4_32B = {
    **COMMON, "architectures": ["Exaone4ForCausalLM"], "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 27392, "layer_types": ([SLIDING] * 3 + [FULL]) * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "transformers_version": "4.54.0.dev0", "vocab_size": 102400,
}  # fmt: skip
SEED_OSS_36B = {
    **COMMON, "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
    "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0, "tie_word_embeddings": False, "transformers_version": "4.55.0", "vocab_size": 155136,
}  # fmt: skip
GRANITE33_8B = {
    **COMMON, "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 4096,
    "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000.0, "tie_word_embeddings": True, "transformers_version": "4.49.0", "vocab_size": 49159,
}  # fmt: skip
ERNIE45_03B = {
    "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
    "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
    "vocab_size": 103424,
}  # fmt: skip
HUNYUAN_7B = {
    **COMMON, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 128,
    "bos_token_id": 127958, "cla_share_factor": 2, "eod_token_id": 127967, "eos_token_id": 127960, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "mlp_bias": False,
    "model_type": "hunyuan_v1_dense", "norm_type": "rms", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "org_vocab_size": 128167, "pad_token_id": 127961, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True,
    "use_rotary_pos_emb": True, "vocab_size": 128167,
}  # fmt: skip
ERNIE45_21B = {
    **ERNIE45_03B, "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
    "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536,
    "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
}  # fmt: skip
HUNYUAN_A13B = {
    **HUNYUAN_7B, "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_dropout": 0.1, "capacity_factor": 1.0,
    "class_num": 0, "group_limited_greedy": False, "im_newline_id": 12, "intermediate_size": 3072, "kv_lora_rank": None,
    "max_position_embeddings": 262144, "model_type": "hunyuan_v1_moe", "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False,
    "moe_topk": [8] * 32, "n_group": None, "norm_topk_prob": True, "num_experts": 64, "num_shared_expert": [1] * 32,
    "pad_id": 127961, "position_embedding_xdrope": False, "q_lora_rank": None, "qk_nope_head_dim": None,
    "qk_rope_head_dim": None, "routed_scaling_factor": 1.0, "sep_token_id": 127962, "skip_cls_token": False,
    "topk_group": None, "use_mixed_mlp_moe": True, "use_mla": False, "v_head_dim": None, "xdrope_section": None,
}  # fmt: skip
LFM2_8B_A1B = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_types": ["conv" if layer not in (2, 6, 10, 14, 18, 21) else FULL for layer in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_embedding": True,
    "transformers_version": "4.57.0.dev0", "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
}  # fmt: skip
DOTS_LLM1 = {
    **COMMON, "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "eos_token_id": 151643,
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768,
    "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 128,
    "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 62, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
SOLAR_OPEN_100B = {
    **COMMON, "architectures": ["SolarOpenForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "first_k_dense_replace": 0, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10240,
    "max_position_embeddings": 131072, "model_type": "solar_open", "moe_intermediate_size": 1280,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "vocab_size": 196608,
}  # fmt: skip
K_EXAONE_236B = {
    **COMMON, "architectures": ["ExaoneMoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 53,
    "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_size": 6144, "intermediate_size": 18432,
    "is_moe_layer": [False] + [True] * 47, "layer_types": ([SLIDING] * 3 + [FULL]) * 12,
    "max_position_embeddings": 262144, "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.0.0.dev0", "vocab_size": 153600,
}  # fmt: skip
MINIMAX_M2 = {
    **COMMON, "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "bos_token_id": None,
    "eos_token_id": None, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "transformers_version": "4.46.1", "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
LFM2_12B = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
LFM3_17B = {
    "architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 124894,
    "conv_L_cache": 7, "conv_bias": False, "eos_token_id": 124900, "head_dim": 128, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 7680,
    "layer_types": ["conv", "conv", FULL, "conv", *[SLIDING, "conv", FULL, "conv"] * 5],
    "max_position_embeddings": 128000, "model_type": "lfm3", "norm_eps": 1e-05, "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 4, "pad_token_id": 124893,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True, "use_cache": True,
    "use_sandwich_norm": True, "vocab_size": 128000,
}  # fmt: skip
"""The defaults of transformers' class, which are those of the checkpoint."""
LLAMA4_SCOUT = {
    **COMMON, "architectures": ["Llama4ForCausalLM"], "attention_bias": False, "attention_chunk_size": 8192,
    "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 200000, "eos_token_id": 200001,
    "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760,
    "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
    "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
    "vocab_size": 202048,
}  # fmt: skip

GEMMA4_E2B = {
    "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_k_eq_v": False,
    "bos_token_id": 2, "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
    "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "max_position_embeddings": 131072,
    "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 8, "num_experts": None,
    "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None,
    "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GLM_4_7 = {
    **COMMON, "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 12288, "max_position_embeddings": 202752, "model_type": "glm4_moe",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
GLM_4_5_AIR = {
    **GLM_4_7, "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip

PUBLISHED_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-4": ("phi3", PHI4),
    "phi-4-mini": ("phi3", PHI4_MINI),
    "smollm3-3b": ("smollm3", SMOLLM3),
    "ministral-3-8b (text)": ("ministral3", MINISTRAL3_8B),
    "olmo-2-7b": ("olmo", OLMO2_7B),
    "olmo-3-32b": ("olmo", OLMO3_32B),
    "exaone-4.0-32b": ("exaone4", EXAONE4_32B),
    "seed-oss-36b": ("seed_oss", SEED_OSS_36B),
    "granite-3.3-8b": ("granite", GRANITE33_8B),
    "ernie-4.5-0.3b": ("ernie4_5", ERNIE45_03B),
    "gemma-4-e2b (text)": ("gemma4", GEMMA4_E2B),
    "ernie-4.5-21b-a3b": ("ernie4_5", ERNIE45_21B),
    "hunyuan-a13b": ("hunyuan", HUNYUAN_A13B),
    "glm-4.5-air": ("qwen_moe", GLM_4_5_AIR),
    "glm-4.7": ("qwen_moe", GLM_4_7),
    "lfm2-8b-a1b": ("lfm2", LFM2_8B_A1B),
    "dots.llm1": ("dots1", DOTS_LLM1),
    "solar-open-100b": ("dots1", SOLAR_OPEN_100B),
    "k-exaone-236b-a23b": ("exaone4", K_EXAONE_236B),
    "minimax-m2": ("minimax_m2", MINIMAX_M2),
    "lfm2-1.2b": ("lfm2", LFM2_12B),
    "lfm3-1.7b": ("lfm3", LFM3_17B),
    "llama-4-scout (text)": ("llama4", LLAMA4_SCOUT),
    "hunyuan-7b": ("hunyuan", HUNYUAN_7B),
}
