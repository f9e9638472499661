"""What mt-models registers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mt_core.hookspecs import hookimpl
from mt_core.specs import CheckConfig, Lazy, LossSpec, ModelSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt",
            doc="Decoder-only transformer: GPT-2, GPT-3 and Llama-like models",
            config_type=Lazy("mt_models.gpt.config:GPTConfig"),
            build=Lazy("mt_models.gpt.model:build_gpt"),
            presets=Lazy("mt_models.gpt.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.gpt.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="llama",
            doc="Llama 1, 2 and 3: grouped queries, SwiGLU, rotary positions with their scalings",
            config_type=Lazy("mt_models.llama.config:LlamaConfig"),
            build=Lazy("mt_models.llama.model:build_llama"),
            presets=Lazy("mt_models.llama.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.llama.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="mistral",
            doc="Mistral 7B: Llama with attention over a sliding window",
            config_type=Lazy("mt_models.mistral.config:MistralConfig"),
            build=Lazy("mt_models.mistral.model:build_mistral"),
            presets=Lazy("mt_models.mistral.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.mistral.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="qwen",
            doc="Qwen 2, 2.5 and 3, dense: Llama with biases on queries, keys and values, or normalized heads",
            config_type=Lazy("mt_models.qwen.config:QwenConfig"),
            build=Lazy("mt_models.qwen.model:build_qwen"),
            presets=Lazy("mt_models.qwen.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.qwen.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="gemma",
            doc="Gemma 2 and 3, text: GeGLU, norms around every block, local and global layers in turn, soft caps",
            config_type=Lazy("mt_models.gemma.config:GemmaConfig"),
            build=Lazy("mt_models.gemma.model:build_gemma"),
            presets=Lazy("mt_models.gemma.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.gemma.hugging_face:HUGGING_FACE")},
        ),
        *_mixtures(),
        ModelSpec(
            name="bert",
            doc="Bidirectional encoder with masked-word and sentence-order heads: BERT, Megatron's BERT",
            config_type=Lazy("mt_models.bert.config:BertConfig"),
            build=Lazy("mt_models.bert.model:build_bert"),
            presets=Lazy("mt_models.bert.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.bert.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="t5",
            doc="Encoder and decoder: T5 with relative positions, T5 1.1, Megatron's T5 with learned positions",
            config_type=Lazy("mt_models.t5.config:T5Config"),
            build=Lazy("mt_models.t5.model:build_t5"),
            presets=Lazy("mt_models.t5.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.t5.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="mamba",
            doc="Mamba-2: state-space layers alone, with a state of fixed size in place of attention",
            config_type=Lazy("mt_models.mamba.config:MambaConfig"),
            build=Lazy("mt_models.mamba.model:build_mamba"),
            presets=Lazy("mt_models.mamba.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.mamba.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="hybrid",
            doc="Mamba-2, attention and feed-forward layers in the order of a pattern: Nemotron-H, Bamba",
            config_type=Lazy("mt_models.hybrid.config:HybridConfig"),
            build=Lazy("mt_models.hybrid.model:build_hybrid"),
            presets=Lazy("mt_models.hybrid.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.hybrid.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="retro",
            doc="GPT that attends to neighbours of its text, chunk by chunk, from a database",
            config_type=Lazy("mt_models.retro.config:RetroConfig"),
            build=Lazy("mt_models.retro.model:build_retro"),
            presets=Lazy("mt_models.retro.presets:PRESETS"),
            shrink=Lazy("mt_models.retro.shrink:shrink_retro"),
        ),
        ModelSpec(
            name="biencoder",
            doc="Two BERT encoders that find the text a question comes from (inverse cloze task)",
            config_type=Lazy("mt_models.biencoder.config:BiencoderConfig"),
            build=Lazy("mt_models.biencoder.model:build_biencoder"),
            presets=Lazy("mt_models.biencoder.presets:PRESETS"),
        ),
        ModelSpec(
            name="vision",
            doc="Image towers of CLIP and SigLIP, alone or with a head that tells the class of an image",
            config_type=Lazy("mt_models.vision.config:VisionConfig"),
            build=Lazy("mt_models.vision.model:build_vision"),
            presets=Lazy("mt_models.vision.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.vision.hugging_face:HUGGING_FACE")},
        ),
        ModelSpec(
            name="llava",
            doc="Images and text: a tower of the family vision in front of any decoder",
            config_type=Lazy("mt_models.llava.config:LlavaConfig"),
            build=Lazy("mt_models.llava.model:build_llava"),
            presets=Lazy("mt_models.llava.presets:PRESETS"),
            name_maps={"hf": Lazy("mt_models.llava.hugging_face:HUGGING_FACE")},
        ),
        *_heads(),
    ]


def _mixtures() -> list[ModelSpec]:
    """Decoders whose layers are mixtures of experts."""
    return [
        _mixture("mixtral", "Mixtral", "Mixtral: Mistral with a mixture of 8 experts in every layer"),
        _mixture("qwen_moe", "QwenMoe", "Qwen2-MoE and Qwen3-MoE: many small experts, with a shared one in Qwen2"),
        replace(
            _mixture(
                "deepseek", "Deepseek", "DeepSeek-V2 and V3: latent attention, shared experts, multi-token prediction"
            ),
            shrink=Lazy("mt_models.deepseek.shrink:shrink_deepseek"),
        ),
        _mixture("granite_moe", "GraniteMoe", "Granite 3 MoE: small experts, factors on embeddings, scores and logits"),
        _mixture("gpt_oss", "GptOss", "GPT-OSS: attention sinks, windows in turn, clamped SwiGLU, biases"),
        _mixture("olmoe", "Olmoe", "OLMoE: 64 small experts, norms over all heads of queries and keys"),
    ]


def _mixture(name: str, prefix: str, doc: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_models.{name}.config:{prefix}Config"),
        build=Lazy(f"mt_models.{name}.model:build_{name}"),
        presets=Lazy(f"mt_models.{name}.presets:PRESETS"),
        name_maps={"hf": Lazy(f"mt_models.{name}.hugging_face:HUGGING_FACE")},
    )


def _heads() -> list[ModelSpec]:
    """A class for a text, or one of several texts, on the bases that have such heads."""
    return [
        _head("bert_classification", "BertClassificationConfig", "build_bert_classifier", "BERT_CLASSIFICATION"),
        _head("bert_multiple_choice", "BertMultipleChoiceConfig", "build_bert_chooser", "BERT_MULTIPLE_CHOICE"),
        _head("gpt_classification", "GPTClassificationConfig", "build_gpt_classifier", "GPT_CLASSIFICATION"),
        _head("gpt_multiple_choice", "GPTMultipleChoiceConfig", "build_gpt_chooser"),
        _head("llama_classification", "LlamaClassificationConfig", "build_llama_classifier", "LLAMA_CLASSIFICATION"),
        _head("llama_multiple_choice", "LlamaMultipleChoiceConfig", "build_llama_chooser"),
    ]


def _head(name: str, config: str, build: str, name_map: str | None = None) -> ModelSpec:
    base, _, task = name.partition("_")
    chosen = "a class for each text" if task == "classification" else "one of several texts"
    return ModelSpec(
        name=name,
        doc=f"The family {base} with a head that chooses {chosen}",
        config_type=Lazy(f"mt_models.heads.config:{config}"),
        build=Lazy(f"mt_models.heads.model:{build}"),
        presets=Lazy("mt_models.heads.presets:PRESETS"),
        name_maps={"hf": Lazy(f"mt_models.heads.hugging_face:{name_map}")} if name_map else {},
    )


@hookimpl
def mt_register_losses() -> list[LossSpec]:
    return [
        LossSpec(
            name="bert",
            doc="Cross entropy of masked words and of the order of two texts",
            build=Lazy("mt_models.bert.loss:build_bert_loss"),
        ),
        LossSpec(
            name="classification",
            doc="Cross entropy of the right class or text, one number a sample",
            build=Lazy("mt_models.heads.loss:build_classification_loss"),
        ),
        LossSpec(
            name="retrieval",
            doc="Cross entropy of each question's own text among those of the micro-batch on all ranks",
            build=Lazy("mt_models.biencoder.loss:build_retrieval_loss"),
        ),
    ]


CHECKS: dict[str, Lazy[CheckConfig]] = {
    "gpt": Lazy("mt_models.gpt.config:check_gpt"),
    "llama": Lazy("mt_models.llama.config:check_llama"),
    "mistral": Lazy("mt_models.mistral.config:check_mistral"),
    "qwen": Lazy("mt_models.qwen.config:check_qwen"),
    "gemma": Lazy("mt_models.gemma.config:check_gemma"),
    "mixtral": Lazy("mt_models.mixtral.config:check_mixtral"),
    "qwen_moe": Lazy("mt_models.qwen_moe.config:check_qwen_moe"),
    "deepseek": Lazy("mt_models.deepseek.config:check_deepseek"),
    "granite_moe": Lazy("mt_models.granite_moe.config:check_granite_moe"),
    "gpt_oss": Lazy("mt_models.gpt_oss.config:check_gpt_oss"),
    "olmoe": Lazy("mt_models.olmoe.config:check_olmoe"),
    "bert": Lazy("mt_models.bert.config:check_bert"),
    "t5": Lazy("mt_models.t5.config:check_t5"),
    "mamba": Lazy("mt_models.mamba.config:check_mamba"),
    "hybrid": Lazy("mt_models.hybrid.config:check_hybrid"),
    "retro": Lazy("mt_models.retro.config:check_retro"),
    "biencoder": Lazy("mt_models.biencoder.config:check_biencoder"),
    "vision": Lazy("mt_models.vision.config:check_vision"),
    "llava": Lazy("mt_models.llava.config:check_llava"),
    **{
        f"{base}_{task}": Lazy("mt_models.heads.config:check_choice")
        for base in ("bert", "gpt", "llama")
        for task in ("classification", "multiple_choice")
    },
}
"""Family -> what refuses configurations that it cannot be built from."""


@hookimpl
def mt_check_config(config: Config) -> None:
    check = CHECKS.get(config.model.family)
    if check is not None:
        check.load()(config)
