"""The thinker of Qwen3-Omni in Hugging Face's format, `qwen3_omni_moe` and `qwen3_omni_moe_thinker`.

Names are those of published files, `thinker.model.`, `thinker.visual.`, `thinker.audio_tower.`; modules of transformers
5 have `thinker.model.language_model.` and so on, those of the thinker alone no `thinker.`. The talker and code2wav,
which speak, are left out, and what is written says that there are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    QK_NORMS,
    attention_rules,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
    rope_table,
)
from mt_models.blocks.hugging_face_moe import ExpertNames, mixed_feed_forward_rules
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor, require_value
from mt_models.llava.image_processor import require_fields
from mt_models.qwen3_omni.config import CHUNK, Qwen3OmniAudioConfig, Qwen3OmniConfig
from mt_models.qwen3_vl import hugging_face as qwen3_vl
from mt_models.qwen3_vl.config import Qwen3VLDecoderConfig
from mt_models.qwen_moe.hugging_face import QWEN3_MOE
from mt_models.qwen_vl.hugging_face import TOKENS, pixel_preprocessor
from mt_models.sound.spectrogram import SAMPLING_RATE, WHISPER_HOP, WHISPER_WINDOW
from mt_models.vision.hugging_face import export_activation, import_activation

WHOLE, THINKER = "qwen3_omni_moe", "qwen3_omni_moe_thinker"

# -- configuration of the decoder --------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": True,
}  # fmt: skip
"""Defaults of transformers, for what a file leaves out."""
BASE = 1000000.0


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model]. external: the configuration of the thinker."""
    text = {**DEFAULTS, **(external.get("text_config") or {})}
    rope = rope_table(text, BASE, **qwen3_vl.MROPE)
    sections = rope.pop("mrope_section")
    # Whatever they say: the class has no other order of axes.
    for key in ("mrope_interleaved", "interleaved"):
        rope.pop(key, None)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    # The outer class ties its LM head by its own key.
    tied = bool(external.get("tie_word_embeddings", False))
    keys = QWEN3_MOE.import_value({**text, "tie_word_embeddings": tied, "rope_scaling": None, "rope_parameters": rope})
    keys.setdefault("kv_channels", keys["hidden_size"] // keys["num_attention_heads"])
    return {**keys, "mrope_section": list(sections)}


def export_decoder(decoder: Qwen3VLDecoderConfig) -> dict[str, Any]:
    """text_config. Raises ConfigError for a decoder that is not Qwen3 with experts."""
    if decoder.moe is None:
        raise ConfigError(
            "model.language_model.moe is not set: a Hugging Face qwen3_omni_moe has experts; a dense decoder with "
            "images is a model.family=qwen3_vl"
        )
    require_value(decoder, "add_qkv_bias", (False,), WHOLE)
    require_value(decoder, "qk_layernorm", (True,), WHOLE)
    require_value(decoder, "sliding_window", (None,), WHOLE)
    left_out = {"mrope_section", "max_window_layers", "sliding_window"}
    text = QWEN3_MOE.export_value(decoder.model_dump(mode="json", exclude=left_out))
    unread = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "use_mrope")
    text = {key: value for key, value in text.items() if key not in unread}
    theta = text.pop("rope_theta")
    rope = text.pop("rope_scaling") or {"rope_type": "default"}
    scaling = {**rope, "mrope_section": decoder.mrope_section, "mrope_interleaved": True}
    # Both: transformers 5 reads the table alone, older versions the two keys.
    return {**text, "model_type": f"{WHOLE}_text", "rope_theta": theta, "rope_scaling": scaling}


# -- configuration of the vision transformer ---------------------------------------------------------

VISION = replace(
    qwen3_vl.VISION,
    architecture="qwen3_omni_moe_vision_encoder",
    fixed=(*qwen3_vl.VISION.fixed, Fixed("apply_vit_abs_pos_embed", (True,), written=False)),
    ignored={
        **qwen3_vl.VISION.ignored,
        "image_size": "images have any size",
        "spatial_patch_size": "repeats patch_size",
        "tokens_per_second": "position_id_per_seconds says it",
    },
)

