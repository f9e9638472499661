"""The config.json files of well-known checkpoints: keys and values as their publishers wrote them."""

from __future__ import annotations

from typing import Any

from tests.models.published_dense import PUBLISHED_DENSE

INFINITY = float("inf")
SLIDING, FULL = "sliding_attention", "full_attention"

# -- GPT-2, GPTBigCode, BLOOM, GPT-NeoX ----------------------------------------------------------------

GPT2_HEADS = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
}
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, **GPT2_HEADS,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
GPT2_MEDIUM = {**GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}
GPT2_XL = {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
DISTILGPT2 = {
    **GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6,
}  # fmt: skip
STARCODER = {
    "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"], "attention_softmax_in_fp32": True,
    "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
    "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
    "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, **GPT2_HEADS, "torch_dtype": "float32",
    "transformers_version": "4.28.1", "use_cache": True, "validate_runner_input": True, "vocab_size": 49152,
}  # fmt: skip
BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom",
    "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100,
    "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False,
    "slow_but_exact": False, "transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True,
    "vocab_size": 250880,
}  # fmt: skip
PYTHIA_160M = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
GPT_NEOX_20B = {
    "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144, "initializer_range": 0.02,
    "intermediate_size": 24576, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
    "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.19.0.dev0", "use_cache": True,
    "vocab_size": 50432,
}  # fmt: skip
DOLLY_V2_3B = {
    **PYTHIA_160M, "_name_or_path": "EleutherAI/pythia-2.8b", "hidden_size": 2560, "intermediate_size": 10240,
    "num_attention_heads": 32, "num_hidden_layers": 32, "gradient_checkpointing": False, "vocab_size": 50280,
    "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline",
                                             "pt": "AutoModelForCausalLM", "tf": "TFAutoModelForCausalLM"}},
}  # fmt: skip

# -- Llama, Mistral, Qwen, Gemma -----------------------------------------------------------------------

LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 2048,
    "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA2_70B = {
    "_name_or_path": "meta-llama/Llama-2-70b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 28672, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.32.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA32_1B = {
    **LLAMA31_8B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA31_8B["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_NEMO = {
    **MISTRAL_7B, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 131072,
    "num_hidden_layers": 40, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.37.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN25_05B = {
    **QWEN2_7B, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_270M = {
    **{key: value for key, value in GEMMA3_1B.items() if key not in ("sliding_window_pattern", "cache_implementation")},
    "_sliding_window_pattern": 6, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "layer_types": [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(18)],
    "rope_local_base_freq": 10000.0, "use_bidirectional_attention": False,
}  # fmt: skip

# -- mixtures of experts -------------------------------------------------------------------------------

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MIXTRAL_8X22B = {
    **MIXTRAL_8X7B, "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536,
    "num_attention_heads": 48, "num_hidden_layers": 56, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
}  # fmt: skip
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_CODER_30B = {
    **QWEN3_30B_A3B, "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
    "qkv_bias": False, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = {
    **DEEPSEEK_V2_LITE, "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280,
}  # fmt: skip
"""Without `quantization_config`, as the published copies in bf16 are."""
KIMI_K2 = {
    **DEEPSEEK_V3, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 163584,
    "eos_token_id": 163585, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2",
    "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
LATER_LAYERS = [0] * 3 + [1] * 57
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "image_seq_length": 576,
    "image_token_index": 200025, "model_type": "minimax_m3_vl", "multimodal_projector_bias": True,
    "img_token_compression_config": {
        "image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "projector_hidden_size": 6144,
    "text_config": {
        "attention_output_gate": False, "dense_intermediate_size": 12288, "head_dim": 128, "hidden_act": "swigluoai",
        "hidden_size": 6144, "intermediate_size": 3072, "max_position_embeddings": 1048576,
        "moe_layer_freq": LATER_LAYERS, "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 60, "num_key_value_heads": 4, "num_local_experts": 128, "num_mtp_modules": 7,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid", "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "sparse_attention_freq": LATER_LAYERS, "sparse_block_size": 128,
            "sparse_disable_index_value": LATER_LAYERS, "sparse_index_dim": 128, "sparse_init_block": 0,
            "sparse_local_block": 1, "sparse_num_index_heads": 4, "sparse_score_type": "max",
            "sparse_topk_blocks": 16, "use_sparse_attention": True,
        },
        "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "video_token_index": 200026,
    "vision_config": {
        "attention_dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 2016,
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "initializer_factor": 1.0, "initializer_range": 0.02, "intermediate_size": 5120, "layer_norm_eps": 1e-05,
        "model_type": "clip_vision_model", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 32,
        "patch_size": 14, "position_embedding_type": "rope", "projection_dim": 6144, "rope_mode": "3d",
        "rope_theta": 10000.0, "vision_segment_max_frames": 4, "vocab_size": 32000,
    },
}  # fmt: skip
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "eos_token_id": 163585,
    "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "pad_token_id": 163839,
    "text_config": KIMI_K2, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.56.2",
    "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"model_type": "kimi_k25_vision", "hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
MOON_VIT = {
    "_attn_implementation": "flash_attention_2", "init_pos_emb_height": 64, "init_pos_emb_time": 4,
    "init_pos_emb_width": 64, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger", "model_type": "", "patch_size": 14, "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
DEEPSEEK_V32 = {
    **DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048, "model_type": "deepseek_v32",
}  # fmt: skip
DEEPSEEK_V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "eos_token_id": 1,
    "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hash_layers": 3, "num_hidden_layers": 43,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
                     "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V4_PRO = {
    **DEEPSEEK_V4_FLASH, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0], "hidden_size": 7168, "index_topk": 1024,
    "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_attention_heads": 128, "num_hidden_layers": 61,
    "o_groups": 16, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "model_type": "glm_moe_dsa", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0", "use_cache": True, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
GLM_5_2 = {**GLM_5, "index_topk_freq": 4, "index_skip_topk_offset": 3}
GLM_4_7_FLASH = {
    **{key: value for key, value in GLM_5.items() if not key.startswith("index") and key != "head_dim"},
    "architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 10240, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_routed_experts": 64,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
}  # fmt: skip
KIMI_LINEAR_48B = {
    "architectures": ["KimiLinearForCausalLM"], "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "transformers_version": "4.56.2", "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip
TRINITY_MINI = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "auto_map": {}, "dtype": "bfloat16",
    "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072, "model_type": "afmoe", "moe_intermediate_size": 1024, "mup_enabled": True,
    "n_group": 1, "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 4, "num_limited_groups": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
    "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False,
    "topk_group": 1, "transformers_version": "4.57.1", "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
QWEN4_EXP = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen4_exp",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "hc_count": 4, "hc_lowrank": 320, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2560, "indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_head_dim": 128,
        "indexer_kv_heads": 1, "indexer_n_heads": 4, "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "model_type": "qwen4_exp_text", "moe_intermediate_size": 640, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "output_gate_type": "sigmoid", "partial_rotary_factor": 0.25, "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 640, "split_ngram_parts": 128, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    },
    "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": {}, "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}  # fmt: skip
MUSE_GLIMMER_30B = {
    "architectures": ["MuseGlimmerForConditionalGeneration"], "dtype": "bfloat16", "image_token_id": 200092,
    "model_type": "muse_glimmer", "out_hidden_size": 6144, "projector_hidden_act": "gelu",
    "projector_hidden_size": 4096, "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": 200001,
        "final_logit_softcapping": 20.0, "head_dim": 128, "hidden_activation": "silu", "hidden_size": 6656,
        "initializer_range": 0.02, "intermediate_size": 19968, "max_position_embeddings": 131072,
        "model_type": "muse_glimmer_text", "num_attention_heads": 32, "num_hidden_layers": 52,
        "num_key_value_heads": 2, "output_multiplier": 0.19611613513818404, "pad_token_id": None,
        "post_norm_eps": 1e-08, "qk_scale_factor": 3.87, "rms_norm_eps": 1e-05, "sliding_window": 2048,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 202048,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0] * 13,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "video_token_id": 200091, "vision_config": {"model_type": "muse_glimmer_vision"},
}  # fmt: skip
MUSE_SPARK_816B = {
    "architectures": ["MuseSparkForConditionalGeneration"], "audio_token_id": 200038, "dtype": "bfloat16",
    "image_token_id": 200092, "model_type": "muse_spark", "out_hidden_size": 6144, "projector_hidden_act": "gelu",
    "projector_hidden_size": 4096, "tie_word_embeddings": False,
    "audio_config": {"model_type": "muse_spark_audio", "out_hidden_size": 8192},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": 200001,
        "final_logit_softcapping": 20.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 8192,
        "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 1048576,
        "mlp_layer_types": ["sparse"] * 62, "model_type": "muse_spark_text", "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "num_local_experts": 256, "output_multiplier": 0.1767766952966369,
        "output_router_logits": False, "pad_token_id": None, "post_norm_eps": 1e-08,
        "qk_scale_factor": 5.4730064863875, "residual_gate_temperature": 0.3, "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 1.0, "sliding_window": 2048, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": 202048,
        "layer_types": ["sliding_attention", *(["full_attention"] + ["sliding_attention"] * 3) * 15, "full_attention"],
        "layer_rope_theta": [500000.0, *[0, 500000.0, 500000.0, 500000.0] * 15, 0],
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
    "video_token_id": 200091, "vision_config": {"model_type": "muse_spark_vision"},
}  # fmt: skip
INKLING = {
    "architectures": ["InklingForConditionalGeneration"], "audio_bos_token_id": 200020, "audio_token_id": 200053,
    "audio_config": {"model_type": "inkling_audio"}, "dtype": "bfloat16", "image_bos_token_id": 200005,
    "image_token_id": 200054, "model_type": "inkling_mm_model",
    "text_config": {
        "d_rel": 16, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
        "intermediate_size": 24576, "layer_types": (["hybrid_sliding"] * 5 + ["hybrid"]) * 11,
        "log_scaling_n_floor": None, "logits_mup_width_multiplier": 24.0, "mlp_layer_types": ["sparse"] * 66,
        "model_max_length": 131072, "model_type": "inkling_text", "moe_intermediate_size": 3072,
        "n_routed_experts": 256, "n_shared_experts": 2, "num_attention_heads": 64, "num_experts_per_tok": 6,
        "num_hidden_layers": 66, "num_key_value_heads": 8, "rel_extent": 1024, "rms_norm_eps": 1e-06,
        "rms_norm_eps_moe_gate": 1e-06, "route_scale": 8.0, "sconv_kernel_size": 4, "shared_expert_sink": True,
        "sliding_window_size": 512, "swa_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16,
        "unpadded_vocab_size": 200058, "vocab_size": 201024,
    },
    "vision_config": {"model_type": "inkling_vision"},
}  # fmt: skip
HY3 = {
    "architectures": ["HYV3ForCausalLM"], "bos_token_id": 120000, "dtype": "bfloat16",
    "enable_attention_fp32_softmax": False, "enable_lm_head_fp32": True, "enable_moe_fp32_combine": False,
    "eod_token_id": 120026, "eos_token_id": 120025, "expert_hidden_dim": 1536, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.006, "intermediate_size": 13312, "max_position_embeddings": 262144, "model_type": "hy_v3",
    "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "num_attention_heads": 64,
    "num_experts": 192, "num_experts_per_tok": 8, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_router_logits": True, "pad_token_id": 120002,
    "qk_norm": True, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": True, "router_scaling_factor": 2.826, "sep_token_id": 120007, "tie_word_embeddings": False,
    "transformers_version": "5.6.0", "use_cache": True, "use_grouped_mm": False, "vocab_size": 120832,
}  # fmt: skip
HY4_PREVIEW = {
    "architectures": ["HYV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 120000,
    "dtype": "bfloat16", "eos_token_id": 120025, "hc_eps": 1e-06, "hc_magnitude": 2.0, "hc_mult": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2816, "index_head_dim": 128, "index_n_heads": 16, "index_topk": 2048,
    "indexer_types": ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(34)],
    "initializer_range": 0.006, "intermediate_size": 6912, "kv_lora_rank": 512, "learnable_sink_init": 0.0,
    "max_position_embeddings": 262144, "mlp_layer_types": ["dense"] + ["sparse"] * 33, "model_type": "hy_v4",
    "moe_intermediate_size": 768, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 8, "num_hidden_layers": 34,
    "num_key_value_heads": 32, "pad_token_id": 120002, "q_lora_rank": 1536, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.827, "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "v_head_dim": 256, "vocab_size": 120832,
}  # fmt: skip
MIMO_V2_FLASH = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"], "attention_bias": False, "attention_chunk_size": 128,
    "attention_dropout": 0.0, "attention_value_scale": 0.707, "auto_map": {}, "head_dim": 192, "hidden_act": "silu",
    "hidden_size": 4096, "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7], "initializer_range": 0.02,
    "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1,
    "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334,
    "rope_theta": 5000000, "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
    "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000, "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 152576,
}  # fmt: skip
GLM_5_3_FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
    "image_token_id": 154854, "video_token_id": 154855, "image_start_token_id": 154830, "image_end_token_id": 154831,
    "video_start_token_id": 154832, "video_end_token_id": 154833, "tie_word_embeddings": False,
    "vision_config": {"model_type": "glm5_next_vision", "depth": 24, "hidden_size": 1024},
    "text_config": {
        "model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 45, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
        "layer_types": [*["linear_attention", "linear_attention", "linear_attention", "deepseek_sparse_attention"] * 11,
                        "linear_attention"],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "mhc": True, "mla_use_nope": True, "hc_mult": 4,
        "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [layer for layer in range(45) if layer % 4 != 3], "full_attn_layers": [*range(3, 45, 4)],
        },
        "q_lora_rank": 1536, "kv_lora_rank": 512, "num_attention_heads": 64, "num_key_value_heads": 64,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "qk_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32,
        "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True,
        "index_kpool_always_select_tail": True, "index_share_for_mtp_iteration": True, "indexer_rope_interleave": True,
        "indexer_types": ["full"] * 45, "n_routed_experts": 288, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "swiglu_limit": 10.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu",
    },
}  # fmt: skip
KIMI_K3_FULL = [*range(4, 93, 4), 93]
KIMI_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}, "ignore_index": -100,
    "media_placeholder_token_id": 163605, "pad_token_id": 163839, "tie_word_embeddings": False,
    "vision_config": {"model_type": "kimi_k3_vision", "vt_hidden_size": 1024, "vt_num_hidden_layers": 27},
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840,
        "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93, "num_attention_heads": 96,
        "num_key_value_heads": 96, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
        "linear_attn_config": {
            "full_attn_layers": KIMI_K3_FULL,
            "kda_layers": [layer for layer in range(1, 94) if layer not in KIMI_K3_FULL],
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "mla_use_nope": True, "mla_use_output_gate": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896,
        "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "use_grouped_topk": True,
        "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "use_cache": True,
    },
}  # fmt: skip
LING_3_TINY = {
    "architectures": ["BailingMoeV3ForCausalLM"], "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config"}, "dtype": "bfloat16",
    "embedding_dropout": 0.0, "eos_token_id": 156895, "expert_swiglu_limit_list": None, "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 4608, "kda_lower_bound": -5,
    "kda_safe_gate": True, "kv_lora_rank": 512, "layer_group_size": 4, "linear_silu": True,
    "max_position_embeddings": 131072, "max_window_layers": 20, "model_type": "bailing_hybrid",
    "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512,
    "mtp_loss_scaling_factor": 0, "mtp_use_kda": False, "n_group": 8, "no_kda_lora": True, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "num_kv_heads_for_linear_attn": 0, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": 156892,
    "partial_rotary_factor": 0.5, "q_lora_rank": 256, "qk_head_dim": 192, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    "rope_theta": 6000000, "rotary_dim": 64, "routed_scaling_factor": 2.5, "router_dtype": "fp32",
    "scale_router_input": False, "score_function": "sigmoid", "scoring_func": "sigmoid", "seq_aux": True,
    "share_expert_swiglu_limit_list": None, "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "transformers_version": "5.8.1", "up_proj_norm": False, "use_bias": False,
    "use_cache": False, "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False, "use_qk_norm": True,
    "use_qkv_bias": False, "v_head_dim": 128, "value_norm": False, "vocab_size": 157184,
}  # fmt: skip
LING_3_FLASH = {
    **{key: value for key, value in LING_3_TINY.items() if key != "rotary_dim"},
    "expert_swiglu_limit_list": [0] * 35 + [4] * 7, "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
    "first_k_dense_replace": 2, "hidden_size": 2560, "intermediate_size": 6144, "layer_group_size": 6,
    "max_position_embeddings": 262144, "moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768,
    "num_attention_heads": 32, "num_experts": 512, "num_hidden_layers": 42, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 1, "q_lora_rank": None,
}  # fmt: skip
STEP_3_7_FLASH = {
    "architectures": ["Step3p7ForConditionalGeneration"], "image_token_id": 128001, "model_type": "step3p7",
    "projector_bias": False, "understand_projector_stride": 2,
    "text_config": {
        "architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
            "num_attention_heads": 96, "true_head_dim": 128,
        },
        "bos_token_id": 0, "eos_token_id": [1, 2, 128007], "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 11264,
        "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(48)],
        "max_position_embeddings": 262144, "max_seq_len": 262144, "model_type": "step3p5",
        "moe_every_n_layer": 1, "moe_intermediate_size": 1280, "moe_layer_offset": 0,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True,
        "norm_expert_weight": True, "num_attention_groups": 8, "num_attention_heads": 64, "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [1.0 if layer % 4 else 0.5 for layer in range(48)],
        "rope_scaling": {
            "factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 131072, "rope_type": "llama3",
        },
        "rope_theta": [10000.0 if layer % 4 else 5000000.0 for layer in range(48)], "share_expert_dim": 1280,
        "sliding_window": 512, "swiglu_limits": [0.0] * 43 + [7] * 2 + [0.0] * 3,
        "swiglu_limits_shared": [0.0] * 43 + [16] * 2 + [0.0] * 3, "torch_dtype": "bfloat16",
        "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True, "use_qk_norm": True,
        "use_rope_layers": [], "vocab_size": 128896, "yarn_only_types": ["full_attention"], "zero_centered": True,
    },
    "vision_config": {
        "heads": 16, "image_size": 728, "layers": 47, "model_type": "perception_encoder", "patch_size": 14,
        "width": 1536,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": [FULL if layer % 2 else SLIDING for layer in range(24)], "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
GRANITE_MOE_1B = {
    "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 512,
    "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe", "num_attention_heads": 16,
    "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 49155,
}  # fmt: skip

# -- state-space models and hybrids --------------------------------------------------------------------

CODESTRAL_MAMBA = {
    "_name_or_path": "mistralai/Mamba-Codestral-7B-v0.1", "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0,
    "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64,
    "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
    "state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
    "time_step_limit": [0.0, INFINITY], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "vocab_size": 32768,
}  # fmt: skip
BAMBA_9B = {
    "architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
    "max_position_embeddings": 262144, "mlp_bias": False, "model_type": "bamba", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0", "use_cache": True, "use_mamba_kernels": True,
    "vocab_size": 128256,
}  # fmt: skip
NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_head_dim": 128, "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0,
    "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, INFINITY], "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 256, "torch_dtype": "bfloat16", "transformers_version": "4.48.0.dev0", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
NEMOTRON_NANO_KEYS = {
    **NEMOTRON_H_8B, "head_dim": 128, "mamba_ssm_cache_dtype": "float32", "norm_eps": 1e-05,
    "partial_rotary_factor": 1.0, "rope_theta": 10000,
}  # fmt: skip
"""With the keys that the Nemotron Nano files have besides."""

# -- encoders --------------------------------------------------------------------------------------------

BERT_BASE_UNCASED = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
BERT_BASE_CHINESE = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi",
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform", "type_vocab_size": 2, "vocab_size": 21128,
}  # fmt: skip
CHINESE_BERT_WWM = {**BERT_BASE_CHINESE, "output_past": True}
RWKV7_15B_WORLD = {
    "a_low_rank_dim": 96,
    "architectures": ["RWKV7ForCausalLM"],
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 0,
    "decay_low_rank_dim": 96,
    "eos_token_id": 0,
    "fuse_cross_entropy": True,
    "fuse_norm": False,
    "gate_low_rank_dim": 256,
    "head_dim": 64,
    "hidden_act": "sqrelu",
    "hidden_ratio": 4.0,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 2048,
    "model_type": "rwkv7",
    "norm_bias": True,
    "norm_eps": 1e-05,
    "norm_first": True,
    "num_heads": 32,
    "num_hidden_layers": 24,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0",
    "use_cache": True,
    "v_low_rank_dim": 64,
    "value_dim": [2048] * 24,
    "vocab_size": 65536,
}
MODERNBERT_BASE = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 50368,
}
BART_BASE = {
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["BartModel"], "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1,
    "classifier_dropout": 0.0, "d_model": 768, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 2, "dropout": 0.1, "early_stopping": True,
    "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layerdrop": 0.0, "encoder_layers": 6,
    "eos_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2, "gradient_checkpointing": False,
    "init_std": 0.02, "is_encoder_decoder": True, "max_position_embeddings": 1024, "model_type": "bart",
    "no_repeat_ngram_size": 3, "normalize_before": False, "normalize_embedding": True, "num_beams": 4,
    "num_hidden_layers": 6, "pad_token_id": 1, "scale_embedding": False, "torch_dtype": "float32", "use_cache": True,
    "vocab_size": 50265,
}  # fmt: skip
BLENDERBOT_3B = {
    "activation_dropout": 0.0, "activation_function": "gelu", "architectures": ["BlenderbotForConditionalGeneration"],
    "attention_dropout": 0.0, "d_model": 2560, "decoder_attention_heads": 32, "decoder_ffn_dim": 10240,
    "decoder_layers": 24, "decoder_start_token_id": 1, "dropout": 0.1, "encoder_attention_heads": 32,
    "encoder_ffn_dim": 10240, "encoder_layers": 2, "encoder_no_repeat_ngram_size": 3, "init_std": 0.02,
    "is_encoder_decoder": True, "max_position_embeddings": 128, "model_type": "blenderbot", "scale_embedding": False,
    "tie_word_embeddings": True, "vocab_size": 8008,
}  # fmt: skip
"""The defaults of transformers' class, which are those of the checkpoint."""
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}},
    "vocab_size": 32128,
}  # fmt: skip
FLAN_T5_BASE = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 768,
    "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1, "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True, "is_gated_act": True,
    "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_decoder_layers": 12, "num_heads": 12,
    "num_layers": 12, "output_past": True, "pad_token_id": 0, "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "transformers_version": "4.23.1",
    "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
