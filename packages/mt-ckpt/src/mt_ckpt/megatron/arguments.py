"""Megatron's arguments, which its checkpoints contain.

All of them are kept as they are in the reader's metadata under `megatron.args`. What they mean for the model is in
`families`, what they say of the run in `run_arguments`; below every one of them is listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from mt_core.config_map import MegatronArguments
from mt_core.errors import ConfigError


class Arguments(MegatronArguments):
    """Megatron's arguments, with those of the layout."""

    @property
    def tensor_parallel(self) -> int:
        # model_parallel_size is the name in Megatron-LM before pipeline parallelism.
        return int(self.get("tensor_model_parallel_size", self.get("model_parallel_size", 1)))

    @property
    def pipeline_parallel(self) -> int:
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def expert_parallel(self) -> int:
        return int(self.get("expert_model_parallel_size", 1))

    @property
    def expert_tensor_parallel(self) -> int:
        return int(self.get("expert_tensor_parallel_size", self.tensor_parallel))


# -- how every argument is handled: read, required to have one value, or ignored for a reason --------
#
# The reasons are for arguments that change neither what the stored tensors are nor what the model computes with them.
# An argument that is in none of the tables is of a newer version; it is kept, and named in the metadata.

ZERO_CENTERED = (
    "norm weights stored less one (adding the one would round them, and of our families only gemma, which Megatron "
    "does not have, keeps them so)"
)
REQUIRED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "multi_latent_attention": ((False,), "multi-latent attention"),
    "experimental_attention_variant": ((None,), "an experimental attention"),
    "linear_attention_freq": ((None,), "linear attention"),
    "mtp_num_layers": ((None, 0), "multi-token prediction"),
    "mtp_hybrid_override_pattern": ((None,), "multi-token prediction with Mamba layers"),
    "is_hybrid_model": ((False,), "a hybrid of attention and Mamba layers"),
    "hybrid_layer_pattern": ((None,), "a hybrid of attention and Mamba layers"),
    "hybrid_override_pattern": ((None,), "a hybrid of attention and Mamba layers"),
    "heterogeneous_layers_config_path": ((None,), "layers of different shapes"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers of different shapes"),
    "apply_residual_connection_post_layernorm": ((False,), "a residual taken behind the norm"),
    "layernorm_zero_centered_gamma": ((False,), ZERO_CENTERED),
    "apply_layernorm_1p": ((False,), ZERO_CENTERED),
    "softmax_type": (("vanilla", None), "a softmax with a sink"),
    "quick_geglu": ((False,), "the gated quick GELU"),
    "glu_linear_offset": ((0, 0.0, None), "an offset in the gated activation"),
    "activation_func_clamp_value": ((None,), "clamped activations"),
    "qk_l2_norm": ((False,), "queries and keys normalized without weights"),
    "attention_output_gate": ((False,), "a gate on the attention's output"),
    "no_rope_freq": ((None,), "layers without positions"),
    "use_mup": ((False,), "maximal-update scaling"),
    "mrope_section": ((None,), "multimodal rotary positions"),
    "enable_mhc_connections": ((False,), "hyper-connections"),
    "enable_hyper_connections": ((False,), "hyper-connections"),
    "moe_mlp_glu_interleave_size": ((None,), "gate and up rows in turns"),
    "moe_shared_expert_glu_interleave_size": ((None,), "gate and up rows of shared experts in turns"),
    "moe_expert_rank_capacity_factor": ((None,), "a capacity of each rank"),
    "moe_router_force_biased": ((None,), "router logits with a bias that forces a choice"),
    "retro_add_retriever": ((False,), "retrieval (RETRO)"),
    "enable_gpt_oss": ((False,), "positions that ModelOpt's scripts set beside the arguments"),
}
"""Argument -> values that our families mean, and what another one stands for."""


