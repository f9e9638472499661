"""What is wrong with a configuration is said with its key, its origin, what was given and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_core.config.checks import divisors, must_divide_all
from mt_core.config.loading import load_config
from mt_core.config.schema import CORE_SECTIONS, REGISTRY_OF_SECTION
from mt_core.config.sources import find_preset
from mt_core.errors import ConfigError, MtError, PluginError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, PluginHost
from mt_core.specs import SECTIONS, ModelSpec


def refusal(host: PluginHost, *overrides: str, preset: str | None = "gpt-tiny", path: Path | None = None) -> str:
    with pytest.raises(MtError) as error:
        load_config(path, preset=preset, overrides=overrides, host=host)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.seed=1", 'unknown section trian (from --set) (did you mean "train"?); sections are model, tokenizer'),
        ("seed.x=1", "unknown section seed (from --set); seed is a key of [train]: write train.seed"),
        ("train.sede=1", 'unknown key train.sede (from --set) (did you mean "seed"?)'),
        ("train.num_layer=1", "unknown key train.num_layer (from --set)"),
        ("train.lr=1", "unknown key train.lr (from --set); it is a key of [optimizer]: write optimizer.lr"),
        ("model.num_layer=1", 'unknown key model.num_layer (from --set) (did you mean "num_layers"?)'),
        ("inference.cache_memry_gb=1", '(from --set) (did you mean "cache_memory_gb"?)'),  # of mt-infer
        ("eval.perplexty=true", 'unknown key eval.perplexty (from --set) (did you mean "perplexity"?)'),  # of mt-eval
        ("train.wandb_project=x", "(from --set); it is a key of [wandb]: write wandb.project"),  # of mt-ops
        ("data.titles_data_path=x", "data.titles_data_path (from --set); it is a key where data.dataset_type is ict"),
        ("optimizer.lion_beta1=0.9", "(from --set); it is a key where optimizer.optimizer is lion or muon"),
        ("train.seed=many", "train.seed (from --set): got 'many', expected an integer"),
        ("train.seed=1.5", "train.seed (from --set): got 1.5, expected an integer"),
        ("train.seed=true", "train.seed (from --set): got True, expected an integer"),
        ("train.seed=-1", "train.seed (from --set): got -1, input should be greater than or equal to 0"),
        ("train.deterministic=1", "train.deterministic (from --set): got 1, expected true or false"),
        ("train.loss=3", "train.loss (from --set): got 3, expected text in quotes"),
        ("train.callbacks=x", "train.callbacks (from --set): got 'x', expected a list"),
        ("train.callbacks=[1]", "train.callbacks.0 (from --set): got 1, expected text in quotes"),
        ("optimizer.lr=fast", "optimizer.lr (from --set): got 'fast', expected a number"),
        ("precision.dtype=fp8", "precision.dtype (from --set): got 'fp8', input should be 'fp32', 'bf16' or 'fp16'"),
        ("optimizer.adam_beta1=1.5", "optimizer.adam_beta1 (from --set): got 1.5, input should be less than 1"),
        ("optimizer.adam_beta1=1", "optimizer.adam_beta1 (from --set): got 1, input should be less than 1"),
        ("optimizer.adam_beta2=1.0", "optimizer.adam_beta2 (from --set): got 1.0, input should be less than 1"),
        ("model.hidden_size=null", "model.hidden_size (from --set): got None, expected an integer"),
        ("optimizer.optimizer=adan", 'optimizer.optimizer=adan needs an optimizer named "adan"; installed plugins'),
        ("optimizer.optimizer=adan", '(did you mean "adam"?)'),
        ("model.family=1", "model.family: got 1, expected a name in quotes"),
        ("seed", "--set seed: expected section.key=value, for instance train.train_iters=100"),
        ("seed=1", "--set seed=1: expected section.key=value"),
        ("train.=1", "--set train.=1: expected section.key=value"),
    ],
)
def test_one_wrong_value(host: PluginHost, override: str, message: str) -> None:
    assert message in refusal(host, override)


def test_every_wrong_value_is_listed(host: PluginHost) -> None:
    lines = refusal(host, "train.seed=x", "train.loss=1", "train.sede=2").splitlines()
    assert len(lines) == 3


def test_keys_of_no_family_are_listed_without_one(host: PluginHost) -> None:
    lines = refusal(host, "model.num_layer=2", "model.hidden_size=8", "train.sede=2", preset=None).splitlines()
    assert lines[0].startswith("model.family is not set; ")
    assert lines[1] == 'unknown key model.num_layer (from --set) (did you mean "num_layers"?)'
    assert lines[2].startswith("unknown key train.sede")
    assert len(lines) == 3


WSD = ["lr_schedule.lr_decay_style=WSD"]
SAMPLES = ["train.train_iters=null", "train.train_samples=1600", "lr_schedule.lr_warmup_iters=null"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_attention_heads=5"], "the number of heads can be 1, 2, 4, 8, 16, 32, 64 or 128"),
        (["model.num_query_groups=3"], "does not divide model.num_attention_heads=4; it can be 1, 2 or 4"),
        (["train.global_batch_size=24"], "the nearest legal values are 16 or 32"),
        (["train.global_batch_size=8"], "the nearest legal values are 16"),
        (["train.train_samples=100"], "train.train_epochs; train_iters and train_samples are set"),
        (["train.train_iters=null"], "train.train_samples, train.train_epochs; none is set"),
        (["optimizer.min_lr=1.0"], "optimizer.min_lr=1.0 is above optimizer.lr=0.003"),
        (["optimizer.lr=inf"], "optimizer.lr"),
        (["optimizer.lr=nan"], "optimizer.lr"),
        (
            ["train.train_iters=10", "lr_schedule.lr_warmup_iters=10"],
            "lr_schedule.lr_warmup_iters=10 leaves nothing of the run, train.train_iters=10; use at most 9, such as "
            "lr_schedule.lr_warmup_iters=1",
        ),
        (
            [*SAMPLES, "lr_schedule.lr_warmup_samples=1616"],
            "lr_schedule.lr_warmup_samples=1616 leaves nothing of the run, train.train_samples=1600; use at most 1599",
        ),
        (
            ["train.train_iters=6", "lr_schedule.lr_warmup_iters=4", "lr_schedule.lr_decay_iters=2"],
            "lr_schedule.lr_warmup_iters=4 leaves nothing of the decay, lr_schedule.lr_decay_iters=2; use at most 1",
        ),
        (
            ["lr_schedule.lr_warmup_iters=null", "lr_schedule.lr_warmup_fraction=1"],
            "lr_schedule.lr_warmup_fraction=1.0 leaves nothing of the run, train.train_iters=450; use less than 1, "
            "such as lr_schedule.lr_warmup_fraction=0.1",
        ),
        (
            [*WSD, "train.train_iters=6", "lr_schedule.lr_warmup_iters=2", "lr_schedule.lr_wsd_decay_iters=5"],
            "lr_schedule.lr_wsd_decay_iters=5 is longer than what the warm-up leaves of the decay, which begins at 2 "
            "and ends at 6; use at most 4",
        ),
        (
            [*WSD, *SAMPLES, "lr_schedule.lr_decay_samples=800", "lr_schedule.lr_wsd_decay_samples=801"],
            "lr_schedule.lr_wsd_decay_samples=801 is longer than what the warm-up leaves of the decay, which begins at "
            "0 and ends at 800; use at most 800",
        ),
        ([*WSD, *SAMPLES, "lr_schedule.lr_wsd_decay_iters=1"], "use lr_schedule.lr_wsd_decay_samples"),
        (
            ["lr_schedule.lr_warmup_init=0.01"],
            "lr_schedule.lr_warmup_init=0.01 is above optimizer.lr=0.003, where the warm-up ends; use at most 0.003",
        ),
        (
            ["lr_schedule.lr_warmup_init=0.001", "lr_schedule.lr_warmup_iters=0"],
            "lr_schedule.lr_warmup_init=0.001 is where a warm-up begins, and this run has none; set one of",
        ),
        (["lr_schedule.lr_warmup_fraction=0.1"], "lr_schedule: set at most one of lr_warmup_iters, lr_warmup_samples"),
        (
            ["train.train_iters=null", "train.train_samples=1600"],
            "is set while training is counted by train.train_samples; use lr_schedule.lr_warmup_samples",
        ),
        (["train.rampup_batch_size=[16, 16, 100]"], "set train.train_samples, not train_iters"),
        (
            [
                "train.train_iters=null",
                "train.train_samples=1600",
                "lr_schedule.lr_warmup_iters=null",
                "train.global_batch_size=64",
                "train.rampup_batch_size=[16, 20, 100]",
            ],
            "never reaches train.global_batch_size=64; the increment can be 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48",
        ),
        *(
            (
                [
                    *("train.train_iters=null", "train.train_samples=1600", "lr_schedule.lr_warmup_iters=null"),
                    *("train.global_batch_size=64", f"train.rampup_batch_size={ramp}"),
                ],
                f"train.rampup_batch_size={ramp} {reason}, so that no step is smaller: remove it",
            )
            for ramp, reason in {
                "[64, 16, 100]": "begins with train.global_batch_size=64",
                "[128, 16, 100]": "begins with train.global_batch_size=64 or more",
                "[16, 16, 0]": "has 0 samples to grow to train.global_batch_size=64",
            }.items()
        ),
        (["parallel.tensor_model_parallel_size=2"], "does not divide the number of processes=1; it can be 1"),
        (
            ["model.position_embedding_type=learned_absolute"],
            "model.max_position_embeddings is not set; learned positions need it, at least data.seq_length=128",
        ),
        (
            ["model.position_embedding_type=learned_absolute", "model.max_position_embeddings=64"],
            "data.seq_length=128 is longer than model.max_position_embeddings=64; use at most 64",
        ),
    ],
)  # fmt: skip
def test_values_that_contradict_one_another(host: PluginHost, overrides: list[str], message: str) -> None:
    assert message in refusal(host, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["precision.loss_scale=128.0"],
            "precision.loss_scale (from --set) would be ignored: it only counts when precision.dtype is fp16, "
            "and that is fp32 (from default)",
        ),
        (
            ["model.max_position_embeddings=64", "model.position_embedding_type=alibi"],
            "model.max_position_embeddings (from --set) would be ignored: it only counts when "
            "model.position_embedding_type is learned_absolute or rope, and that is alibi (from --set)",
        ),
        (["recompute.recompute_num_layers=2"], "only counts when recompute.recompute_granularity is full"),
    ],
)
def test_a_value_that_nothing_would_read(host: PluginHost, overrides: list[str], message: str) -> None:
    assert message in refusal(host, *overrides)


def test_a_condition_that_holds_lets_the_value_pass(host: PluginHost) -> None:
    overrides = ["precision.dtype=fp16", "precision.loss_scale=128.0"]
    assert load_config(preset="gpt-tiny", overrides=overrides, host=host).config.precision.loss_scale == 128.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model\n", "config file run.toml: "),
        ("preset = 3\n", "preset is 3, expected the name of a preset"),
        ('preset = "gpt-tinny"\n', 'preset gpt-tinny is unknown (did you mean "gpt-tiny"?); `mt models` lists the '),
        ("model = 3\n", "model (from file run.toml): got 3, expected a table of keys"),
        ("num_layers = 3\n", "unknown section num_layers (from file run.toml)"),
        ("seq_length = 3\n", "seq_length is a key of [data]: write data.seq_length"),
        ("[model]\nvocab_size = 5\n", "model.family is not set; choose a preset (mt models lists them) or one of "),
        ('[model]\nfamily = "gpt"\n[train]\ntrain_iters = 5\n', "model.num_layers is missing; set it in the file or"),
    ],
)
def test_a_file_that_is_wrong(host: PluginHost, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in refusal(host, preset=None, path=path).replace(f"{tmp_path}/", "")


def test_a_file_that_cannot_be_read(host: PluginHost, tmp_path: Path) -> None:
    assert refusal(host, path=tmp_path / "no.toml").endswith("no.toml: No such file or directory")
    latin = tmp_path / "latin.toml"
    latin.write_bytes('[train]\nsample_prompt = "caf\xe9"\n'.encode("latin-1"))
    assert "latin.toml: line 2 is no UTF-8 (invalid continuation byte); save the file" in refusal(host, path=latin)
    listing = tmp_path / "list.json"
    listing.write_text("[1, 2]")
    assert "list.json" in refusal(host, path=listing)


def test_a_warm_up_in_the_other_unit_is_not_compared_with_the_run(host) -> None:
    said = refusal(host, "lr_schedule.lr_warmup_iters=null", "lr_schedule.lr_warmup_samples=1000")
    assert said.endswith("counted by train.train_iters; use lr_schedule.lr_warmup_iters")
    assert "\n" not in said


def test_without_a_plugin_the_message_says_what_to_install() -> None:
    empty = PluginHost()
    with pytest.raises(ConfigError, match="no installed plugin brings a preset .pip install mt-models"):
        load_config(preset="gpt-tiny", host=empty)
    with pytest.raises(ConfigError, match=r"model\.family is not set, and no installed plugin registers one"):
        load_config(host=empty)
    with pytest.raises(PluginError, match="pip install mt-models"):
        load_config(overrides=["model.family=gpt"], host=empty)


def family(name: str, presets: str) -> type:
    spec = ModelSpec(name=name, doc="of a test", config_type=Lazy("a:b"), build=Lazy("a:b"), presets=Lazy(presets))
    return type("Module", (), {"mt_register_models": staticmethod(hookimpl(lambda: [spec]))})


PRESETS = {"small": {"train": {"train_iters": 3}}}


def test_presets_of_a_broken_plugin_stop_nobody_else() -> None:
    host = PluginHost()
    host.add(family("broken", "a_module_that_is_not_there:PRESETS"), Plugin("broken", "m", "dist-broken", "1.0"))
    host.add(family("good", f"{__name__}:PRESETS"), Plugin("good", "m", "dist-good", "1.0"))
    assert find_preset("small", host) == {"train": {"train_iters": 3}, "model": {"family": "good"}}
    with pytest.raises(
        ConfigError, match=r'plugin "broken" \(dist-broken 1\.0\) cannot give its presets: ModuleNotFound'
    ):
        find_preset("large", host)


def test_a_preset_of_two_families_is_a_conflict() -> None:
    host = PluginHost()
    for name in ("a", "b"):
        host.add(family(name, f"{__name__}:PRESETS"), Plugin(name, "m", f"dist-{name}", "1.0"))
    with pytest.raises(
        ConfigError, match=r'"a" \(dist-a 1\.0\) for family a and plugin "b" \(dist-b 1\.0\) for family b'
    ):
        find_preset("small", host)


def test_divisors_of_any_number_are_found_at_once() -> None:
    assert [divisors(number) for number in range(400)] == [
        [d for d in range(1, number + 1) if number % d == 0] for number in range(400)
    ]
    # 2^30 5^30 has 31 * 31 divisors; the second is a prime.
    assert (len(divisors(10**30)), divisors(999_999_999_989)) == (961, [1, 999_999_999_989])


def test_the_sizes_of_a_message_pass_all_its_rules() -> None:
    with pytest.raises(ConfigError, match="size=8 does not divide a=12; it can be 1, 2 or 4"):
        must_divide_all("size", 8, {"a": 12, "b": 8})


def test_each_section_of_a_distribution_is_known_by_the_name_of_that_one(host: PluginHost) -> None:
    """A missing one is named with what to install."""
    # A distribution has one package: mt_ops of mt-ops.
    homes = {spec.name: spec.config_type.reference.partition(".")[0].replace("_", "-") for spec in host[SECTIONS]}
    assert homes == SECTIONS.homes


def test_every_key_has_a_help_text(host: PluginHost) -> None:
    types = [(base, base) for base in CORE_SECTIONS.values()]
    for section, kind in REGISTRY_OF_SECTION.items():
        types += [(CORE_SECTIONS[section], spec.config_type.load()) for spec in host.registry(kind)]
    bare = [
        f"{type_.__name__}.{key}"
        for base, type_ in types
        for key, field in type_.model_fields.items()
        if not field.description and key != base.selector  # a type may fix its own name there
    ]
    assert bare == []


def test_a_warm_up_may_be_longer_than_a_run_whose_decay_is_written(host: PluginHost) -> None:
    """A trial of a long schedule; the learning rate of its steps is that of the long run."""
    overrides = ["train.train_iters=6", "lr_schedule.lr_warmup_iters=20", "lr_schedule.lr_decay_iters=200"]
    assert load_config(preset="gpt-tiny", overrides=overrides, host=host).config.lr_schedule.lr_warmup_iters == 20


def test_the_warm_up_of_a_preset_does_not_forbid_a_short_trial(host: PluginHost) -> None:
    loaded = load_config(preset="gpt-tiny", overrides=["train.train_iters=3"], host=host)
    assert loaded.config.lr_schedule.lr_warmup_iters == 20