T5_V11_XXL = {
    **FLAN_T5_BASE, "d_ff": 10240, "d_model": 4096, "num_decoder_layers": 24, "num_heads": 64, "num_layers": 24,
    "tokenizer_class": "T5Tokenizer",
}  # fmt: skip

# -- images ----------------------------------------------------------------------------------------------

OF_EVERY_PART = {
    "_name_or_path": "", "add_cross_attention": False, "architectures": None, "bad_words_ids": None,
    "bos_token_id": None, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None,
    "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "eos_token_id": None, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "pad_token_id": None,
    "prefix": None, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "task_specific_params": None, "temperature": 1.0, "tie_encoder_decoder": False, "tie_word_embeddings": True,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torch_dtype": None, "torchscript": False,
    "transformers_version": "4.16.0.dev0", "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""What transformers 4.16 wrote into each part of a configuration."""
MT5_SMALL = {
    "architectures": ["MT5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "mt5",
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "tokenizer_class": "T5Tokenizer",
    "transformers_version": "4.10.0.dev0",
    "use_cache": True,
    "vocab_size": 250112,
}
UMT5_BASE = {
    "architectures": ["UMT5ForConditionalGeneration"],
    "classifier_dropout": 0.0,
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "umt5",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "scalable_attention": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "T5Tokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 256384,
}
CLIP_VIT_L14_VISION = {
    **OF_EVERY_PART, "attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "quick_gelu", "hidden_size": 1024,
    "image_size": 224, "initializer_factor": 1.0, "initializer_range": 0.02, "intermediate_size": 4096,
    "layer_norm_eps": 1e-05, "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
    "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
SIGLIP_BASE_VISION = {
    "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768, "image_size": 224,
    "intermediate_size": 3072, "layer_norm_eps": 1e-06, "model_type": "siglip_vision_model",
    "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16,
    "torch_dtype": "float32", "transformers_version": "4.37.0.dev0",
}  # fmt: skip
LLAVA_15_7B = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
QWEN25_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
    "use_cache": True, "use_sliding_window": False, "video_token_id": 151656,
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
        "in_chans": 3, "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        "tokens_per_second": 2, "window_size": 112,
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "boi_token_id": 255999,
    "eoi_token_id": 258882, "image_token_id": 258880, "initializer_range": 0.02, "model_type": "gemma4",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4,
        "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
        "use_cache": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True, "video_token_id": 258884,
    "vision_config": {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 72, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 4304, "max_position_embeddings": 131072,
        "model_type": "gemma4_vision", "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}, "standardize": True,
        "use_clipped_linears": False,
    },
}  # fmt: skip
MISTRAL_SMALL_31 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
QWEN35_9B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "model_type": "qwen3_5_text",
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": False, "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
QWEN3_OMNI_30B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "assistant_token_id": 77091, "dtype": "bfloat16",
    "enable_audio_output": True, "im_end_token_id": 151645, "im_start_token_id": 151644, "model_type": "qwen3_omni_moe",
    "code2wav_config": {"codebook_size": 2048, "hidden_size": 1024, "num_hidden_layers": 8},
    "talker_config": {"accept_hidden_layer": 24, "audio_token_id": 151675, "thinker_hidden_size": 2048},
    "system_token_id": 8948, "transformers_version": "4.57.0.dev0", "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673, "tts_pad_token_id": 151671, "user_token_id": 872,
    "thinker_config": {
        "audio_config": {
            "activation_dropout": 0, "activation_function": "gelu", "attention_dropout": 0, "conv_chunksize": 500,
            "d_model": 1280, "downsample_hidden_size": 480, "dropout": 0, "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120, "encoder_layers": 32, "initializer_range": 0.02, "max_source_positions": 1500,
            "model_type": "qwen3_omni_moe_audio_encoder", "n_window": 50, "n_window_infer": 800,
            "num_hidden_layers": 32, "num_mel_bins": 128, "output_dim": 2048, "scale_embedding": False,
        },
        "audio_end_token_id": 151670, "audio_start_token_id": 151669, "audio_token_id": 151675, "dtype": "bfloat16",
        "image_token_id": 151655, "initializer_range": 0.02, "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13, "seconds_per_chunk": 2,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 768,
            "max_position_embeddings": 65536, "mlp_only_layers": [], "model_type": "qwen3_omni_moe_text",
            "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default", "type": "default",
            },
            "rope_theta": 1000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 0,
            "sliding_window": None, "use_cache": True, "use_qk_norm": True, "use_sliding_window": False,
            "vocab_size": 152064,
        },
        "user_token_id": 872, "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "image_size": 768, "in_channels": 3, "in_chans": 3, "initializer_range": 0.02,
            "intermediate_size": 4304, "model_type": "qwen3_omni_moe_vision_encoder", "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
            "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
            "apply_vit_abs_pos_embed": True,
        },
        "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    },
}  # fmt: skip
SMOLVLM_500M = {
    "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "model_type": "smolvlm",
    "pad_token_id": 128002, "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
        "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    },
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.1", "use_cache": False,
    "use_reentrant_checkpointing": False,
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "smolvlm_vision",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
    "vocab_size": 49280,
}  # fmt: skip
INTERNVL3_1B = {
    "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
    "image_token_id": 151667, "model_type": "internvl", "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 70, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1000000.0,
        "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0",
    "vision_config": {
        "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448],
        "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
        "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14],
        "projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
    },
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
}  # fmt: skip
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMO_HYBRID_7B = {
    "architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 3840, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_a_log_max": 16.0, "linear_a_log_min": 0.0, "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4,
    "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1, "linear_dt_min": 0.001, "linear_key_head_dim": 96,
    "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_value_head_dim": 192,
    "max_position_embeddings": 65536, "model_type": "olmo_hybrid", "num_attention_heads": 30, "num_hidden_layers": 32,
    "num_key_value_heads": 30, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
"""The defaults of transformers' class, which are those of the checkpoint."""

NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, INFINITY],
    "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
