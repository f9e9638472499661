"""Models of every family through Hugging Face's format and back, bit for bit; what `transformers` computes from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import LLAMA, MODELS
from tests.covering import EXHAUSTIVE

from mt_ckpt.convert import convert
from mt_ckpt.convert.verify import Verification
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.train.trained_model import load_trained_model

OF_EVERY_KIND = ("gpt2", "llama_tied_biased", "mixtral", "deepseek", "mamba", "hybrid", "t5", "vision", "llava")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in OF_EVERY_KIND else EXHAUSTIVE) for name in MODELS]
)
def test_through_hugging_face_in_shards(make_model, host, tmp_path: Path, model: str) -> None:
    """What is verified and divided is the same of every model; test_convert_grid.py has the bits of every family, and
    test_convert_families.py shards that begin at transformers' models."""
    source = make_model(**MODELS[model])
    options = ConvertOptions(max_shard_size=20_000)
    report = convert(source, tmp_path / "hf", saver="hf", options=options, verify=True, host=host)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert isinstance(report.verification, Verification)
    assert report.verification.num_tensors == report.num_tensors
    convert(tmp_path / "hf", tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "back")))


NOT_CAUSAL = ("bert", "modernbert", "t5", "bart", "vision", "llava")
"""transformers has no class of RWKV-7 and Kimi K3 either."""
OF_LARGER_CLASSES = ("muse_glimmer", "mistral_large4", "step3p7", "muse_spark")
"""transformers has these decoders with an LM head within a class with a tower alone, which the files do not have."""
WITHOUT_HEAD = "glm5_next"
"""transformers has the decoder by itself without an LM head alone."""
CAUSAL = [name for name in MODELS if name not in (*NOT_CAUSAL, WITHOUT_HEAD, "rwkv7", "kimi_k3")]


@pytest.mark.parametrize("model", CAUSAL)
def test_transformers_computes_the_same(make_model, host, tmp_path: Path, model: str) -> None:
    import transformers

    convert(make_model(**MODELS[model]), tmp_path / "hf", saver="hf", host=host)
    # By its class: Mistral 4 is in none of transformers' automatic ones.
    (architecture,) = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    theirs, info = getattr(transformers, architecture).from_pretrained(tmp_path / "hf", output_loading_info=True)
    missing = {name for name in info["missing_keys"] if model not in OF_LARGER_CLASSES or ".language_model." in name}
    assert not any((missing, info["unexpected_keys"], info["mismatched_keys"]))
    tokens = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(0))
    ours = load_trained_model(tmp_path / "source", host, device="cpu").model
    with torch.no_grad():
        expected, actual = theirs.eval()(tokens).logits, ours(tokens)
    torch.testing.assert_close(actual, expected, atol=2e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    "model", [OF_LARGER_CLASSES[0], WITHOUT_HEAD, *(pytest.param(n, marks=EXHAUSTIVE) for n in OF_LARGER_CLASSES[1:])]
)
def test_verification_knows_the_parts_that_a_family_leaves_out(make_model, host, tmp_path: Path, model: str) -> None:
    """The loss that transformers computes, although its class misses a tower, or an LM head."""
    report = convert(make_model(**MODELS[model]), tmp_path / "hf", saver="hf", verify=True, host=host)
    assert report.verification is not None
    loss = report.verification.loss
    assert loss is not None
    assert loss.reader == "transformers"
    assert loss.target == pytest.approx(loss.source, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "loader_class"),
    [("bert", "AutoModelForPreTraining"), ("t5", "AutoModelForSeq2SeqLM"), ("bart", "AutoModelForSeq2SeqLM")],
)
def test_transformers_takes_every_weight(make_model, host, tmp_path: Path, model: str, loader_class: str) -> None:
    import transformers

    convert(make_model(**MODELS[model]), tmp_path / "hf", saver="hf", host=host)
    loaded, info = getattr(transformers, loader_class).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "back", saver="mt", host=host)
    back = tensors_of(open_checkpoint(tmp_path / "back"))
    assert_same_state(tensors_of(open_checkpoint(tmp_path / "source")), back)


def test_number_formats(make_model, host, tmp_path: Path) -> None:
    """bf16 stays bf16; a cast is torch's own; the optimizer, which belongs to the weights as they were, is left out."""
    source = make_model(optimizer=True, **LLAMA)
    full = tensors_of(open_checkpoint(source))
    report = convert(
        source, tmp_path / "bf16", saver="mt", options=ConvertOptions(dtype="bf16"), host=host, verify=True
    )
    half = tensors_of(open_checkpoint(tmp_path / "bf16"))
    expected = {name: value.to(torch.bfloat16) for name, value in full.items() if name.startswith("model.")}
    assert_same_state(half, expected)
    assert set(report.left_out) == {name for name in full if name.startswith("optimizer.")}
    convert(tmp_path / "bf16", tmp_path / "hf", saver="hf", host=host, verify=True)
    convert(tmp_path / "hf", tmp_path / "back", saver="mt", host=host)
    assert_same_state(half, tensors_of(open_checkpoint(tmp_path / "back")))


def test_mt_to_mt_keeps_everything(make_model, host, tmp_path: Path) -> None:
    source = make_model(optimizer=True, **LLAMA)
    report = convert(source, tmp_path / "copy", saver="mt", host=host, options=ConvertOptions(max_shard_size=30_000))
    assert report.left_out == ()
    first, second = open_checkpoint(source), open_checkpoint(tmp_path / "copy")
    assert_same_state(tensors_of(first), tensors_of(second))
    assert {key: second.metadata[key] for key in first.metadata} == first.metadata
    assert len(second.manifest.shards) > 3
