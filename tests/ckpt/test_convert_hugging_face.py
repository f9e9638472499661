"""Reading Hugging Face's format: all its files, its tied copies, its damaged and its malicious ones; tokenizers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GPT2, LLAMA

from mt_ckpt.convert import convert, reader_loss
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.files.safetensors import SafetensorsFile, TensorInfo, align, write_safetensors
from mt_ckpt.hugging_face import family
from mt_ckpt.hugging_face.family import identify
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.kinds import Lazy
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_core.train.trained_model import load_trained_model

TIED = {**LLAMA, "untie_embeddings_and_output_weights": False}


@pytest.fixture
def make_hf(make_model, host, tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a model as Hugging Face's format; mt's own is beside it as `source`."""

    def make(max_shard_size: int | None = None, **keys) -> Path:
        options = ConvertOptions(max_shard_size=max_shard_size)
        convert(make_model(**keys), tmp_path / "hf", saver="hf", options=options, host=host)
        (tmp_path / "hf" / CHECKSUMS).unlink()  # as other programs write it: tests change its files
        return tmp_path / "hf"

    return make


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Through the safetensors library, which shares no code with ours."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def as_bin(folder: Path, shards: int = 1, *, legacy: bool = False, **changes: object) -> None:
    """The weights as pytorch_model.bin instead, in one file or in several with an index."""
    state = {**load(folder), **changes}
    for file in folder.glob("model*"):
        file.unlink()
    names = list(state)
    files = {f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin": names[i::shards] for i in range(shards)}
    if shards == 1:
        files = {"pytorch_model.bin": names}
    for file, part in files.items():
        content = {name: state[name] for name in part}
        torch.save(content, folder / file, _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def replace_weights(folder: Path, state: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    for file in folder.glob("model*"):
        file.unlink()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(host, folder: Path, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        convert(folder, folder.with_name("x"), saver="mt", host=host)
    assert not folder.with_name("x").exists()
    return str(caught.value)


def assert_equals_source(host, folder: Path) -> None:
    convert(folder, folder.with_name("back"), saver="mt", host=host)
    source, back = (open_checkpoint(folder.with_name(name)) for name in ("source", "back"))
    assert_same_state(tensors_of(source), tensors_of(back))


# -- the kinds of files -----------------------------------------------------------------------------


def test_the_safetensors_library_reads_what_we_write(make_hf, host) -> None:
    folder = make_hf(max_shard_size=20_000, **LLAMA)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = load(folder)
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert all(file.stat().st_size < 20_000 + 4096 for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("legacy", [False, True])
def test_bin_files(make_hf, host, shards: int, legacy: bool) -> None:
    folder = make_hf(**LLAMA)
    as_bin(folder, shards, legacy=legacy)
    assert_equals_source(host, folder)


def test_safetensors_win_over_bin(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    torch.save({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert_equals_source(host, folder)


def test_names_without_the_base_models_prefix(make_hf, host) -> None:
    """As in the files of GPT-2 itself, with the masks that old versions stored."""
    folder = make_hf(**GPT2)
    state = {name.removeprefix("transformer."): tensor for name, tensor in load(folder).items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    replace_weights(folder, state)
    assert_equals_source(host, folder)


def test_aligned_whatever_the_element_sizes(tmp_path: Path) -> None:
    values = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(5), "c": torch.randn(3).bfloat16()}
    values |= {"d": torch.tensor(2.5, dtype=torch.float64), "e": torch.zeros(0, 4)}
    infos = align({name: TensorInfo(tuple(value.shape), value.dtype) for name, value in values.items()})
    write_safetensors(tmp_path / "x.safetensors", infos, [values[name] for name in infos])
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert_same_state(load(tmp_path), values)
    assert_same_state({name: file.read(name) for name in file.tensors}, values)


# -- tied copies ------------------------------------------------------------------------------------


def test_a_stored_copy_that_is_one(make_hf, host) -> None:
    folder = make_hf(**TIED)
    assert "lm_head.weight" not in load(folder)
    state = load(folder)
    replace_weights(folder, {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    assert_equals_source(host, folder)


def test_only_the_copy_is_stored(make_hf, host) -> None:
    folder = make_hf(**TIED)
    state = load(folder)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    replace_weights(folder, state)
    assert_equals_source(host, folder)


def test_a_copy_that_is_none(make_hf, host) -> None:
    folder = make_hf(**TIED)
    state = load(folder)
    replace_weights(folder, {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})
    message = refusal(host, folder)
    assert "ties lm_head.weight to model.embed_tokens.weight, but the two differ" in message
    assert "tie_word_embeddings to false" in message


# -- what does not fit ------------------------------------------------------------------------------


def test_missing_and_further_tensors(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    state = load(folder)
    del state["model.layers.1.self_attn.k_proj.weight"]
    state["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(16)
    replace_weights(folder, state)
    message = refusal(host, folder)
    assert "model.layers.1.self_attn.k_proj.weight is missing in the checkpoint" in message
    assert "model.layers.1.self_attn.k_proj.bias is in the checkpoint but unknown" in message


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_family_that_cannot_be_imported_stops_no_other(make_hf, tmp_path: Path) -> None:
    """Its name is in the message where no other family knows the type."""
    host = load_plugins()
    known = host[MODELS].registrations[0]
    broken = replace(known.spec, name="eliza", name_maps={"hf": Lazy("no_such_module:MAP")})
    host[MODELS].registrations.append(replace(known, spec=broken))
    folder = make_hf(**LLAMA)
    assert convert(folder, tmp_path / "mt", saver="mt", host=host).family == "llama"
    change_config(folder, model_type="eliza")
    assert "cannot be loaded: eliza (No module named 'no_such_module')" in refusal(host, folder, ConfigError)


def test_configurations_that_are_not_known(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    change_config(folder, flux_capacitor=1.21)
    assert "flux_capacitor=1.21" in refusal(host, folder, ConfigError)
    (folder / "config.json").write_text('{"model_type": "eliza"}')
    message = refusal(host, folder, ConfigError)
    assert "model_type='eliza' is of no installed model family; known are" in message
    assert "llama" in message
    (folder / "config.json").write_text("[1")
    assert f"{folder / 'config.json'}: not JSON" in refusal(host, folder)


def test_heads_of_another_number(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    change_config(folder, num_key_value_heads=4)
    assert "linear_qkv.weight" in refusal(host, folder)


@pytest.mark.parametrize("cut", [4, 300, -1])
def test_truncated_files(make_hf, host, cut: int) -> None:
    folder = make_hf(**LLAMA)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert str(file) in refusal(host, folder)


def test_a_damaged_header(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    for flipped in (0, 7, 9, data.index(b'"shape":[') + 9, data.index(b'"data_offsets":[') + 16, data.index(b"F32")):
        damaged = bytearray(data)
        damaged[flipped] ^= 0x02
        file.write_bytes(damaged)
        assert str(file) in refusal(host, folder), flipped


def test_a_flipped_bit_in_a_bin_file_is_named(make_hf, host) -> None:
    """Its archive has checksums; safetensors has none of the tensors."""
    folder = make_hf(**LLAMA)
    as_bin(folder)
    file = folder / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    value = load_one(file, "model.layers.0.mlp.up_proj.weight").numpy().tobytes()
    data[data.index(value) + 100] ^= 1
    file.write_bytes(data)
    message = refusal(host, folder)
    assert str(file) in message
    assert "damaged" in message


def load_one(file: Path, name: str) -> torch.Tensor:
    return torch.load(file, weights_only=True)[name]


def test_indexes_that_lie(make_hf, host) -> None:
    folder = make_hf(max_shard_size=20_000, **LLAMA)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]

    def write(weight_map) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write({**names, "model.norm.weight": "../../etc/passwd"})
    assert "lists the file '../../etc/passwd', which is not in" in refusal(host, folder)
    write({**names, "model.ghost.weight": names["model.norm.weight"]})
    assert "lists tensors that its files do not have: model.ghost.weight" in refusal(host, folder)
    write({name: file for name, file in names.items() if name != "model.norm.weight"})
    assert "its files have tensors that it does not list: model.norm.weight" in refusal(host, folder)
    write(names)
    missing = folder / names["model.norm.weight"]
    shutil.move(missing, folder.with_name("aside"))
    assert f"lists files that are not there: {missing.name}" in refusal(host, folder)
    index.write_text('{"metadata": {}}')
    assert "has no weight_map" in refusal(host, folder)


# -- pickles ----------------------------------------------------------------------------------------


class Malicious:
    """Makes a file when it is unpickled by Python's own reader."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_malicious_pickle_is_refused(make_hf, host, tmp_path: Path) -> None:
    folder, touched = make_hf(**LLAMA), tmp_path / "executed"
    as_bin(folder, evil=Malicious(touched))
    message = refusal(host, folder)
    assert str(folder / "pytorch_model.bin") in message
    assert "system" in message
    assert not touched.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert touched.exists()  # so the file was one that would have done it


def test_a_bare_pickle_is_refused(make_hf, host, tmp_path: Path) -> None:
    folder, touched = make_hf(**LLAMA), tmp_path / "executed"
    as_bin(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(touched)))
    assert str(folder / "pytorch_model.bin") in refusal(host, folder)
    assert not touched.exists()


def test_other_things_than_tensors(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    as_bin(folder, optimizer={"lr": 1.0})
    assert "optimizer is a dict, expected named tensors and nothing else" in refusal(host, folder)


# -- families that share a model_type ---------------------------------------------------------------


@pytest.mark.parametrize("head", ["GPT2ForSequenceClassification", "BertForSequenceClassification"])
def test_a_model_with_a_head_is_distinguished_from_its_base(host, tmp_path: Path, head: str) -> None:
    import transformers

    kind = head.partition("For")[0]
    keys = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
        "Bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=60, num_labels=3, **keys)
    model = getattr(transformers, head)(config)
    model.save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "mt", saver="mt", host=host)
    assert report.family == {"GPT2": "gpt_classification", "Bert": "bert_classification"}[kind]
    convert(tmp_path / "mt", tmp_path / "back", saver="hf", host=host)
    back = type(model).from_pretrained(tmp_path / "back")
    assert_same_state(dict(model.state_dict()), dict(back.state_dict()))


# -- tokenizers and generation ----------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(98))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_the_tokenizer_is_copied(make_hf, host, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    folder = make_hf(**LLAMA)
    write_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_config(folder, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    convert(folder, tmp_path / "mt", saver="mt", host=host)
    shutil.rmtree(folder)  # what was converted stands on its own
    trained = load_trained_model(tmp_path / "mt", host, device="cpu")
    assert trained.tokenizer.encode("w3 w0") == [6, 3]
    convert(tmp_path / "mt", tmp_path / "again", saver="hf", host=host)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("w3 w0")["input_ids"] == [6, 3]
    assert tokenizer.eos_token_id == 1
    defaults = GenerationConfig.from_pretrained(tmp_path / "again")
    assert (defaults.bos_token_id, defaults.eos_token_id) == (0, 1)


def test_ids_of_a_trained_runs_tokenizer(make_hf, host) -> None:
    """Without a file of defaults they are the tokenizer's, not those that transformers assumes for the family."""
    folder = make_hf(**GPT2)
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 49)  # NullTokenizer: the last id ends documents
    assert config["torch_dtype"] == "float32"
    assert config["architectures"] == ["GPT2LMHeadModel"]


def test_mt_generates_from_the_format_itself(make_hf, host) -> None:
    folder = make_hf(**LLAMA)
    write_tokenizer(folder)
    trained = load_trained_model(folder, host, device="cpu")
    assert trained.model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 101)
    assert trained.tokenizer.decode([3]) == "w0"


LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
ABSURD = {
    "null": ({"rms_norm_eps": None}, r"rms_norm_eps=null is not supported; it can be a number"),
    "text": ({"rope_theta": "x"}, r"rope_theta='x' is not supported; it can be a number"),
    "text for a table": ({"rope_scaling": "x"}, r"rope_scaling='x' is not supported; it can be a JSON object"),
    "a list for a table": ({"rope_scaling": [1]}, r"rope_scaling=\[1\] is not supported; it can be a JSON object"),
    "layers": ({"num_hidden_layers": 20_000}, r"num_hidden_layers=20000, and the checkpoint has 1 tensors in all"),
    "more layers": (
        {"num_hidden_layers": 10**9},
        r"num_hidden_layers=1000000000 is not supported; it can be at least 0 and at most",
    ),
    "layers as a float": (
        {"num_hidden_layers": 1e9},
        r"num_hidden_layers=1000000000\.0 is not supported; .* an integer",
    ),
    "sizes": ({"hidden_size": 1e18}, r"hidden_size=1e\+18 is not supported; it can be an integer"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_values_are_named(case: str) -> None:
    change, message = ABSURD[case]
    with pytest.raises(ConfigError, match=message):
        identify({**LLAMA_CONFIG, **change}, ["model.embed_tokens.weight"], load_plugins())


# -- the loss of the source ----------------------------------------------------------------------------


def test_a_setting_that_is_read_otherwise_than_by_transformers_is_found(make_hf, host, monkeypatch) -> None:
    folder, read = make_hf(**LLAMA), family.read_config

    def misread(*arguments: object) -> Config:
        config = read(*arguments)
        return config.model_copy(update={"model": config.model.model_copy(update={"norm_epsilon": 0.5})})

    monkeypatch.setattr(family, "read_config", misread)
    with pytest.raises(CheckpointError, match="mt computes another loss from it: .* as transformers computes it"):
        convert(folder, folder.with_name("x"), saver="mt", verify=True, host=host)


def test_a_source_that_transformers_cannot_read_is_computed_by_mt_and_says_why(make_hf, host, monkeypatch) -> None:
    def failing(*arguments: object) -> None:
        raise ImportError("kernels are missing")

    folder = make_hf(**LLAMA)
    monkeypatch.setattr(reader_loss, "_transformers_model", failing)
    report = convert(folder, folder.with_name("x"), saver="mt", verify=True, host=host)
    assert report.verification.loss.source_reader.startswith("mt (transformers does not read it: ImportError: kernels")
