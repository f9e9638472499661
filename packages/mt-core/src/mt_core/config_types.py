"""Types of the values of config.json by the names of its fields, which are the same in every model_type.

A field that stands in none of the tables may have any value; the family that reads it decides. Types are those that the
configuration classes of Transformers declare, which refuse other ones, and for fields of publishers' own code those of
the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mt_core.errors import ConfigError

_INTEGERS = """
    assistant_token_id attention_context_left attention_context_right attn_layer_offset attn_layer_period
    audio_bos_token_id audio_start_token_id block_multiple_of chunk_size chunk_size_feed_forward conv_L_cache
    conv_chunksize conv_kernel conv_kernel_size d_ff d_kv d_rel decoder_sparse_step dense_intermediate_size depth
    downsample_hidden_size encoder_no_repeat_ngram_size expand expert_ffn_hidden_size expert_layer_offset
    expert_layer_period ffn_hidden_size floor_scale hc_count hc_lowrank hc_mult hc_sinkhorn_iters heads_per_ngram
    hidden_size hidden_size_per_layer_input im_end_token_id im_start_token_id image_bos_token_id image_end_token_id
    image_seq_length image_start_token_id image_token_index in_channels index_block_size index_head_dim index_kpool
    index_local_blocks index_n_heads index_topk index_topk_blocks interleave_moe_layer_step intermediate_size
    intermediate_size_mlp layer_group_size linear_conv_kernel_dim linear_head_dim linear_num_heads local_attention
    make_ngram_vocab_size_divisible_by mamba_head_dim mamba_num_heads max_position_embeddings max_source_positions
    merge_size moe_hidden_size moe_shared_expert_intermediate_size n_embd n_groups n_head n_layer n_positions
    n_window n_window_infer ngram_size ngram_vocab_size_base no_rope_layer_interval num_attention_heads num_channels
    num_heads num_hidden_layers num_kv_shared_layers num_layers num_mel_bins num_nextn_predict_layers
    num_position_embeddings o_groups o_lora_rank original_max_position_embeddings out_hidden_size output_dim
    output_proj_dims ple_conv_kernel_size pooling_kernel_size pos_emb_height pos_emb_time pos_emb_width
    position_embedding_size position_id_per_seconds projector_hidden_size rel_extent relative_attention_max_distance
    relative_attention_num_buckets rotary_dim scale_factor seed share_expert_dim shared_expert_intermediate_size
    shared_intermediate_size short_conv_kernel_size sliding_window_size sparse_pred_ignore_index spatial_merge_size
    split_ngram_parts ssm_state_size state_size swa_head_dim swa_num_attention_heads swa_num_key_value_heads
    system_token_id text_hidden_size tokens_per_second tts_bos_token_id tts_eos_token_id tts_pad_token_id
    type_vocab_size user_token_id video_end_token_id video_start_token_id video_token_index vision_end_token_id
    vision_start_token_id vocab_size vocab_size_per_layer_input window_size zero_expert_num
"""
_INTEGERS_OR_NULL = """
    a_low_rank_dim attention_chunk_size audio_token_id block_ff_dim boa_token_id boi_token_id bos_token_id
    cls_token_id compress_rate_csa compress_rate_hca d_model decay_low_rank_dim decoder_attention_heads
    decoder_ffn_dim decoder_layers decoder_start_token_id encoder_attention_heads encoder_ffn_dim encoder_layers
    eoa_token_index eod_token_id eoi_token_id expert_hidden_dim experts_per_token first_k_dense_replace
    full_attention_interval gate_low_rank_dim global_attn_every_n_layers global_head_dim head_dim image_token_id
    index_skip_topk_offset index_topk_freq indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads
    indexer_n_heads kv_lora_rank linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim log_scaling_n_floor mamba_chunk_size mamba_d_conv mamba_d_ssm mamba_d_state mamba_expand
    mamba_n_groups mamba_n_heads max_window_layers moe_k moe_latent_size moe_layer_end_index moe_layer_interval
    moe_layer_start_index moe_num_experts moe_num_shared_experts moe_top_k mtp_num_hidden_layers n_embed n_group
    n_inner n_routed_experts n_shared_experts num_attention_groups num_decoder_layers num_dense_layers
    num_expert_group num_experts num_experts_per_tok num_experts_per_token num_global_key_value_heads
    num_hash_layers num_key_value_heads num_labels num_local_experts num_logits_to_keep num_mtp_layers
    num_shared_experts num_sliding_attention_heads pad_token_id ple_embed_dim pretraining_tp projection_dim
    projection_hidden_size q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim sconv_kernel_size sep_token_id
    sliding_window swa_v_head_dim top_k_experts topk_group unpadded_vocab_size v_head_dim v_low_rank_dim
    video_token_id
