"""A trained encoder of questions and passages: a biencoder, or a BERT whose states are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_core.versions import installed_versions
from mt_data.datasets.text_files import bare_encoder
from mt_infer.embedding import InputType, TextEmbedder
from mt_models.bert.model import BertEncoder
from mt_retrieval.evidence import TextPairs, bare_question


class Encoder:
    """Embeds sequences of tokens. seq_length: of the longest; longer ones are cut."""

    def __init__(self, trained: TrainedModel, host: PluginHost, seq_length: int | None = None) -> None:
        self._embedder = TextEmbedder.of_trained(trained)
        self._trained, self._host = trained, host
        self._encode = bare_encoder(trained.tokenizer)
        self.seq_length = seq_length or trained.config.data.seq_length
        if self.seq_length > self._embedder.longest:
            raise ConfigError(
                f"--seq-length {self.seq_length} is longer than the {self._embedder.longest} positions of "
                f"{trained.checkpoint}; give at most that many"
            )
        self.pairs = TextPairs.of(trained.tokenizer, self.seq_length)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        host: PluginHost | None = None,
        seq_length: int | None = None,
    ) -> Encoder:
        """From a run directory, or a checkpoint of any format. settings: as of `load_trained_model`; with "parallel" in
        them collective.

        Raises ConfigError for a model that embeds nothing, and for pipeline or context parallelism.
        """
        host = host or load_plugins()
        trained = load_trained_model(path, host, device=device, settings=settings)
        pp, cp = trained.ctx.axis("pp").size, trained.ctx.cp.size
        for size, key in ((pp, "pipeline_model_parallel_size"), (cp, "context_parallel_size")):
            if size > 1:
                raise ConfigError(
                    f"parallel.{key}={size}: an encoder of passages runs under tensor and data parallelism"
                )
        return cls(trained, host, seq_length)

    @property
    def checkpoint(self) -> Path:
        return self._trained.checkpoint

    @property
    def config(self) -> Config:
        return self._trained.config

    @property
    def ctx(self) -> ParallelContext:
        return self._trained.ctx

    @property
    def tokenizer(self) -> Tokenizer:
        return self._trained.tokenizer

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        return self._embedder.longest

    @cached_property
    def fingerprint(self) -> str:
        """See `encoder_fingerprint`. The first time the checkpoint is read again; later it need not exist any more."""
        return encoder_fingerprint(open_checkpoint(self.checkpoint, self._host), self.tokenizer)

    def questions(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[texts, P]. One trailing question mark is left out, as in training."""
        return self.vectors([self.pairs.question(self._encode(bare_question(text))) for text in texts], "query")

    def vectors(self, sequences: Sequence[Sequence[int]], input_type: InputType) -> NDArray[np.float32]:
        """[sequences, P] of tokens with CLS and SEP."""
        vectors: NDArray[np.float32] = self._embedder.vectors(sequences, input_type).cpu().numpy()
        return vectors

    @torch.inference_mode()
    def mean_states(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[sequences, H] of tokens with CLS and SEP: the mean of a BERT's last hidden states without those of the two,
        as Megatron's Retro embeds chunks. A model that is no BERT: as `vectors`, by the encoder of texts."""
        model = self._embedder.model
        if not isinstance(model, BertEncoder):
            return self.vectors(sequences, "document")
        tokens, seen = self._embedder.padded(sequences)
        states = model.hidden_states(tokens, padding_mask=seen).float()
        # Example: CLS a b SEP pad has seen 1 1 1 1 0. Shifted by one, inner is 1 1 1 0 at the positions of CLS a b SEP:
        # SEP's is 0. Leaving out the first column drops CLS; a and b are averaged.
        inner = seen[:, 1:].float()  # One place less: with those behind SEP its own is left out; and that of CLS.
        means: NDArray[np.float32] = (
            # states [B, S, H], inner [B, S - 1] -> [B, H]
            ((states[:, :-1] * inner[..., None])[:, 1:].sum(1) / inner[:, 1:].sum(1, keepdim=True)).cpu().numpy()
        )
        return means


# -- identity of an encoder, and what results record of its origin -----------------------------------

DISTRIBUTIONS = ("mt-core", "mt-data", "mt-infer", "mt-models", "mt-retrieval", "torch", "numpy", "faiss-cpu")
WEIGHTS = "model."


def encoder_fingerprint(reader: CheckpointReader, tokenizer: Tokenizer) -> str:
    """SHA-256 of the weights as they are stored and of the tokenizer, whatever the format and place of the files."""
    digest = sha256(tokenizer.fingerprint().encode())
    # Sorted, and without optimizer state: the same weights in another format or file layout have the same hash.
    for name in sorted(name for name in reader.shapes() if name.startswith(WEIGHTS)):
        tensor = reader.read(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # Bytes, since NumPy has no bf16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    return installed_versions(DISTRIBUTIONS)


def computation(config: Config, ctx: ParallelContext) -> dict[str, Any]:
    """Versions, layout and precision of a computation by a model."""
    return {
        "versions": versions(),
        "layout": {name: ctx.axis(name).size for name in ("tp", "dp")},
        "precision": config.precision.dtype,
        "device": ctx.device.type,
    }
