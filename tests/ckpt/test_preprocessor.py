"""preprocessor_config.json beside the weights of a model of images of any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.ckpt.convert_cases import QWEN_VL

from mt_ckpt.convert import convert
from mt_ckpt.hugging_face.family import family_named
from mt_core.config.loading import config_from_dict

pytest.importorskip("transformers")


def test_processors_find_the_sizes_of_the_model(host, make_model, tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    convert(make_model(**QWEN_VL), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "hf")
    assert (processor.patch_size, processor.merge_size, processor.size["shortest_edge"]) == (2, 2, 64)
    # One that was read is written as it was.
    (tmp_path / "hf" / "preprocessor_config.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "again", saver="hf", host=host)
    assert json.loads((tmp_path / "again" / "preprocessor_config.json").read_text()) == {}


def test_a_run_has_the_colours_and_sizes_of_its_data(host) -> None:
    model = config_from_dict({"model": QWEN_VL, "train": {"train_iters": 1}}, host).model
    data = {"dynamic_resolution": True, "max_pixels": 1024, "image_std": [0.5] * 3, "image_mean": [0.4] * 3}
    written = family_named("qwen_vl", host).preprocessor.write(model, data)
    assert (written["max_pixels"], written["min_pixels"], written["image_std"]) == (1024, 64, [0.5] * 3)
