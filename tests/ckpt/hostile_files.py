"""Files that ask for more than they are, and what reads them. Run with a folder: each case in turn, in a process of
its own limits; a line of JSON for each, before it begins and after its end."""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
import zipfile
from base64 import b64encode
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MEMORY_BYTES, SECONDS = 1 << 30, 5.0
MANY = 10**6
Content = bytes | Callable[[], bytes]
"""Of a file; large ones are made when their case runs, so that naming the cases costs nothing."""


def made(content: Content) -> bytes:
    return content() if callable(content) else content


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
DOUBLED = "{% set ns = namespace(x='ab' * 1000) %}{% for i in range(40) %}{% set ns.x = EXPR %}{% endfor %}{{ ns.x }}"
TEMPLATES = {
    "concatenation": DOUBLED.replace("EXPR", "ns.x ~ ns.x"),
    "addition": DOUBLED.replace("EXPR", "ns.x + ns.x"),
    "join": DOUBLED.replace("EXPR", "[ns.x, ns.x] | join"),
    "join of a text": DOUBLED.replace("EXPR", "(ns.x | join(ns.x[:99]))"),
    "replace": DOUBLED.replace("EXPR", "ns.x | replace('a', 'aaa')"),
    "format": DOUBLED.replace("EXPR", "'%s%s' | format(ns.x, ns.x)"),
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "indent of text": "{{ 'a\nb' | indent('x' * 10000 * 90000) }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "width of a format": "{{ '%10000000000d' | format(1) }}",
    "power": "{{ (9 ** 9) ** (9 ** 9) }}",
    "list": "{{ ([0] * 10 ** 9) | length }}",
    "loops": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "long output": "{% for i in range(99999) %}" * 2 + "{{ 'a' * 9999 }}" + "{% endfor %}" * 2,
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long sum": "{{ " + "+".join(["1"] * 50000) + " }}",
    "tojson": DOUBLED.replace("EXPR", "[ns.x, ns.x] | tojson"),
    "indent of tojson": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "slices": "{{ [1] | slice(10 ** 9) | list | length }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "range": "{{ range(10 ** 12) | list | length }}",
}


def refuse_template(source: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_data.datasets.sft.chat_templates import ChatTemplate
        from mt_data.datasets.sft.conversations import Conversation

        template = ChatTemplate("the template", source, {}, False)
        return template.render(Conversation(MESSAGES, None, "chats.jsonl", 1), MESSAGES)

    return read


def tokenizer(model: Any = None, **parts: Any) -> Callable[[Path], Any]:
    """Opens a tokenizer.json and encodes a short text."""
    words = {"a": 0, "b": 1}
    plain = {"type": "BPE", "vocab": words, "merges": [], "unk_token": "a"}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model or plain, **parts,
    }  # fmt: skip

    def read(folder: Path) -> Any:
        from mt_data.tokenizers.hugging_face import HuggingFaceConfig, HuggingFaceTokenizer

        (folder / "tokenizer.json").write_text(json.dumps(content))
        opened = HuggingFaceTokenizer(HuggingFaceConfig(tokenizer_model=str(folder)))
        return len(opened.encode("ab" * 50 + "a" * 30 + "!"))

    return read


def replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def template_tokens(count: int) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}] * count + [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {"a": {"id": "a", "ids": [0] * count, "tokens": ["a"] * count}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


TOKENIZERS = {
    "replace doubles": tokenizer(normalizer={"type": "Sequence", "normalizers": [replaced("a", "aa")] * 40}),
    "replace with a long text": tokenizer(normalizer=replaced("a", "a" * 20_000_000)),
    "decoder doubles": tokenizer(decoder={"type": "Sequence", "decoders": [replaced("a", "aa")] * 40}),
    "prepend": tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 50_000_000}),
    "template": tokenizer(post_processor=template_tokens(20_000)),
    "regular expression": tokenizer(pre_tokenizer=split(r"(a|a|aa)+$")),
    "nested regular expression": tokenizer(pre_tokenizer=split(r"((a+)+)+[^!ab]")),
    "counted regular expression": tokenizer(pre_tokenizer=split(r"((a{0,1000}){0,1000}){0,1000}b")),
    "normalizer's regular expression": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": r"(a|a|aa)+$"}, "content": ""}
    ),
    "decoder's regular expression": tokenizer(
        decoder={"type": "Replace", "pattern": {"Regex": r"(a+)+b"}, "content": ""}
    ),
    "processors": tokenizer(
        post_processor={
            "type": "Sequence",
            "processors": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
            * 1000,
        }
    ),
    "merges": tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]] * MANY, "unk_token": "a"}),
    "parentheses": tokenizer(pre_tokenizer=split("(" * 100_000 + ")" * 100_000)),
    "padding": tokenizer(
        padding={
            "strategy": {"Fixed": 10**10},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    ),
    "ids": tokenizer(model={"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": [], "unk_token": "a"}),
    "added ids": tokenizer(
        added_tokens=[
            {
                "id": 4_000_000_000,
                "content": "x",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ]
    ),
    "nested sequences": tokenizer(normalizer=json.loads('{"type":"Sequence","normalizers":[' * 100 + "]}" * 100)),
}


def open_safetensors(content: Content, length: int | None = None) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_ckpt.files.safetensors import SafetensorsFile

        file, header = folder / "model.safetensors", made(content)
        file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
        opened = SafetensorsFile(file)
        return sum(opened.read(name).numel() for name in opened.tensors)

    return read


def entries(entry: str) -> bytes:
    return ("{" + ",".join(f'"{number}":{entry}' for number in range(MANY)) + "}").encode()


SAFETENSORS = {
    "length": open_safetensors(b"{}", 2**63),
    "empty entries": open_safetensors(lambda: entries('{"dtype":"F32","shape":[0],"data_offsets":[0,0]}')),
    "numbers": open_safetensors(lambda: entries("0")),
    "nested": open_safetensors(b"[" * 200_000),
    "nested objects": open_safetensors(b'{"a":' * 200_000),
    "dimensions": open_safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9," * MANY + b'1],"data_offsets":[0,4]}}'),
    "negative": open_safetensors(b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}'),
    "digits": open_safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * MANY + b'],"data_offsets":[0,4]}}'),
    "large": open_safetensors(b'{"a":{"dtype":"F32","shape":[1e308],"data_offsets":[0,4]}}'),
    "no number": open_safetensors(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}'),
    "empty dimensions": open_safetensors(b'{"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
    "many dimensions": open_safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"1," * 10**5 + b'0],"data_offsets":[0,0]}}'
    ),
    "many entries of metadata": open_safetensors(lambda: b'{"__metadata__":' + entries('"a"') + b"}"),
}


def open_gguf(data: Content) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_ckpt.gguf.file import GGUFFile

        (folder / "model.gguf").write_bytes(made(data))
        opened = GGUFFile(folder / "model.gguf")
        return sum(opened.read(name).numel() for name in opened.tensors)

    return read


def gguf(tensors: int, values: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


EMPTY_TENSOR = struct.pack("<IQIQ", 1, 0, 0, 0)
GGUFS = {
    "tensors": open_gguf(gguf(2**62, 0)),
    "values": open_gguf(gguf(0, 2**62)),
    "empty tensors": open_gguf(lambda: gguf(MANY, 0, b"".join(text(b"%d" % n) + EMPTY_TENSOR for n in range(MANY)))),
    "nested arrays": open_gguf(
        lambda: gguf(0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000)
    ),
    "arrays of nothing": open_gguf(
        lambda: gguf(
            0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, MANY) + struct.pack("<IQ", 4, 0) * MANY
        )
    ),
    "string": open_gguf(gguf(0, 1, struct.pack("<Q", 2**63))),
    "long array": open_gguf(lambda: gguf(0, 1, text(b"k") + struct.pack("<IIQ", 9, 0, 30 * MANY) + b"1" * 30 * MANY)),
    "alignment": open_gguf(gguf(0, 1, text(b"general.alignment") + struct.pack("<IQ", 10, 2**63))),
    "shape": open_gguf(gguf(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0))),
    "empty shape": open_gguf(gguf(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 0, 2**63, 0, 0))),
}


def open_torch(make: Callable[[Path], None]) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_ckpt.pickles.torch_file import open_torch_file

        make(folder / "model.pt")
        return open_torch_file(folder / "model.pt").value

    return read


def archive(pickle: Content, method: int = zipfile.ZIP_STORED, others: int = 0) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        with zipfile.ZipFile(file, "w", method) as opened:
            opened.writestr("archive/data.pkl", made(pickle))
            opened.writestr("archive/version", "3\n")
            for number in range(others):
                opened.writestr(f"archive/data/{number}", b"")

    return make