"""
_NUMBERS = """
    attention_invalid_logits_value attention_logit_cap attention_probs_dropout_prob attn_pdrop attn_scale
    block_ffn_dim_multiplier compress_rope_theta downsample_ratio dropout_rate embd_pdrop embedding_dropout
    gradient_clipping hc_eps hc_magnitude hidden_dropout hidden_dropout_prob initializer_cutoff_factor
    kda_lower_bound layer_norm_eps layer_norm_epsilon layer_scale_init_value learnable_sink_init linear_a_log_max
    linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min log_scaling_alpha logits_mup_width_multiplier
    mlp_dropout moe_router_scaling_factor mtp_loss_scaling_factor norm_eps output_multiplier post_norm_eps
    projection_dropout projection_layer_norm_eps qk_scale_factor resid_pdrop residual_dropout
    residual_gate_temperature residual_weight rms_norm_eps rms_norm_eps_moe_gate router_jitter_noise
    router_scaling_factor summary_first_dropout swiglu_alpha swiglu_limit time_step_floor time_step_max
    time_step_min
"""
_NUMBERS_OR_NULL = """
    activation_dropout attention_dropout attention_factor attention_in_multiplier attention_multiplier
    attention_out_multiplier attention_value_scale attn_logit_softcapping aux_loss_alpha beta_fast beta_slow
    classifier_dropout clip_qkv decoder_layerdrop dropout embedding_multiplier encoder_layerdrop factor
    final_logit_softcapping global_rope_theta hidden_ratio high_freq_factor init_std initializer_factor
    initializer_range key_multiplier layernorm_epsilon linear_lower_bound llama_4_scaling_beta lm_head_multiplier
    local_rope_theta logit_scale_init_value logits_scaling low_freq_factor moe_norm_min mscale mscale_all_dim
    partial_rotary_factor query_pre_attn_scalar residual_multiplier rope_local_base_freq rope_percent
    rotary_emb_base rotary_pct rotary_percent route_scale routed_scaling_factor router_aux_loss_coef
    ssm_in_multiplier ssm_out_multiplier swa_rope_theta z_loss_coefficient
"""
_FLAGS = """
    add_cross_attention apply_residual_connection_post_layernorm attention_k_eq_v attention_out_bias
    attention_softmax_in_fp32 attn_temperature_tuning block_auto_adjust_ff_dim chain_hidden_post_norm
    classifier_bias conv_bias decoder_bias deterministic_flash_attn enable_audio_output enable_moe_block
    enable_moe_fp32_combine index_kpool_always_select_tail kda_safe_gate linear_allow_neg_eigval mlp_bias
    moe_shared_expert_overlap mtp_hidden_states_first multi_query multimodal_projector_bias norm_bias projector_bias
    qkv_bias reorder_and_upcast_attn rescale_prenorm_residual residual_in_fp32 scale_attention_softmax_in_fp32
    scale_attn_by_inverse_layer_idx scale_attn_weights shared_expert_sink slow_but_exact sparse_prediction
    standardize summary_proj_to_labels summary_use_proj tie_word_embeddings use_absolute_position_embeddings
    use_associative_scan use_attention_gate use_clipped_linears use_conv_bias use_double_wide_mlp use_expert_bias
    use_mamba_kernels use_mambapy use_mask_token use_mean_pooling use_parallel_residual use_qk_norm
    use_sandwich_norm vision_use_head
"""
_FLAGS_OR_NULL = """
    add_pooling_layer attention_bias is_decoder is_encoder_decoder is_gated_act mamba_conv_bias
    mamba_norm_before_gate mamba_proj_bias mamba_rms_norm moe_renormalize moe_router_enable_expert_bias
    mrope_interleaved mup_enabled norm_topk_prob output_hidden_states output_router_logits projectors_bias
    return_dict rope_interleave scale_decoder_outputs scale_embedding seq_aux tie_embedding truncate use_bias
    use_cache use_sliding_window