READ = (
    # the model
    *("num_layers", "encoder_num_layers", "decoder_num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"),
    *("num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings", "rotary_base"),
    *("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
    *("rope_scaling_factor", "rope_type", "relative_attention_num_buckets", "relative_attention_max_distance"),
    *("normalization", "norm_epsilon", "layernorm_epsilon", "qk_layernorm", "swiglu", "squared_relu", "openai_gelu"),
    *("bias_gelu_fusion", "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights", "window_size"),
    *("window_attn_skip_freq", "hidden_dropout", "attention_dropout", "init_method_std", "fp32_residual_connection"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor"),
    *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim"),
    *(
        "yarn_correction_range_round_to_int",
        "mtp_loss_scaling_factor",
        "mtp_use_repeated_layer",
        "mtp_detach_heads",
        "mtp_hsm",
    ),
    *("mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_num_heads", "hybrid_attention_ratio"),
    *("hybrid_mlp_ratio", "make_vocab_size_divisible_by", "transformer_impl"),
    *("mup_base_hidden_size", "mup_width_mult", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim"),
    "mup_attn_scale_power",
    *("mhc_num_residual_streams", "num_residual_streams", "mhc_sinkhorn_iterations", "mhc_init_gating_factor"),
    "mhc_single_pass",
    # MoE
    *("num_experts", "moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_load_balancing_type"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_token_drop_policy", "moe_expert_capacity_factor"),
    *("moe_pad_expert_input_to_capacity", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_latent_size", "moe_input_jitter_eps", "moe_apply_probs_on_input"),
    # the run
    *("seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "micro_batch_size"),
    *("global_batch_size", "rampup_batch_size", "train_samples", "train_iters", "seed", "consumed_train_samples"),
    *("params_dtype", "bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
    *("hysteresis", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "optimizer", "lr", "min_lr"),
    *("decoupled_lr", "decoupled_min_lr", "clip_grad", "weight_decay", "weight_decay_incr_style"),
    *("start_weight_decay", "end_weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
    *("lion_beta1", "lion_beta2", "muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_coefficient_type"),
    *("muon_scale_mode", "muon_extra_scale_factor", "muon_split_qkv", "muon_fp32_matmul_prec"),
    *("muon_scalar_optimizer", "lr_decay_style", "lr_warmup_init", "lr_warmup_fraction", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    *("lr_wsd_decay_samples", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "distribute_saved_activations", "tokenizer_type", "vocab_file", "merge_file"),
    *("tokenizer_model", "null_tokenizer_eod_id", "padded_vocab_size"),
    # its layout
    *("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size", "data_parallel_size"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "ddp_bucket_size", "ddp_pad_buckets_for_high_nccl_busbw"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Arguments that define the model or the sharding of its tensors, or that our other sections have too."""

IGNORED: Mapping[str, tuple[str, ...]] = {
    "how work is shared, sent and overlapped; the tensors themselves show how they were divided": (
        *(
            "tp_comm_*",
            "*_comm_*",
            "*overlap*",
            "sequence_parallel",
            "hierarchical_context_parallel_sizes",
            "world_size",
        ),
        *("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "*_weight_shards", "*gtp_*", "local_rank", "rank"),
        *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "variable_seq_lengths"),
        *("num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_*", "transformer_pipeline_model_*"),
        *("mtp_standalone", "moe_token_dispatcher_type", "moe_flex_*", "moe_deepep_*", "moe_hybridep_*"),
        *("moe_ncclep_*", "moe_enable_deepep", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype", "*sharp*", "ddp_*"),
        *("moe_permute_fusion_into_hybridep", "align_*_gather", "align_grad_reduce", "lazy_mpu_init", "*_fsdp*"),
        *("*fsdp_*", "use_torch_fsdp2", "*_nccl_ub", "nccl_*", "high_priority_*", "use_*_mapping", "distributed_*"),
        *("use_gloo_process_groups", "disable_gloo_process_groups", "data_parallel_sharding_strategy", "use_ring_*"),
        *("outer_dp_sharding_strategy", "gradient_reduce_div_fusion", "*layer_wise*", "num_distributed_*"),
        *("create_all_gather_group", "disable_symmetric_registration", "suggested_communication_unit_size"),
        *("enable_full_sharding_in_hsdp", "fake_process_group", "cp_comm_type", "*wgrad_compute", "wgrad_*_limit"),
        *("flight_recorder_*", "symmetric_ar_type", "pipeline_model_parallel_comm_backend"),
    ),
    "another implementation of the same computation": (
        *("*_fusion", "*_fusion_impl", "*_fuser", "fused_*", "use_fused_*", "attention_backend", "use_flash_attn"),
        *("*flash_*", "*kitchen*", "use_te_activation_func", "*grouped_gemm*", "moe_use_grouped_tensor"),
        *("moe_single_grouped_*", "moe_router_padding_for_*", "use_mamba_mem_eff_path", "disable_mamba_mem_eff_path"),
        *("deterministic_mode", "batch_invariant_*", "*cuda_graph*", "no_persist_layer_norm", "mlp_chunks_*"),
        *("deprecated_use_mcore_models", "use_mcore_models", "use_legacy_models", "spec", "apply_rope_fusion"),
        *("cache_mla_latents", "moe_pad_experts_*", "onnx_safe", "use_transformer_engine_op_fuser"),
    ),
    "how exactly numbers are computed, not which": (
        *("fp8*", "fp4*", "first_last_layers_bf16", "num_layers_at_*_in_bf16", "te_precision_config_file"),
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp16_lm_cross_entropy", "*_ssm_states_dtype"),
        *("*_conv_states_dtype", "output_logit_dtype", "disable_bf16_reduced_precision_matmul"),
        *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
        *("exp_avg_sq_dtype", "keep_fp8_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag", "*_in_bf16"),
    ),
    "what is kept in memory, and where": (
        *("*offload*", "pin_cpu_*", "moe_paged_stash*", "moe_layer_recompute", "checkpoint_activations", "load_main_*"),
        *("recompute_activations", "empty_unused_memory_level", "clone_scatter_output_in_embedding", "manual_gc*"),
    ),
    "initial weights, which training has changed": (
        *("init_model_with_*", "init_method_xavier_uniform", "embedding_init_method_std", "use_cpu_initialization"),
        *("perform_initialization", "data_parallel_random_init", "moe_use_upcycling"),
        *("moe_upcycling_granularity", "*_rng_tracker"),
    ),
    "training beside what our sections say; a resumed run is described by its own configuration": (
        *("qk_clip*", "calculate_per_token_loss", "freeze_all_layers", "iterations_to_skip", "skip_train", "test_mode"),
        *("step_batch_size_schedule", "decrease_batch_size_if_needed", "batch_size", "train_sync_interval"),
        *("check_*", "gpu_sniff_test_interval", "exit_*", "iteration", "consumed_valid_samples", "skipped_*"),
        *("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type", "muon_tp_mode", "muon_use_syrk", "warmup"),
        *("optimizer_*", "dump_param_to_param_group_map", "override_opt_param_scheduler", "moe_router_quantile_*"),
        *("use_checkpoint_opt_param_scheduler", "moe_router_force_load_balancing", "moe_enable_routing_replay"),
        *("eval_*", "start_eval_at_iter", "full_validation", "*validation_set*", "result_rejected_*", "logits_*"),
        *("dataloader_type", "_is_global_batch_size_explicitly_specified", "delta_*", "config_logger_dir"),
    ),
    "data": (
        *("*data_path", "data_*_path", "*data_args_path", "split", "per_dataset_*", "dataloader_*", "mmap_bin_files"),
        *("mock_data", "encoder_seq_length", "decoder_seq_length", "sample_rate", "mask_prob", "short_seq_prob"),
        *("num_workers", "create_attention_mask_in_dataloader", "num_dataset_builder_threads", "object_storage_*"),
        *("mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "fim_*", "sft*", "phase_transition_iterations"),
        *("*_msc*", "metadata_path", "classes_fraction"),
    ),
    "the tokenizer beside its files": (
        *("pad_vocab_size", "vocab_extra_ids", "tokenizer_*", "tiktoken_*", "trust_remote_code", "null_tokenizer_*"),
        *("chat_template", "use_gigatoken", "special_tokens"),
    ),
    "how checkpoints are written and found": (
        *("save*", "load", "*ckpt*", "*checkpoint*", "finetune", "no_save_*", "no_load_*", "non_persistent_*"),
        *("async_*", "replication*", "verify_integrity", "dist_ckpt_*", "distrib_optim_*", "yaml_cfg", "strict_fsdp_*"),
    ),
    "records, profiles and diagnoses": (
        *("log_*", "logging_level", "tensorboard_*", "wandb_*", "timing_*", "*one_logger*", "otel_*", "app_tag_*"),
        *("profile*", "*pytorch_profiler*", "record_*", "memory_snapshot_path", "nvtx_ranges", "*straggler*"),
        *("barrier_with_*", "moe_per_layer_logging", "moe_routing_trace_*", "run_workload_inspector_server"),
    ),
    "restarts after faults": (
        *("inprocess_*", "adlr_*", "*ft_*", "error_injection_*", "rerun_mode", "fault_injector_*"),
    ),
    "serving": (
        *("*inference*", "max_tokens_to_oom", "output_bert_embeddings", "bert_embedder_type", "decode_only_*"),
        *("enable_chunked_prefill", "num_speculative_tokens", "use_legacy_static_engine"),
        *("offset_sampling_seed_by_dp_rank", "use_same_sampling_seed_across_dp_ranks", "stream_ckpt_dequant"),
    ),
    "reinforcement learning": ("rl_*", "grpo_*", "langrl_*", "perform_rl_step", "refit_method"),
    "a part that the model only has with an argument that is refused": (
        *("dsa_*", "linear_*", "mhc_*", "gdp_*", "enable_experimental", "bert_binary_head"),
    ),
    "models that Megatron has no longer": (
        *("ict_*", "biencoder_*", "bert_load", "titles_data_path", "query_in_block_prob", "use_one_sent_docs"),
        *("evidence_data_path", "retriever_*", "block_data_path", "embedding_path", "indexer_*", "num_classes"),
        *("img_*", "num_channels", "patch_dim", "head_lr_mult", "vision_*", "swin_*", "mask_type", "mask_factor"),
        *("iter_per_epoch", "dino_*", "data_sharding", "data_per_class_fraction", "retro_*"),
    ),
}
"""Why -> names, or patterns of names, of arguments that are not read."""


@lru_cache(maxsize=1024)  # some hundred arguments against some hundred patterns, again for each checkpoint
def reason_ignored(name: str) -> str | None:
    """Why an argument is not read; None for one that is read, required or not known."""
    # First, since patterns of IGNORED match arguments that are read: overlap_grad_reduce is in READ, *overlap* is not.
    if name in READ or name in REQUIRED:
        return None
    return next((why for why, names in IGNORED.items() if any(fnmatchcase(name, entry) for entry in names)), None)


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Those that no table has."""
    return sorted(name for name in names if name not in READ and name not in REQUIRED and reason_ignored(name) is None)


def refuse_others(args: MegatronArguments, read: Collection[str] = ()) -> None:
    """read: arguments that the family gives a meaning to. Raises ConfigError for one whose value no family reads."""
    for name, (allowed, meaning) in REQUIRED.items():
        if name in args.values and name not in read and args.values[name] not in allowed:
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]!r} stands for {meaning}, which is not read from Megatron's "
                f"formats for this kind of model; it can be {' or '.join(repr(value) for value in allowed)}"
            )
