"""A plugin with a data set of samples for encoders and decoders, made up as they are asked for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

import numpy as np

from mt_core.config.schema import DataConfig
from mt_core.hookspecs import hookimpl
from mt_core.interfaces import SampleField, SplitRequest, Tokenizer
from mt_core.kinds import Lazy
from mt_core.plugins import ENTRY_POINT_GROUP, PluginHost, load_plugins
from mt_core.specs import DatasetSpec

SAMPLE = (
    SampleField("encoder_tokens", "int64", "[sequence_length]", ""),
    SampleField("decoder_tokens", "int64", "[decoder_seq_length]", ""),
    SampleField("labels", "int64", "[decoder_seq_length]", ""),
    SampleField("loss_mask", "float32", "[decoder_seq_length]", ""),
    SampleField("encoder_mask", "int64", "[sequence_length]", ""),
)


class MadeUpConfig(DataConfig):
    dataset_type: str = "fake_pairs"
    decoder_seq_length: int = 16


class Pairs:
    def __init__(self, config: MadeUpConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        lengths = {"[sequence_length]": self.config.seq_length, "[decoder_seq_length]": self.config.decoder_seq_length}
        return {one.name: np.ones(lengths[one.shape], one.dtype) for one in SAMPLE}

    def describe(self, index: int) -> str:
        return f"pair {index}"


def build_pairs(config: MadeUpConfig, tokenizer: Tokenizer, request: SplitRequest) -> Pairs:
    return Pairs(config)


@hookimpl
def mt_register_datasets() -> list[DatasetSpec]:
    return [
        DatasetSpec(
            name="fake_pairs",
            doc="Pairs of texts",
            config_type=Lazy("fake:MadeUpConfig"),
            build=Lazy("fake:build_pairs"),
            sample=SAMPLE,
        )
    ]


@cache
def host() -> PluginHost:
    """The installed plugins, and this one."""
    return load_plugins(
        entry_points=[*entry_points(group=ENTRY_POINT_GROUP), EntryPoint("fake", "fake", ENTRY_POINT_GROUP)]
    )