# -- configuration of the audio encoder --------------------------------------------------------------

UNREAD = "the class does not read it"


def import_chunks(external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for chunks of another length: the class counts 13 positions for each, which are those of 100
    frames."""
    if (half := external.get("n_window", CHUNK // 2)) != CHUNK // 2:
        raise ConfigError(
            f"audio_config.n_window={half} is not supported; it can be {CHUNK // 2}, since positions of a sound are "
            "counted as 13 for each chunk of 100 frames"
        )
    window = external.get("n_window_infer", 800)
    # Whole chunks: the class divides.
    return {"attention_window": window // CHUNK * CHUNK or window}


def export_audio(model: Mapping[str, Any]) -> dict[str, Any]:
    tower = Qwen3OmniAudioConfig.model_validate(model)
    if tower.norm_epsilon != 1e-5:
        raise ConfigError(
            f"model.audio_model.norm_epsilon={tower.norm_epsilon} cannot be written as a Hugging Face {WHOLE}, which "
            "has 1e-5"
        )
    return {
        "n_window": CHUNK // 2,
        "n_window_infer": tower.window_chunks * CHUNK,
        "encoder_ffn_dim": tower.ffn_size,
    }


AUDIO = ConfigMap(
    architecture="qwen3_omni_moe_audio_encoder",
    fields=(
        Field("encoder_layers", "num_layers", default=32),
        Field("d_model", "hidden_size", default=1280),
        Field("encoder_attention_heads", "num_attention_heads", default=20),
        Field("encoder_ffn_dim", "ffn_hidden_size", default=5120),
        Field("num_mel_bins", "num_mel_bins", default=128),
        Field("downsample_hidden_size", "conv_channels", default=480),
        Field("activation_function", "activation", import_activation, export_activation, default="gelu"),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        "output_dim": "is the hidden_size of the decoder",
        "conv_chunksize": "computes the same convolutions in pieces",
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "scale_embedding"), UNREAD),
        "max_source_positions": "length of a table of which 13 rows are read",
    },
    spellings={
        "num_hidden_layers": "encoder_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
    },
    import_extra=import_chunks,
    import_extra_keys=("n_window", "n_window_infer"),
    export_extra=export_audio,
)

# -- configuration of the thinker, and of the whole --------------------------------------------------


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of the parts, and the vocabulary. Raises ConfigError where widths do not fit."""
    vision, audio = (dict(external.get(key) or {}) for key in ("vision_config", "audio_config"))
    decoder = import_decoder(external)
    qwen3_vl.require_width(vision, decoder["hidden_size"])
    if (width := audio.get("output_dim", 3584)) != decoder["hidden_size"]:
        raise ConfigError(
            f"audio_config.output_dim={width} and text_config.hidden_size={decoder['hidden_size']} differ; the audio "
            "encoder makes vectors of the decoder's width"
        )
    if (rows := audio.get("max_source_positions", 1500)) < 13:
        raise ConfigError(f"audio_config.max_source_positions={rows} is not supported; a chunk has 13 positions")
    return {
        "vision_model": {"use_scaled_init_method": False, **VISION.import_value(vision)},
        "audio_model": {"use_scaled_init_method": False, **AUDIO.import_value(audio)},
        "vocab_size": decoder.pop("vocab_size"),
        "language_model": decoder,
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Qwen3OmniConfig.model_validate(model)
    text, width = export_decoder(config.language_model), config.decoder.hidden_size
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    audio = AUDIO.export_value(config.audio_model.model_dump(mode="json"))
    return {
        "text_config": {**text, "vocab_size": config.vocab_size},
        "vision_config": {**vision, "model_type": f"{WHOLE}_vision_encoder", "out_hidden_size": width},
        "audio_config": {**audio, "model_type": f"{WHOLE}_audio_encoder", "output_dim": width},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def number(value: Any) -> float:
    return float(value)


def whole_number(value: float) -> int:
    """Raises ConfigError for a fraction: the class has a whole number."""
    if value != int(value):
        raise ConfigError(
            f"model.position_id_per_seconds={value} cannot be written as a Hugging Face {WHOLE}; it is a whole number "
            "there"
        )
    return int(value)


OF_MARKERS = "marks sound and speakers in texts, which the tokenizer's template does"
THINKER_MAP = ConfigMap(
    architecture=THINKER,
    fields=(
        Field("image_token_id", "image_token_index", default=151655),
        Field("audio_token_id", "audio_token_index", default=151646),
        Field("vision_start_token_id", "vision_start_token_index", default=151652),
        Field("audio_start_token_id", "audio_start_token_index", default=151647),
        Field("position_id_per_seconds", "position_id_per_seconds", number, whole_number, default=25),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        **{key: why for key, why in TOKENS.items() if key != "vision_start_token_id"},
        **dict.fromkeys(
            ("audio_end_token_id", "user_token_id", "system_token_id", "assistant_token_id"),
            OF_MARKERS,
        ),
        "initializer_range": "of all parts together, which have their own",
        "seconds_per_chunk": "of sound within videos, which is not read",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "audio_config", "text_config", "tie_word_embeddings"),
    export_extra=export_parts,
)


def import_thinker(external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a file without a thinker."""
    thinker = external.get("thinker_config")
    if thinker is None:
        raise ConfigError("thinker_config=null: the file has no thinker, and model.family=qwen3_omni is that part")
    return THINKER_MAP.import_value(thinker)


SPEAKS = "of the talker and code2wav, which speak; the thinker alone is read"
WHOLE_MAP = ConfigMap(
    architecture=WHOLE,
    fields=(),
    # What is written has no talker.
    fixed=(Fixed("enable_audio_output", (False, True)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **dict.fromkeys(
            ("talker_config", "code2wav_config", "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"), SPEAKS
        ),
        **dict.fromkeys(
            ("im_start_token_id", "im_end_token_id", "user_token_id", "system_token_id", "assistant_token_id"),
            OF_MARKERS,
        ),
        "initializer_range": "of all parts together, which have their own",
        "tie_word_embeddings": "thinker_config says it",
    },
    import_extra=import_thinker,
    import_extra_keys=("thinker_config",),
    export_extra=lambda model: {"thinker_config": {"model_type": THINKER, **THINKER_MAP.export_value(model)}},
)

# -- names -------------------------------------------------------------------------------------------

KINDS = ("weight", "bias")
MERGER = re.compile(r"(thinker\.visual\.merger(?:_list\.\d+)?)\.(norm|linear_fc1|linear_fc2)\.")
IN_MERGER = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}


def in_thinker(name: str) -> str:
    """The name here of a tensor of Qwen3-VL's vision transformer."""
    name = name.replace("model.visual.", "thinker.visual.").replace("deepstack_merger_list", "merger_list")
    return MERGER.sub(lambda match: f"{match[1]}.{IN_MERGER[match[2]]}.", name)


def vision_rules(config: Qwen3OmniConfig) -> list[Rule]:
    return [
        replace(rule, theirs=tuple(map(in_thinker, rule.sources))) for rule in qwen3_vl.tower_rules(config.vision_model)
    ]


def audio_rules(config: Qwen3OmniAudioConfig) -> list[Rule]:
    ours, theirs = "audio_model.", "thinker.audio_tower."
    layer, their_layer = f"{ours}decoder.layers.{{i}}.", f"{theirs}layers.{{i}}."
    heads = config.num_attention_heads
    rules: list[Rule] = [Same(f"{ours}embedding.linear.weight", f"{theirs}conv_out.weight")]
    for kind in KINDS:
        rules += [
            *(Same(f"{ours}embedding.conv{n}.{kind}", f"{theirs}conv2d{n}.{kind}") for n in (1, 2, 3)),
            Same(f"{layer}input_layernorm.{kind}", f"{their_layer}self_attn_layer_norm.{kind}"),
            Same(f"{layer}pre_mlp_layernorm.{kind}", f"{their_layer}final_layer_norm.{kind}"),
            GroupedQKV(
                f"{layer}self_attention.linear_qkv.{kind}",
                tuple(f"{their_layer}self_attn.{name}_proj.{kind}" for name in "qkv"),
                groups=heads,
                heads=heads,
            ),
            Same(f"{layer}self_attention.linear_proj.{kind}", f"{their_layer}self_attn.out_proj.{kind}"),
            Same(f"{layer}mlp.linear_fc1.{kind}", f"{their_layer}fc1.{kind}"),
            Same(f"{layer}mlp.linear_fc2.{kind}", f"{their_layer}fc2.{kind}"),
            Same(f"{ours}decoder.final_layernorm.{kind}", f"{theirs}ln_post.{kind}"),
            Same(f"audio_projection.linear_fc1.{kind}", f"{theirs}proj1.{kind}"),
            Same(f"audio_projection.linear_fc2.{kind}", f"{theirs}proj2.{kind}"),
        ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


def decoder_map(config: Qwen3VLDecoderConfig) -> NameMap:
    sparse = config.moe is not None
    blocks = mixed_feed_forward_rules(config, ExpertNames()) if sparse else feed_forward_rules()
    return decoder_name_map(config, [*norm_rules(PRE_NORMS), *norm_rules(QK_NORMS), *attention_rules(config), *blocks])


def beside_towers(rule: Rule) -> Rule:
    """The rule of a decoder that is a part of the model."""
    return replace(
        rule,
        ours=f"language_model.{rule.ours}",
        theirs=tuple(f"thinker.{name}" for name in rule.sources),
        others=tuple(map(beside_towers, rule.others)),
    )


def name_map(config: Qwen3OmniConfig) -> NameMap:
    decoder = decoder_map(config.decoder)
    rules = [*vision_rules(config), *audio_rules(config.audio_model), *map(beside_towers, decoder.rules)]
    ignored = {f"thinker.{name}" for name in decoder.ignored} | {"talker.*", "code2wav.*"}
    return NameMap(rules, 0, ignored)


def spelling(config: Qwen3OmniConfig, name: str) -> str:
    """The name in published files, from that in modules of transformers 5, of the whole or of the thinker alone."""
    if name.startswith(("talker.", "code2wav.")):
        return name
    name = name.removeprefix("thinker.")
    for part in ("visual", "audio_tower"):
        name = name.removeprefix("model.") if name.startswith(f"model.{part}.") else name
    return f"thinker.{name.replace('model.language_model.', 'model.', 1)}"


def copies(config: Qwen3OmniConfig) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    if config.decoder.untie_embeddings_and_output_weights:
        return {}
    return {"thinker.lm_head.weight": "thinker.model.embed_tokens.weight"}


# -- images and sound --------------------------------------------------------------------------------

IMAGES = pixel_preprocessor("Qwen3OmniMoeProcessor")


def sound_fields(config: Any) -> dict[str, Any]:
    """Those of a WhisperFeatureExtractor, which is in the same file."""
    return {
        "feature_size": config.audio_model.num_mel_bins,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": WHISPER_HOP,
        "n_fft": WHISPER_WINDOW,
        "dither": 0.0,
        "padding_value": 0.0,
    }


def write_preprocessor(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "return_attention_mask": True}
    return {**IMAGES.write(config, data), **extractor, **sound_fields(config)}


def read_preprocessor(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for patches and spectrograms that are not the model's."""
    require_fields(external, sound_fields(config))
    return dict(IMAGES.read(config, external))


HUGGING_FACE = HuggingFaceFamily(
    "qwen3_omni",
    {WHOLE: WHOLE_MAP, THINKER: THINKER_MAP},
    name_map,
    model_type_of=lambda config: WHOLE,
    copies=copies,
    spelling=spelling,
    architectures={WHOLE: "Qwen3OmniMoeForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
    ids_read=tuple(("thinker_config", field.theirs) for field in THINKER_MAP.fields),
    within={THINKER: "thinker_config"},
)
