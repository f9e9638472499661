"""A chat model of transformers, fine-tuned by `mt train`, is a chat model of transformers again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.convert_cases import LLAMA, MODELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from mt_ckpt.commands.ckpt import app as ckpt_app
from mt_ckpt.convert import convert
from mt_core.config.loading import load_config
from mt_core.plugins import PluginHost
from mt_core.train.trainer import Trainer

OWN = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<end>{% endfor %}"
NUMBERED = "{% for m in messages %}{{ loop.index }}.{{ m['content'] }}<end>{% endfor %}"
MESSAGES = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "sat"}]
SPECIAL = ["<s>", "</s>", "<end>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def chat_model(make_model: Any, host: PluginHost, tmp_path: Path) -> Path:
    """A folder of transformers: weights, tokenizer with a template, generation_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the cat sat"],
        trainers.BpeTrainer(vocab_size=264, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    parts = tmp_path / "parts"
    parts.mkdir()
    tokenizer.save(str(parts / "tokenizer.json"))
    (parts / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (parts / "chat_template.jinja").write_text(OWN)
    (parts / "additional_chat_templates").mkdir()
    (parts / "additional_chat_templates" / "numbered.jinja").write_text(NUMBERED)
    (parts / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.25}))
    model = make_model(**{**LLAMA, "vocab_size": 264})
    convert(model, tmp_path / "chat", saver="hf", tokenizer=parts, host=host)
    return tmp_path / "chat"


def tuned(start: Path, host: PluginHost, run: Path, **data: Any) -> Path:
    """The run of two steps of fine-tuning that starts from a folder; interrupted and resumed after the first."""
    chats = run.with_suffix(".jsonl")
    chats.write_text((json.dumps({"messages": MESSAGES}) + "\n") * 4)
    for last in (1, 2):
        sections = {
            "checkpoint": {"load": str(start)},
            "data": {"dataset_type": "sft", "data_path": [str(chats)], "split": "1", "seq_length": 32, **data},
            "train": {"train_iters": 2, "exit_iteration": last, "micro_batch_size": 1, "device": "cpu"},
        }
        Trainer(load_config(sections=sections, host=host), run_dir=run, host=host).train()
    return run


def rendered(folder: Path, template: str | None = None) -> str:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False))


def test_a_tuned_chat_model_keeps_template_and_ends(chat_model: Path, host: PluginHost, tmp_path: Path) -> None:
    import transformers

    convert(tuned(chat_model, host, tmp_path / "run"), tmp_path / "out", saver="hf", host=host)
    assert rendered(tmp_path / "out") == rendered(chat_model) == "<s>[user] the cat?<end>[assistant] sat<end>"
    assert rendered(tmp_path / "out", "numbered") == "1.the cat?<end>2.sat<end>"
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.temperature == 0.25
    # The id of <end>, with which answers end in training, and those that the model had.
    assert generation.eos_token_id == [2, 1, 7]


@pytest.mark.parametrize("keys", [{"chat_template": "chatml"}, {"chat_template_file": "own.jinja"}])
def test_the_template_of_the_data_goes_with_the_model(
    chat_model: Path, host: PluginHost, tmp_path: Path, keys: dict[str, str]
) -> None:
    import transformers

    source = "{% for m in messages %}{{ m['role'] }}={{ m['content'] }}<|im_end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    given = {name: str(tmp_path / value) if name == "chat_template_file" else value for name, value in keys.items()}
    run = tuned(chat_model, host, tmp_path / "run", **given)
    (tmp_path / "own.jinja").unlink()  # the run has it
    report = convert(run, tmp_path / "out", saver="hf", host=host)
    assert report.files_left_out == ()
    expected = {
        "chat_template": "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n",
        "chat_template_file": "user=the cat?<|im_end|>assistant=sat<|im_end|>",
    }
    assert rendered(tmp_path / "out") == expected[next(iter(keys))]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [4, 1, 7]


@pytest.mark.parametrize("saver", ["mt", "hf", "megatron", "meta", "trtllm"])
def test_further_templates_are_carried_or_named(chat_model: Path, host: PluginHost, tmp_path: Path, saver: str) -> None:
    name = "additional_chat_templates/numbered.jinja"
    report = convert(chat_model, tmp_path / "out", saver=saver, host=host)
    dry = convert(chat_model, tmp_path / "dry", saver=saver, dry_run=True, host=host)
    assert dry.files_left_out == report.files_left_out
    folder = {"mt": "files", "hf": ".", "trtllm": "."}.get(saver)
    if folder is None:
        assert name in report.files_left_out
    else:
        assert (tmp_path / "out" / folder / name).read_text() == NUMBERED


def test_gguf_names_the_defaults_of_generation_that_it_has_no_place_for(
    chat_model: Path, host: PluginHost, tmp_path: Path
) -> None:
    """A file of GGUF has no temperature; ends and the default template are in its metadata."""
    report = convert(chat_model, tmp_path / "out", saver="gguf", host=host)
    assert report.files_left_out == ("generation_config.json (temperature)",)
    convert(tmp_path / "out", tmp_path / "back", saver="hf", host=host)
    assert rendered(tmp_path / "back") == rendered(chat_model)
    assert rendered(tmp_path / "back", "numbered") == rendered(chat_model, "numbered")


def test_a_processor_keeps_its_templates(make_model: Any, host: PluginHost, chat_model: Path, tmp_path: Path) -> None:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    start = tmp_path / "start"
    convert(make_model(**{**MODELS["llava"], "vocab_size": 264}), start, saver="hf", host=host)
    (start / "mt-checksums.json").unlink()  # the processor changes the files
    templates = {"default": OWN, "numbered": NUMBERED}
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    images = CLIPImageProcessorPil(size=8, crop_size=8)
    transformers.LlavaProcessor(images, tokenizer, patch_size=4, chat_template=templates).save_pretrained(start)
    for target, saver in (("mt", "mt"), ("out", "hf")):
        assert convert(start, tmp_path / target, saver=saver, host=host).files_left_out == ()
        start = tmp_path / target
    assert transformers.LlavaProcessor.from_pretrained(start).chat_template == templates


def test_a_mean_names_what_it_leaves_out(chat_model: Path, host: PluginHost, tmp_path: Path) -> None:
    run = tuned(chat_model, host, tmp_path / "run", chat_template="chatml")
    for saver, lost in (("hf", None), ("megatron", "chat_template.jinja, generation_config.json")):
        target = tmp_path / saver
        result = CliRunner().invoke(
            ckpt_app, ["average", str(run), "--last", "2", "--save-dir", str(target), "--saver", saver]
        )
        assert result.exit_code == 0, result.output
        assert "left out, since a mean has weights alone" in result.output
        assert ("the files" in result.output) == (lost is not None)
        assert lost is None or lost in result.output
    assert rendered(tmp_path / "hf").startswith("<|im_start|>user")
