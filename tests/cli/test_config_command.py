"""`mt config`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_cli.config_fields import section_fields
from mt_core.config.files import shown, to_toml
from mt_core.config.loading import load_config
from mt_core.config.sections import section_types
from mt_core.plugins import load_plugins

JSON = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(JSON)
def test_toml_is_read_back(value: object) -> None:
    assert tomllib.loads(f"value = {to_toml(value)}")["value"] == value


def test_null_is_no_toml() -> None:
    with pytest.raises(ValueError, match="null"):
        to_toml([1, None])
    assert (shown(None), shown([None])) == ("null", "[null]")
    assert to_toml({"a": None, "b c": 1}) == '{"b c" = 1}'


def test_show_prints_values_and_origins(mt, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "gpt-tiny"\n[train]\nseed = 7\n')
    outcome = mt("config", "show", path, "--set", "optimizer.lr=0.5", "--origin")
    assert outcome.code == 0
    assert ["hidden_size", "128", "preset", "gpt-tiny"] in outcome.lines
    assert ["seed", "7", "file", "run.toml"] in outcome.lines
    assert ["lr", "0.5", "--set"] in outcome.lines
    assert ["eval_iters", "10", "default"] in outcome.lines
    assert ["[lr_schedule]"] in outcome.lines
    assert ["seed", "7"] in mt("config", "show", path).lines


@pytest.mark.parametrize("flags", [["--json"], ["--toml"], ["--toml", "--origin"]])
def test_what_is_shown_can_be_trained(mt, tmp_path: Path, flags: list[str]) -> None:
    overrides = ["train.seed=7", 'train.sample_prompt="a \\"b\\"\\n"', "optimizer.min_lr=1e-5"]
    text = mt("config", "show", *[part for o in overrides for part in ("--set", o)], *flags).out
    path = tmp_path / ("all.json" if flags == ["--json"] else "all.toml")
    path.write_text(text)
    assert load_config(path).config == load_config(preset="gpt-tiny", overrides=overrides).config


def test_toml_says_which_null_it_cannot_hold(mt) -> None:
    text = mt("config", "show", "--toml", "--set", "train.eval_interval=null").out
    assert "# eval_interval is null, which TOML lacks: add --set train.eval_interval=null" in text
    assert "eval_interval" not in tomllib.loads(text)["train"]


def test_json_with_origins(mt) -> None:
    found = json.loads(mt("config", "show", "--json", "--origin", "--set", "train.seed=3").out)
    assert found["train"]["seed"] == {"value": 3, "origin": "--set"}
    assert found["model"]["vocab_size"] == {"value": None, "origin": "default"}
    assert mt("config", "show", "--json", "--toml").code == 2


def test_a_run_directory_stands_for_its_configuration(mt, tmp_path: Path) -> None:
    assert (
        mt("config", "show", tmp_path).err == f"error: config file {tmp_path}/config.json: No such file or directory\n"
    )
    (tmp_path / "config.json").write_text(mt("config", "show", "--json", "--set", "train.seed=5").out)
    assert ["seed", "5"] in mt("config", "show", tmp_path).lines


def test_validate(mt, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "gpt-tiny"\n[train]\nseed = 7\n')
    outcome = mt("config", "validate", path)
    assert (outcome.code, outcome.out) == (0, f"{path} with preset gpt-tiny is valid (1 value set on top)\n")
    path.write_text("[model]\nhidden_sizes = 3\n")
    assert mt("config", "validate", path).code == 2


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.loss=x", 'train.loss=x needs a loss named "x"'),
        ("checkpoint.ckpt_format=x", 'checkpoint.ckpt_format=x needs a checkpoint saver named "x"'),
        ('logging.trackers=["x"]', 'logging.trackers=x needs a callback named "x"'),
        ('train.callbacks=["x"]', 'train.callbacks=x needs a callback named "x"'),
        ("model.attention_backend=flash", 'model.attention_backend=flash needs an attention backend named "flash"'),
    ],
)
def test_validate_looks_up_names(mt, override: str, says: str) -> None:
    outcome = mt("config", "validate", "--set", override)
    assert outcome.code == 3
    assert says in outcome.err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('train.eval_metrics=["f1"]', 'train.eval_metrics has "f1", and train.loss=cross_entropy has no metrics'),
        (
            "checkpoint.best_metric=valid_los",
            'checkpoint.best_metric="valid_los": evaluations have valid_loss (did you mean "valid_loss"?)',
        ),
    ],
)
def test_validate_looks_up_metrics(mt, override: str, says: str) -> None:
    outcome = mt("config", "validate", "--set", override)
    assert outcome.code == 2
    assert says in " ".join(outcome.err.split())


@pytest.mark.slow
def test_explain(mt) -> None:
    words = " ".join(mt("config", "explain", "model.rotary_percent").out.split())
    assert "type number > 0 and <= 1 default 1.0" in words
    assert 'counts only when model.position_embedding_type is "rope"' in words
    assert 'needs model.family = "gpt" or "gpt_classification" or "gpt_multiple_choice"' in words
    assert mt("config", "explain", "rotary_percent").out == mt("config", "explain", "model.rotary_percent").out
    assert ["type", '"fp32"', "|", '"bf16"', "|", '"fp16"'] in mt("config", "explain", "precision.dtype").lines
    assert ["default", "required"] in mt("config", "explain", "num_layers").lines
    (found,) = json.loads(mt("config", "explain", "train.rampup_batch_size", "--json").out)
    assert found["type"] == "[integer > 0, integer > 0, integer >= 0] or null"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("train.sede", 'unknown key train.sede (did you mean "train.seed"?); mt config keys train lists them'),
        ("finetune", "finetune is an option of Megatron's and no key here: checkpoint.load=PATH"),
        ("sede", 'unknown key sede (did you mean "seed"?); mt config keys lists them'),
        ("logging.wandb_project", "unknown key logging.wandb_project; it is a key of [wandb]: write wandb.project"),
        ("trian.seed", 'unknown section trian (did you mean "train"?)'),
    ],
)
def test_explain_an_unknown_key(mt, key: str, says: str) -> None:
    outcome = mt("config", "explain", key)
    assert outcome.code == 2
    assert says in outcome.err


def test_keys_are_listed_under_what_brings_them(mt) -> None:
    text = mt("config", "keys", "optimizer").out
    assert text.index("[optimizer]\n".rstrip()) < text.index("clip_grad") < text.index('with optimizer = "adam"')
    assert text.index('with optimizer = "adam"') < text.index("adam_eps") < text.index('with optimizer = "sgd"')
    assert mt("config", "keys", "optimiser").code == 2


@pytest.mark.slow
def test_keys_cover_every_field_of_every_type() -> None:
    host = load_plugins()
    for section, base in section_types(load_plugins()).items():
        fields = section_fields(section, host)
        assert [f.key for f in fields if not f.selected_by] == list(base.model_fields)
        for field in fields:
            assert field.doc, field.dotted
            assert field.type not in ("any value", "None"), field.dotted
    adam = {f.key for f in section_fields("optimizer", host) if "adam" in f.selected_by}
    assert adam == {"adam_beta1", "adam_beta2", "adam_eps", "main_weights", "exp_avg_dtype"}


# -- tables below a section ------------------------------------------------------------------------------


@pytest.mark.slow
def test_moe_keys(mt) -> None:
    words = " ".join(mt("config", "explain", "model.moe.moe_router_bias_update_rate").out.split())
    assert "type number >= 0 default 0.001" in words
    assert "counts only when model.moe.moe_router_enable_expert_bias is true" in words
    assert ["default", "required"] in mt("config", "explain", "num_experts").lines
    text = mt("config", "keys", "model.moe").out
    assert text.split()[0] == "[model.moe]"
    assert "moe_router_topk" in text
    assert '[model.moe.moe_dispatcher_options] with model.moe.moe_token_dispatcher_type = "flex"' in text
    assert "  num_layers" not in text
    everything = mt("config", "keys").out
    assert everything.index("[model]") < everything.index("[model.moe]") < everything.index("[tokenizer]")


def test_keys_have_their_meaning_on_a_narrow_terminal(mt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = mt("config", "keys", "model.moe").out
    words = " ".join(out.split())
    assert "moe_router_topk Experts of a token. integer > 0; default 2" in words
    assert '[model.moe.moe_dispatcher_options] with model.moe.moe_token_dispatcher_type = "flex"' in words


def test_moe_keys_cover_its_type() -> None:
    from mt_moe.config import MoeConfig

    fields = section_fields("model.moe", load_plugins())
    assert [field.key for field in fields] == list(MoeConfig.model_fields)
    assert all(field.doc and not field.selected_by for field in fields)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["explain", "model.moe.num_expert"],
            'unknown key model.moe.num_expert (did you mean "model.moe.num_experts"?)',
        ),
        (["keys", "model.mo"], 'unknown section model.mo (did you mean "model.moe"?)'),
        (["keys", "train.moe"], "unknown section train.moe"),
    ],
)
def test_unknown_keys_below_a_section(mt, arguments: list[str], says: str) -> None:
    outcome = mt("config", *arguments)
    assert outcome.code == 2
    assert says in outcome.err
