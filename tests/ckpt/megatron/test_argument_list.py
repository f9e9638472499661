"""Every argument of Megatron's is read, has to have one value, or is ignored for a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint
from tests.ckpt.megatron.handmade import arguments, gpt, save_rank

import mt_ckpt.megatron
from mt_ckpt.megatron.arguments import IGNORED, READ, REQUIRED, Arguments, reason_ignored, unknown_arguments
from mt_ckpt.megatron.families import model_section
from mt_ckpt.megatron.reader import open_checkpoint
from mt_ckpt.megatron.run_arguments import run_sections
from mt_ckpt.megatron.target import make_plan
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError

NAMES = (Path(__file__).parent / "argument_names.txt").read_text().split()
"""The attributes of the Namespace of Megatron-Core 0.19.2, and options that versions around it have."""


def test_every_argument_is_in_exactly_one_table() -> None:
    assert unknown_arguments(NAMES) == []
    assert not set(READ) & set(REQUIRED)
    assert len(READ) == len(set(READ))
    for name in NAMES:
        tables = [name in READ, name in REQUIRED, reason_ignored(name) is not None]
        assert sum(tables) == 1, name


def test_the_list_has_the_arguments_of_what_megatron_wrote(golden, host) -> None:
    for model in ("gpt", "bert", "moe", "gpt_distopt"):
        folder = next(iter(sorted((golden / model).glob("legacy_*"))))
        metadata = open_checkpoint(folder, host).metadata["megatron"]
        assert set(metadata["args"]) <= set(NAMES)
        assert metadata["unknown_arguments"] == []


def test_nothing_is_listed_as_read_that_no_code_names() -> None:
    folder = Path(next(iter(mt_ckpt.megatron.__path__)))
    sources = [file.read_text() for file in folder.rglob("*.py") if file.name != "argument_list.py"]
    sources += [file.read_text() for file in (folder.parent / "megatron_dist").glob("*.py")]
    assert [name for name in READ if not any(f'"{name}"' in source for source in sources)] == []


@pytest.mark.parametrize("names", IGNORED.values(), ids=range(len(IGNORED)))
def test_every_pattern_is_of_use(names) -> None:
    from fnmatch import fnmatchcase

    assert [entry for entry in names if not any(fnmatchcase(name, entry) for name in NAMES)] == []


class Recorded(dict[str, Any]):
    """Arguments that remember which were looked at."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("model", MODELS)
def test_no_argument_is_read_that_is_not_listed(model, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    made = make_plan(source, ConvertOptions(), host, "torch")
    values = Recorded(dict(made.args))
    args = Arguments(values, Path("rank"))
    model_section(args, list(made.layouts), 101, host)
    run_sections(args)
    assert {name for name in values.seen if name not in READ and name not in REQUIRED} == set()


KINDS = ("is_hybrid_model", "multi_latent_attention", "hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that say what kind of model it is, which the tensors contradict."""


OF_GPT = ("use_mup", "mtp_num_layers", "enable_mhc_connections", "enable_hyper_connections")
"""Arguments that the family gpt reads."""


@pytest.mark.parametrize("name", [name for name in REQUIRED if name not in (*KINDS, *OF_GPT)])
def test_an_argument_that_changes_the_numbers_is_refused(name, tmp_path, host) -> None:
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(**{name: "M*"}), "model": gpt()})
    with pytest.raises(ConfigError, match=f"{name}='M\\*' stands for"):
        open_checkpoint(tmp_path, host)


@pytest.mark.parametrize("name", [name for name in REQUIRED if name in KINDS[2:]])
def test_a_pattern_of_layers_that_the_tensors_contradict_is_refused(name, tmp_path, host) -> None:
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(**{name: "M*"}), "model": gpt()})
    with pytest.raises(CheckpointError, match=r"decoder.layers.0.mixer.A_log is missing"):
        open_checkpoint(tmp_path, host)


def test_arguments_of_a_version_that_is_not_known_are_named(tmp_path, host) -> None:
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(brand_new_thing=3), "model": gpt()})
    assert open_checkpoint(tmp_path, host).metadata["megatron"]["unknown_arguments"] == ["brand_new_thing"]


RUNS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "adam_beta2": 0.95, "decoupled_lr": 1e-2, "decoupled_min_lr": 1e-3},
    "lion": {"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.99},
    "muon": {"optimizer": "muon", "muon_num_ns_steps": 6, "muon_scale_mode": "shape_scaling"},
    "dist_muon": {"optimizer": "dist_muon", "muon_scalar_optimizer": "lion", "lion_beta1": 0.9},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.8},
    "decay": {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.2},
    "fp16": {"fp16": True, "params_dtype": None, "initial_loss_scale": 4096.0, "hysteresis": 3},
    "bf16": {"bf16": True, "params_dtype": None, "grad_reduce_in_bf16": True},
    "rampup": {"rampup_batch_size": ["4", "4", "100"], "micro_batch_size": 2, "global_batch_size": 8},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    "data": {"reset_position_ids": True, "eod_mask_loss": True},
}


@pytest.mark.parametrize("run", RUNS)
def test_how_a_run_was_trained_comes_as_our_configuration_and_goes_back(run, tmp_path, host) -> None:
    """The sections are accepted, and make the arguments again that Megatron had."""
    from mt_ckpt.megatron.run_arguments import run_arguments

    args = arguments(lr=1e-3, min_lr=1e-4, weight_decay=0.1, clip_grad=1.0, **RUNS[run])
    save_rank(tmp_path, "mp_rank_00", {"args": args, "model": gpt()})
    metadata = open_checkpoint(tmp_path, host).metadata
    sections = {name: values for name, values in metadata["config"].items() if name != "tokenizer"}
    config = config_from_dict(sections, host)
    again = run_arguments(metadata)
    kept = {name: value for name, value in RUNS[run].items() if name not in ("fp16", "bf16", "params_dtype")}
    kept |= {"optimizer": "muon"} if run == "dist_muon" else {}
    kept |= {"rampup_batch_size": [4, 4, 100]} if run == "rampup" else {}
    kept |= {"recompute_modules": ["core_attn", "layernorm", "mlp"]} if run == "selective" else {}
    assert {name: again[name] for name in kept} == kept
    if run in ("fp16", "bf16"):
        assert config.precision.dtype == run
    else:
        assert config.optimizer.optimizer == kept.get("optimizer", "adam")
