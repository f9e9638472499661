"""Small tokenizers trained on the standard library's own text, and texts that tokenizers get wrong."""

from __future__ import annotations

import ast
import base64
import io
import json
import textwrap
from pathlib import Path

import pytest

ADVERSARIAL = [
    "",
    " ",
    "\n\n",
    "a",
    "Hello  world\tand\r\nmore",
    "naïve café — “quotes” … ½ ﬁ",
    "日本語のテキスト と 한국어 中文，。",
    "🙂👩‍👩‍👧‍👦🇫🇷 👍🏽",
    "1234567890 3.14159 1e-10 0xDEADBEEF ٣٤ Ⅻ ²",
    "don't we'll I've they're it's I'm you'd DON'T WE'LL",
    "a\x00b\x01\x1b[0m\u200bc\ufeffd\u00ad\u0085e",
    "def f(x):\n    return x  # ok\n\n\n\tif x:\r\n\t\tpass",
    "e\u0301 versus é, Z̴̧̛͙̯a̷l̵g̶o̸",
    "before<|endoftext|>after <|endoftext|>",
    "<|endoftext|><|endoftext|>",
    "<|endoftext <|endoftext|",
    "trailing spaces   ",
    "   leading",
    "\u3000\u00a0 \u2003x\u2028y\u2029",
    "𝔏🧪กำ עברית العربية हिन्दी",
    "x" * 700,
    "ab" * 3000,
    " " * 700 + "x",
    "\n" * 300 + " y",
    "=-" * 500,
    "[CLS] [MASK] [SEP] [PAD] [UNK] [BOS] <s> </s> <pad> <unk> <extra_id_0><extra_id_1>",
    "\U0010ffff\ufffd\ue000",
]


@pytest.fixture(scope="session")
def adversarial() -> list[str]:
    return ADVERSARIAL


def stdlib_text() -> str:
    """About 200 kB of code and prose that every Python carries."""
    names = ("ast.py", "argparse.py", "textwrap.py", "this.py", "turtle.py")
    folder = Path(ast.__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Paragraphs, some in other scripts."""
    return [*stdlib_text().split("\n\n"), *ADVERSARIAL[5:13]]


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> dict[str, str]:
    """vocab.json and merges.txt, trained by `tokenizers` and laid out as GPT-2's: <|endoftext|> is last."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus, vocab_size=1500, min_frequency=2, show_progress=False)
    trained.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocab["<|endoftext|>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@pytest.fixture(scope="session")
def bert_vocab_file(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> str:
    from tokenizers import BertWordPieceTokenizer

    folder = tmp_path_factory.mktemp("bert")
    trained = BertWordPieceTokenizer(lowercase=False)
    trained.train_from_iterator(corpus, vocab_size=1500, show_progress=False)
    trained.save_model(str(folder))
    return str(folder / "vocab.txt")


@pytest.fixture(scope="session", params=["unigram", "bpe"])
def sentencepiece_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: list[str]
) -> str:
    import sentencepiece

    model = io.BytesIO()
    lines = [line for text in corpus for line in textwrap.wrap(text, 200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=900,
        model_type=request.param,
        minloglevel=2,
        byte_fallback=True,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="session")
def hugging_face_directory(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> str:
    """A byte-level BPE that puts <s> before each text, saved by transformers."""
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hf")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        corpus, vocab_size=1200, special_tokens=["<s>", "</s>", "<pad>", "<|endoftext|>"], show_progress=False
    )
    bos = ("<s>", trained.token_to_id("<s>"))
    trained._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[bos]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def rank_file(tmp_path_factory: pytest.TempPathFactory, gpt2_files: dict[str, str]) -> str:
    """A tiktoken rank file: the bytes and merges of the trained BPE, in order."""
    from mt_data.tokenizers.merges import parse_vocab_and_merges

    paths = (gpt2_files["vocab_file"], gpt2_files["merge_file"])
    pairs = parse_vocab_and_merges(Path(paths[0]).read_bytes(), Path(paths[1]).read_bytes(), *paths)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(pairs.ids_by_bytes))
    path = tmp_path_factory.mktemp("rank") / "ranks.tiktoken"
    path.write_text("".join(lines))
    return str(path)
