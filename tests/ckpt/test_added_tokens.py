"""Tokens are added to a model: new rows are the mean of the true ones, and transformers reads model and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mt_ckpt.commands.ckpt import app
from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")


def write_model(folder: Path, rows: int, tied: bool) -> Path:
    """A model of `rows` rows with a tokenizer of 257 ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def add(source: Path, target: Path, *tokens: str) -> None:
    words = [part for token in tokens for part in ("--token", token)]
    result = CliRunner().invoke(app, ["add-tokens", str(source), *words, "--save-dir", str(target)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("rows", [257, 258, 300])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_true_ones(tmp_path: Path, rows: int, tied: bool) -> None:
    """Rows that the model has beyond its tokenizer's ids are no tokens: they are used first and count in no mean."""
    base = write_model(tmp_path / "base", rows, tied)
    add(base, tmp_path / "out", "<|im_start|>", "<|im_end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [257, 258]
    before = transformers.LlamaForCausalLM.from_pretrained(base)
    after = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert after.config.vocab_size == max(rows, 259)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(before, get)().weight, getattr(after, get)().weight
        assert torch.equal(new[:257], old[:257])
        assert torch.allclose(new[257:259], old[:257].mean(0).expand(2, -1), atol=1e-7)
        assert torch.equal(new[259:], old[259:])


def test_a_token_that_is_there_is_named(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", 257, True)
    with pytest.raises(ConfigError, match="has <end> already"):
        add(base, tmp_path / "out", "<end>")
    with pytest.raises(ConfigError, match="named twice"):
        add(base, tmp_path / "out", "<a>", "<a>")
