"""Text as people have it, named in data.data_path: folders, patterns, encodings, one long document."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.gpt import GPTDataConfig, build_gpt
from mt_data.datasets.splits import parse_split, range_of_split
from mt_data.indexed.reader import MemoryIndexedDataset
from mt_data.preprocess import PreprocessOptions, preprocess
from mt_data.preprocess.encodings import MARKS, utf16_without_mark
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TEXT = "Größe, café: 100 €. "
LENGTH = 16


def tokens_of(paths: list[Path | str], split: str = "1", part: str = "train", **keys: Any) -> np.ndarray:
    """All tokens of the sequences that a split of these paths has, in the order of the files."""
    config = GPTDataConfig(data_path=[str(path) for path in paths], split=split, seq_length=LENGTH, **keys)
    found: Any = build_gpt(config, tokenizer(), SplitRequest(part, None, LENGTH, 1))  # type: ignore[arg-type]
    return np.concatenate([found.source.read(place) for place in sorted(set(found.index.document_index.tolist()))])


def tokenizer() -> ByteLevelTokenizer:
    return ByteLevelTokenizer()


def ids(*texts: str) -> list[int]:
    return [token for text in texts for token in [*text.encode(), tokenizer().special.eod]]


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "gb18030", "utf-7", "cp1140"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".MD.gz"])
def test_text_in_any_encoding_is_the_text(tmp_path: Path, encoding: str, ending: str) -> None:
    texts = [(TEXT if encoding != "latin-1" else "Größe, café. ") * (3 + number) for number in range(3)]
    content = (
        "\n".join(texts)
        if "jsonl" not in ending
        else "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    )
    data = content.encode(encoding)
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    wanted = ids(*texts) if "jsonl" in ending else ids(content)
    assert tokens_of([path], encodings=[encoding]).tolist() == wanted
    if data.startswith(tuple(MARKS)):
        assert tokens_of([path]).tolist() == wanted, "a mark is enough"


def test_a_folder_of_mixed_encodings(tmp_path: Path) -> None:
    (tmp_path / "b" / "cache" / "mt").mkdir(parents=True)
    (tmp_path / "b" / ".hidden.txt").write_text("hidden")
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "a.txt").write_bytes(TEXT.encode("cp1252"))
    (tmp_path / "b" / "c.md").write_bytes(TEXT.encode())
    (tmp_path / "b" / "d.TXT").write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(DataError, match=r"a.txt, line 1: is no UTF-8 .*data.encodings"):
        tokens_of([tmp_path])
    for name in (tmp_path, f"{tmp_path}/", f"{tmp_path}/**/*.*[tTdD]"):
        assert tokens_of([name], encodings=["utf-8", "cp1252"]).tolist() == ids(TEXT, TEXT, TEXT)
    assert not list(tmp_path.glob("[*]*")), "no cache in a folder that is called as the pattern"


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"has no text: its files end in .pdf \(1\)"):
        tokens_of([tmp_path])
    (tmp_path / "n.txt").write_bytes("abc".encode("utf-16-le"))
    with pytest.raises(DataError, match="NUL character.*utf-16-le"):
        tokens_of([tmp_path / "n.txt"])
    # The key alone is advised without a word before it: mt train has no such option.
    (tmp_path / "l.txt").write_bytes("Überfluß".encode("cp1252"))
    with pytest.raises(DataError, match=r'such as \["utf-8", "cp1252"\] \(of mt data preprocess: --encoding cp1252\)'):
        tokens_of([tmp_path / "l.txt"])
    with pytest.raises(ValidationError, match="'klingon', which is no text encoding"):
        tokens_of([tmp_path / "n.txt"], encodings=["klingon"])
    (tmp_path / "array.json").write_text('[{"text": "a"}]\n')
    with pytest.raises(DataError, match=r"is a list; .*jq -c"):
        tokens_of([tmp_path / "array.json"])


def test_empty_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    for number in range(10):
        (tmp_path / f"empty{number}.txt").touch()
    assert tokens_of([tmp_path]).tolist() == ids(TEXT)
    assert "empty files give no tokens" in caplog.text
    assert "empty7.txt and 2 more; fill them, or remove them from the input" in caplog.text
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"every file is empty: .*a.txt, .*; fill them, or name other files"):
        tokens_of([tmp_path])
    options = PreprocessOptions(
        input=(str(tmp_path),), output_prefix=str(tmp_path / "o"), tokenizer_type="ByteLevelTokenizer"
    )
    with pytest.raises(DataError, match="every file is empty"):
        preprocess(options)


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "0123456789abcdefghi"}\n'))
    assert tokens_of([tmp_path / "a.jsonl"]).tolist() == ids("0123456789abcdefghi")


@pytest.mark.parametrize("lengths", [[1000], [400, 300, 300], [997, 1, 2], [0, 1000, 0]])
@pytest.mark.parametrize("split", ["969,30,1", "80,20,0", "1,1,1"])
def test_ranges_of_splits_are_a_partition_of_all_tokens(lengths: list[int], split: str) -> None:
    stream = np.arange(sum(lengths))
    parts = np.split(stream, np.cumsum(lengths)[:-1])
    file = MemoryIndexedDataset.from_sequences(parts, prefix="memory")
    fractions, found = parse_split(split), []
    for name in ("train", "valid", "test"):
        part = range_of_split(file, fractions, name)
        read = [part.read(place) for place in part.elements]
        inside = part.sequence_lengths[part.elements.start : part.elements.stop].tolist()
        assert [len(piece) for piece in read] == inside
        for place, piece in zip(part.elements, read, strict=True):
            assert len(piece) < 3 or np.array_equal(part.read(place, 1, 2), piece[1:3])
        found += read
    assert np.array_equal(np.concatenate(found), stream)


@pytest.mark.parametrize("prepared", [False, True])
def test_one_long_document_has_training_and_validation(tmp_path: Path, prepared: bool) -> None:
    novel = tmp_path / "novel.txt"
    novel.write_text("".join(chr(97 + number % 26) for number in range(3000)))
    path = str(novel)
    if prepared:
        options = PreprocessOptions(
            input=(path,), output_prefix=str(tmp_path / "n"), tokenizer_type="ByteLevelTokenizer", append_eod=True
        )
        path = str(preprocess(options).outputs["text"])
    train, valid = (tokens_of([path], "90,10,0", part) for part in ("train", "valid"))
    assert (len(train), len(valid)) == (2701, 300)
    assert [*train.tolist(), *valid.tolist()] == ids(novel.read_text())


def gpt_of(paths: list[Path], part: str, samples: int | None, **keys: Any) -> Any:
    config = GPTDataConfig(data_path=[str(path) for path in paths], seq_length=LENGTH, **keys)
    return build_gpt(config, tokenizer(), SplitRequest(part, samples, LENGTH, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [100, 12])
def test_several_short_texts_have_training_and_validation(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A validation part below one sequence (100), and texts below one (12): together they are read as a folder is."""
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text(path.stem * size)
    stream = np.array(ids(*(path.read_text() for path in paths)))
    parts = {part: gpt_of(paths, part, 20) for part in ("train", "valid")}
    border = round(0.969 * len(stream))
    assert np.array_equal(parts["train"].source.file.read(1), stream[size + 1 : 2 * size + 2])
    assert [parts["train"].source.begin, parts["train"].source.end] == [0, border]
    assert [parts["valid"].source.begin, parts["valid"].source.end] == [border, round(0.999 * len(stream))]
    assert caplog.text.count("too short to give each split a sample, so that the 3 data sets") == 1
    assert f"{paths[1]} document 0 tokens" in "".join(map(parts["train"].describe, range(len(parts["train"]))))
    seen = np.concatenate([parts["train"].tokens(number) for number in range(20)])
    assert set(seen.tolist()) == set(stream[:border].tolist())


