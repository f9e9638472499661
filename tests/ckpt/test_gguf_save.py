"""Writing GGUF: files that the `gguf` package reads, mixtures, importance matrices, tokenizers there and back."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.ckpt.convert_cases import LLAMA
from tests.ckpt.convert_cases import MODELS as FAMILIES
from tests.ckpt.test_gguf_tokenizer import SPLITTINGS, TEXTS, trained
from tests.peer.gguf_models import BESIDE_TOWERS
from tests.peer.gguf_models import MODELS as IN_LLAMA_CPP
from tokenizers import Tokenizer

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.file import GGUFFile
from mt_ckpt.gguf.imatrix import Sums, read_imatrix, write_imatrix
from mt_ckpt.gguf.mixtures import Model, types_of
from mt_ckpt.gguf.options import GGUFOptions, options_for
from mt_ckpt.gguf.tokenizer import tokenizer_files
from mt_ckpt.gguf.write_tokenizer import tokenizer_metadata
from mt_ckpt.model import build_model, model_config
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import load_parameters
from mt_models.bert.hugging_face import CONFIG_MAPS

FALCON_H1, BERT = FAMILIES["falcon_h1"], CONFIG_MAPS["bert"]
WIDE = {**LLAMA, "hidden_size": 256, "ffn_hidden_size": 512, "vocab_size": 96}


def test_the_package_reads_what_is_written(make_model, host, tmp_path: Path) -> None:
    """Names are those that it gives Hugging Face's tensors, and values those of the source within a half step."""
    source = make_model(**WIDE)
    convert(source, tmp_path / "hf", saver="hf", host=host)
    convert(source, tmp_path / "g", saver="gguf", options=ConvertOptions(quantize="Q8_0"), host=host)
    read = gguf.GGUFReader(tmp_path / "g" / "g.gguf")
    tensors = {tensor.name: tensor for tensor in read.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {names.get_name(name, (".weight", ".bias")) for name in stored} == set(tensors)
    down = stored["model.layers.1.mlp.down_proj.weight"].numpy()
    there = tensors["blk.1.ffn_down.weight"]
    values = gguf.quants.dequantize(there.data, there.tensor_type)
    assert there.tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert np.abs(values - down).max() <= np.abs(down).max() / 127
    assert tensors["blk.1.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_options_are_refused(make_model, host, tmp_path: Path) -> None:
    source = make_model(**WIDE)
    for options, words in (
        (ConvertOptions(quantize="Q9"), "--quantize Q9 .* it can be F32"),
        (ConvertOptions(target_tensor_parallel_size=2), "means nothing to the format gguf"),
        (ConvertOptions(max_shard_size=1000), "it is one file"),
        (GGUFOptions(importance_matrix=tmp_path / "none"), "give --quantize too"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(source, tmp_path / "x", saver="gguf", options=options, host=host)
    with pytest.raises(ConfigError, match="means nothing to the format hf"):
        options_for("hf", tmp_path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("truncate", [True, False])
def test_a_rounded_range_of_yarn_comes_back(make_model, host, tmp_path: Path, truncate: bool) -> None:
    """GPT-OSS: llama.cpp has no key for it, and published files are not rounded. mt has one of its own."""
    source = make_model(**{**IN_LLAMA_CPP["gpt-oss"], "rope_truncate": truncate})
    convert(source, tmp_path / "gguf", saver="gguf", host=host)
    convert(tmp_path / "gguf", tmp_path / "back", saver="mt", host=host)
    stored = open_checkpoint(tmp_path / "back").metadata["config"]["model"]
    assert stored["rope_truncate"] is truncate


def test_the_coefficient_of_balance_of_deepseek_v4_comes_back(make_model, host, tmp_path: Path) -> None:
    """llama.cpp has no key for it. mt has one of its own, which holds 32 bits."""
    keys = IN_LLAMA_CPP["deepseek4"]
    balance = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.003]}
    source = make_model(**{**keys, "moe": {**keys["moe"], **balance}})
    convert(source, tmp_path / "gguf", saver="gguf", host=host)
    convert(tmp_path / "gguf", tmp_path / "back", saver="mt", host=host)
    stored = open_checkpoint(tmp_path / "back").metadata["config"]["model"]["moe"]
    assert {key: stored[key] for key in balance} == balance


@pytest.mark.slow
def test_factors_of_falcon_h1_are_in_its_matrices(make_model, host, tmp_path: Path) -> None:
    """What is read has none, and the same logits. One matrix cannot contain two of them."""
    keys = {**FALCON_H1, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7}
    keys |= {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.6, 1.4], "num_layers": 2}
    with pytest.raises(ConfigError, match=r"embedding_multiplier=2.0 .* it can be 0.5"):
        convert(make_model(**keys, untie_embeddings_and_output_weights=False), tmp_path / "x", saver="gguf", host=host)
    source = make_model(**keys)
    convert(source, tmp_path / "g", saver="gguf", host=host)
    convert(tmp_path / "g", tmp_path / "back", saver="mt", host=host)
    ours, theirs = (logits_of(path, host) for path in (source, tmp_path / "back"))
    assert ours.std() > 0
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek3", "deepseek4", "qwen35moe", "nemotron_h"])
def test_multi_token_prediction_that_llama_cpp_lacks_is_left_out(name: str, make_model, host, tmp_path: Path) -> None:
    """Published files have it. What is written is the file of the same model without it, and the report says so."""
    depth = {"mtp_hybrid_override_pattern": "*-"} if name == "nemotron_h" else {}
    source = make_model(**{**IN_LLAMA_CPP[name], "mtp_num_layers": 1, **depth})
    report = convert(source, tmp_path / "g", saver="gguf", host=host)
    assert sum("multi-token prediction" in note for note in report.notes) == 1
    assert report.num_omitted_tensors == 0
    convert(tmp_path / "g", tmp_path / "back", saver="mt", host=host)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    kept = {name for name in before.shapes() if name.startswith("model.") and not name.startswith("model.mtp.")}
    assert kept == {name for name in after.shapes() if name.startswith("model.")}
    assert len(kept) < len(before.shapes())
    for tensor in kept:
        # The file has 1 + w for norms whose weight is w: the last bit of 1 is lost.
        torch.testing.assert_close(after.read(tensor), before.read(tensor), rtol=1e-6, atol=2**-24)


ENCODER = {**FAMILIES["bert"], "layernorm_placement": "post", "add_lm_head": False, "bert_binary_head": False}
ENCODER |= {"add_pooler": True}
COMPRESSED = {**FAMILIES["deepseek_v4"], "compress_ratios": [0, 4, 128], "indexed_compress_ratio": 4}
COMPRESSED |= {"rope_attention_factor": 1.0, "mtp_num_layers": 0}
READ = [FAMILIES["kimi_k3"], FAMILIES["t5"], ENCODER, COMPRESSED]
READ += [IN_LLAMA_CPP[name] for name in ("bailingmoe3", "minimax-m3", "glm5-next")]


@pytest.mark.slow
@pytest.mark.parametrize("keys", READ, ids=lambda keys: keys["family"])
def test_what_is_read_computes_the_same(keys: dict[str, Any], make_model, host, tmp_path: Path) -> None:
    """Products of norms and queries of kimi_k3 are read as queries behind norms of 1; of T5's last norm and the factor
    of its output, as the norm of a model that does not scale it."""
    source = make_model(**keys)
    convert(source, tmp_path / "g", saver="gguf", host=host)
    convert(tmp_path / "g", tmp_path / "back", saver="mt", host=host)
    ours, theirs = (logits_of(path, host) for path in (source, tmp_path / "back"))
    assert ours.std() > 0
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_TOWERS)
def test_a_decoder_beside_a_tower_is_written_and_read_as_one(
    name: str, make_model, host, tmp_path: Path, caplog
) -> None:
    """From Hugging Face's format too. Names are those that the package knows, and the tower is reported as left out."""
    source = make_model(**BESIDE_TOWERS[name])
    report = convert(source, tmp_path / "g", saver="gguf", host=host)
    tower = [name for name in open_checkpoint(source).shapes() if name.startswith("model.vision_")]
    assert report.num_omitted_tensors == len(tower) > 0
    convert(source, tmp_path / "hf", saver="hf", host=host)
    assert convert(tmp_path / "hf", tmp_path / "h", saver="gguf", host=host).num_omitted_tensors == len(tower)
    read, other = (gguf.GGUFReader(tmp_path / folder / f"{folder}.gguf") for folder in "gh")
    architecture = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    known = {gguf.TENSOR_NAMES[kind].format(bid=0) for kind in gguf.MODEL_TENSORS[architecture]}
    first = {tensor.name for tensor in read.tensors if not re.match(r"blk\.[1-9]", tensor.name)}
    assert {tensor.rpartition(".")[0] for tensor in first} <= known
    stored = {tensor.name: tensor.data for tensor in other.tensors}
    assert len(stored) == len(read.tensors)
    for tensor in read.tensors:
        np.testing.assert_array_equal(tensor.data, stored[tensor.name])
    caplog.clear()
    convert(tmp_path / "g", tmp_path / "back", saver="mt", host=host)
    assert f"GGUF of the architecture {name} holds the decoder of a model with an image tower" in caplog.text
    ours, theirs = (logits_of(path, host) for path in (source, tmp_path / "back"))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stated", [None, [2, 0, 0]])
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_sections_of_pictures_of_a_decoder_come_back(name: str, stated, make_model, host, tmp_path: Path) -> None:
    """Text alone is computed the same whatever they are, and programs with the image tower read them."""
    source = make_model(**IN_LLAMA_CPP[name], mrope_section=stated)
    convert(source, tmp_path / "g", saver="gguf", host=host)
    key = gguf.Keys.Rope.DIMENSION_SECTIONS.format(arch=name)
    sections = gguf.GGUFReader(tmp_path / "g" / "g.gguf").fields[key].contents()
    pairs = model_config(open_checkpoint(source), host).model.rotary_dim // 2
    # Time, height, width, and a fourth.
    assert (len(sections), sum(sections)) == (4, sum(stated) if stated else pairs)
    convert(tmp_path / "g", tmp_path / "back", saver="mt", host=host)
    assert model_config(open_checkpoint(tmp_path / "back"), host).model.mrope_section == stated


def logits_of(path: Path, host: PluginHost) -> torch.Tensor:
    reader = open_checkpoint(path)
    config = model_config(reader, host)
    model = build_model(config, host).eval()
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), "model.", ParallelContext())
    ids = torch.tensor([[3, 7, 1, 0, 9]])
    with torch.no_grad():
        output = model(ids, ids) if config.model.family == "t5" else model(ids)
    return output[0] if isinstance(output, tuple) else output