"""
_TEXTS = """
    classifier_activation classifier_pooling feed_forward_proj hidden_act hidden_activation mamba_hidden_act
    mamba_ssm_cache_dtype mlp_hidden_act norm_type projector_hidden_act scoring_func summary_type
    vision_feature_select_strategy
"""
_TEXTS_OR_NULL = """
    activation_function dense_act_fn hybrid_override_pattern mtp_hybrid_override_pattern output_gate_type
    position_embedding_type problem_type rope_type summary_activation topk_method transformers_version
"""
_LISTS_OF_INTEGERS = """
    attn_layer_indices compress_ratios full_attn_idxs hybrid_layer_pattern kv_source_layers local_layer_ids
    mlp_only_layers moe_layers mrope_section mtp_local_layer_ids no_rope_layers ple_layer_ids
"""
_LISTS_OF_NUMBERS = """
    layer_rope_theta long_factor mlp_multipliers partial_rotary_factors short_factor ssm_multipliers swiglu_limits
    swiglu_limits_shared
"""
_LISTS_OF_TEXTS = """
    indexer_types layer_types layers_block_type mlp_layer_types mtp_layer_types mtp_layers_block_type
    mtp_mlp_layer_types
"""
_OBJECTS = """
    code2wav_config compress_rates full_attention id2label label2id linear_attn_config per_layer_config
    rope_parameters rope_scaling sliding_attention sparse_attention_config talker_config
"""
_COUNTS = """
    d_kv decoder_attention_heads decoder_layers depth encoder_attention_heads encoder_layers experts_per_token
    global_head_dim hc_count hc_mult hc_sinkhorn_iters head_dim heads_per_ngram index_head_dim index_n_heads
    indexer_head_dim indexer_kv_heads indexer_n_heads linear_head_dim linear_key_head_dim linear_num_heads
    linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_d_head mamba_head_dim mamba_n_groups
    mamba_n_heads mamba_num_heads moe_k moe_num_experts moe_num_shared_experts moe_top_k moe_topk
    mtp_num_hidden_layers n_group n_groups n_head n_layer n_routed_experts n_shared_experts ngram_size
    num_attention_groups num_attention_heads num_decoder_layers num_dense_layers num_expert_group num_experts
    num_experts_per_tok num_experts_per_token num_global_key_value_heads num_hash_layers num_heads num_hidden_layers
    num_key_value_heads num_kv_shared_layers num_layers num_local_experts num_mtp_layers num_nextn_predict_layers
    num_shared_experts num_sliding_attention_heads o_groups qk_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim
    split_ngram_parts swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_v_head_dim top_k_experts
    topk_group v_head_dim zero_expert_num
