"""Every field of every configuration of `transformers`, changed by itself: the same function, or refused by name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("transformers")

from tests.ckpt.config_sweep import FAILURES, Judged, Outcome, Sweep, quiet
from tests.ckpt.config_values import Path as FieldPath
from tests.ckpt.family_cases import Case, model_type_of
from tests.ckpt.larger_classes import SWEEP_CASES

from mt_core.plugins import load_plugins
from mt_core.specs import MODELS

MAX_HARMLESS_SHARE = 0.02
"""Of all values of one case for each configuration, those that are refused although they change nothing."""
NOT_SWEPT = {
    "step3p5": "step3p7's text_config as a file of its own, for which transformers has no class with a head",
    "kimi_k2": "deepseek_v3, under another name, for which transformers has no class",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker with a talker, whose class has no forward pass",
    "rwkv7": "transformers has no class for it; tests/models/test_rwkv7.py compares it with formulas",
    "kimi_k3": "transformers has no class for it; tests/models/test_kimi_k3.py compares it with formulas",
}
"""Types of a family that no case has: why."""
OF_MT = {("t5", "blenderbot")}
"""What mt alone writes: a T5 whose two tables of positions are one."""


ASKED_FOR_ELSEWHERE = {
    "output_router_logits": "a class adds the loss of balance only where logits of routers are asked for; mt trains "
    "with the coefficient of config.json, which model.moe.moe_aux_loss_coeff changes",
}
"""Fields that may act otherwise in training: why."""


def one_case_for_each(key: Callable[[Case], Hashable]) -> list[str]:
    found: dict[Hashable, str] = {}
    for name, case in SWEEP_CASES.items():
        found.setdefault(key(case), name)
    return list(found.values())


SWEPT = one_case_for_each(lambda case: (case.family, case.config, case.model))
CONFIGURATIONS = one_case_for_each(lambda case: case.config)


@cache
def all_judged(name: str) -> list[Judged]:
    with TemporaryDirectory() as folder, quiet():
        sweep = Sweep(name, Path(folder), load_plugins())
        return [sweep.judge(path, value) for path, value in sweep.changes()]


def failures(judged: list[Judged]) -> list[str]:
    return [
        str(one)
        for one in judged
        if one.outcome in FAILURES
        and not (one.outcome == Outcome.SILENT_IN_TRAINING and one.path[-1] in ASKED_FOR_ELSEWHERE)
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_every_field_changed_by_itself(name: str) -> None:
    assert failures(all_judged(name)) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_few_harmless_values_are_refused() -> None:
    judged = {name: all_judged(name) for name in CONFIGURATIONS}
    refused = Counter(
        name for name, values in judged.items() for value in values if value.outcome == Outcome.REFUSED_HARMLESS
    )
    assert refused.total() < MAX_HARMLESS_SHARE * sum(map(len, judged.values())), refused


# -- a part of it by default ---------------------------------------------------------------------------

TELLING = {
    "llama": ("rope_parameters", "rope_scaling", "max_position_embeddings", "head_dim"),
    "gpt_oss": ("rope_parameters",),
    "gemma3": ("attn_logit_softcapping", "rope_scaling"),
    "gpt_neox": ("rope_parameters", "rotary_pct"),
    "nemotron": ("rope_parameters", "rope_scaling"),
    "t5": (
        "dense_act_fn",
        "feed_forward_proj",
        "is_gated_act",
        "relative_attention_max_distance",
        "tie_word_embeddings",
    ),
    "qwen3_next": ("layer_types", "rope_parameters", "norm_topk_prob", "linear_conv_kernel_dim"),
    "qwen3_5_text": ("layer_types", "rope_parameters", "attention_bias", "head_dim"),
    "gemma4_text": ("layer_types", "rope_parameters", "num_kv_shared_layers", "per_layer_config", "head_dim"),
    "gemma4 with pictures, large": ("use_bidirectional_attention", "standardize", "pooling_kernel_size"),
    "minimax_m3_vl": ("spatial_merge_size", "rope_parameters", "tie_word_embeddings", "projector_hidden_size"),
    "gemma4 with sound": ("attention_context_right", "subsampling_conv_channels", "attention_chunk_size"),
    "kimi_k25": ("pos_emb_height", "merge_kernel_size", "projection_layer_norm_eps", "n_group"),
    "mistral3": ("hidden_act", "spatial_merge_size", "vision_feature_layer", "head_dim"),
    "qwen3_vl": ("rope_parameters", "deepstack_visual_indexes", "num_position_embeddings", "out_hidden_size"),
    "qwen3_omni_moe_thinker": ("n_window", "n_window_infer", "num_mel_bins", "activation_function", "norm_topk_prob"),
    "olmo_hybrid": ("layer_types", "rope_parameters", "linear_allow_neg_eigval", "num_key_value_heads"),
    "mamba2": ("rescale_prenorm_residual",),
    "deepseek_v3": ("n_group", "topk_group", "head_dim", "num_nextn_predict_layers"),
    "deepseek_v32": ("mlp_layer_types", "layer_types", "index_topk", "head_dim", "first_k_dense_replace"),
    "glm_moe_dsa": ("indexer_types", "mlp_layer_types", "n_group", "rope_parameters"),
    "deepseek_v4": ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"),
    "minimax_m3_vl_text": ("layer_types", "mlp_layer_types", "index_n_heads", "rotary_dim", "rope_parameters"),
    "kimi_linear": ("layer_types", "mlp_layer_types", "rope_parameters", "linear_head_dim"),
    "qwen4_exp_text": (
        "indexer_n_heads",
        "layer_types",
        "ple_layer_ids",
        "eos_token_id",
        "seed",
        "indexer_budget",
        "output_gate_type",
    ),
    "muse_glimmer": ("layer_types", "layer_rope_theta", "sliding_window", "rope_parameters", "post_norm_eps"),
    "step3p7": ("layer_types", "mlp_layer_types", "per_layer_config", "rope_parameters", "swiglu_limits"),
    "muse_spark": ("layer_types", "layer_rope_theta", "rope_parameters", "mlp_layer_types", "moe_hidden_size"),
    "inkling_text": ("layer_types", "mlp_layer_types", "local_layer_ids", "swa_head_dim", "log_scaling_n_floor"),
    "hy_v3": ("mlp_layer_types", "num_shared_experts", "first_k_dense_replace", "rope_parameters"),
    "hy_v4": ("mlp_layer_types", "indexer_types", "rope_parameters", "n_group", "swiglu_limit"),
    "nemotron_h with experts": ("moe_latent_size", "n_shared_experts", "mtp_layers_block_type", "n_group"),
    "granitemoehybrid with experts": ("num_local_experts", "intermediate_size", "shared_intermediate_size"),
    "falcon_h1": ("mamba_rms_norm", "mamba_d_ssm", "head_dim", "rope_parameters", "ssm_multipliers"),
    "mistral4": ("rope_parameters", "norm_topk_prob", "n_group", "first_k_dense_replace", "rope_interleave"),
    "jamba": ("attn_layer_offset", "expert_layer_period", "mamba_dt_rank", "num_experts"),
    "glm4_moe_lite": ("mlp_layer_types", "rope_parameters", "rope_interleave", "q_lora_rank"),
    "bart": ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "hidden_size"),
    "mixtral": ("router_jitter_noise", "attention_dropout"),
    "bert classes": ("num_labels", "chunk_size_feed_forward"),
}
"""Fields of which some values were once read as something else, or ended in a traceback."""
OF_EACH = 2
"""Of the values of each of them, spread over all, so many are tried, and of all fields of a case together."""


def spread(changes: list[tuple[FieldPath, object]], number: int) -> list[tuple[FieldPath, object]]:
    return changes[:: max(1, -(-len(changes) // number))]


def telling(changes: list[tuple[FieldPath, object]]) -> list[tuple[FieldPath, object]]:
    """Some values of a field, empty tables among them, which are as false as a field that is missing."""
    chosen = spread(changes, OF_EACH)
    return chosen + [change for change in changes if change[1] == {} and change not in chosen]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", TELLING)
def test_telling_fields_changed_by_themselves(host, tmp_path: Path, name: str) -> None:
    with quiet():
        sweep = Sweep(name, tmp_path, host)
        by_field = defaultdict(list)
        for path, value in sweep.changes():
            by_field[path[-1]].append((path, value))
        chosen = spread([change for changes in by_field.values() for change in changes], OF_EACH)
        chosen += [change for field in TELLING[name] for change in telling(by_field[field])]
        assert set(TELLING[name]) <= set(by_field)
        assert failures([sweep.judge(path, value) for path, value in chosen]) == []


MEDIA = {
    "gemma4 without its tower": ("image_token_id", "video_token_id", "audio_token_id"),
    "gemma4 with pictures": ("video_token_id", "audio_token_id"),
    "kimi_k25 without its tower": ("image_token_id", "video_token_id"),
    "kimi_k25": ("video_token_id",),
}
"""Fields of tokens in whose place media would be, and which classes embed as another token in a text without them."""
IN_TEXT = 1
"""A token of the inputs of these cases."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIA)
def test_tokens_of_media_in_a_text_without_them(host, tmp_path: Path, name: str) -> None:
    with quiet():
        sweep = Sweep(name, tmp_path, host)
        outcomes = [sweep.judge((key,), IN_TEXT).outcome for key in MEDIA[name]]
    # The class computes something else, and mt the same.
    assert outcomes == [Outcome.SAME] * len(outcomes)


def test_every_type_of_every_family_has_a_case(host) -> None:
    """A new family is swept as soon as it has a case, which it needs for its conversion too."""
    maps = {spec.name: spec.name_maps["hf"].load() for spec in host[MODELS] if "hf" in spec.name_maps}
    wanted = {(family, kind) for family, found in maps.items() for kind in found.model_types if kind not in NOT_SWEPT}
    classifying = {(family, kind) for family, kind in wanted if family.endswith(("_classification", "_choice"))}
    have = {(case.family, model_type_of(case)) for case in SWEEP_CASES.values()}
    # A head is the same on every base.
    assert wanted - classifying - have == OF_MT
    assert {family for family, _ in classifying} <= {family for family, _ in have}
