"""Every family of Hugging Face's that converts, as a small model of `transformers` itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 101
"""Odd, so that nothing divides it."""
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MOE = {**DECODER, "num_experts_per_tok": 2, "experts_implementation": "eager"}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
ENCODER = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"num_decoder_layers": 3}
BART = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 32}
BART |= {
    f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in (("attention_heads", 4), ("ffn_dim", 48))
}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8}
MAMBA |= {"state_size": 6, "n_groups": 2, "chunk_size": 8}
NEMOTRON_H = {**DECODER, "hybrid_override_pattern": "M-*", "head_dim": 8, "ssm_state_size": 6, "n_groups": 2}
NEMOTRON_H |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 8}
BAMBA = {**DECODER, "attn_layer_indices": [1], "mamba_d_state": 6, "mamba_n_heads": 8, "mamba_d_head": 8}
BAMBA |= {"mamba_n_groups": 2, "mamba_chunk_size": 8}
NEMOTRON_3 = {**NEMOTRON_H, "hybrid_override_pattern": "ME*E", "n_routed_experts": 6, "num_experts_per_tok": 3}
NEMOTRON_3 |= {"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 12}
NEMOTRON_3 |= {"n_group": 3, "topk_group": 2, "experts_implementation": "eager"}
GRANITE_HYBRID = {**DECODER, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48}
GRANITE_HYBRID |= {
    "mamba_d_state": 6,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
GRANITE_HYBRID |= {"num_local_experts": 0, "num_experts_per_tok": 0, "attention_multiplier": 0.2}
GRANITE_HYBRID |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
DELTA_NET = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16}
DELTA_NET |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
DELTA_NET |= {"linear_value_head_dim": 10, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LATENT = {**DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 12, "n_routed_experts": 8}
LATENT |= {"num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10}
LATENT |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 8, "experts_implementation": "eager"}
GROUPS = {"n_group": 4, "topk_group": 2}
MINIMAX_M3 = {**DECODER, "head_dim": 12, "rotary_dim": 6, "dense_intermediate_size": 40, "intermediate_size": 20}
MINIMAX_M3 |= {"shared_intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 3, "index_n_heads": 2}
MINIMAX_M3 |= {"index_head_dim": 10, "index_block_size": 2, "index_topk_blocks": 2, "bos_token_id": None}
MINIMAX_M3 |= {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "eos_token_id": None}
MINIMAX_M3 |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "experts_implementation": "eager"}
MINIMAX_M3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}
TOWER = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40}
TOWER |= {"image_size": 12, "patch_size": 4}
FEATURES, IMAGE = 9, VOCAB - 1
"""Patches of an image, and the token that stands for one."""
AUDIO, SOUND_SAMPLES, SOUND_POSITIONS = VOCAB - 2, 3_300, 3
"""The token that stands for sound; samples of a sound of 20 frames, and the tokens that it has."""


@dataclass(frozen=True)
class Case:
    """model, config: classes of `transformers`. keys: of its configuration. parts: configurations within it.

    inputs: which kind it takes. unused: beginnings of weights that the class never looks at; they are not carried.
    drawn_in_bf16: weights that bf16 can hold, as published ones are: to add 1 to a norm's is exact for these.
    """

    family: str
    model: str
    config: str
    keys: dict[str, Any]
    inputs: str = "tokens"
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    drawn_in_bf16: bool = False

    def uses(self, name: str) -> bool:
        return not name.startswith(self.unused)

    @property
    def auto_class(self) -> str:
        """What loads it without knowing its class."""
        for end, name in AUTO.items():
            if self.model.endswith(end):
                return name
        return "AutoModel"


AUTO = {
    # transformers lists it as the decoder of a model of images and text alone.
    "Mistral4ForCausalLM": "Mistral4ForCausalLM",
    "Glm5NextTextForCausalLM": "Glm5NextTextForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForMaskedLM": "AutoModelForMaskedLM",
    **dict.fromkeys(
        (f"{stem}ForConditionalGeneration" for stem in ("T5", "MT5", "UMT5", "Bart", "Blenderbot", "BlenderbotSmall")),
        "AutoModelForSeq2SeqLM",
    ),
    "LlavaForConditionalGeneration": "AutoModelForImageTextToText",
    "Idefics3ForConditionalGeneration": "AutoModelForImageTextToText",
    "InternVLForConditionalGeneration": "AutoModelForImageTextToText",
    "Qwen2_5_VLForConditionalGeneration": "AutoModelForImageTextToText",
    "Qwen3VLForConditionalGeneration": "AutoModelForImageTextToText",
    "Qwen3_5ForConditionalGeneration": "AutoModelForImageTextToText",
    "Gemma4ForConditionalGeneration": "AutoModelForImageTextToText",
    "Mistral3ForConditionalGeneration": "AutoModelForImageTextToText",
    "MistralLarge4ForConditionalGeneration": "AutoModelForImageTextToText",
    "Kimi_K25ForConditionalGeneration": "AutoModelForImageTextToText",
    "MuseGlimmerForConditionalGeneration": "AutoModelForImageTextToText",
    "Step3p7ForConditionalGeneration": "AutoModelForImageTextToText",
    "MuseSparkForConditionalGeneration": "AutoModelForImageTextToText",
    "MiniMaxM3SparseForConditionalGeneration": "AutoModelForImageTextToText",
    "Qwen3_5MoeForConditionalGeneration": "AutoModelForImageTextToText",
    "Qwen3VLMoeForConditionalGeneration": "AutoModelForImageTextToText",
    # transformers lists the whole with its talker alone.
    "Qwen3OmniMoeThinkerForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
    "ForImageClassification": "AutoModelForImageClassification",
}


def causal(family: str, stem: str, **keys: Any) -> Case:
    return Case(family, f"{stem}ForCausalLM", f"{stem}Config", {**DECODER, **keys})


def moe_case(family: str, stem: str, **keys: Any) -> Case:
    return Case(family, f"{stem}ForCausalLM", f"{stem}Config", {**MOE, **keys})


def dense(family: str, stem: str, **keys: Any) -> Case:
    """One whose default ids of special tokens are beyond a small vocabulary."""
    return causal(family, stem, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")), **keys)


def gemma4(stem: str, **keys: Any) -> Case:
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"num_hidden_layers": 4, "layer_types": kinds, "head_dim": 10, "global_head_dim": 12, "sliding_window": 5}
    own |= {"final_logit_softcapping": 4.0, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
    if stem == "Gemma4":
        own |= {"vocab_size_per_layer_input": VOCAB, "experts_implementation": "eager"}
    return Case("gemma4", f"{stem}ForCausalLM", f"{stem}TextConfig", {**DECODER, **own, **keys})


def latent(generation: str, **keys: Any) -> Case:
    stem = f"Deepseek{generation}"
    return Case("deepseek", f"{stem}ForCausalLM", f"{stem}Config", {**LATENT, **keys})


def sparse(stem: str, **keys: Any) -> Case:
    indexer = {"q_lora_rank": 14, "index_topk": 5, "index_n_heads": 13, "index_head_dim": 8}
    return Case("deepseek_v32", f"{stem}ForCausalLM", f"{stem}Config", {**LATENT, **indexer, **keys})


def compressed(**keys: Any) -> Case:
    own = {"index_topk": 2, "index_n_heads": 13, "index_head_dim": 8, "head_dim": 10, "partial_rotary_factor": 0.4}
    own |= {"q_lora_rank": 14, "o_groups": 2, "o_lora_rank": 6, "sliding_window": 5, "num_experts_per_tok": 2}
    own |= {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
    own |= {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "hc_mult": 3}
    own |= {"mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 8, "moe_intermediate_size": 12}
    # Small norms behind sums of streams would make gradients of their weights differences of large terms.
    own |= {"rms_norm_eps": 0.1, "num_nextn_predict_layers": 0, "experts_implementation": "eager"}
    own |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    base = {key: value for key, value in DECODER.items() if key not in ("num_key_value_heads", "intermediate_size")}
    return Case("deepseek_v4", "DeepseekV4ForCausalLM", "DeepseekV4Config", {**base, **own, **keys})


def tower(stem: str, **keys: Any) -> Case:
    return Case("vision", f"{stem}VisionModel", f"{stem}VisionConfig", {**TOWER, **keys}, "images")


def classifier(stem: str, tower_type: str, *unused: str) -> Case:
    vision = {**TOWER, "model_type": tower_type}
    keys = {"vision_config": vision, "num_labels": 5}
    return Case("vision", f"{stem}ForImageClassification", f"{stem}Config", keys, "images", unused=unused)


def llava(vision: str, text: str, text_keys: dict[str, Any], **keys: Any) -> Case:
    parts = {"vision_config": (f"{vision}VisionConfig", TOWER), "text_config": (f"{text}Config", text_keys)}
    keys = {"image_token_index": IMAGE, **keys}
    return Case("llava", "LlavaForConditionalGeneration", "LlavaConfig", keys, "text_with_images", parts)


def smolvlm(**text_keys: Any) -> Case:
    parts = {"vision_config": ("Idefics3VisionConfig", TOWER), "text_config": ("LlamaConfig", text_keys)}
    keys = {"image_token_id": IMAGE, "scale_factor": 3}
    return Case("smolvlm", "Idefics3ForConditionalGeneration", "Idefics3Config", keys, "text_with_views", parts)


def internvl(**text_keys: Any) -> Case:
    tower = {**TOWER, "image_size": 8, "attention_bias": True}
    parts = {"vision_config": ("InternVLVisionConfig", tower), "text_config": ("Qwen2Config", text_keys)}
    keys = {"image_token_id": IMAGE, "tie_word_embeddings": False}
    return Case("internvl", "InternVLForConditionalGeneration", "InternVLConfig", keys, "text_with_small_images", parts)


def qwen_vl(**text_keys: Any) -> Case:
    vision = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "patch_size": 2, "window_size": 8,
        "fullatt_block_indexes": [1], "out_hidden_size": text_keys["hidden_size"],
    }  # fmt: skip
    heads = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "bos_token_id": None, "eos_token_id": None}
    parts = {
        "vision_config": ("Qwen2_5_VLVisionConfig", vision),
        "text_config": ("Qwen2_5_VLTextConfig", text_keys | heads),
    }
    keys = {"image_token_id": IMAGE}
    return Case("qwen_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", keys, "text_with_patches", parts)


def qwen3_vl(kind: str, **text_keys: Any) -> Case:
    vision = {
        "depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2], "out_hidden_size": text_keys["hidden_size"],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1]}
    heads = {"head_dim": 10, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    stem = f"Qwen3VL{kind}"
    parts = {
        "vision_config": (f"{stem}VisionConfig", vision),
        "text_config": (f"{stem}TextConfig", text_keys | heads),
    }
    keys = {"image_token_id": IMAGE}
    return Case("qwen3_vl", f"{stem}ForConditionalGeneration", f"{stem}Config", keys, "text_with_patches", parts)


def qwen3_omni() -> Case:
    text = {**MOE, "num_experts": 4, "moe_intermediate_size": 12, "rope_parameters": {"rope_type": "default"}}
    text["rope_parameters"] |= {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = qwen3_vl("", **DECODER).parts["vision_config"][1]
    audio = {
        "num_mel_bins": 19, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 20, "d_model": 24,
        "output_dim": text["hidden_size"], "downsample_hidden_size": 5,
    }  # fmt: skip
    parts = {
        "audio_config": ("Qwen3OmniMoeAudioEncoderConfig", audio),
        "vision_config": ("Qwen3OmniMoeVisionEncoderConfig", vision),
        "text_config": ("Qwen3OmniMoeTextConfig", text),
    }
    keys = {"image_token_id": IMAGE, "audio_token_id": AUDIO, "tie_word_embeddings": False}
    stem = "Qwen3OmniMoeThinker"
    return Case("qwen3_omni", f"{stem}ForConditionalGeneration", f"{stem}Config", keys, "text_with_sound", parts)


def gemma4_vl(vision_keys: dict[str, Any], **text_keys: Any) -> Case:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 12, "patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 25,
        "rms_norm_eps": 1e-3, **vision_keys,
    }  # fmt: skip
    parts = {
        "vision_config": ("Gemma4VisionConfig", vision),
        "text_config": ("Gemma4TextConfig", {**gemma4("Gemma4").keys, "pad_token_id": 0, **text_keys}),
    }
    # Tokens of videos and sounds are in no text here.
    keys = {"image_token_id": IMAGE, **dict.fromkeys(("video_token_id", "audio_token_id"), 10_000)}
    return Case("gemma4_vl", "Gemma4ForConditionalGeneration", "Gemma4Config", keys, "text_with_pooled_patches", parts)


def gemma4_with_sound() -> Case:
    """A small one, with per-layer embeddings, and an audio tower beside that for pictures."""
    pictures = gemma4_vl({"use_clipped_linears": True}, hidden_size_per_layer_input=6, num_kv_shared_layers=2)
    audio = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "subsampling_conv_channels": [16, 6],
        "conv_kernel_size": 3, "attention_chunk_size": 4, "attention_context_left": 4, "output_proj_dims": 20,
    }  # fmt: skip
    parts = {**pictures.parts, "audio_config": ("Gemma4AudioConfig", audio)}
    return replace(pictures, keys={**pictures.keys, "audio_token_id": AUDIO}, parts=parts, inputs="text_with_frames")


def mistral3(kind: str, **text_keys: Any) -> Case:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "image_size": 40, "hidden_act": "silu",
    }  # fmt: skip
    text = {**DECODER, "head_dim": 8, **text_keys}
    parts = {"vision_config": ("PixtralVisionConfig", vision), "text_config": (f"{kind}Config", text)}
    keys = {"image_token_index": IMAGE, "tie_word_embeddings": False}
    model = "Mistral3ForConditionalGeneration"
    return Case("mistral3", model, "Mistral3Config", keys, "text_with_sized_images", parts)


def muse_glimmer(**text_keys: Any) -> Case:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "pos_emb_height": 4, "pos_emb_width": 4,
    }  # fmt: skip
    text = {**DECODER, "num_hidden_layers": 5, "head_dim": 10, "sliding_window": 5, "final_logit_softcapping": 4.0}
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    parts = {
        "vision_config": ("MuseGlimmerVisionConfig", vision),
        "text_config": ("MuseGlimmerTextConfig", {**text, **text_keys}),
    }
    keys = {"image_token_id": IMAGE, "video_token_id": IMAGE, "projector_hidden_size": 16, "out_hidden_size": 64}
    unused = tuple(f"model.{part}." for part in ("vision_tower", "vision_adapter", "vision_projection"))
    model = "MuseGlimmerForConditionalGeneration"
    return Case("muse_glimmer", model, "MuseGlimmerConfig", keys, parts=parts, unused=unused)


def step3p7() -> Case:
    """Without the tower, which this family leaves out."""
    whole, windowed = "full_attention", "sliding_attention"
    scaled = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    scaled |= {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 8}
    keys = {key: value for key, value in MOE.items() if key != "experts_implementation"}
    keys |= {"n_routed_experts": 6, "moe_intermediate_size": 12, "share_expert_dim": 20, "head_dim": 12}
    keys |= {"num_sliding_attention_heads": 6, "layer_types": [whole, windowed, windowed], "sliding_window": 5}
    keys |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_router_scaling_factor": 1.5}
    keys |= {"rope_parameters": {whole: scaled, windowed: {"rope_type": "default", "rope_theta": 100.0}}}
    keys |= {"swiglu_limits": [None, 0.1, 0.0], "swiglu_limits_shared": [0.3, 0.0, 0.2], "pad_token_id": IMAGE}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1.0, "patch_size": 4}
    parts = {
        "vision_config": ("Step3p7VisionConfig", {**vision, "image_size": 8}),
        "text_config": ("Step3p7TextConfig", keys),
    }
    tower = ("model.vision_model.", "model.multi_modal_projector.")
    return Case("step3p7", "Step3p7ForConditionalGeneration", "Step3p7Config", {}, parts=parts, unused=tower)


def mistral_large4() -> Case:
    """Without the tower, which this family leaves out."""
    keys = {key: value for key, value in LATENT.items() if key not in ("first_k_dense_replace", "q_lora_rank")}
    keys |= {"num_hidden_layers": 4, "index_topk": 5, "index_n_heads": 13, "index_head_dim": 8}
    keys |= {"no_rope_layers": [1, 0, 1, 0], "kv_source_layers": [0, 1, 0, 3], "final_logit_softcapping": 5.0}
    keys |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "image_size": 8,
    }  # fmt: skip
    parts = {
        "vision_config": ("PixtralVisionConfig", vision),
        "text_config": ("MistralLarge4TextConfig", keys),
    }
    tower = ("vision_encoder.", "model.vision_tower.", "model.multi_modal_projector.")
    model = "MistralLarge4ForConditionalGeneration"
    return Case("mistral_large4", model, "MistralLarge4Config", {}, parts=parts, unused=tower)


def muse_spark(**text_keys: Any) -> Case:
    glimmer = muse_glimmer()
    _, vision = glimmer.parts["vision_config"]
    _, text = glimmer.parts["text_config"]
    text = {**text, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    text |= {"moe_hidden_size": 20, "experts_implementation": "eager"}
    sounds = {"patch_sizes": [2], "hidden_sizes": [4], "depths": [1], "num_hidden_layers": 1, "out_hidden_size": 32}
    parts = {
        "vision_config": ("MuseSparkVisionConfig", vision),
        "audio_config": ("MuseSparkAudioConfig", sounds),
        "text_config": ("MuseSparkTextConfig", {**text, **text_keys}),
    }
    keys = {**glimmer.keys, "audio_token_id": AUDIO}
    unused = (*glimmer.unused, "model.audio_tower.")
    model = "MuseSparkForConditionalGeneration"
    return Case("muse_spark", model, "MuseSparkConfig", keys, parts=parts, unused=unused)


def kimi_k25(**text_keys: Any) -> Case:
    decoder = latent("V3", q_lora_rank=14, **GROUPS, num_nextn_predict_layers=0)
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "pos_emb_height": 5, "pos_emb_width": 5,
    }  # fmt: skip
    parts = {
        "vision_config": ("Kimi_K25VisionConfig", vision),
        "text_config": ("DeepseekV3Config", {**decoder.keys, **text_keys}),
    }
    keys = {"image_token_id": IMAGE, "projection_hidden_size": 16, "tie_word_embeddings": False}
    model = "Kimi_K25ForConditionalGeneration"
    return Case("kimi_k25", model, "Kimi_K25Config", keys, "text_with_rows_of_patches", parts)


def minimax_m3_vl() -> Case:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }  # fmt: skip
    parts = {
        "vision_config": ("MiniMaxM3VLVisionConfig", vision),
        "text_config": ("MiniMaxM3VLTextConfig", MINIMAX_M3),
    }
    keys = {"image_token_index": IMAGE, "projector_hidden_size": 20, "tie_word_embeddings": False}
    model = "MiniMaxM3SparseForConditionalGeneration"
    return Case("minimax_m3_vl", model, "MiniMaxM3VLConfig", keys, "text_with_patches", parts)


def qwen_next_vl(kind: str, **text_keys: Any) -> Case:
    vision = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "patch_size": 2,
        "num_position_embeddings": 25, "out_hidden_size": text_keys["hidden_size"],
    }  # fmt: skip
    stem = f"Qwen3_5{kind}"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    parts = {
        "vision_config": (f"{stem}VisionConfig", vision),
        "text_config": (f"{stem}TextConfig", {**text_keys, **DELTA_NET, "rope_parameters": rope}),
    }
    keys = {"image_token_id": IMAGE}
    return Case("qwen_next_vl", f"{stem}ForConditionalGeneration", f"{stem}Config", keys, "text_with_patches", parts)


CASES: dict[str, Case] = {
    "gpt2": Case("gpt", "GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": Case("gpt", "GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "gpt2 classes": Case(
        "gpt_classification",
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {**GPT2, "num_labels": 3, "pad_token_id": 0},
    ),
    "gpt_bigcode": Case("gpt", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2),
    "gpt_neox": Case("gpt", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**ENCODER, "rotary_pct": 0.5}),
    "nemotron": Case(
        "gpt",
        "NemotronForCausalLM",
        "NemotronConfig",
        {**ENCODER, "num_key_value_heads": 2},
        drawn_in_bf16=True,
    ),
    "bloom": Case(
        "gpt", "BloomForCausalLM", "BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}
    ),
    "llama": causal("llama", "Llama"),
    "llama tied, biased, wide heads": causal(
        "llama", "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "llama multi-head": causal("llama", "Llama", num_key_value_heads=4),
    "llama classes": Case(
        "llama_classification",
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**DECODER, "num_labels": 3, "pad_token_id": 0},
    ),
    "mistral": causal("mistral", "Mistral", sliding_window=5),
    "qwen2": causal("qwen", "Qwen2"),
    "qwen2 tied": causal("qwen", "Qwen2", tie_word_embeddings=True),
    "qwen3": causal("qwen", "Qwen3", head_dim=12),
    "gemma2": causal("gemma", "Gemma2", head_dim=16, sliding_window=5),
    "gemma2 untied": causal("gemma", "Gemma2", head_dim=16, sliding_window=5, tie_word_embeddings=False),
    "gemma3": Case(
        "gemma",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
    "phi3": dense("phi3", "Phi3", sliding_window=5),
    "phi3 longrope, three quarters of each head, tied": dense(
        "phi3",
        "Phi3",
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 4.0, 8.0],
        },
        tie_word_embeddings=True,
    ),
    "smollm3": dense("smollm3", "SmolLM3", no_rope_layer_interval=2),
    "ministral3": dense(
        "ministral3",
        "Ministral3",
        head_dim=12,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 6,
            "rope_theta": 1e6,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "olmo2": dense("olmo", "Olmo2"),
    "olmo3": dense("olmo", "Olmo3", sliding_window=5, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "exaone4": dense("exaone4", "Exaone4", sliding_window=5, sliding_window_pattern=3),
    "seed_oss": dense("seed_oss", "SeedOss", head_dim=12),
    "granite": dense(
        "granite",
        "Granite",
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "ernie4_5": dense("ernie4_5", "Ernie4_5", head_dim=12),
    "lfm2": dense("lfm2", "Lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=10),
    "lfm3": dense(
        "lfm3",
        "Lfm3",
        head_dim=10,
        layer_types=["conv", "sliding_attention", "full_attention"],
        sliding_window=5,
        conv_L_cache=4,
    ),
    "hunyuan_v1_dense": dense(
        "hunyuan",
        "HunYuanDenseV1",
        head_dim=12,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "afmoe": moe_case(
        "afmoe",
        "Afmoe",
        num_experts=6,
        moe_intermediate_size=12,
        head_dim=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
        mup_enabled=True,
        route_scale=1.5,
    ),
    "mimo_v2_flash": moe_case(
        "mimo_v2_flash",
        "MiMoV2Flash",
        n_routed_experts=6,
        moe_intermediate_size=12,
        head_dim=12,
        v_head_dim=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=5,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        bos_token_id=None,
    ),
    "mixtral": moe_case("mixtral", "Mixtral", num_local_experts=4),
    "mixtral tied, wide heads": moe_case(
        "mixtral", "Mixtral", num_local_experts=3, head_dim=12, tie_word_embeddings=True
    ),
    "qwen2_moe": moe_case(
        "qwen_moe", "Qwen2Moe", num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=20
    ),
    "qwen2_moe every second layer dense, no biases": moe_case(
        "qwen_moe",
        "Qwen2Moe",
        num_experts=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        decoder_sparse_step=2,
        qkv_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": moe_case(
        "qwen_moe", "Qwen3Moe", num_experts=6, moe_intermediate_size=12, head_dim=16, mlp_only_layers=[0]
    ),
    "glm4_moe": moe_case(
        "qwen_moe",
        "Glm4Moe",
        n_routed_experts=4,
        moe_intermediate_size=12,
        head_dim=8,
        use_qk_norm=True,
        n_group=1,
        topk_group=1,
    ),
    "olmoe clipped": moe_case("olmoe", "Olmoe", num_experts=8, pad_token_id=None, eos_token_id=None, clip_qkv=0.5),
    "olmoe": moe_case("olmoe", "Olmoe", num_experts=8, pad_token_id=None, eos_token_id=None),
    "ernie4_5_moe": dense(
        "ernie4_5", "Ernie4_5_Moe", moe_num_experts=5, moe_k=3, moe_intermediate_size=12, experts_implementation="eager"
    ),
    "hunyuan_v1_moe": dense(
        "hunyuan",
        "HunYuanMoEV1",
        head_dim=12,
        num_experts=5,
        moe_topk=3,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        experts_implementation="eager",
    ),
    "dots1": dense(
        "dots1",
        "Dots1",
        n_routed_experts=5,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        experts_implementation="eager",
    ),
    "solar_open": dense(
        "dots1",
        "SolarOpen",
        head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        **GROUPS,
        experts_implementation="eager",
    ),
    "exaone_moe": dense(
        "exaone4",
        "ExaoneMoe",
        head_dim=12,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        sliding_window=5,
        sliding_window_pattern=2,
        experts_implementation="eager",
    ),
    "lfm2_moe": dense(
        "lfm2",
        "Lfm2Moe",
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        experts_implementation="eager",
    ),
    "minimax_m2": moe_case(
        "minimax_m2",
        "MiniMaxM2",
        num_local_experts=5,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    ),
    "minimax_m3_vl_text": Case(
        "minimax_m3",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        MINIMAX_M3,
    ),
    "llama4": Case(
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **DECODER,
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
            "head_dim": 12,
            "num_local_experts": 3,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 5,
            "floor_scale": 4,
        },
    ),
    "gpt_oss": moe_case("gpt_oss", "GptOss", num_local_experts=6, head_dim=12, sliding_window=4),
    "gpt_oss tied": moe_case("gpt_oss", "GptOss", num_local_experts=3, head_dim=12, tie_word_embeddings=True),
    "granitemoe": moe_case("granite_moe", "GraniteMoe", num_local_experts=6, attention_multiplier=0.2),
    "granitemoe tied": moe_case(
        "granite_moe", "GraniteMoe", num_local_experts=6, attention_multiplier=0.2, tie_word_embeddings=True
    ),
    "deepseek_v2": latent("V2", q_lora_rank=14),
    "deepseek_v2 without query latents": latent("V2", q_lora_rank=None),
    "deepseek_v3": latent("V3", q_lora_rank=14, **GROUPS, num_nextn_predict_layers=0),
    "deepseek_v3 tied": latent(
        "V3", q_lora_rank=None, n_group=1, topk_group=1, tie_word_embeddings=True, num_nextn_predict_layers=0
    ),
    "deepseek_v32": sparse("DeepseekV32", **GROUPS),
    "glm_moe_dsa": sparse("GlmMoeDsa", indexer_types=["full", "full", "shared"]),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"} | {"q_lora_rank": 14},
    ),
    "deepseek_v4": compressed(),
    "inkling_text": Case(
        "inkling",
        "InklingForCausalLM",
        "InklingTextConfig",
        MOE
        | {"head_dim": 10, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
        | {"sliding_window_size": 5, "d_rel": 6, "rel_extent": 7, "log_scaling_n_floor": 4, "n_shared_experts": 2}
        | {"n_routed_experts": 4, "moe_intermediate_size": 12, "logits_mup_width_multiplier": 2.0}
        | {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    ),
    "hy_v3": moe_case("hy_v3", "HYV3", num_experts=4, moe_intermediate_size=12, num_shared_experts=2, head_dim=12),
    "kimi_linear": Case(
        "kimi_linear",
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "max_position_embeddings")}
        | {"num_experts": 8, "model_max_length": 64, "linear_num_heads": 4, "linear_head_dim": 6}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    ),
    "qwen4_exp_text": Case(
        "qwen4_exp",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {key: value for key, value in MOE.items() if key != "intermediate_size"}
        | DELTA_NET
        | {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10, "hc_count": 3}
        | {"hc_lowrank": 6, "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 3, "eos_token_id": 3}
        | {"ngram_vocab_size_base": 20, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2}
        | {"indexer_n_heads": 13, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
        | {"indexer_compress_ratio": 2, "output_gate_type": "sigmoid"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "glm5_next": Case(
        "glm5_next",
        "Glm5NextTextForCausalLM",
        "Glm5NextTextConfig",
        {key: value for key, value in LATENT.items() if key not in ("qk_rope_head_dim", "first_k_dense_replace")}
        | {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "q_lora_rank": 14}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "linear_num_heads": 4, "linear_head_dim": 6}
        | {"index_topk": 6, "index_kpool": 2, "index_n_heads": 13, "index_head_dim": 8, "hc_mult": 3}
        # Small norms behind sums of streams would make gradients of their weights differences of large terms.
        | {"rms_norm_eps": 0.1, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))},
    ),
    "hy_v4": Case(
        "hy_v4",
        "HYV4ForCausalLM",
        "HYV4Config",
        {key: value for key, value in LATENT.items() if key not in ("first_k_dense_replace", "num_key_value_heads")}
        | {"q_lora_rank": 14, "index_topk": 5, "index_n_heads": 13, "index_head_dim": 8, "hc_mult": 3}
        # As of glm5_next.
        | {"rms_norm_eps": 0.1, "swiglu_limit": 0.5}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    ),
    "bailing_hybrid": Case(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "max_position_embeddings")}
        | {"num_experts": 8, "model_max_length": 64, "head_dim": 6, **GROUPS}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_nextn_predict_layers": 0}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    ),
    "qwen3_next": Case(
        "qwen_next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**MOE, **DELTA_NET, "num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
        | {"mlp_only_layers": [1]},
    ),
    "gemma4_text": gemma4("Gemma4", hidden_size_per_layer_input=6, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma4_text with experts": gemma4(
        "Gemma4",
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=12,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4_unified_text": gemma4("Gemma4Unified", attention_k_eq_v=True, num_global_key_value_heads=4),
    "qwen3_5_text": Case("qwen_next", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**DECODER, **DELTA_NET}),
    "qwen3_5_moe_text": Case(
        "qwen_next",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {key: value for key, value in MOE.items() if key != "intermediate_size"}
        | {**DELTA_NET, "num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    ),
    "olmo_hybrid": Case(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {key: value for key, value in {**DECODER, **DELTA_NET}.items() if key != "head_dim"},
    ),
    "mamba2": Case("mamba", "Mamba2ForCausalLM", "Mamba2Config", MAMBA),
    "mamba2 tied, biased": Case(
        "mamba", "Mamba2ForCausalLM", "Mamba2Config", {**MAMBA, "tie_word_embeddings": True, "use_bias": True}
    ),
    "nemotron_h": Case("hybrid", "NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_H),
    "nemotron_h with experts": Case("hybrid", "NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_3),
    "bamba": Case("hybrid", "BambaForCausalLM", "BambaConfig", BAMBA),
    "granitemoehybrid": Case("hybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_HYBRID),
    "granitemoehybrid with experts": Case(
        "hybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 12}
        | {"experts_implementation": "eager"},
    ),
    "falcon_h1": Case(
        "falcon_h1",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **DECODER,
            "mamba_d_ssm": 40,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "mamba_chunk_size": 8,
        }
        | {
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 1.5,
            "key_multiplier": 0.7,
        }
        | {"attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.5, 0.7, 1.5, 1.25, 0.8], "mlp_multipliers": [0.9, 0.6]},
    ),
    "mistral4": Case(
        "mistral4",
        "Mistral4ForCausalLM",
        "Mistral4Config",
        {
            **LATENT,
            "q_lora_rank": 14,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 6,
                "rope_theta": 1e4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "jamba": Case(
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        {**MOE, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6},
    ),
    "mistral_large4": mistral_large4(),
    "longcat_flash": Case(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 12,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "q_lora_rank": 14,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 6,
            "head_dim": 6,
            "v_head_dim": 8,
            "max_position_embeddings": 64,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        },
    ),
    "bert": Case("bert", "BertForPreTraining", "BertConfig", ENCODER),
    "megatron-bert": Case("bert", "MegatronBertForPreTraining", "MegatronBertConfig", ENCODER),
    "modernbert": Case(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**ENCODER, "local_attention": 6, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))},
    ),
    "bert classes": Case(
        "bert_classification", "BertForSequenceClassification", "BertConfig", {**ENCODER, "num_labels": 3}
    ),
    "modernbert classes": Case(
        "modernbert_classification",
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**ENCODER, "local_attention": 6, "num_labels": 3}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    ),
    "bert choice": Case("bert_multiple_choice", "BertForMultipleChoice", "BertConfig", ENCODER, "choices"),
    "t5": Case("t5", "T5ForConditionalGeneration", "T5Config", T5, "two_texts"),
    "t5 1.1": Case(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "two_texts",
    ),
    "mt5": Case("t5", "MT5ForConditionalGeneration", "MT5Config", T5, "two_texts"),
    "umt5": Case("t5", "UMT5ForConditionalGeneration", "UMT5Config", T5, "two_texts"),
    "bart": Case("bart", "BartForConditionalGeneration", "BartConfig", BART, "two_texts"),
    "mbart": Case("bart", "MBartForConditionalGeneration", "MBartConfig", BART, "two_texts"),
    "blenderbot": Case("bart", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, "two_texts"),
    "blenderbot small": Case(
        "bart", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", BART, "two_texts"
    ),
    "clip tower": tower("CLIP"),
    "siglip tower": tower("Siglip"),
    "siglip tower without a pooler": tower("Siglip", vision_use_head=False),
    "clip classes": classifier("CLIP", "clip_vision_model", "vision_model.post_layernorm."),
    "siglip classes": classifier("Siglip", "siglip_vision_model", "vision_model.head."),
    "llava": llava("CLIP", "Llama", {**DECODER, "pad_token_id": 0}),
    "llava of siglip and qwen3": llava(
        "Siglip",
        "Qwen3",
        {**DECODER, "head_dim": 8},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    ),
    "smolvlm": smolvlm(**DECODER, pad_token_id=0),
    "internvl": internvl(**DECODER, pad_token_id=0),
    "qwen2_5_vl": qwen_vl(**DECODER),
    "muse_glimmer": muse_glimmer(),
    "step3p7": step3p7(),
    "muse_spark": muse_spark(),
    "mistral3": mistral3("Mistral", sliding_window=None),
    "mistral3 of ministral3": mistral3("Ministral3", sliding_window=None),
    "mistral3 of mistral4": mistral3(
        "Mistral4", **{**LATENT, "head_dim": 18}, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ),
    "kimi_k25": kimi_k25(),
    "minimax_m3_vl": minimax_m3_vl(),
    "gemma4 with pictures": gemma4_vl(
        {"use_clipped_linears": True}, hidden_size_per_layer_input=6, num_kv_shared_layers=2
    ),
    "gemma4 with pictures, large": gemma4_vl(
        {"standardize": True}, attention_k_eq_v=True, use_bidirectional_attention="vision", sliding_window=5
    ),
    "gemma4 with sound": gemma4_with_sound(),
    "qwen3_5": qwen_next_vl("", **DECODER),
    "qwen3_5_moe": qwen_next_vl(
        "Moe",
        **{key: value for key, value in MOE.items() if key != "intermediate_size"},
        num_experts=6,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_vl": qwen3_vl("", **DECODER),
    "qwen3_vl_moe": qwen3_vl("Moe", **MOE, num_experts=4, moe_intermediate_size=12),
    "qwen3_omni_moe_thinker": qwen3_omni(),
}


def class_named(name: str) -> Any:
    """A class of `transformers`, or one around a decoder that it has without an LM head alone."""
    import transformers

    if name in ("Glm5NextTextForCausalLM", "Glm5NextTextModel"):
        from tests.models.glm5_next_reference import Glm5NextTextForCausalLM

        return Glm5NextTextForCausalLM
    return getattr(transformers, name)


def model_type_of(case: Case) -> str:
    import transformers

    kind: str = getattr(transformers, case.config).model_type
    return kind


def make_model(case: Case) -> nn.Module:
    """Weights far from initial values and different everywhere, so that no two tensors can be taken for one another."""
    import transformers

    parts = {name: getattr(transformers, kind)(**keys) for name, (kind, keys) in case.parts.items()}
    config = getattr(transformers, case.config)(**case.keys, **parts)
    if case.inputs == "text_with_sound":
        # Published files have these, which the class reads and does not declare.
        config.vision_start_token_id = config.vision_end_token_id = 0
    config._attn_implementation = "eager"
    model = class_named(case.model)(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn.bfloat16() if case.drawn_in_bf16 else drawn)
        for module in model.modules():
            # LongCat-Flash: matrices of experts that return the token, which nothing reads and mt writes as zeros.
            if getattr(module, "zero_expert_num", 0) and getattr(module, "gate_up_proj", None) is not None:
                module.gate_up_proj[module.num_routed_experts :] = 0.0
        for buffer in trained_buffers(model):
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return model


def trained_buffers(model: nn.Module) -> list[Tensor]:
    """Weights that no gradient changes: DeepSeek-V3's biases of experts, Mistral Large 4's factors of frequencies."""
    trained = ("e_score_correction_bias", "expert_bias", "rotary_emb.alpha")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(trained)]


def inputs_of(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, IMAGE, (2, 14), generator=generator)
    images = torch.randn(2, 3, TOWER["image_size"], TOWER["image_size"], generator=generator)
    if case.inputs == "tokens":
        return {"input_ids": tokens}
    if case.inputs == "choices":
        return {"input_ids": tokens[None]}
    if case.inputs == "two_texts":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)[:, :9]}
    if case.inputs == "images":
        return {"pixel_values": images}
    if case.inputs == "text_with_views":
        tokens[:, 2] = IMAGE
        return {"input_ids": tokens, "pixel_values": images[:, None]}
    if case.inputs == "text_with_small_images":
        tokens[:, 2] = IMAGE
        return {"input_ids": tokens, "pixel_values": images[..., :8, :8]}
    if case.inputs == "text_with_pooled_patches":
        tokens[:, 2:8] = IMAGE
        y, x = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
        return {
            "input_ids": tokens,
            "pixel_values": torch.rand(2, 24, 12, generator=generator),
            "image_position_ids": torch.stack([x, y], -1).flatten(0, 1).expand(2, -1, -1),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    if case.inputs == "text_with_sized_images":
        tokens[:, 2:8] = IMAGE
        whole = torch.randn(2, 3, 8, 12, generator=generator)
        return {"input_ids": tokens, "pixel_values": whole, "image_sizes": torch.tensor([[8, 12]] * 2)}
    if case.inputs == "text_with_rows_of_patches":
        tokens[:, 2:8] = IMAGE
        patches = torch.randn(48, 3, 2, 2, generator=generator)
        return {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]] * 2)}
    if case.inputs == "text_with_frames":
        tokens = tokens.where(tokens != AUDIO, 1)
        tokens[:, 2:7] = AUDIO
        frames, bins = (SOUND_SAMPLES - 1) // 160, case.parts["audio_config"][1]["subsampling_conv_channels"][0]
        return {
            "input_ids": tokens,
            "input_features": torch.randn(2, frames, bins, generator=generator),
            "input_features_mask": torch.ones(2, frames, dtype=torch.bool),
        }
    if case.inputs == "text_with_sound":
        # Without grids positions are those of words, as they are beside sound alone.
        tokens = tokens.where(tokens != AUDIO, 1)
        tokens[:, 2 : 2 + SOUND_POSITIONS] = AUDIO
        frames, bins = SOUND_SAMPLES // 160, case.parts["audio_config"][1]["num_mel_bins"]
        return {
            "input_ids": tokens,
            "input_features": torch.randn(2, bins, frames, generator=generator),
            "feature_attention_mask": torch.ones(2, frames, dtype=torch.long),
            "attention_mask": torch.ones_like(tokens),
        }
    if case.inputs == "text_with_patches":
        tokens[:, 2:8] = IMAGE
        patches = torch.randn(48, 24, generator=generator)
        return {
            "input_ids": tokens,
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([[1, 4, 6]] * 2),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    tokens[:, 2 : 2 + FEATURES] = IMAGE
    return {"input_ids": tokens, "pixel_values": images}


def output_of(model: nn.Module, case: Case) -> Tensor:
    """The first floating-point tensor that the model returns: logits, or hidden states of a tower."""
    with torch.no_grad():
        first = model(**inputs_of(case))[0]
    assert isinstance(first, Tensor)
    return first
