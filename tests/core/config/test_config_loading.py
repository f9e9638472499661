"""ScheduleTable of the layers, origins, presets, round trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.config.loading import config_from_dict, load_config
from mt_core.errors import ConfigError, MtError
from mt_core.plugins import PluginHost

RUN = """
preset = "gpt-tiny"

[train]
train_iters = 50
seed = 7

[optimizer]
lr = 1e-4
min_lr = 0.0
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_default_preset_file_set(host: PluginHost, run_toml: Path) -> None:
    loaded = load_config(run_toml, overrides=["train.seed=8", "train.seed=9"], host=host)
    values = {
        "train.eval_iters": (10, "default"),
        "model.hidden_size": (128, "preset gpt-tiny"),
        "train.train_iters": (50, "file run.toml"),
        "optimizer.lr": (1e-4, "file run.toml"),
        "train.seed": (9, "--set"),
    }
    for key, (value, origin) in values.items():
        section, name = key.split(".")
        assert getattr(getattr(loaded.config, section), name) == value
        assert loaded.origin(key) == origin


def test_a_preset_given_by_hand_wins_over_the_files(host: PluginHost, run_toml: Path) -> None:
    overrides = ["train.train_iters=1"]
    loaded = load_config(run_toml, preset="gpt2-124m", overrides=overrides, host=host)
    assert loaded.preset == "gpt2-124m"
    assert loaded.config.model.hidden_size == 768  # type: ignore[attr-defined]


def test_a_preset_is_named_in_the_place_of_a_file(host: PluginHost, tmp_path: Path, monkeypatch) -> None:
    """As `mt plan llama3-8b` and `mt train gpt-tiny`; a file of that name is read."""
    monkeypatch.chdir(tmp_path)
    assert load_config("gpt-tiny", host=host) == load_config(preset="gpt-tiny", host=host)
    with pytest.raises(ConfigError, match="config file gpt-tinny: No such file"):
        load_config("gpt-tinny", host=host)
    (tmp_path / "gpt-tiny").write_text("[model]")
    with pytest.raises(ConfigError, match=r"set exactly one of train\.train_iters"):
        load_config("gpt-tiny", host=host)


def test_another_optimizer_drops_the_presets_options_of_the_first(host: PluginHost) -> None:
    loaded = load_config(preset="gpt-tiny", overrides=["optimizer.optimizer=sgd"], host=host)
    assert loaded.config.optimizer.sgd_momentum == 0.9  # type: ignore[attr-defined]
    assert loaded.config.optimizer.lr == 3e-3
    with pytest.raises(ConfigError, match=r"unknown key optimizer\.adam_beta1 \(from --set\)"):
        load_config(preset="gpt-tiny", overrides=["optimizer.optimizer=sgd", "optimizer.adam_beta1=0.8"], host=host)


def test_set_changes_one_entry_of_a_table(host: PluginHost, tmp_path: Path) -> None:
    path = tmp_path / "moe.toml"
    path.write_text('preset = "gpt-tiny"\n[model]\nmoe = {num_experts = 4, top_k = 2}\n')
    other = PluginHost()  # without mt-moe, which refuses the key
    for plugin in host.plugins:
        if plugin.name != "moe":
            other.add(host._manager.get_plugin(plugin.name), plugin)
    loaded = load_config(path, overrides=["model.moe.top_k=1", "model.moe.router.kind=x"], host=other)
    assert loaded.config.model.moe == {"num_experts": 4, "top_k": 1, "router": {"kind": "x"}}  # type: ignore[attr-defined]


def test_null_and_bare_text(host: PluginHost) -> None:
    overrides = ["train.eval_interval=null", "train.sample_prompt=once upon", "data.dataset_type=mock"]
    train = load_config(preset="gpt-tiny", overrides=overrides, host=host).config.train
    assert (train.eval_interval, train.sample_prompt) == (None, "once upon")


def test_the_resolved_configuration_loads_to_itself(host: PluginHost, run_toml: Path, tmp_path: Path) -> None:
    first = load_config(run_toml, overrides=["train.eval_interval=null", "train.callbacks=[]"], host=host)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(first.config.to_dict()))
    again = load_config(path, host=host)
    assert again.config == first.config
    assert config_from_dict(first.config.to_dict(), host) == first.config
    assert set(again.origins.values()) == {"file config.json"}


