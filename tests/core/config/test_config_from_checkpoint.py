"""checkpoint.load brings model and tokenizer, below what a file and --set write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.core.conftest import LITTLE_TEXT, TINY

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.config.loading import LoadedConfig, load_config, load_sections
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.train import Trainer


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece vocabulary of characters, which is a file that has to travel."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{each}" for each in characters)]
    path.write_text("\n".join(pieces) + "\n")
    return path


@pytest.fixture(scope="module")
def run(host: PluginHost, vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained gpt of an odd shape, whose vocabulary file is gone."""
    directory = tmp_path_factory.mktemp("pretrained") / "run"
    wordpiece = ["tokenizer.tokenizer_type=BertWordPieceLowerCase", f"tokenizer.vocab_file={vocab}"]
    shape = ["model.num_layers=3", "model.hidden_size=24", "train.train_iters=2"]
    config = load_config(preset="gpt-tiny", overrides=[*TINY, *wordpiece, *shape, LITTLE_TEXT], host=host)
    Trainer(config, run_dir=directory, host=host).train()
    vocab.unlink()
    return directory


def load(run: Path, host: PluginHost, *overrides: str, path: Path | None = None) -> LoadedConfig:
    own = [text for text in TINY if not text.startswith("model.")] + [LITTLE_TEXT]
    settings = [f"checkpoint.load={run}", *own, *overrides]
    return load_config(path, overrides=settings, default_preset="gpt-tiny", host=host)


@pytest.mark.slow
def test_model_and_tokenizer_come_from_the_checkpoint(run: Path, host: PluginHost) -> None:
    loaded = load(run, host)
    model, tokenizer = loaded.config.model.model_dump(), loaded.config.tokenizer.model_dump()
    assert (model["num_layers"], model["hidden_size"], model["family"]) == (3, 24, "gpt")
    assert loaded.origin("model.num_layers") == loaded.origin("tokenizer.vocab_file") == f"checkpoint {run}"
    assert tokenizer["tokenizer_type"] == "BertWordPieceLowerCase"
    assert Path(tokenizer["vocab_file"]).parent.parent.parent == run / "checkpoints"
    assert loaded.origin("optimizer.lr") == "preset gpt-tiny"


@pytest.mark.slow
def test_such_a_run_trains(run: Path, host: PluginHost, tmp_path: Path) -> None:
    trainer = Trainer(load(run, host, "train.train_iters=2"), run_dir=tmp_path / "more", host=host)
    assert trainer.loaded_weights.initialized == []
    assert trainer.train().state.iteration == 2


def test_the_configuration_of_such_a_run_needs_the_checkpoint_no_more(
    run: Path, host: PluginHost, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    config = load(moved, host).config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    shutil.rmtree(moved)
    assert load_config(file, host=host).config == config


def test_written_keys_win_over_the_checkpoint(run: Path, host: PluginHost, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nattention_dropout = 0.25\n[train]\ntrain_iters = 2\n")
    loaded = load(run, host, "model.num_layers=1", path=file)
    assert loaded.config.model.attention_dropout == 0.25  # type: ignore[attr-defined]
    assert loaded.origin("model.attention_dropout") == "file run.toml"
    assert loaded.origin("model.num_layers") == "--set"
    assert loaded.config.model.hidden_size == 24  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="does not fit the model"):
        Trainer(loaded, host=host)


def test_what_is_written_is_checked_with_what_is_not(run: Path, host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_attention_heads"):
        load(run, host, "model.num_attention_heads=5")


def test_a_preset_of_the_same_family_gives_way(run: Path, host: PluginHost) -> None:
    settings = [*TINY[3:], f"checkpoint.load={run}"]
    loaded = load_config(preset="gpt2-124m", overrides=settings, host=host)
    assert loaded.config.model.hidden_size == 24  # type: ignore[attr-defined]


def test_another_family_takes_nothing_but_the_tokenizer(run: Path, host: PluginHost, tmp_path: Path) -> None:
    settings = [*TINY[3:], f"checkpoint.load={run}", "data.seq_length=16"]
    loaded = load_config(preset="llama3.2-1b", overrides=settings, host=host)
    assert loaded.origin("model.hidden_size") == "preset llama3.2-1b"
    assert loaded.config.tokenizer.tokenizer_type == "BertWordPieceLowerCase"
    file = tmp_path / "run.toml"
    file.write_text('preset = "llama3.2-1b"\n[tokenizer]\ntokenizer_type = "ByteLevelTokenizer"\n')
    loaded = load_config(file, overrides=settings, host=host)
    assert not any(origin.startswith("checkpoint") for origin in loaded.origins.values())


def test_no_checkpoint_is_an_error_where_the_model_depends_on_it(host: PluginHost, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load(tmp_path / "nowhere", host)


def test_no_checkpoint_stops_nobody_who_names_the_model(host: PluginHost, tmp_path: Path) -> None:
    """A run that resumes from its own checkpoints no longer needs the one it started from."""
    named = ["model.family=gpt", *TINY[:3], "tokenizer.tokenizer_type=ByteLevelTokenizer"]
    assert load(tmp_path / "nowhere", host, *named, "model.max_position_embeddings=16").config.model.family == "gpt"


def test_set_changes_one_entry_of_a_table_of_the_checkpoint(host: PluginHost, tmp_path: Path, monkeypatch) -> None:
    stored = {
        "model": {**load_config(preset="mixtral-8x7b", overrides=["train.train_iters=1"]).config.model.model_dump()}
    }
    monkeypatch.setattr("mt_core.config.checkpoint_layer._stored_sections", lambda load, host: stored)
    settings = [f"checkpoint.load={tmp_path}", "model.moe.moe_router_topk=3", "data.seq_length=16"]
    loaded = load_config(overrides=settings, default_preset="gpt-tiny", host=host)
    moe = loaded.config.model.model_dump()["moe"]
    assert (moe["num_experts"], moe["moe_router_topk"]) == (8, 3)


def test_sections_alone_take_the_tokenizer(run: Path, host: PluginHost) -> None:
    config = load_sections(["tokenizer"], overrides=[f"checkpoint.load={run}"], host=host)
    assert config.tokenizer.tokenizer_type == "BertWordPieceLowerCase"


def test_another_format_brings_its_own(run: Path, host: PluginHost, tmp_path: Path) -> None:
    reader = open_checkpoint(find_checkpoint(run), host)
    convert = host[CHECKPOINT_SAVERS].get("hf").convert
    assert convert is not None
    convert.load()(tmp_path / "hf", reader, ConvertOptions(), host)
    loaded = load(tmp_path / "hf", host)
    assert loaded.config.model.hidden_size == 24  # type: ignore[attr-defined]
    assert loaded.origin("model.family") == f"checkpoint {tmp_path / 'hf'}"
    assert loaded.config.tokenizer.model_dump()["vocab_file"] == str(tmp_path / "hf" / "vocab.txt")