def test_a_short_text_with_a_weight_is_for_training_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its weight stays what it was, and validation is the longer text's."""
    paths = {"short": tmp_path / "short.txt", "long": tmp_path / "long.txt"}
    paths["short"].write_text("1234567")
    paths["long"].write_text("abcdefghij" * 100)
    blend = [{"prefix": str(paths["short"]), "weight": 1}, {"prefix": str(paths["long"]), "weight": 3}]
    config = GPTDataConfig.model_validate({"data_path": blend, "seq_length": LENGTH, "split": "80,20,0"})
    train, valid = (
        build_gpt(config, tokenizer(), SplitRequest(part, 20, LENGTH, 1))  # type: ignore[arg-type]
        for part in ("train", "valid")
    )
    digits = [train[number]["tokens"].tolist()[0] in ids("1234567") for number in range(20)]
    assert sum(digits) == 5
    assert not set(ids("1234567")[:7]) & {token for number in range(20) for token in valid[number]["tokens"].tolist()}
    assert caplog.text.count("short.txt: too short to divide") == 1


def test_texts_of_less_than_a_sequence_together_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in paths:
        path.write_text("1234567")
    with pytest.raises(DataError, match=r'16 tokens, no more.*seq_length=16 takes \(17\).*split="1"'):
        gpt_of(paths, "train", 4)
    assert len(gpt_of(paths, "train", 4, split="1")) == 4


