"""A BERT as the start of every tower of a biencoder (Megatron-LM's --bert-load)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, dtype

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_models.bert.config import BertConfig
from mt_models.biencoder.config import BiencoderConfig

MODEL = "model."
ENCODER = ("embedding.", "encoder.")
"""Parts of a BERT that a tower has; heads and pooler have no place in it."""
COMPUTED_BY = (
    "layernorm_placement",
    "norm_epsilon",
    "activation",
    "num_attention_heads",
    "num_tokentypes",
    "max_position_embeddings",
)
"""Keys that change what the same weights compute, or their shapes."""


@dataclass(frozen=True)
class TowersOfBert:
    """A checkpoint of BERT in which every tower has its weights. names: of the towers."""

    reader: CheckpointReader
    towers: tuple[str, ...]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._in_towers(self.reader.shapes())

    def dtypes(self) -> Mapping[str, dtype]:
        return self._in_towers(self.reader.dtypes())

    def read(self, name: str) -> Tensor:
        # "model.query_model.encoder.x" -> "model.encoder.x": two towers read the same stored tensor.
        return self.reader.read(MODEL + name.removeprefix(MODEL).partition(".")[2])

    def files(self) -> Mapping[str, bytes]:
        return self.reader.files()

    def _in_towers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        parts = {name.removeprefix(MODEL): value for name, value in values.items() if name.startswith(MODEL)}
        kept = {name: value for name, value in parts.items() if name.startswith(ENCODER)}
        return {f"{MODEL}{tower}.{name}": value for tower in self.towers for name, value in kept.items()}


def towers_of_bert(reader: CheckpointReader, config: Config, host: PluginHost) -> CheckpointReader:
    """See `mt_core.specs.AdaptCheckpoint`. Raises ConfigError for a BERT whose keys differ from the towers'."""
    stored = reader.metadata["config"]["model"]
    if stored["family"] != "bert":
        return reader
    model = config.model
    assert isinstance(model, BiencoderConfig)
    bert = BertConfig.model_validate(stored)
    different = [key for key in COMPUTED_BY if getattr(bert, key) != getattr(model, key)]
    if different:
        settings = ", ".join(f"model.{key}={getattr(bert, key)} (now {getattr(model, key)})" for key in different)
        raise ConfigError(
            f"the BERT of checkpoint.load={config.checkpoint.load} has other keys than the towers: set {settings}"
        )
    shared = model.biencoder_shared_query_context_model
    return TowersOfBert(reader, ("shared_model",) if shared else ("query_model", "context_model"))