@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt3-175b", "gpt-tiny"])
def test_every_preset_round_trips(host: PluginHost, tmp_path: Path, preset: str) -> None:
    overrides = [] if preset == "gpt-tiny" else ["train.train_iters=5"]
    config = load_config(preset=preset, overrides=overrides, host=host).config
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert load_config(path, host=host).config == config


VALUES = {
    "train.seed": st.integers(0, 2**32 - 1),
    "train.exit_iteration": st.none() | st.integers(1, 10**6),
    "train.sample_prompt": st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20),
    "train.deterministic": st.booleans(),
    "train.callbacks": st.lists(st.sampled_from(["log_file", "metrics_jsonl", "progress"]), max_size=3),
    "optimizer.weight_decay": st.floats(0, 1e6, allow_nan=False),
    "optimizer.adam_eps": st.floats(0, 1, exclude_min=True, allow_nan=False, allow_subnormal=False),
    "model.init_method_std": st.floats(1e-8, 10),
    "model.make_vocab_size_divisible_by": st.integers(1, 4096),
}


def as_toml(value: object) -> str:
    return "null" if value is None else json.dumps(value, ensure_ascii=False)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_set_gives_the_value_that_was_written(host: PluginHost, values: dict[str, object]) -> None:
    overrides = [f"{key}={as_toml(value)}" for key, value in values.items()]
    loaded = load_config(preset="gpt-tiny", overrides=overrides, host=host)
    for key, value in values.items():
        section, name = key.split(".")
        got = getattr(getattr(loaded.config, section), name)
        assert got == value
        assert type(got) is type(value)
        assert loaded.origin(key) == "--set"


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=12)
    | st.builds(
        "{}.{}{}={}".format,
        st.sampled_from(["model", "train", "optimizer", "data", "tokenizer", "x", ""]),
        st.sampled_from(
            ["family", "optimizer", "tokenizer_type", "dataset_type", "seed", "rampup_batch_size", "lr", "x"]
        ),
        st.sampled_from(["", ".x", ".x.y", "."]),
        st.sampled_from(["1", "-1", "1.5", "true", "null", "[", "[1, 2, 3]", "{a = 1}", '"', "", "x", "1e400", "nan"])
        | st.text(max_size=6),
    )
)
def test_whatever_is_set_either_loads_or_is_refused_in_words(host: PluginHost, override: str) -> None:
    try:
        loaded = load_config(preset="gpt-tiny", overrides=[override], host=host)
    except MtError as error:
        message = str(error)
        assert message
    else:
        assert "--set" in loaded.origins.values()


ENDLESS = {
    "lists.toml": "x = " + "[" * 200_000 + "]" * 200_000,
    "key.toml": ".".join(["a"] * 200_000) + " = 1",
    "table.toml": f"[{'.'.join(['a'] * 200_000)}]",
    "tables.toml": "[model]\nx = " + "{a = " * 90 + "1" + "}" * 90,
    "lists.json": '{"model": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "list.json": '{"model": ' + "[" * 60 + "]" * 60 + "}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_values_within_values_without_end(tmp_path, host, name) -> None:
    path = tmp_path / name
    path.write_text(ENDLESS[name])
    with pytest.raises(ConfigError, match=f"config file .*{name}: tables and lists are nested more than 50 levels"):
        load_config(path, host=host)


def test_values_without_end_on_the_command_line(host) -> None:
    with pytest.raises(ConfigError, match="--set: .*nested more than 50 levels"):
        load_config(preset="gpt-tiny", overrides=["model.x=" + "[" * 10_000 + "]" * 10_000], host=host)
    with pytest.raises(ConfigError, match=r"train\.train_iters"):
        load_config(preset="gpt-tiny", overrides=["train.train_iters=" + "1" * 5000], host=host)


def test_a_file_that_is_no_configuration_by_its_size(tmp_path, host) -> None:
    path = tmp_path / "weights.toml"
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ConfigError, match="17825792 bytes, and no configuration has more than 16777216"):
        load_config(path, host=host)