def test_an_encoder_without_a_pooler_is_read() -> None:
    """As llama.cpp's converter writes BERT."""
    external = {"architectures": ["BertModel"], "num_attention_heads": 4, "add_pooling_layer": False}
    assert BERT.import_value(external)["add_pooler"] is False
    assert BERT.import_value({**external, "add_pooling_layer": True})["add_pooler"] is True


def info(*shape: int) -> TensorInfo:
    return TensorInfo(shape, torch.bfloat16)


def test_mixtures() -> None:
    """As llama.cpp chooses: of 8 layers 0, 3, 6 and 7 get more bits; widths that 256 does not divide, other types."""
    layers = {f"blk.{i}.{part}.weight": info(256, 256) for i in range(8) for part in ("attn_q", "attn_v", "ffn_down")}
    others = {"token_embd.weight": info(300, 256), "output.weight": info(300, 256), "blk.0.attn_norm.weight": info(256)}
    odd = {"blk.0.ffn_up.weight": info(64, 96)}
    chosen = types_of({**layers, **others, **odd}, "Q4_K_M", Model(layers=8, experts=0, groups=1))
    kinds = {name: type_.name for name, type_ in chosen.items()}
    assert [kinds[f"blk.{i}.attn_v.weight"] == "Q6_K" for i in range(8)] == [i in (0, 3, 6, 7) for i in range(8)]
    assert [kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K" for i in range(8)] == [i in (0, 3, 6, 7) for i in range(8)]
    assert {kinds[f"blk.{i}.attn_q.weight"] for i in range(8)} == {"Q4_K"}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q4_K", "Q6_K")
    assert (kinds["blk.0.attn_norm.weight"], kinds["blk.0.ffn_up.weight"]) == ("F32", "Q5_0")
    kept = ["indexer_compressor_ape", "attn_compressor_ape", "indexer.q_proj", "indexer.k_proj"]
    # llama.cpp adds the biases to fp32 and cannot add others, and its converter keeps the projections.
    other = types_of(
        {f"blk.0.{name}.weight": info(4, 256) for name in kept}, "BF16", Model(layers=8, experts=0, groups=1)
    )
    assert {type_.name for type_ in other.values()} == {"F32"}
    tied = types_of({"token_embd.weight": info(300, 256)}, "Q4_K_M", Model(layers=8, experts=0, groups=1))
    assert tied["token_embd.weight"].name == "Q6_K"


# -- importance matrices -----------------------------------------------------------------------------


def test_importance_matrices(tmp_path: Path) -> None:
    """Ours as the package reads it, the older binary format, and what is neither."""
    squares = np.arange(6, dtype=np.float64).reshape(2, 3)
    write_imatrix(tmp_path / "i.gguf", {"blk.0.x.weight": Sums(squares, np.array([2.0, 0.0]))}, ["text"], 1, 64)
    there = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    np.testing.assert_array_equal(there["blk.0.x.weight.in_sum2"], squares.astype(np.float32))
    np.testing.assert_array_equal(there["blk.0.x.weight.counts"].reshape(-1), [2, 0])
    # An expert that no token reached counts as 1.
    np.testing.assert_array_equal(read_imatrix(tmp_path / "i.gguf")["blk.0.x.weight"], [[0, 0.5, 1], [1, 1, 1]])
    name = b"blk.0.x.weight"
    old = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii3f", 4, 3, 4.0, 8.0, 2.0)
    (tmp_path / "i.dat").write_bytes(old)
    np.testing.assert_array_equal(read_imatrix(tmp_path / "i.dat")["blk.0.x.weight"], [[1, 2, 0.5]])
    for damaged in (b"", old[:-1], b"\xff" * 40, struct.pack("<i", 2**30)):
        (tmp_path / "i.dat").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no importance matrix"):
            read_imatrix(tmp_path / "i.dat")


def test_an_importance_matrix_lowers_the_weighted_error(make_model, host, tmp_path: Path) -> None:
    source = make_model(**WIDE)
    weights = np.full((1, 256), 1e-4)
    weights[0, :16] = 100.0
    write_imatrix(tmp_path / "i.gguf", {"blk.0.ffn_up.weight": Sums(weights, np.ones(1))}, ["text"], 1, 64)
    convert(source, tmp_path / "exact", saver="gguf", host=host)
    exact = GGUFFile(tmp_path / "exact" / "exact.gguf").read("blk.0.ffn_up.weight")
    errors = []
    for matrix in (None, tmp_path / "i.gguf"):
        target = tmp_path / f"q{len(errors)}"
        convert(
            source, target, saver="gguf", options=GGUFOptions(quantize="Q4_K_M", importance_matrix=matrix), host=host
        )
        found = GGUFFile(target / f"{target.name}.gguf").read("blk.0.ffn_up.weight")
        errors.append(float((found - exact)[:, :16].square().sum()))
    assert errors[1] < 0.8 * errors[0]
    other = {"blk.9.ffn_up.weight": Sums(weights, np.ones(1))}
    write_imatrix(tmp_path / "i.gguf", other, ["text"], 1, 64)
    options = GGUFOptions(quantize="Q4_K_M", importance_matrix=tmp_path / "i.gguf")
    with pytest.raises(ConfigError, match=r"is of another model: it names blk\.9"):
        convert(source, tmp_path / "x", saver="gguf", options=options, host=host)


# -- tokenizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITTINGS)
def test_tokenizers_there_and_back(name: str) -> None:
    original = trained(name)
    settings: dict[str, Any] = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages }}",
    }
    files = {"tokenizer.json": original.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    metadata = tokenizer_metadata(files, 340)
    assert len(metadata["tokenizer.ggml.tokens"]) == 340  # rows of the model that no token has
    back = tokenizer_files(metadata)
    read = Tokenizer.from_str(back["tokenizer.json"].decode())
    for text in TEXTS:
        assert read.encode(text).ids == original.encode(text).ids
    assert json.loads(back["tokenizer_config.json"])["chat_template"] == "{{ messages }}"


def test_no_tokenizer_is_a_model_of_ids() -> None:
    assert tokenizer_metadata({}, 10)["tokenizer.ggml.model"] == "none"
    assert not [key for key in tokenizer_metadata({}, 10) if key.endswith("_token_id")]


IDS = {"bos_token_id": 3, "eos_token_id": 5, "pad_token_id": 0}


@pytest.mark.parametrize("ids", [IDS, {}], ids=["named", "none"])
def test_ids_of_a_model_without_a_tokenizer_come_back_and_none_is_invented(
    make_model, host, tmp_path: Path, ids: dict[str, int]
) -> None:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    config = tmp_path / "hf" / "config.json"
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "hf" / CHECKSUMS).unlink()
    stated = {**dict.fromkeys(IDS), **ids}
    config.write_text(json.dumps(json.loads(config.read_text()) | stated))
    convert(tmp_path / "hf", tmp_path / "gguf", saver="gguf", host=host)
    reader = gguf.GGUFReader(tmp_path / "gguf" / "gguf.gguf")
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {key: reader.get_field(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    assert {key: field.contents() for key, field in keys.items() if field is not None} == ids
    convert(tmp_path / "gguf", tmp_path / "mt", saver="mt", host=host)
    convert(tmp_path / "mt", tmp_path / "back", saver="hf", host=host)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: back[key] for key in IDS} == stated
    assert (tmp_path / "back" / "generation_config.json").is_file() == bool(ids)


def test_further_ends_have_keys_and_those_without_one_are_named(make_model, host, tmp_path: Path) -> None:
    """llama.cpp stops at eos, eot and eom; a model that ends its turn by a token that is left out never stops there."""
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / CHECKSUMS).unlink()
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 2, 9, 5]}))
    report = convert(tmp_path / "hf", tmp_path / "gguf", saver="gguf", host=host)
    (note,) = report.notes
    assert note.endswith("(eos=5, eot=7, eom=2): 9")
    reader = gguf.GGUFReader(tmp_path / "gguf" / "gguf.gguf")
    keys = gguf.Keys.Tokenizer
    fields = [reader.get_field(key) for key in (keys.EOS_ID, keys.EOT_ID, keys.EOM_ID)]
    assert [field.contents() for field in fields if field is not None] == [5, 7, 2]
    again = convert(tmp_path / "gguf", tmp_path / "back", saver="hf", host=host)
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["eos_token_id"] == [5, 7, 2]
    assert again.notes == ()


def scored_tokenizer() -> tuple[dict[str, bytes], Tokenizer]:
    """A byte-fallback BPE like Llama 2's, as the tokenizers library has it."""
    from tokenizers import AddedToken, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat ran to the cat"] * 5, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for token in bytes_:
        vocabulary[token] = len(vocabulary)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    files = {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return files, Tokenizer.from_str(json.dumps(content))


def test_a_vocabulary_with_scores_there_and_back() -> None:
    files, original = scored_tokenizer()
    metadata = tokenizer_metadata(files, original.get_vocab_size())
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.add_space_prefix"]) == ("llama", True)
    read = Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())
    for text in ("the rat sat on a mat", "cat  and é日 ran", "to the"):
        assert read.encode(text, add_special_tokens=False).ids == original.encode(text, add_special_tokens=False).ids
        assert read.decode(read.encode(text, add_special_tokens=False).ids) == text
