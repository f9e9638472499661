"""Ids of tokens in config.json of folders that transformers wrote, through mt's own format and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.family_cases import CASES, make_model
from tests.ckpt.larger_classes import LARGER_CLASSES
from tests.models.test_kept_token_ids import contents, ids_in, numbered

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import ConvertOptions

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("without_waiting_for_the_disk")
CONFIG, GENERATION = "config.json", "generation_config.json"


def saved(case, folder: Path, **changes: Any) -> dict[str, Any]:
    """A folder of transformers. changes: of config.json. Returns that file's content."""
    make_model(case).save_pretrained(folder)
    external = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(external))
    return external


def there_and_back(source: Path, host) -> Path:
    convert(source, source.parent / "mt", saver="mt", host=host)
    convert(source.parent / "mt", source.parent / "back", saver="hf", options=ConvertOptions(), host=host)
    return source.parent / "back"


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4 with pictures"])
def test_every_id_is_the_same_after_both_ways(host, tmp_path, name) -> None:
    saved(CASES[name], tmp_path / "theirs")
    external = numbered(contents(transformers.AutoConfig.from_pretrained(tmp_path / "theirs")), iter(range(3, 99)))
    external |= {"bos_token_id": 51, "eos_token_id": [52, 53], "pad_token_id": 54}
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(external))
    (tmp_path / "theirs" / GENERATION).unlink(missing_ok=True)
    back = transformers.AutoConfig.from_pretrained(there_and_back(tmp_path / "theirs", host))
    expected = ids_in(contents(transformers.AutoConfig.from_pretrained(tmp_path / "theirs")))
    assert len(expected) > 6
    assert ids_in(contents(back)) == expected


def test_a_text_takes_its_ends_from_its_own_part_and_names_what_it_leaves_out(host, tmp_path) -> None:
    external = saved(LARGER_CLASSES["glm5_next without its tower"], tmp_path / "theirs")
    external["text_config"] |= {"bos_token_id": 7, "eos_token_id": [8, 9]}
    external |= {"image_start_token_id": 55, "bos_token_id": None, "eos_token_id": None}
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(external))
    (tmp_path / "theirs" / GENERATION).unlink(missing_ok=True)
    report = convert(tmp_path / "theirs", tmp_path / "back", saver="hf", host=host)
    (note,) = report.notes
    assert "image_start_token_id=55" in note
    assert "glm5_next" in note
    back = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (back.model_type, back.bos_token_id, back.eos_token_id) == ("glm5_next_text", 7, [8, 9])


def test_a_class_that_takes_one_end_gets_the_first_of_several(host, tmp_path) -> None:
    saved(CASES["inkling_text"], tmp_path / "theirs", eos_token_id=5)
    (tmp_path / "theirs" / GENERATION).write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": 0}))
    report = convert(tmp_path / "theirs", tmp_path / "back", saver="hf", verify=True, host=host)
    assert report.verification is not None
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").eos_token_id == 5
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == [5, 7]


@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v3"])
def test_sizes_of_experts_that_no_layer_has_are_named(host, tmp_path, name) -> None:
    """The written config.json has none, for which transformers takes the defaults of its class."""
    layers = 3
    kinds = {"mlp_layer_types": ["dense"] * layers} if name == "glm_moe_dsa" else {}
    keys = CASES[name].keys | kinds | {"first_k_dense_replace": layers}
    saved(replace(CASES[name], keys=keys), tmp_path / "theirs", n_routed_experts=8, moe_intermediate_size=12)
    report = convert(tmp_path / "theirs", tmp_path / "back", saver="hf", host=host)
    (note,) = report.notes
    assert note.startswith("config.json: left out, since no layer has experts")
    assert {"n_routed_experts=8", "moe_intermediate_size=12"} <= set(note.replace(",", "").split())