NEMOTRON_3_SUPER = {
    **NEMOTRON_3_NANO, "hidden_size": 4096, "intermediate_size": 2688, "mamba_num_heads": 128,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "moe_intermediate_size": 2688, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
    "moe_shared_expert_overlap": False, "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 512,
    "num_experts_per_tok": 22, "num_hidden_layers": 88, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
    "keep_mtp_spec_in_bf16": True,
}  # fmt: skip
GRANITE_4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.1, "intermediate_size": 512,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)], "logits_scaling": 6,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
    "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
    "num_local_experts": 64, "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
FALCON_H1_05B = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048, "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
    "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
    "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551584,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32784,
}  # fmt: skip
MISTRAL_SMALL_4_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 256, "max_position_embeddings": 1048576, "model_type": "mistral4",
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 32,
    "pad_token_id": 11, "pretraining_tp": 1, "q_lora_rank": 1024, "qk_head_dim": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 1048576, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "rope_type": "yarn", "type": "yarn",
    },
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "v_head_dim": 128,
    "vocab_size": 131072,
}  # fmt: skip
"""The defaults of transformers' class, which are those of the checkpoint."""
JAMBA_MINI = {
    "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8,
    "bos_token_id": 1, "eos_token_id": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False,
    "max_position_embeddings": 262144, "model_type": "jamba", "num_attention_heads": 32, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
    "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip

MISTRAL_LARGE_3_TEXT = {
    "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 16384,
    "kv_lora_rank": 512, "max_position_embeddings": 294912, "model_type": "mistral4", "moe_intermediate_size": 4096,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 4, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_parameters": {
        "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 36.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8192, "rope_theta": 10000.0, "rope_type": "yarn",
    },
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "v_head_dim": 128,
    "vocab_size": 131072,
}  # fmt: skip
"""The published params.json, in the words of transformers' Mistral 4."""
MISTRAL_LARGE_4 = {
    "architectures": ["MistralLarge4ForConditionalGeneration"], "image_token_index": 10,
    "model_type": "mistral_large4", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "final_logit_softcapping": 30.0, "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "indexer_types": ["full"] * 72, "initializer_range": 0.02, "intermediate_size": 24576, "kv_lora_rank": 512,
        "kv_source_layers": list(range(72)), "layer_types": ["indexed_attention"] * 72,
        "max_position_embeddings": 1048576, "mlp_layer_types": ["dense"] + ["sparse"] * 71,
        "model_type": "mistral_large4_text", "moe_intermediate_size": 6144, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "no_rope_layers": [1, 1, 1, 0] * 18, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 72, "num_key_value_heads": 64, "qk_head_dim": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 2048.0,
            "original_max_position_embeddings": 512, "rope_theta": 10000.0, "rope_type": "yarn",
        },
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_cache": True, "v_head_dim": 128, "vocab_size": 204800,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_act": "silu", "hidden_size": 2048, "image_size": 1540, "intermediate_size": 6144,
        "model_type": "pixtral", "num_attention_heads": 16, "num_hidden_layers": 30, "patch_size": 14,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