def test_compressed_text_and_tables_in_a_folder(tmp_path: Path) -> None:
    """With the text under a key of one's own, read from each of them in the order of names."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstd = pytest.importorskip("backports.zstd")
    texts = [TEXT * count for count in (1, 2, 3)]
    line = json.dumps({"id": "a", "body": texts[0]}).encode() + b"\n"
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(line))
    parquet.write_table(pyarrow.table({"id": ["b"], "body": [texts[1]]}), tmp_path / "b.parquet")
    (tmp_path / "c.json.zst").write_bytes(
        zstd.compress(line.replace(json.dumps(texts[0]).encode(), json.dumps(texts[2]).encode()))
    )
    assert tokens_of([tmp_path], json_key="body").tolist() == ids(*texts)
    assert tokens_of([f"{tmp_path}/*.parquet"], json_key="body").tolist() == ids(texts[1])
    # Plain text beside them has no keys.
    (tmp_path / "c.txt").write_text(texts[0])
    assert tokens_of([tmp_path], json_key="body").tolist() == ids(*texts, texts[0])
    with pytest.raises(DataError, match="body"):
        tokens_of([tmp_path])


JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
CHINESE = "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？"
KOREAN = "모든 국민은 신체의 자유를 가진다."


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [
        *(TEXT, "Überfluß an Prosa, naïve façades", "Широкая электрификация южных губерний"),
        *(JAPANESE, CHINESE, KOREAN, "令和六年度予算案\n"),
    ],
)
def test_utf16_without_a_mark_is_named(encoding: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=rf'data.encodings, such as \["{encoding}"\]'):
        tokens_of([tmp_path / "n.txt"])
    assert tokens_of([tmp_path / "n.txt"], encodings=[encoding]).tolist() == ids(text)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((JAPANESE, name) for name in ("shift_jis", "euc_jp", "iso2022_jp")),
        *((CHINESE, name) for name in ("gb18030", "big5hkscs")),
        *((KOREAN, "euc_kr"), (TEXT, "latin-1"), ("Широкая электрификация", "cp1251")),
        *((JAPANESE.replace("。", ""), "shift_jis"), (KOREAN.replace(" ", ""), "euc_kr")),
    ],
)
def test_other_encodings_are_not_taken_for_utf16(text: str, encoding: str) -> None:
    assert utf16_without_mark(text.encode(encoding, errors="ignore")) is None


def test_a_text_whose_ending_says_no_format_names_the_key_that_does(tmp_path: Path) -> None:
    """Else it is taken for the prefix of a token file, whose absence is reported."""
    source = tmp_path / "sub.py"
    source.write_text("print(1)\n" * 400)
    with pytest.raises(DataError, match=r'sub\.py is a file whose ending.*data\.input_format="text"'):
        tokens_of([source])
    assert tokens_of([source], input_format="text").tolist() == ids(source.read_text())
