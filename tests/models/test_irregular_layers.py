"""Kinds of layers in any order: the logits of transformers, and the same lists in the file that is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from scripts.model_cards.compare import compare
from tests.ckpt.family_cases import CASES, VOCAB, Case, make_model
from tests.models import decoder_reference as dense

from mt_ckpt.hugging_face.family import family_named, read_config
from mt_core.errors import ConfigError
from mt_models.blocks.window_pattern import first_without_window, has_window
from mt_models.hugging_face import load_reference

pytest.importorskip("transformers")
FULL, WINDOW = "full_attention", "sliding_attention"
KINDS = [FULL, WINDOW, WINDOW, FULL, FULL, WINDOW, FULL]
"""No period fits. The last one is global, as Gemma 4 makes it whatever the list says."""
NAMES = ["gemma3", "gemma4_text", "olmo3", "exaone4", "exaone_moe"]


def irregular(name: str):
    case = CASES[name]
    keys = {**case.keys, "num_hidden_layers": len(KINDS), "layer_types": KINDS, "sliding_window": 3}
    keys.pop("sliding_window_pattern", None)
    if "mlp_layer_types" in keys:
        keys["mlp_layer_types"] = ["dense", *["sparse"] * (len(KINDS) - 1)]
    return replace(case, keys=keys)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_class(host, tmp_path, name) -> None:
    theirs = make_model(irregular(name))
    theirs.save_pretrained(tmp_path)
    external = theirs.config.to_dict()
    assert external["layer_types"] == KINDS
    family = family_named(CASES[name].family, host)
    model = read_config(family, external, host).model
    assert [model.window_of(layer) is None for layer in range(len(KINDS))] == [kind == FULL for kind in KINDS]
    assert family.write_config(model)["layer_types"] == KINDS
    ours = dense.build_from(host, family.read_config(external), backend="eager")
    load_reference(ours, load_file(tmp_path / "model.safetensors"), family)
    tokens = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    dense.assert_decoding_equals_forward(ours, tokens[:1, :9])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kinds", [[*KINDS[:-1], "chunked_attention"], KINDS[1:]])
def test_other_kinds_and_numbers_of_layers_are_refused(host, name, kinds) -> None:
    external = {**make_config(name), "layer_types": kinds}
    if kinds[-1] != FULL and name == "gemma4_text":
        external["layer_types"] = ["chunked_attention", *KINDS[1:]]
    with pytest.raises(ConfigError, match="layer_types"):
        read_config(family_named(CASES[name].family, host), external, host)


def make_config(name: str):
    import transformers

    case = irregular(name)
    return getattr(transformers, case.config)(**case.keys).to_dict()


def test_a_pattern_by_hand() -> None:
    pattern = "([1]*2+[0]*1+[1]*1)"
    assert [has_window(pattern, layer, 4) for layer in range(5)] == [True, True, False, True, False]
    assert (first_without_window(pattern, 4), first_without_window(3, 4)) == (2, 2)
    assert first_without_window("([1]*4)", 4) == 4
    with pytest.raises(ConfigError, match=r"model\.sliding_window_pattern=.* has 4 entries"):
        has_window(pattern, 0, 5)


# -- indexers and experts ------------------------------------------------------------------------------

INDEXERS = ["full", "shared", "full", "full", "shared", "full"]
FEED_FORWARDS = ["dense", "sparse", "dense", "sparse", "sparse", "dense"]
LISTS = {
    "glm_moe_dsa": {"indexer_types": INDEXERS, "mlp_layer_types": FEED_FORWARDS},
    "deepseek_v32": {"mlp_layer_types": FEED_FORWARDS},
    "hy_v4": {"indexer_types": INDEXERS, "mlp_layer_types": FEED_FORWARDS},
}


@pytest.mark.parametrize("name", LISTS)
def test_indexers_and_experts_are_those_of_the_class(host, tmp_path, name) -> None:
    case = CASES[name]
    theirs = make_model(replace(case, keys={**case.keys, "num_hidden_layers": 6, "index_topk": 3, **LISTS[name]}))
    theirs.save_pretrained(tmp_path)
    external, family = theirs.config.to_dict(), family_named(case.family, host)
    written = family.write_config(read_config(family, external, host).model)
    assert {key: written[key] for key in LISTS[name]} == LISTS[name]
    again = type(theirs.config).from_dict(written).to_dict()
    assert {key: again[key] for key in LISTS[name]} == LISTS[name]
    ours = dense.build_from(host, family.read_config(external), backend="eager")
    load_reference(ours, load_file(tmp_path / "model.safetensors"), family)
    tokens = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_number_of_dense_layers_beside_the_list_does_not_count(host) -> None:
    """The class of GLM-5 writes its default there."""
    from transformers import GlmMoeDsaConfig

    keys = {**CASES["glm_moe_dsa"].keys, "first_k_dense_replace": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    external = GlmMoeDsaConfig(**keys).to_dict()
    assert external["first_k_dense_replace"] == 3
    model = read_config(family_named("deepseek_v32", host), external, host).model
    assert model.moe["moe_layer_freq"] == "([0]*1+[1]*2)"


def test_the_first_layer_needs_an_indexer(host) -> None:
    keys = family_named("deepseek_v32", host).read_config({**make_glm(), "indexer_types": ["full", "full", "shared"]})
    with pytest.raises(ConfigError, match=r"model\.dsa_indexer_pattern=.* begins with 0"):
        dense.build_from(host, {**keys, "dsa_indexer_pattern": "([0]*1+[1]*2)"})


def make_glm():
    from transformers import GlmMoeDsaConfig

    return GlmMoeDsaConfig(**CASES["glm_moe_dsa"].keys).to_dict()


# -- dense layers and layers with experts --------------------------------------------------------------

SMALL = ["sparse", "dense", "sparse"]
"""No number of dense layers says it."""
MIXED = (
    *("glm4_moe_lite", "kimi_linear", "bailing_hybrid", "glm5_next", "deepseek_v32", "glm_moe_dsa", "hy_v3", "hy_v4"),
    *("mimo_v2_flash", "exaone_moe", "inkling_text", "muse_spark", "minimax_m3_vl_text", "mistral_large4", "step3p7"),
)
"""Every class with `mlp_layer_types` of dense and sparse layers that a family computes."""


def mixed(name: str) -> Case:
    case = CASES[name]
    class_name, text = case.parts.get("text_config", ("", case.keys))
    layers = text["num_hidden_layers"]
    kinds = (SMALL * layers)[:layers]
    text = {key: value for key, value in text.items() if key != "first_k_dense_replace"} | {"mlp_layer_types": kinds}
    if not class_name:
        return replace(case, keys=text)
    return replace(case, parts={**case.parts, "text_config": (class_name, text)})


@pytest.mark.parametrize("name", MIXED)
def test_dense_layers_between_others_are_those_of_the_class(host, monkeypatch, name) -> None:
    """Logits, loss, gradients, the weights and the list that are written, and a greedy continuation."""
    monkeypatch.setattr("scripts.model_cards.compare.DRAWS", 1)
    case = mixed(name)
    compared = compare(case, host)
    errors = {key: compared[key] for key in ("outputs", "loss", "gradients")}
    if "fp64" in compared:
        # Sums of gradients that nearly cancel: both libraries are as far from fp64.
        assert compared["fp64"]["mt"] < 1.5 * compared["fp64"]["transformers"]
        del errors["gradients"]
    assert max(errors.values()) < 1e-5, errors
    assert compared["weights"]
    assert compared["greedy"]
    external = make_model(case).config.to_dict()
    family = family_named(case.family, host)
    written = family.write_config(read_config(family, external, host).model)
    text = external.get("text_config", external)
    assert written.get("text_config", written)["mlp_layer_types"] == text["mlp_layer_types"]