"""The defaults of transformers' class, which are those of the checkpoint."""

LONGCAT_FLASH = {
    "architectures": ["LongcatFlashForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_method": "MLA", "bos_token_id": 1, "eos_token_id": 2, "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288, "hidden_size": 6144, "kv_lora_rank": 512, "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "model_type": "longcat_flash", "moe_topk": 12,
    "n_routed_experts": 512, "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "routed_scaling_factor": 6.0,
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 131072, "zero_expert_num": 256,
    "zero_expert_type": "identity",
}  # fmt: skip

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", GPT2),
    "gpt2-medium": ("gpt", GPT2_MEDIUM),
    "gpt2-xl": ("gpt", GPT2_XL),
    "distilgpt2": ("gpt", DISTILGPT2),
    "starcoder": ("gpt", STARCODER),
    "bloom-560m": ("gpt", BLOOM_560M),
    "pythia-160m": ("gpt", PYTHIA_160M),
    "gpt-neox-20b": ("gpt", GPT_NEOX_20B),
    "dolly-v2-3b": ("gpt", DOLLY_V2_3B),
    "llama-7b": ("llama", LLAMA_7B),
    "llama-2-70b": ("llama", LLAMA2_70B),
    "llama-3.1-8b": ("llama", LLAMA31_8B),
    "llama-3.2-1b": ("llama", LLAMA32_1B),
    "smollm2-135m-instruct": ("llama", SMOLLM2_135M),
    "mistral-7b-v0.1": ("mistral", MISTRAL_7B),
    "mistral-nemo": ("mistral", MISTRAL_NEMO),
    "qwen2-7b": ("qwen", QWEN2_7B),
    "qwen2.5-0.5b": ("qwen", QWEN25_05B),
    "qwen3-0.6b": ("qwen", QWEN3_06B),
    "gemma-2-9b": ("gemma", GEMMA2_9B),
    "gemma-3-1b": ("gemma", GEMMA3_1B),
    "gemma-3-270m": ("gemma", GEMMA3_270M),
    **PUBLISHED_DENSE,
    "mixtral-8x7b": ("mixtral", MIXTRAL_8X7B),
    "mixtral-8x22b": ("mixtral", MIXTRAL_8X22B),
    "qwen1.5-moe-a2.7b": ("qwen_moe", QWEN15_MOE),
    "qwen3-30b-a3b": ("qwen_moe", QWEN3_30B_A3B),
    "qwen3-coder-30b-a3b": ("qwen_moe", QWEN3_CODER_30B),
    "qwen3-next-80b-a3b": ("qwen_next", QWEN3_NEXT_80B),
    "olmo-hybrid-7b": ("olmo_hybrid", OLMO_HYBRID_7B),
    "deepseek-v2-lite": ("deepseek", DEEPSEEK_V2_LITE),
    "deepseek-v3-bf16": ("deepseek", DEEPSEEK_V3),
    "kimi-k2 (without FP8)": ("deepseek", KIMI_K2),
    "kimi-k2.5 (text)": ("deepseek", KIMI_K25),
    "minimax-m3 (text)": ("minimax_m3", MINIMAX_M3),
    "minimax-m3": ("minimax_m3_vl", MINIMAX_M3),
    "kimi-k2.5": ("kimi_k25", {**KIMI_K25, "vision_config": MOON_VIT}),
    "kimi-k2.6": ("kimi_k25", KIMI_K25),
    "deepseek-v3.2 (without FP8)": ("deepseek_v32", DEEPSEEK_V32),
    "glm-5": ("deepseek_v32", GLM_5),
    "glm-5.2": ("deepseek_v32", GLM_5_2),
    "glm-4.7-flash": ("glm4_moe_lite", GLM_4_7_FLASH),
    "deepseek-v4-flash (without FP8)": ("deepseek_v4", DEEPSEEK_V4_FLASH),
    "deepseek-v4-pro (without FP8)": ("deepseek_v4", DEEPSEEK_V4_PRO),
    "kimi-linear-48b-a3b": ("kimi_linear", KIMI_LINEAR_48B),
    "trinity-mini": ("afmoe", TRINITY_MINI),
    "qwen4-exp": ("qwen4_exp", QWEN4_EXP),
    "muse-glimmer-30b": ("muse_glimmer", MUSE_GLIMMER_30B),
    "muse-spark-816b-a42b": ("muse_spark", MUSE_SPARK_816B),
    "inkling (text)": ("inkling", INKLING),
    "hy3": ("hy_v3", HY3),
    "mimo-v2-flash (without FP8)": ("mimo_v2_flash", MIMO_V2_FLASH),
    "ling-3.0-tiny": ("bailing_hybrid", LING_3_TINY),
    "glm-5.3-flash (text)": ("glm5_next", GLM_5_3_FLASH),
    "ling-3.0-flash": ("bailing_hybrid", LING_3_FLASH),
    "kimi-k3 (without MXFP4, from descriptions)": ("kimi_k3", KIMI_K3),
    "hy4-preview": ("hy_v4", HY4_PREVIEW),
    "step-3.7-flash (text)": ("step3p7", STEP_3_7_FLASH),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS_20B),
    "olmoe-1b-7b": ("olmoe", OLMOE_1B_7B),
    "granite-3.0-1b-a400m": ("granite_moe", GRANITE_MOE_1B),
    "mamba-codestral-7b": ("mamba", CODESTRAL_MAMBA),
    "bamba-9b": ("hybrid", BAMBA_9B),
    "nemotron-h-8b": ("hybrid", NEMOTRON_H_8B),
    "nemotron-nano": ("hybrid", NEMOTRON_NANO_KEYS),
    "nemotron-3-nano": ("hybrid", NEMOTRON_3_NANO),
    "nemotron-3-super": ("hybrid", NEMOTRON_3_SUPER),
    "granite-4.0-h-tiny": ("hybrid", GRANITE_4_H_TINY),
    "falcon-h1-0.5b": ("falcon_h1", FALCON_H1_05B),
    "jamba-mini": ("jamba", JAMBA_MINI),
    "mistral-small-4 (text)": ("mistral4", MISTRAL_SMALL_4_TEXT),
    "rwkv7-1.5b-world": ("rwkv7", RWKV7_15B_WORLD),
    "mistral-large-3 (text)": ("mistral4", MISTRAL_LARGE_3_TEXT),
    "longcat-flash-chat": ("longcat_flash", LONGCAT_FLASH),
    "mistral-large-4": ("mistral_large4", MISTRAL_LARGE_4),
    "bert-base-uncased": ("bert", BERT_BASE_UNCASED),
    "bert-base-chinese": ("bert", BERT_BASE_CHINESE),
    "chinese-bert-wwm": ("bert", CHINESE_BERT_WWM),
    "modernbert-base": ("modernbert", MODERNBERT_BASE),
    "bart-base": ("bart", BART_BASE),
    "blenderbot-3b": ("bart", BLENDERBOT_3B),
    "t5-small": ("t5", T5_SMALL),
    "flan-t5-base": ("t5", FLAN_T5_BASE),
    "t5-v1_1-xxl": ("t5", T5_V11_XXL),
    "mt5-small": ("t5", MT5_SMALL),
    "umt5-base": ("t5", UMT5_BASE),
    "clip-vit-large-patch14 (vision)": ("vision", CLIP_VIT_L14_VISION),
    "siglip-base-patch16-224 (vision)": ("vision", SIGLIP_BASE_VISION),
    "llava-1.5-7b": ("llava", LLAVA_15_7B),
    "qwen2.5-vl-7b": ("qwen_vl", QWEN25_VL_7B),
    "qwen3.5-9b": ("qwen_next_vl", QWEN35_9B),
    "gemma-4-31b": ("gemma4_vl", GEMMA4_31B),
    "mistral-small-3.1": ("mistral3", MISTRAL_SMALL_31),
    "qwen3-vl-8b": ("qwen3_vl", QWEN3_VL_8B),
    "qwen3-omni-30b-a3b": ("qwen3_omni", QWEN3_OMNI_30B),
    "smolvlm2-500m": ("smolvlm", SMOLVLM_500M),
    "internvl3-1b": ("internvl", INTERNVL3_1B),
}
"""Checkpoint -> `model.family` and its config.json."""
