"""Files of every format give the same configuration; a YAML file cannot do harm; all errors are reported at once."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mt_core.config.files import MAX_NODES, MAX_YAML_DEPTH, parse_yaml, read_config_file
from mt_core.config.loading import config_from_dict, load_config, load_config_anywhere
from mt_core.errors import ConfigError, MtError, PluginError
from mt_core.plugins import PluginHost, load_plugins

YAML = """
preset: gpt-tiny
train:
  train_iters: 50
  eval_interval: null
  rampup_batch_size: null
optimizer: {lr: 1e-4, min_lr: 0}
data:
  dataset_type: builtin
"""
TOML = """
preset = "gpt-tiny"
[train]
train_iters = 50
[optimizer]
lr = 1e-4
min_lr = 0
[data]
dataset_type = "builtin"
"""
JSON = '{"optimizer": {"lr": 1e-4, "min_lr": 0}, "train": {"train_iters": 50}}'


def refusal(path: Path, host: PluginHost, *overrides: str) -> str:
    with pytest.raises(MtError) as error:
        load_config(path, overrides=overrides, host=host)
    return str(error.value)


@pytest.mark.parametrize("ending", ["yaml", "yml", "YAML"])
def test_yaml_says_what_toml_says(host: PluginHost, tmp_path: Path, ending: str) -> None:
    yaml, toml = tmp_path / f"run.{ending}", tmp_path / "run.toml"
    yaml.write_text(YAML)
    toml.write_text(TOML)
    loaded = load_config(yaml, host=host)
    assert loaded.config == load_config(toml, overrides=["train.eval_interval=null"], host=host).config
    assert loaded.origin("optimizer.lr") == f"file run.{ending}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-4", 1e-4),  # a number, as YAML 1.2 has it and 1.1 does not
        ("a: no", "no"),  # a word, for the same reason
        ("a: 0o10", 8),
        ("a: null", None),
        ("a: &x [1]\nb: *x", [1]),
    ],
)
def test_yaml_is_read_as_version_1_2(text: str, value: object) -> None:
    assert parse_yaml(text)["a"] == value


def laughs(levels: int) -> str:
    """Ten times more values with each level."""
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(9), f"more than {MAX_NODES:,} values once its aliases are written out"),
        ("a: " + "[" * 5000, f"nested more than {MAX_YAML_DEPTH} deep"),
        ("a: &a [*a]", "*a stands inside of itself, or is not defined"),
        ("a: *b", "*b stands inside of itself, or is not defined"),
        ("train:\n  seed: 1\n  seed: 2", 'duplicate key "seed"'),
        ("a: !!python/object/apply:os.system [ls]", "python/object/apply:os.system"),
        ("1: {a: 2}", "the key 1 is no text; put it in quotes"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: [1", "expected"),
        ("[1, 2]", "got a list, expected sections with keys"),
    ],
)
def test_bad_yaml_is_refused_with_its_file(host: PluginHost, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    found = refusal(path, host)
    assert found.startswith(f"config file {path}: ")
    assert message in found
    assert "yaml.dev" not in found, "how to turn the check off in ruamel.yaml"


def test_a_few_aliases_are_welcome() -> None:
    assert parse_yaml(laughs(3))["l2"][0][0] == ["x"] * 10


def test_without_a_parser_yaml_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(ConfigError, match=r'pip install "mt-core\[yaml\]"'):
        parse_yaml("a: 1")


def test_json_nested_too_deep_is_an_error_of_the_file(host: PluginHost, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"a": ' + "[" * 200_000)
    assert refusal(path, host).startswith(f"config file {path}: ")


# -- all at once ---------------------------------------------------------------------------------------

MANY = {
    "preset": "gpt-tiny",
    "trian": {"seed": 1},
    "model": {"num_layer": 2, "hidden_size": "wide"},
    "train": {"seed": -1, "lr": 1},
    "optimizer": {"optimizer": "adan"},
    "checkpoint": 3,
}


def test_every_error_of_a_file_is_reported(host: PluginHost, tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text(json.dumps(MANY))
    for load in (load_config, load_config_anywhere):
        with pytest.raises(ConfigError) as error:
            load(path, overrides=["seed", "data.seq_length=none"], host=host)
        lines = str(error.value).splitlines()
        for part in (
            "--set seed: expected section.key=value",
            "unknown section trian",
            "checkpoint (from file many.json): got 3, expected a table",
            "unknown key model.num_layer",
            "model.hidden_size (from file many.json): got 'wide'",
            "train.seed (from file many.json): got -1",
            "unknown key train.lr",
            "optimizer.optimizer=adan needs an optimizer",
            "data.seq_length (from --set): got 'none'",
        ):
            assert sum(part in line for line in lines) == 1, part
        assert len(lines) == 9


def test_every_broken_rule_is_reported(host: PluginHost) -> None:
    overrides = [
        "train.train_iters=null",
        "optimizer.min_lr=1.0",
        "train.global_batch_size=24",
        "model.rotary_base=1e6",
        "model.position_embedding_type=learned_absolute",
        "precision.loss_scale=8.0",
        "recompute.distribute_saved_activations=true",
    ]
    with pytest.raises(ConfigError) as error:
        load_config(preset="gpt-tiny", overrides=overrides, host=host)
    lines = str(error.value).splitlines()
    for part in ("none is set", "min_lr=1.0 is above", "16 or 32", "rotary_base", "loss_scale", "would be ignored"):
        assert any(part in line for line in lines), part
    assert len(lines) == 7


def test_rules_that_need_the_layout_wait_for_it(host: PluginHost) -> None:
    """With 3 processes of 1 there is no data-parallel size; the other rules are reported all the same."""
    with pytest.raises(ConfigError) as error:
        load_config(
            preset="gpt-tiny", overrides=["parallel.tensor_model_parallel_size=3", "optimizer.min_lr=1.0"], host=host
        )
    assert len(str(error.value).splitlines()) == 2


def test_an_error_alone_keeps_its_type(host: PluginHost) -> None:
    with pytest.raises(PluginError):
        load_config(preset="gpt-tiny", overrides=["optimizer.optimizer=adan"], host=host)


def test_objections_of_all_plugins_are_reported() -> None:
    from mt_core.hookspecs import hookimpl
    from mt_core.plugins import Plugin

    host = PluginHost()
    for name in ("a", "b"):

        def object_to(config: object, name: str = name) -> None:
            raise ConfigError(f"no, says {name}")

        module = type("M", (), {"mt_check_config": staticmethod(hookimpl(object_to))})
        host.add(module, Plugin(name, name, name, "1"))
    with pytest.raises(ConfigError) as error:
        host.check_config(SimpleNamespace(model=SimpleNamespace(family="none")))
    assert sorted(str(error.value).splitlines()) == ["no, says a", "no, says b"]


# -- Megatron's words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "ours"), [("rotary", "rope"), ("absolute", "learned_absolute")])
def test_megatrons_positions_are_taken_with_a_note(host: PluginHost, caplog, word: str, ours: str) -> None:
    overrides = [f"model.position_embedding_type={word}"]
    overrides += ["model.max_position_embeddings=128"] if word == "absolute" else []
    with caplog.at_level(logging.WARNING):
        loaded = load_config(preset="gpt-tiny", overrides=overrides, host=host)
    assert loaded.config.model.position_embedding_type == ours  # type: ignore[attr-defined]
    assert caplog.messages == [f"note: model.position_embedding_type={word} (from --set) is called {ours} here"]


def test_the_former_name_of_a_key_is_taken_with_a_note(host: PluginHost, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load_config(preset="gpt-tiny", overrides=["train.late_metrics=never"], host=host)
    assert loaded.config.train.deferred_metrics == "never"
    assert caplog.messages == ["note: train.late_metrics (from --set) is called train.deferred_metrics now"]
    stored = loaded.config.to_dict()
    stored["train"] = {**stored["train"], "late_metrics": "always"}
    del stored["train"]["deferred_metrics"]
    assert config_from_dict(stored, host).train.deferred_metrics == "always"


def test_options_of_trackers_of_former_runs_are_read(
    host: PluginHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were keys of [logging]; a run wrote all of them, most with defaults."""
    stored = load_config(preset="gpt-tiny", host=host).config.to_dict()
    trackers = {name: stored.pop(name) for name in ("tensorboard", "wandb", "mlflow", "trackio", "comet")}
    former = {f"{name}_{key}": value for name, keys in trackers.items() for key, value in keys.items()}
    former |= {"trackers": ["wandb"], "wandb_project": "mine"}
    stored["logging"] = {**stored["logging"], **former}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stored))
    monkeypatch.setenv("MT_PLUGINS", ",".join({plugin.name for plugin in host.plugins} - {"ops"}))
    # A program without mt-ops keeps them as they are.
    configs = [
        load_config(file, host=host).config,
        *(config_from_dict(stored, have) for have in (host, load_plugins())),
    ]
    for written in [config.to_dict() for config in configs]:
        expected = {**trackers, "wandb": {**trackers["wandb"], "project": "mine"}}
        assert {name: written[name] for name in trackers} == expected


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("checkpoint.ckpt_format=torch_dist", "mt convert --saver megatron-dist"),
        ("checkpoint.ckpt_format=torch", "mt convert --saver megatron"),
        ("checkpoint.ckpt_format=core", "mt convert --saver megatron"),
        ("checkpoint.ckpt_format=legacy", "mt convert --saver megatron-legacy"),
        ("checkpoint.finetune=true", "checkpoint.load=PATH starts from weights alone"),
        ("train.finetune=true", "checkpoint.load=PATH starts from weights alone"),
        ("model.attention_head_type=multiquery", "write model.num_query_groups=1 for multiquery"),
        ("data.json_keys=text", "mt data preprocess --json-keys"),
    ],
)
def test_megatrons_other_words_are_refused_with_ours(host: PluginHost, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(preset="gpt-tiny", overrides=[override], host=host)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("kind", "word", "ours"),
    [
        ("checkpoint_loaders", "torch_dist", "megatron-dist"),
        ("checkpoint_loaders", "torch", "megatron"),
        ("checkpoint_loaders", "core", "megatron"),
        ("checkpoint_loaders", "legacy", "megatron-legacy"),
        ("checkpoint_loaders", "mixtral_hf", "hf"),
        ("checkpoint_savers", "torch_dist", "megatron-dist"),
        ("checkpoint_savers", "core", "megatron"),
        ("checkpoint_savers", "mcore", "megatron"),
        ("checkpoint_savers", "legacy", "megatron-legacy"),
    ],
)
def test_formats_of_megatrons_converter(host: PluginHost, caplog, kind: str, word: str, ours: str) -> None:
    with caplog.at_level(logging.WARNING):
        assert host.registry(kind).get(word, key="--loader").name == ours
    assert caplog.messages == [f"note: --loader={word} is called {ours} here"]