TORCH = {
    "memo": open_torch(archive(b"\x80\x02r" + struct.pack("<I", 2**31) + b".")),
    "memo of None": open_torch(archive(b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".")),
    "bytes": open_torch(archive(b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".")),
    "text": open_torch(archive(b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".")),
    "frame": open_torch(archive(b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.")),
    "number": open_torch(archive(b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".")),
    "digits": open_torch(archive(lambda: b"\x80\x02L" + b"9" * MANY + b"L\n.")),
    "lists": open_torch(archive(lambda: b"\x80\x02" + b"]" * MANY + b".")),
    "nested lists": open_torch(archive(lambda: b"\x80\x02" + b"]" * MANY + b"a" * (MANY - 1) + b".")),
    "tuples": open_torch(archive(lambda: b"\x80\x02)" + b"\x85" * MANY + b".")),
    "compressed": open_torch(archive(lambda: b"\x80\x02" + b"N" * 200_000_000 + b".", zipfile.ZIP_DEFLATED)),
    "members": open_torch(archive(b"\x80\x02}.", others=100_000)),
}


def open_indexed(idx: bytes, num_bytes: int = 16) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_data.indexed import IndexedDataset

        (folder / "data.idx").write_bytes(idx)
        (folder / "data.bin").write_bytes(bytes(num_bytes))
        opened = IndexedDataset(str(folder / "data"))
        return [int(opened[number].sum()) for number in range(min(len(opened), 10))]

    return read


def index(sequences: int, documents: int, rest: bytes = b"", dtype: int = 4) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, dtype, sequences, documents) + rest


INDEXED = {
    "sequences": open_indexed(index(2**63, 1)),
    "wrapped around": open_indexed(index(2**62, 2**61, bytes(64))),
    "documents": open_indexed(index(0, 2**63)),
    "length": open_indexed(index(1, 2, struct.pack("<iqqq", 2**31 - 1, 0, 0, 1))),
    "negative length": open_indexed(index(1, 2, struct.pack("<iqqq", -5, 0, 0, 1))),
    "offset": open_indexed(index(1, 2, struct.pack("<iqqq", 4, 2**62, 0, 1))),
    "negative offset": open_indexed(index(1, 2, struct.pack("<iqqq", 1, -(2**40), 0, 1))),
    "document": open_indexed(index(1, 2, struct.pack("<iqqq", 4, 0, 2**60, 2**61))),
}


def open_npy(shape: str, suffix: str = ".npy") -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_data.datasets.images.pixels import ImageFile, read_image

        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
        data = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head
        (folder / "image.npy").write_bytes(data)
        return read_image(ImageFile(folder / "image.npy")).shape

    return read


NUMPY = {
    "shape": open_npy("(100000, 1000000, 3)"),
    "huge shape": open_npy("(9223372036854775807, 9223372036854775807, 3)"),
    "negative shape": open_npy("(-1, 4, 3)"),
    "nested shape": open_npy("(" * 500 + ")" * 500),
    "long head": open_npy("(" + "1," * 400_000 + ")"),
}


def open_archive(make: Callable[[Path], None]) -> Callable[[Path], Any]:
    """Opens an archive of arrays under the name of one array: as an image, and as neighbours of chunks."""

    def read(folder: Path) -> Any:
        from mt_core.errors import DataError
        from mt_data.datasets.images.pixels import ImageFile, read_image
        from mt_data.datasets.retro.files import NeighborsFile, open_neighbors

        make(folder / "image.npy")
        try:
            open_neighbors(NeighborsFile(folder / "image.npy", None), 1, 1, False)
        except DataError:
            return read_image(ImageFile(folder / "image.npy")).shape
        return None

    return read


def npz(head: bytes, method: int = zipfile.ZIP_DEFLATED, others: int = 0) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        with zipfile.ZipFile(file, "w", method) as opened:
            opened.writestr("arr_0.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + bytes(10**7))
            for number in range(others):
                opened.writestr(f"{number}.npy", b"")

    return make


NUMPY_ARCHIVES = {
    "shape": open_archive(npz(b"{'descr': '|u1', 'fortran_order': False, 'shape': (100000, 1000000, 3), }")),
    "object": open_archive(npz(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }")),
    "members": open_archive(npz(b"", others=10_000)),
    "damaged": open_archive(lambda file: file.write_bytes(b"PK\x03\x04" + b"\xff" * 1000) and None),
}


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def message(field: int, content: bytes) -> bytes:
    """A field of a protocol buffer that has a length."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def piece(name: bytes, kind: int = 1) -> bytes:
    return message(1, message(1, name) + b"\x15" + struct.pack("<f", 0.0) + b"\x18" + varint(kind))


def sentencepiece(pieces: bytes, charsmap: bytes = b"") -> bytes:
    control = piece(b"<unk>", 2) + piece(b"<s>", 3) + piece(b"</s>", 3)
    letters = b"".join(piece(bytes([letter])) for letter in b"ab")
    return control + letters + pieces + message(2, b"\x18\x01") + message(3, message(2, charsmap) if charsmap else b"")


def open_sentencepiece(content: Content) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_data.tokenizers.sentence_piece import SentencePieceConfig, SentencePieceTokenizer

        file = folder / "tokenizer.model"
        file.write_bytes(made(content))
        opened = SentencePieceTokenizer(SentencePieceConfig(tokenizer_model=str(file)))
        return opened.decode(opened.encode("ab" * 500 + "!"))

    return read


SENTENCEPIECE = {
    "size": open_sentencepiece(b"\x0a" + varint(2**62) + b"a"),
    "size of 31 bits": open_sentencepiece(b"\x0a" + varint(2**31 - 1) + b"a"),
    "empty entries": open_sentencepiece(lambda: message(1, b"") * MANY),
    "many entries": open_sentencepiece(lambda: sentencepiece(b"".join(piece(b"%d" % n) for n in range(MANY)))),
    "equal entries": open_sentencepiece(lambda: sentencepiece(piece(b"ab") * MANY)),
    "long entry": open_sentencepiece(lambda: sentencepiece(piece(b"a" * 50_000_000))),
    "nested groups": open_sentencepiece(varint(15 << 3 | 3) * MANY),
    "size of the characters' map": open_sentencepiece(sentencepiece(b"", b"\xff\xff\xff\x7f" + bytes(99))),
    "places in the characters' map": open_sentencepiece(
        sentencepiece(b"", struct.pack("<I", 1024) + struct.pack("<I", 0x7FFFFC00) * 256 + b"a\0")
    ),
    "no UTF-8": open_sentencepiece(sentencepiece(piece(b"\xff"))),
}


def open_tiktoken(content: Content) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mt_data.tokenizers.tik_token import TikTokenConfig, TikTokenizer

        file = folder / "ranks.tiktoken"
        file.write_bytes(made(content))
        opened = TikTokenizer(TikTokenConfig(tokenizer_model=str(file), tiktoken_pattern="gpt2"))
        return opened.decode(opened.encode("ab" * 500 + "!"))

    return read


def ranks(*lines: bytes) -> bytes:
    letters = (b"%s %d" % (b64encode(bytes([letter])), letter) for letter in range(256))
    return b"\n".join((*letters, *lines))


TIKTOKEN = {
    "rank": open_tiktoken(ranks(b"YWI= 4294967295")),
    "rank of 32 bits": open_tiktoken(ranks(b"YWI= 4294967296")),
    "rank of 64 bits": open_tiktoken(ranks(b"YWI= 18446744073709551616")),
    "digits": open_tiktoken(ranks(b"YWI= " + b"9" * 5000)),
    "negative rank": open_tiktoken(ranks(b"YWI= -1")),
    "many entries": open_tiktoken(
        lambda: ranks(*(b"%s %d" % (b64encode(b"%dx" % n), 256 + n) for n in range(MANY // 2)))
    ),
    "long token": open_tiktoken(lambda: ranks(b64encode(b"a" * 50_000_000) + b" 256")),
    "digits of a list": open_tiktoken(b'[{"rank": ' + b"9" * 5000 + b', "token_bytes": "AA=="}]'),
    "nested list": open_tiktoken(b"[" * MANY),
}
CATALOGUE: dict[str, Callable[[Path], Any]] = {
    f"{kind}: {name}": read
    for kind, cases in {
        "template": {name: refuse_template(source) for name, source in TEMPLATES.items()},
        "tokenizer": TOKENIZERS,
        "safetensors": SAFETENSORS,
        "gguf": GGUFS,
        "torch": TORCH,
        "indexed": INDEXED,
        "npy": NUMPY,
        "npz": NUMPY_ARCHIVES,
        "sentencepiece": SENTENCEPIECE,
        "tiktoken": TIKTOKEN,
    }.items()
    for name, read in cases.items()
}


def main() -> None:
    # Before anything is timed.
    for module in (
        "mt_ckpt.files.safetensors",
        "mt_data.datasets.images.pixels",
        "mt_data.datasets.sft.jinja_sandbox",
        "mt_data.datasets.retro.files",
        "mt_data.tokenizers.hugging_face",
        "sentencepiece",
        "tiktoken",
    ):
        import_module(module)
    from mt_core.errors import MtError

    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    # Private memory, which address space reserved by libraries is not.
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for number, (name, read) in enumerate(CATALOGUE.items()):
        if wanted and name not in wanted:
            continue
        print(json.dumps({"begins": name}), flush=True)
        place = folder / str(number)
        place.mkdir()
        began, outcome = time.process_time(), "read"
        try:
            read(place)
        except MtError as error:
            outcome = f"refused: {error}"[:300]
        except BaseException as error:
            outcome = f"traceback: {type(error).__name__}: {error}"[:300]
        print(json.dumps({"name": name, "outcome": outcome, "seconds": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()
