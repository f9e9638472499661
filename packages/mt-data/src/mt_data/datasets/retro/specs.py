"""What the data sets with neighbours register; read whenever plugins are listed, so nothing heavy is imported."""

from __future__ import annotations

from mt_core.specs import CAUSAL_LM_SAMPLE, DatasetSpec, Lazy, SampleField

NEIGHBORS = "[sequence_length / retro_chunk_length, retro_num_neighbors, retrieved length]"
RETRO_SAMPLE = (
    *(field for field in CAUSAL_LM_SAMPLE if field.name != "segment_ids"),
    SampleField("neighbor_tokens", "int64", NEIGHBORS, "ids of each chunk's neighbours, padded at the end"),
    SampleField("neighbor_mask", "int64", NEIGHBORS, "1 for tokens, 0 for padding"),
)

RETRO_DATASETS = (
    DatasetSpec(
        name="builtin_retro",
        doc="The text that every Python carries, with similar chunks of other documents",
        config_type=Lazy("mt_data.datasets.retro.config:BuiltinRetroDataConfig"),
        build=Lazy("mt_data.datasets.retro.builtin:build_builtin_retro"),
        sample=RETRO_SAMPLE,
    ),
    DatasetSpec(
        name="retro",
        doc="Token files with a chunk database and the neighbours of each chunk",
        config_type=Lazy("mt_data.datasets.retro.config:RetroDataConfig"),
        build=Lazy("mt_data.datasets.retro.files:build_retro_files"),
        sample=RETRO_SAMPLE,
    ),
)
