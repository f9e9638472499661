"""llama.cpp, from the wheel xllamacpp by its C interface: logits, states, greedy text, tokens and blocks.

It has its own environment, reads one JSON job from standard input and writes arrays to the file that it names."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import xllamacpp

LIBRARY = ctypes.CDLL(next(str(file) for file in Path(xllamacpp.__file__).parent.glob("*.so")))


class Parameters(ctypes.Structure):
    """Larger than llama_model_params and llama_context_params of any version. They are passed in memory, so that the
    rest does no harm."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def declare() -> None:
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_model_default_params", Parameters, []),
        ("llama_context_default_params", Parameters, []),
        ("llama_model_load_from_file", pointer, [text, Parameters]),
        ("llama_init_from_model", pointer, [pointer, Parameters]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", number, [pointer]),
        ("llama_decode", number, [pointer, Batch]),
        ("llama_encode", number, [pointer, Batch]),
        ("llama_set_embeddings", None, [pointer, ctypes.c_bool]),
        ("llama_get_embeddings", ctypes.POINTER(ctypes.c_float), [pointer]),
        ("llama_model_n_embd", number, [pointer]),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
        ("llama_tokenize", number, [pointer, text, number, pointer, number, ctypes.c_bool, ctypes.c_bool]),
        ("ggml_quantize_chunk", ctypes.c_size_t, [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]),
    ):
        function = getattr(LIBRARY, name)
        function.restype, function.argtypes = result, arguments


def batch_of(ids: list[int]) -> Batch:
    """With outputs at all ids."""
    return Batch(len(ids), (ctypes.c_int32 * len(ids))(*ids), logits=(ctypes.c_int8 * len(ids))(*[1] * len(ids)))


class Model:
    def __init__(self, file: str, length: int) -> None:
        self.model = LIBRARY.llama_model_load_from_file(file.encode(), LIBRARY.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp does not load {file}")
        self.vocabulary = LIBRARY.llama_model_get_vocab(self.model)
        parameters = LIBRARY.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch
        parameters.words[0] = parameters.words[1] = parameters.words[2] = length
        self.context = LIBRARY.llama_init_from_model(self.model, parameters)
        if not self.context:
            sys.exit(f"llama.cpp makes no context of {file}")

    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocabulary], after what was decoded before."""
        if LIBRARY.llama_decode(self.context, batch_of(ids)):
            sys.exit("llama_decode failed")
        size = LIBRARY.llama_vocab_n_tokens(self.vocabulary)
        return np.ctypeslib.as_array(LIBRARY.llama_get_logits(self.context), (len(ids), size)).copy()

    def encode(self, ids: list[int]) -> None:
        """What a decoder reads whose ids follow."""
        if LIBRARY.llama_encode(self.context, batch_of(ids)):
            sys.exit("llama_encode failed")

    def states(self, ids: list[int]) -> np.ndarray:
        """[len(ids), width] of an encoder, behind its last norm."""
        LIBRARY.llama_set_embeddings(self.context, True)
        self.encode(ids)
        width = LIBRARY.llama_model_n_embd(self.model)
        return np.ctypeslib.as_array(LIBRARY.llama_get_embeddings(self.context), (len(ids), width)).copy()

    def greedy(self, ids: list[int], number: int) -> list[int]:
        found = []
        for _ in range(number):
            ids = [int(self.logits(ids)[-1].argmax())]
            found += ids
        return found

    def tokens(self, text: str) -> list[int]:
        data, buffer = text.encode(), (ctypes.c_int32 * 4096)()
        count = LIBRARY.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), True, True)
        return list(buffer[:count])


def quantized(number: int, x: np.ndarray, num_bytes: int, importance: np.ndarray | None) -> np.ndarray:
    out = np.zeros(num_bytes, np.uint8)
    weights = None if importance is None else importance.ctypes.data
    LIBRARY.ggml_quantize_chunk(number, x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], weights)
    return out


def main() -> None:
    job = json.load(sys.stdin)
    declare()
    found: dict[str, np.ndarray] = {}
    if "quantize" in job:
        inputs = np.load(job["inputs"])
        for name, (number, num_bytes, with_importance) in job["quantize"].items():
            importance = inputs["importance"] if with_importance else None
            found[name] = quantized(number, inputs["x"], num_bytes, importance)
    if "file" in job:
        if "ids" in job and job.get("encode"):
            found["states"] = Model(job["file"], job["length"]).states(job["ids"])
        elif "ids" in job:
            model = Model(job["file"], job["length"])
            if "encoder_ids" in job:
                model.encode(job["encoder_ids"])
            found["logits"] = model.logits(job["ids"])
        if "greedy" in job:
            found["greedy"] = np.array(Model(job["file"], job["length"]).greedy(job["ids"], job["greedy"]))
        if "texts" in job:
            model = Model(job["file"], job["length"])
            found |= {f"tokens{i}": np.array(model.tokens(text)) for i, text in enumerate(job["texts"])}
    np.savez(job["output"], **found)


main()
