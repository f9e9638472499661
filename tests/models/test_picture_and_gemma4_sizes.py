"""Presets of Gemma 4, Qwen3-VL and Qwen3.5 with pictures have as many parameters as transformers' classes."""

from __future__ import annotations

import pytest
from tests.models.decoder_reference import without_values
from tests.models.vision_reference import canonical_size

from mt_core.config.loading import load_config
from mt_core.specs import MODELS

transformers = pytest.importorskip("transformers")

SIZES = {
    "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418,
    "gemma4-12b": 11_907_350_320,
    "gemma4-31b": 30_697_345_340,
    "gemma4-26b-a4b": 25_233_141_790,
    "gemma4-e2b-vl": 4_797_114_083,
    "gemma4-e2b-vl-audio": 5_104_298_467,
    "qwen3-omni-30b-a3b": 31_719_205_488,
    "gemma4-31b-vl": 31_273_088_876,
    "gemma4-26b-a4b-vl": 25_805_936_206,
    "mistral-small-3.1-24b": 24_011_361_280,
    "ministral3-3b-vl": 3_849_090_048,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3.5-0.8b-vl": 852_985_920,
    "qwen3.5-9b-vl": 9_409_813_744,
    "qwen3.6-35b-a3b-vl": 35_107_181_936,
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("preset", SIZES)
def test_a_preset_has_the_size_of_the_class(host, preset: str) -> None:
    # transformers' classes leave out the layer of multi-token prediction.
    predicts = ["model.language_model.mtp_num_layers=0"] if preset.startswith(("qwen3.5", "qwen3.6")) else []
    config = load_config(preset=preset, overrides=["train.train_iters=1", *predicts], host=host).config
    assert canonical_size(host, config) == SIZES[preset]
    external = host[MODELS].get(config.model.family).name_maps["hf"].load().write_config(config.model)
    kind = getattr(transformers, external["architectures"][0])
    reference = without_values(kind, kind.config_class.from_dict(external))
    # Weights that transformers has as buffers.
    kept = ("layer_scalar", "std_bias", "std_scale", "_min", "_max")
    scalars = sum(tensor.numel() for name, tensor in reference.named_buffers() if name.endswith(kept))
    assert reference.num_parameters() + scalars == SIZES[preset]
