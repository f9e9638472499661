"""Ids of tokens that a config.json names are in the one that is written, at any depth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.ckpt.family_cases import CASES, Case
from tests.ckpt.larger_classes import LARGER_CLASSES
from torch import nn

from mt_ckpt.convert.reader_loss import token_inputs
from mt_ckpt.hugging_face.family import family_named, read_config
from mt_core.errors import ConfigError
from mt_models.kept_token_ids import with_kept_ids

transformers = pytest.importorskip("transformers")

ENDS = ("_token_id", "_token_index")
OF_GENERATION = {"bos_token_id", "eos_token_id", "pad_token_id"}
"""At the top of config.json they are those of generation_config.json, which stands beside it in a folder."""
WITH_PARTS = [name for name, case in CASES.items() if case.parts]


def config_of(case: Case) -> Any:
    parts = {name: getattr(transformers, kind)(**keys) for name, (kind, keys) in case.parts.items()}
    return getattr(transformers, case.config)(**case.keys, **parts)


def contents(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def numbered(table: Mapping[str, Any], numbers: Iterator[int], outer: bool = True) -> dict[str, Any]:
    """config.json in which every id of a token is another one."""
    changed = dict(table)
    for key, value in table.items():
        if isinstance(value, Mapping):
            changed[key] = numbered(value, numbers, outer=False)
        elif key.endswith(ENDS) and not (outer and key in OF_GENERATION):
            changed[key] = next(numbers)
    return changed


def ids_in(table: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            ids |= ids_in(value, f"{within}{key}.")
        elif key.endswith(ENDS):
            ids[f"{within}{key}"] = value
    return ids


@pytest.mark.parametrize("name", [name for name in WITH_PARTS if "thinker" not in name])
def test_every_id_of_a_model_with_parts_survives_as_transformers_reads_it(name, host) -> None:
    case = CASES[name]
    config, family = config_of(case), family_named(case.family, host)
    external = numbered(contents(config), iter(range(3, 99)))
    model = read_config(family, external, host).model
    written = type(config).from_dict(family.write_config(model))
    meant = type(config).from_dict(json.loads(json.dumps(external)))
    assert ids_in(contents(written)) == ids_in(contents(meant))
    assert any("." in path for path in ids_in(external))
    again = read_config(family, family.write_config(model), host).model
    assert again.kept_token_ids == model.kept_token_ids


def test_ids_of_a_thinker_stand_within_the_whole_model(host) -> None:
    case = CASES["qwen3_omni_moe_thinker"]
    config, family = config_of(case), family_named(case.family, host)
    # Published files have the first, which the class reads and does not declare.
    external = numbered({**contents(config), "vision_start_token_id": 1}, iter(range(3, 99)))
    written = family.write_config(read_config(family, external, host).model)
    assert written["model_type"] == "qwen3_omni_moe"
    thinker = type(config).from_dict(written["thinker_config"])
    assert ids_in(contents(thinker)) == ids_in(contents(type(config).from_dict(external)))
    whole = {**written, "im_start_token_id": 70, "tts_pad_token_id": 71}
    again = family.write_config(read_config(family, whole, host).model)
    assert ids_in(again) == ids_in(whole)


def test_null_and_a_list_are_kept(host) -> None:
    # The class of the text has 1 and 2 for what is left out.
    config, family = config_of(CASES["mistral3"]), family_named("mistral3", host)
    external = contents(config)
    external["text_config"] |= {"bos_token_id": None, "eos_token_id": [5, 6]}
    text = family.write_config(read_config(family, external, host).model)["text_config"]
    assert (text["bos_token_id"], text["eos_token_id"]) == (None, [5, 6])


def test_a_null_that_a_key_of_the_model_has_a_number_for_is_null_until_that_key_changes(host) -> None:
    """Positions of pictures take embeddings of each layer of `per_layer_image_token`, 0 where config.json has null."""
    config, family = config_of(CASES["gemma4 with pictures"]), family_named("gemma4_vl", host)
    external = contents(config)
    external["text_config"] |= {"pad_token_id": None}
    model = read_config(family, external, host).model
    assert model.language_model.per_layer_image_token == 0
    assert family.write_config(model)["text_config"]["pad_token_id"] is None
    text = model.language_model.model_copy(update={"per_layer_image_token": 7})
    changed = family.write_config(model.model_copy(update={"language_model": text}))
    assert changed["text_config"]["pad_token_id"] == 7


def test_an_id_that_a_key_of_the_model_has_follows_that_key(host) -> None:
    config, family = config_of(CASES["qwen3_vl"]), family_named("qwen3_vl", host)
    model = read_config(family, {**contents(config), "image_token_id": 50}, host).model
    assert "image_token_id" not in model.kept_token_ids
    assert family.write_config(model.model_copy(update={"image_token_index": 51}))["image_token_id"] == 51


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("mistral3", ("vision_config", "image_size"), 1120),
        ("jamba", ("use_mamba_kernels",), False),
        ("qwen3_5_text", ("rope_parameters", "mrope_section"), [1, 1, 0]),
        ("qwen3_5_moe_text", ("rope_parameters", "mrope_section"), [1, 1, 0]),
    ],
)
def test_other_values_that_text_does_not_depend_on_come_back(name, path, value, host) -> None:
    config, family = config_of(CASES[name]), family_named(CASES[name].family, host)
    external = contents(config)
    for part in path[:-1]:
        external[part] = dict(external[part])
    at(external, path[:-1])[path[-1]] = value
    model = read_config(family, external, host).model
    back = contents(type(config).from_dict(family.write_config(model)))
    assert at(back, path) == value
    # Nothing beside it has changed.
    without = family.write_config(read_config(family, contents(config), host).model)
    expected = contents(type(config).from_dict(without))
    at(expected, path[:-1])[path[-1]] = value
    assert {**back, "rope_parameters": None} == {**expected, "rope_parameters": None}


def at(table: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        table = table[key]
    return table


@pytest.mark.parametrize(("name", "case"), LARGER_CLASSES.items())
def test_ids_of_towers_that_are_left_out_are_named(name, case, host) -> None:
    family = family_named(case.family, host)
    external = numbered(contents(config_of(case)), iter(range(3, 99)))
    (sentence,) = family.left_out_ids(external)
    named = {entry.partition("=")[0] for entry in sentence.rpartition(": ")[2].split(", ")}
    of_text = {f"text_config.{key}" for key in OF_GENERATION}
    assert named == {path for path, value in ids_in(external).items() if value is not None} - of_text - OF_GENERATION
    written = family.write_config(read_config(family, external, host).model)
    assert not (set(ids_in(written)) & named)
    # Those of the text are the generation's.
    stated = family.ids_of_generation({**external, "bos_token_id": None, "eos_token_id": 98})
    assert stated["bos_token_id"] == external["text_config"]["bos_token_id"]
    assert stated["eos_token_id"] == 98


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4 with sound", "kimi_k25"])
def test_random_texts_are_without_ids_of_media(name, host) -> None:
    """Of a small vocabulary nearly every text of random ids would have them."""
    case = CASES[name]
    external = {**contents(config_of(case)), "video_token_id": 4}
    model = read_config(family_named(case.family, host), external, host).model
    assert {model.image_token_index, 4} <= model.media_token_ids
    few = 6
    module = Module()
    module.config = model.model_copy(update={"image_token_index": 3})
    drawn = [token_inputs(module, few)["tokens"] for _ in range(2)]
    assert not torch.isin(drawn[0], torch.tensor([3, 4])).any()
    assert torch.equal(*drawn)


class Module(nn.Module):
    config: Any = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def test_an_id_of_a_part_that_is_not_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.kept_token_ids\.vision_config cannot be written"):
        with_kept_ids({"model_type": "llama"}, {"vision_config": {"x_token_id": 3}}, "llama")
