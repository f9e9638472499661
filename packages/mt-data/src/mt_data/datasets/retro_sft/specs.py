"""What instruction tuning with passages registers; read whenever plugins are listed, so nothing heavy is imported."""

from __future__ import annotations

from mt_core.specs import DatasetSpec, Lazy
from mt_data.datasets.retro.specs import RETRO_SAMPLE

RETRO_SFT_DATASET = DatasetSpec(
    name="retro_sft",
    doc="Questions with answers and retrieved passages, for instruction tuning of RETRO",
    config_type=Lazy("mt_data.datasets.retro_sft.config:RetroSFTDataConfig"),
    build=Lazy("mt_data.datasets.retro_sft.dataset:build_retro_sft"),
    sample=RETRO_SAMPLE,
    checkpoint_files=Lazy("mt_data.datasets.sft.checkpoint_files:checkpoint_files"),
)
