"""The models that a path means: a checkpoint of mt, or a Hugging Face folder as transformers computes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import load_trained_model
from mt_ops.deep.recording import RecordedModel

TO_MT: tuple[tuple[str, str], ...] = (
    (r"(?:model|transformer)\.(?:embed_tokens|wte)", "embedding.word_embeddings"),
    (r"(?:model\.layers|transformer\.h)\.(\d+)", r"decoder.layers.\1"),
    (r"(?:model\.layers|transformer\.h)\.(\d+)\.(?:input_layernorm|ln_1)", r"decoder.layers.\1.input_layernorm"),
    (r"(?:model\.layers|transformer\.h)\.(\d+)\.(?:self_attn|attn)", r"decoder.layers.\1.self_attention"),
    (
        r"(?:model\.layers|transformer\.h)\.(\d+)\.(?:self_attn\.o_proj|attn\.c_proj)",
        r"decoder.layers.\1.self_attention.linear_proj",
    ),
    (
        r"(?:model\.layers|transformer\.h)\.(\d+)\.(?:post_attention_layernorm|ln_2)",
        r"decoder.layers.\1.pre_mlp_layernorm",
    ),
    (r"(?:model\.layers|transformer\.h)\.(\d+)\.mlp", r"decoder.layers.\1.mlp"),
    (r"(?:model\.layers|transformer\.h)\.(\d+)\.mlp\.(?:down_proj|c_proj)", r"decoder.layers.\1.mlp.linear_fc2"),
    (r"(?:model\.norm|transformer\.ln_f)", "decoder.final_layernorm"),
)
"""Names of modules in transformers' decoders -> mt's. Those without a counterpart are not compared."""


def mt_module(name: str) -> str | None:
    """mt's name of a module of transformers, None for one that mt does not have."""
    for pattern, ours in TO_MT:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    return None


def is_hugging_face(path: Path) -> bool:
    """A folder whose config.json names a model_type, which a run's does not."""
    from mt_ops.reading.json_lines import read_json

    content = read_json(path / "config.json")
    return isinstance(content, Mapping) and "model_type" in content


def open_model(path: Path, host: PluginHost) -> tuple[RecordedModel, int]:
    """The model in fp32 on the CPU, and its vocabulary's size. Raises CheckpointError without a checkpoint."""
    if is_hugging_face(path):
        return _of_transformers(path)
    loaded = load_trained_model(path, host, device="cpu", settings={"precision": {"dtype": "fp32"}})

    def logits(tokens: Tensor) -> Tensor:
        output: Any = loaded.model(tokens)
        if not isinstance(output, Tensor):
            raise ConfigError(f"{path}: mt compare --deep compares decoders, whose output is logits")
        return output[..., : loaded.config.model.vocab_size]

    return RecordedModel(loaded.model, logits), int(loaded.config.model.vocab_size or 0)


def _of_transformers(path: Path) -> tuple[RecordedModel, int]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError(f"{path} is a Hugging Face folder: pip install transformers, which computes it") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: transformers does not load it: {error}") from error

    def logits(tokens: Tensor) -> Tensor:
        output: Tensor = model(input_ids=tokens, use_cache=False).logits
        return output

    return RecordedModel(model, logits, mt_module), int(model.config.vocab_size)
