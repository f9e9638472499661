"""`mt convert --tokenizer`: a folder that can generate, from files that have no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.ckpt.convert_cases import GPT2, LLAMA
from tests.ckpt.test_convert_command import run_convert
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mt_ckpt.commands.convert import describe
from mt_ckpt.convert import convert
from mt_core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of 270 ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cat"] * 3, trainer)
    path = tmp_path / "tokenizer"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return path


@pytest.mark.parametrize("form", ["megatron-dist", "transformers-megatron"])
def test_a_folder_that_transformers_generates_from(form: str, folder: Path, make_model, host, tmp_path: Path) -> None:
    import transformers

    keys = {**(GPT2 if form == "transformers-megatron" else LLAMA), "vocab_size": 270, "norm_epsilon": 1e-5}
    convert(make_model(**keys), tmp_path / "m", saver=form, host=host)
    target = tmp_path / "hf"
    result = run_convert("--load-dir", tmp_path / "m", "--save-dir", target, "--saver", "hf", "--tokenizer", folder)
    assert result.exit_code == 0, result.exception
    assert "without a tokenizer" not in result.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    prompt = tokenizer("the cat", return_tensors="pt")
    assert prompt.input_ids.tolist() == [Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the cat").ids]
    made = model.generate(prompt.input_ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made.shape[1] == prompt.input_ids.shape[1] + 3
    assert model.config.eos_token_id == 1


@pytest.mark.slow
def test_a_model_of_bytes_has_a_tokenizer_that_transformers_reads(host, tmp_path: Path) -> None:
    """It is described by its name alone: the files are written for it."""
    import transformers

    from mt_core.config.loading import load_config
    from mt_core.train import Trainer
    from mt_data.tokenizers.byte_level import ByteLevelTokenizer
    from mt_infer.sampling.parameters import SamplingParameters
    from mt_infer.text import TextGenerator

    sizes = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "data.seq_length=16"]
    run = ["train.train_iters=1", "data.dataset_type=mock", "train.eval_iters=0"]
    config = load_config(preset="gpt-tiny", overrides=[*sizes, *run, "train.eval_interval=null"], host=host)
    Trainer(config, run_dir=tmp_path / "run").train()
    result = run_convert("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "hf", "--saver", "hf")
    assert result.exit_code == 0, result.exception
    assert "without a tokenizer" not in result.output
    ours, theirs = ByteLevelTokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("hello <eod> Zürich 日本 🎉\n\t\0 end", "", "  a"):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (256, 257, ours.vocab_size)
    greedy = SamplingParameters(temperature=0.0, max_tokens=4)
    texts = [
        TextGenerator.load(tmp_path / name, host=host).generate(["hello"], greedy)[0][0].tokens
        for name in ("run", "hf")
    ]
    assert texts[0] == texts[1]


def test_a_source_without_a_tokenizer_is_reported(make_model, tmp_path: Path) -> None:
    result = run_convert("--load-dir", make_model(**LLAMA), "--save-dir", tmp_path / "hf", "--saver", "hf")
    assert "without a tokenizer" in result.output
    assert "--tokenizer DIR adds one" in result.output


def test_refusals(folder: Path, make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    with pytest.raises(ConfigError, match=r"this tokenizer has 270 ids, but the model's vocab_size is 101"):
        convert(source, tmp_path / "x", saver="hf", tokenizer=folder, host=host)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: there is no tokenizer; .* tokenizer.json"):
        convert(source, tmp_path / "x", saver="hf", tokenizer=tmp_path / "empty", host=host)
    assert not (tmp_path / "x").exists()


def test_a_written_t5_says_how_its_decoder_begins(make_model, host, tmp_path: Path) -> None:
    from tests.ckpt.convert_cases import MODELS

    source = make_model(**MODELS["t5"])
    convert(source, tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # the files are changed on purpose
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["decoder_start_token_id"] == 0
    config["decoder_start_token_id"] = 7
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)  # it has the last word
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "mt", saver="mt", host=host)
    convert(tmp_path / "mt", tmp_path / "again", saver="hf", host=host)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["decoder_start_token_id"] == 7


@pytest.mark.parametrize("saver", ["hf", "mt", "megatron", "megatron-dist", "megatron-legacy", "trtllm", "meta"])
def test_files_that_a_format_has_no_place_for_are_named(
    saver: str, folder: Path, make_model, host, tmp_path: Path
) -> None:
    """Template and end tokens of a chat model: in the target, or in the command's output."""
    model = make_model(**{**LLAMA, "vocab_size": 280})
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    convert(model, tmp_path / "chat", saver="hf", tokenizer=folder, host=host)
    planned = convert(tmp_path / "chat", tmp_path / "out", saver=saver, dry_run=True, host=host)
    report = convert(tmp_path / "chat", tmp_path / "out", saver=saver, host=host)
    assert planned.files_left_out == report.files_left_out
    names = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    carried = {file.name for file in (tmp_path / "out").rglob("*") if file.is_file()} & names
    assert set(report.files_left_out) == names - carried
    assert carried == (names if saver in ("hf", "mt", "trtllm") else set())
    if saver not in ("hf", "mt", "trtllm"):
        said = "\n".join(describe(report, "out", dry_run=False))
        assert "has no place for them: the files chat_template.jinja, generation_config.json, tokenizer.json" in said
