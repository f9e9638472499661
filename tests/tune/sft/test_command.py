"""`mt tune sft`: a Hugging Face folder becomes a tuned one in three commands, which transformers continues identically.
Costs about 15 CPU seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_cli.main import run
from mt_core.config.files import read_config_file
from mt_core.plugins import load_plugins

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def mt(*arguments: Any) -> None:
    assert run(list(map(str, arguments)), debug=True) == 0


def write_folder(folder: Path) -> Path:
    """A small Llama with random weights, and a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(["plus is what"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(path: Path) -> Path:
    """ShareGPT's format."""
    turns = [[("human", f"What is {a} plus 1?"), ("gpt", f"It is {a + 1}.")] for a in range(8)] * 8
    records = [{"conversations": [{"from": who, "value": text} for who, text in pair]} for pair in turns]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_a_hugging_face_folder_becomes_a_tuned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, data = write_folder(tmp_path / "base"), write_data(tmp_path / "data.jsonl")
    mt("tune", "sft", base, data, "--lr", "8e-3", "--epochs", "40", "--batch-size", "4", "--run-dir", "run")
    mt("convert", "--loader", "auto", "--load-dir", "run", "--saver", "hf", "--save-dir", "tuned")
    question = [{"role": "user", "content": "What is 3 plus 1?"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    # It answers in the form of the data, and ends by the mark of the template, which generation_config.json names
    # before the id that the folder began with.
    assert tokenizer.decode(ids).startswith("It is ")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|end|>") == model.generation_config.eos_token_id[0]
    assert tokenizer.chat_template == TEMPLATE

    from mt_core.train.trained_model import load_trained_model
    from mt_infer.sampling.parameters import SamplingParameters
    from mt_infer.text import TextGenerator

    trained = load_trained_model(Path("run/checkpoints"), load_plugins(), device="cpu")
    generator = TextGenerator.of_model(trained.model, trained.tokenizer, trained.config, trained.ctx)
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ours = "".join(generator.stream(prompt, SamplingParameters(temperature=0.0, max_tokens=len(ids) - 1)))
    assert ours == tokenizer.decode(ids[:-1])


def test_the_configuration_is_an_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base, data = write_folder(tmp_path / "base"), write_data(tmp_path / "data.jsonl")
    options = ["--adapter", "lora", "--rank", "4", "--neftune-alpha", "5", "--set", "train.seed=7"]
    # Compared with the steps that follow from the data, which are known after their first reading.
    options += ["--set", "lr_schedule.lr_warmup_iters=9"]
    mt("tune", "sft", base, data, *options, "-o", "sft.toml")
    _, layer = read_config_file(tmp_path / "sft.toml")
    assert layer.values["adapter"] == {"type": "lora", "rank": 4, "alpha": 8.0}
    assert layer.values["optimizer"]["lr"] == pytest.approx(2e-4)
    assert layer.values["tune"] == {"neftune_noise_alpha": 5.0}
    assert layer.values["train"]["seed"] == 7
    assert layer.values["lr_schedule"]["lr_warmup_iters"] == 9
    # As many positions as the model has.
    assert layer.values["data"]["seq_length"] == 128
    mt("config", "validate", "sft.toml")
    capsys.readouterr()
    mt("tune", "sft", base, data, *options, "--show")
    assert capsys.readouterr().out == (tmp_path / "sft.toml").read_text()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    from mt_core.errors import ConfigError

    with pytest.raises(ConfigError, match="neither a folder .* nor a preset .did you mean"):
        mt("tune", "sft", "gpt-tinny", write_data(tmp_path / "data.jsonl"))