"""
MOST = 100_000
"""Layers, heads, experts and channels of a head that a model can have: what has one entry for each does not end with
more."""


@dataclass(frozen=True)
class ValueType:
    """words: what the value can be, as a message says it. takes: whether a value is of the type; null is not."""

    words: str
    takes: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(takes: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    # Lists by layer may have null for a layer that has none.
    return lambda value: (
        isinstance(value, list | tuple)
        and len(value) >= least
        and all(entry is None or takes(entry) for entry in value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


INTEGER, NUMBER = ValueType("an integer", _is_integer), ValueType("a number", _is_number)
FLAG, TEXT = ValueType("true or false", _is_flag), ValueType("a text", _is_text)
OBJECT = ValueType("a JSON object", lambda value: isinstance(value, Mapping))
INTEGERS = ValueType("a list of integers", _is_list(_is_integer))
NUMBERS = ValueType("a list of numbers", _is_list(_is_number))
TEXTS = ValueType("a list of texts", _is_list(_is_text))
SIZES = ValueType("a list of integers", _is_list(_is_integer, least=1))
BASES = ValueType("a list of numbers", _is_list(_is_number, least=1))

_TABLES: tuple[tuple[str, tuple[ValueType, ...], bool], ...] = (
    (_INTEGERS, (INTEGER,), False),
    (_INTEGERS_OR_NULL, (INTEGER,), True),
    (_NUMBERS, (NUMBER,), False),
    (_NUMBERS_OR_NULL, (NUMBER,), True),
    (_FLAGS, (FLAG,), False),
    (_FLAGS_OR_NULL, (FLAG,), True),
    (_TEXTS, (TEXT,), False),
    (_TEXTS_OR_NULL, (TEXT,), True),
    (_LISTS_OF_INTEGERS, (INTEGERS,), True),
    (
        "deepstack_visual_indexes depths fullatt_block_indexes hidden_sizes merge_kernel_size patch_sizes "
        "subsampling_conv_channels",
        (INTEGERS,),
        False,
    ),
    (_LISTS_OF_NUMBERS, (NUMBERS,), True),
    (_LISTS_OF_TEXTS, (TEXTS,), True),
    (_OBJECTS, (OBJECT,), True),
    ("mamba_dt_rank time_step_rank", (INTEGER, TEXT), False),
    ("mamba_d_head sliding_window_pattern", (INTEGER, TEXT), True),
    ("eos_token_id forced_eos_token_id", (INTEGER, INTEGERS), True),
    ("moe_intermediate_size", (INTEGER, SIZES), True),
    ("image_size moe_topk patch_size temporal_patch_size vision_feature_layer", (INTEGER, SIZES), False),
    ("rope_theta", (NUMBER, BASES), True),  # a list has one for each layer
)
"""(names of fields, types of their values, whether null stands for a default)."""


@dataclass(frozen=True)
class FieldType:
    types: tuple[ValueType, ...]
    nullable: bool

    def takes(self, value: Any) -> bool:
        return self.nullable if value is None else any(known.takes(value) for known in self.types)

    def __str__(self) -> str:
        return " or ".join([known.words for known in self.types] + ["null"] * self.nullable)


FIELD_TYPES: Mapping[str, FieldType] = {
    name: FieldType(types, nullable) for names, types, nullable in _TABLES for name in names.split()
}


def require_types(external: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the field with the path to it, for a value of another type than its field has,
    and for more layers, heads and the like than any model has."""
    for within, name, value in _fields(external):
        known = _type_of(within, name)
        if known is not None and not known.takes(value):
            shown = "null" if value is None else f"{value!r:.80}"
            raise ConfigError(f"{within}{name}={shown} is not supported; it can be {known}")
        if _is_integer(value) and ((name in _COUNTED and value > MOST) or (value < 0 and _is_size(name))):
            most = f" and at most {MOST}" if name in _COUNTED else ""
            raise ConfigError(f"{within}{name}={value} is not supported; it can be at least 0{most}")


def _fields(external: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path to the table, name, value) of each field, and of those of configurations within it."""
    for name, value in external.items():
        yield within, name, value
        if isinstance(value, Mapping) and _has_fields(name, within):
            yield from _fields(value, f"{within}{name}.")


_COUNTED = frozenset(_COUNTS.split())
_SIZES = ("_size", "_dim", "_rank", "_embeddings", "_positions")
_ROPE = ("rope_parameters", "rope_scaling")
_PER_LAYER = "per_layer_config"
_STORAGE = ("quantization", "compression")


def _is_size(name: str) -> bool:
    # A window or chunk of -1 may stand for none.
    is_any = name in FIELD_TYPES and name.endswith(_SIZES) and "window" not in name and "chunk" not in name
    return is_any or name in _COUNTED


def _has_fields(name: str, within: str) -> bool:
    # Tables of RoPE and of layers may have one for each type of layer or layer. How tensors are stored is not the
    # model's.
    inner = within.rstrip(".").rpartition(".")[2] in (*_ROPE, _PER_LAYER)
    return inner or name in _ROPE or (name.endswith("_config") and not name.startswith(_STORAGE))


def _type_of(within: str, name: str) -> FieldType | None:
    tables = within.rstrip(".").split(".")
    if tables[-1] == _PER_LAYER:
        return FieldType((OBJECT,), nullable=False)
    known = FIELD_TYPES.get(name)
    # Null beside a model's sizes is a default; no program computes rotations with it.
    if known is not None and name in ("rope_theta", "partial_rotary_factor", "truncate") and {*tables} & {*_ROPE}:
        return replace(known, nullable=False)
    return known