@pytest.mark.parametrize(("kind", "key"), [("checkpoint_loaders", "--loader"), ("checkpoint_savers", "--saver")])
def test_a_word_that_may_mean_two_formats_is_refused(host: PluginHost, kind: str, key: str) -> None:
    with pytest.raises(PluginError, match=f"{key}=llama_mistral is hf or meta here; name one of them"):
        host.registry(kind).get("llama_mistral", key=key)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.yaml", YAML), ("run.json", JSON)])
def test_a_byte_order_mark_names_the_encoding(
    host: PluginHost, tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    path = tmp_path / name
    mark = "\ufeff" if encoding.endswith(("le", "be")) else ""
    path.write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))
    assert load_config(path, host=host).config.optimizer.lr == 1e-4


@pytest.mark.parametrize("name", ["run.toml", "run.yaml", "run.json"])
def test_an_empty_file_sets_no_key_in_every_format(name: str, tmp_path) -> None:
    (tmp_path / name).write_text("\n")
    preset, layer = read_config_file(tmp_path / name)
    assert (preset, layer.values) == (None, {})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", '{"train": {"seed": 1, "seed": 2}}', "the key 'seed' stands twice"),
        ("run.toml", "[train]\nseed = 1\nseed = 2\n", "train.seed stands twice, again in line 3"),
        ("run.toml", "[train]\n[data]\n[train]\n", "the table [train] stands twice, again in line 3"),
        ("run.toml", "[data]\na = [\n1\n]\na = [\n2\n]\n", "data.a stands twice, again in line 7"),
        ("run.toml", "train.seed = 1\ntrain.seed = 2\n", "train.seed stands twice, again in line 2"),
        ("run.yaml", "train:\n  seed: 1\n  seed: 2\n", 'duplicate key "seed"'),
    ],
)
def test_a_key_that_stands_twice_is_named(host: PluginHost, tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert says in refusal(path, host)


def test_a_file_in_another_encoding_is_named_with_its_line(host: PluginHost, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[train]\n# caf\xe9\n")
    assert "line 2 is no UTF-8 (invalid continuation byte)" in refusal(path, host)


@pytest.mark.parametrize("override", ["train.seed=4294967296", "train.seed=-1", "optimizer.adam_eps=0"])
def test_numbers_that_training_cannot_use_are_refused(host: PluginHost, tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    assert override.partition("=")[0] in refusal(path, host, override)
