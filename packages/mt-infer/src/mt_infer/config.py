"""The section [inference] of the configuration."""

from __future__ import annotations

from typing import Literal

from mt_core.config.fields import PositiveFloat, PositiveInt, Section, used_when


class InferenceConfig(Section):
    """Generating and scoring with a trained model."""

    max_sequence_length: PositiveInt | None = None
    """Longest sequence, prompt and generated tokens together. Default: the model's positions, else data.seq_length."""
    max_requests: PositiveInt = 64
    """Sequences that are computed at a time; others wait."""
    max_tokens_per_step: PositiveInt = 512
    """New positions of a forward pass. Longer prompts take several (chunked prefill)."""
    cache_memory_gb: PositiveFloat | None = None
    """GiB for keys, values and states of sequences, a draft model's included. Default: half of the free memory."""
    cache_block_size: PositiveInt = 16
    """Positions of a block, the unit in which the cache's memory is given."""
    prefix_caching: bool = True
    """Keep what was computed for prompts, for others that begin alike."""
    quantize_weights: Literal["int8", "int8_dynamic", "int4", "fp8"] | None = None
    """Store matrices in 8 or 4 bits, quantized when a checkpoint is loaded. Embeddings, norms, routers and, without
    quantize_output_layer, the LM head keep their dtype. int8_dynamic: inputs of products are int8 too, each position's
    with a scale of its own. Default: all keep their dtype."""
    quantize_group_size: PositiveInt = used_when(128, quantize_weights=("int8", "int4", "fp8"))
    """Input features of a matrix that share a scale."""
    quantize_output_layer: bool = used_when(False, quantize_weights=("int8", "int8_dynamic", "int4", "fp8"))
    """Quantize the LM head too, where it is not tied to the embeddings; with int8_dynamic tied embeddings too."""
    cuda_graphs: Literal["auto", "none", "decode"] = "auto"
    """Capture steps that compute one position of each sequence as CUDA graphs, one for each of a few batch sizes.
    auto: where the device and the model allow it; on a CPU their operators are recorded."""
    cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Type of keys, values and latents in the cache; 8 bits have a scale for each vector. auto: the model's dtype."""
    speculative_method: Literal["ngram", "draft_model", "mtp"] | None = None
    """Guess tokens and verify several in one forward pass, for the same output: from the text itself, by a small model,
    or by the model's own layers of multi-token prediction."""
    speculative_tokens: PositiveInt = 4
    """Tokens that are guessed at a time; with mtp at most the model's mtp_num_layers."""
    speculative_ngram: PositiveInt = 3
    """With ngram: last tokens that are looked up in the text before them, at most."""
    speculative_model: str | None = None
    """With draft_model: its run directory or checkpoint. It has the tokenizer of the large model."""
