"""What a script does wrong is an error that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.accelerate.programs import build, samples
from torch.utils.data import DataLoader

from mt_accelerate import Accelerator, MegatronLMPlugin, notebook_launcher
from mt_accelerate.launch import checked_values, launch_command, launch_variables
from mt_accelerate.utils import (
    GradientAccumulationPlugin,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    ProjectConfiguration,
)
from mt_core.errors import ConfigError, DataError, MtError


def prepare(model: Any = None, optimizer: Any = None, *others: Any, fields: Any = None) -> Any:
    model = build("gpt2") if model is None else model
    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer(model.parameters())
    loader = () if any(isinstance(one, MegatronLMDummyDataLoader) for one in others) else (rows(),)
    return Accelerator(megatron_lm_plugin=MegatronLMPlugin(**(fields or {})), cpu=True).prepare(
        model, optimizer, *others, *loader
    )


def rows(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples("gpt2", 4), **{"batch_size": 2, **options})


def unknown_model() -> Any:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return DistilBertForMaskedLM(DistilBertConfig(n_layers=1, dim=32, n_heads=2, hidden_dim=32, vocab_size=96))


def torch_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def two_rates(parameters: Any) -> Any:
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": rest, "lr": 1e-4}])


def left_padded() -> Any:
    model = prepare()[0]
    ids = torch.ones(2, 16, dtype=torch.long)
    return model(input_ids=ids, attention_mask=torch.arange(16).expand(2, 16) > 3)


def unread_batch() -> Any:
    ids = torch.ones(2, 16, dtype=torch.long)
    return prepare()[0](input_ids=ids, token_type_ids=ids)


def option_of_tracker() -> None:
    accelerator = Accelerator(log_with="tensorboard", project_dir="unused", cpu=True)
    accelerator.init_trackers("run", init_kwargs={"tensorboard": {"flush_secs": 60}})


def with_plugin() -> Accelerator:
    return Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True)


def clip_otherwise() -> Any:
    return with_plugin().clip_grad_norm_(None, 2.0)


def scaled_loss() -> None:
    accelerator, model = with_plugin(), build("gpt2")
    model, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), rows())
    accelerator.backward(model(**next(iter(loader))).loss / 2)


def frozen() -> Any:
    model = build("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    return prepare(model)


def stepped(schedule: Callable[[Any], Any], *, of_groups: bool = False) -> None:
    """Two steps by a scheduler of torch."""
    model = build("gpt2")
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if of_groups else [{"params": [first, *rest]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    scheduler = schedule(optimizer)
    model, _, loader, scheduler = with_plugin().prepare(model, optimizer, rows(), scheduler)
    for batch in loader:
        model(**batch)
        scheduler.step()


def set_in_loop(name: str, value: Any, *, dummy: bool = False) -> None:
    """A program that sets a value of its optimizer's groups before a step."""
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedulers = [MegatronLMDummyScheduler(optimizer, total_num_steps=9)] if dummy else []
    model, optimizer, loader, *_ = with_plugin().prepare(model, optimizer, rows(), *schedulers)
    for group in optimizer.param_groups:
        group[name] = value
    model(**next(iter(loader)))


def decay_of_a_part(parameters: Any) -> Any:
    """Of the three matrices that are one parameter of mt."""
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:2], "weight_decay": 0.1}, {"params": every[2:], "weight_decay": 0.0}])


CASES: dict[str, tuple[Callable[[], Any], type[MtError], str]] = {
    "type of a field": (lambda: MegatronLMPlugin(tp_degree="2"), ConfigError, "tp_degree='2'"),
    "bool for a number": (lambda: MegatronLMPlugin(gradient_clipping="no"), ConfigError, "gradient_clipping='no'"),
    "unknown field": (lambda: MegatronLMPlugin(tp_degre=2), ConfigError, 'did you mean "tp_degree"'),
    "field of Megatron alone": (
        lambda: prepare(fields={"other_megatron_args": {"moe_grouped_gemm": True, "vocab_fil": "x"}}),
        ConfigError,
        'Megatron has no vocab_fil (did you mean "vocab_file"?)',
    ),
    "argument that is a field": (
        lambda: prepare(fields={"other_megatron_args": {"tensor_model_parallel_size": 2}}),
        ConfigError,
        "tensor_model_parallel_size is a field of the plugin; give MegatronLMPlugin(tp_degree=...)",
    ),
    "argument that the loader decides": (
        lambda: prepare(fields={"other_megatron_args": {"micro_batch_size": 3}}),
        ConfigError,
        "gives train.micro_batch_size=3, and the program's model, optimizer, loaders and seed give 2; leave it out",
    ),
    "processes": (lambda: prepare(fields={"tp_degree": 3}), ConfigError, "1 processes are no multiple of tp_degree=3"),
    "positions": (lambda: prepare(fields={"use_rotary_position_embeddings": True}), ConfigError, "contradicts"),
    "accumulation": (
        lambda: Accelerator(
            gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4)
        ),
        ConfigError,
        "give one of them",
    ),
    "precision": (lambda: Accelerator(mixed_precision="fp12"), ConfigError, "no, fp16, bf16, fp8"),
    "plugin": (lambda: Accelerator(megatron_lm_plugin={"tp_degree": 2}), ConfigError, "must be a MegatronLMPlugin"),
    "no name map": (lambda: prepare(unknown_model()), ConfigError, "distilbert"),
    "no transformers model": (lambda: prepare(torch.nn.Linear(2, 2)), ConfigError, "a Linear, which has no config"),
    "optimizer": (lambda: prepare(None, torch.optim.Adagrad), ConfigError, "Adam, AdamW or SGD"),
    "relative of Adam": (lambda: prepare(None, torch.optim.NAdam), ConfigError, "NAdam cannot be followed"),
    "relative of SGD": (lambda: prepare(None, torch.optim.ASGD), ConfigError, "ASGD cannot be followed"),
    "momentum by a scheduler": (
        lambda: stepped(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=9)),
        ConfigError,
        "changed adam_beta1 from 0.95",
    ),
    "rates of groups by a scheduler": (
        lambda: stepped(
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step]),
            of_groups=True,
        ),
        ConfigError,
        "they can have one lr",
    ),
    "decay in the loop": (
        lambda: set_in_loop("weight_decay", 0.3),
        ConfigError,
        "changed weight_decay from 0.01 to 0.3",
    ),
    "betas in the loop": (lambda: set_in_loop("betas", (0.5, 0.9)), ConfigError, "changed adam_beta1 from 0.9 to 0.5"),
    "rate beside the schedule": (lambda: set_in_loop("lr", 1e-3, dummy=True), ConfigError, "leave the scheduler out"),
    "parameters after prepare": (
        lambda: prepare()[1].add_param_group({"params": []}),
        ConfigError,
        "before it is prepared",
    ),
    "batches by the loader's rule": (
        lambda: Accelerator(megatron_lm_plugin=MegatronLMPlugin(), split_batches=True, cpu=True),
        ConfigError,
        "does not follow split_batches=True",
    ),
    "key of a file": (lambda: checked_values({"num_proceses": 8}), ConfigError, 'did you mean "num_processes"'),
    "engine of a file": (lambda: checked_values({"distributed_type": "FSDP"}), ConfigError, "distributed_type=FSDP"),
    "settings of a file": (
        lambda: checked_values({"deepspeed_config": {"gradient_accumulation_steps": 4}}),
        ConfigError,
        "deepspeed_config={'gradient_accumulation_steps': 4} is not done",
    ),
    "coupled decay": (
        lambda: prepare(None, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
        ConfigError,
        "torch.optim.AdamW",
    ),
    "two rates": (lambda: prepare(None, two_rates), ConfigError, "lr of [0.0001, 0.001]"),
    "scheduler": (
        lambda: prepare(None, None, torch_schedule(torch.optim.SGD([torch.zeros(1)]))),
        ConfigError,
        "another optimizer",
    ),
    "schedule": (
        lambda: prepare(None, None, MegatronLMDummyScheduler(None)),
        ConfigError,
        "total_num_steps",
    ),
    "one data set": (lambda: prepare(None, None, MegatronLMDummyDataLoader()), ConfigError, "three times"),
    "tracker": (lambda: Accelerator(log_with="tensorbord"), ConfigError, 'did you mean "tensorboard"'),
    "folder of a tracker": (lambda: Accelerator(log_with="tensorboard"), ConfigError, "project_dir"),
    "option of a tracker": (lambda: option_of_tracker(), ConfigError, "takes max_queue, and no flush_secs"),
    "tracker that was not started": (lambda: Accelerator(cpu=True).get_tracker("wandb"), ConfigError, "log_with"),
    "automatic names": (lambda: ProjectConfiguration(total_limit=2), ConfigError, "total_limit=2"),
    "nothing prepared": (clip_otherwise, ConfigError, "gradient_clipping"),
    "scaled loss": (scaled_loss, ConfigError, "scales the loss by 0.5"),
    "frozen parameters": (frozen, ConfigError, "does not train 1 parameters of the model (transformer.wte.weight)"),
    "decay of a part": (
        lambda: prepare(build("llama"), decay_of_a_part),
        ConfigError,
        "decays a part of decoder.layers.0.self_attention.linear_qkv.weight",
    ),
    "padding before text": (left_padded, DataError, "on the right"),
    "field of a batch": (unread_batch, DataError, "does not take token_type_ids"),
    "weights on one process": (lambda: prepare()[0].save_pretrained("x"), ConfigError, "accelerator.save_model(model,"),
    "whole state": (lambda: with_plugin().get_state_dict(None), ConfigError, "save_model(model, DIR)"),
    "pickled weights": (
        lambda: Accelerator(cpu=True).save_model(None, "x", safe_serialization=False),
        ConfigError,
        "would write a pickle",
    ),
    "object without a state": (
        lambda: Accelerator(cpu=True).register_for_checkpointing(3),
        ConfigError,
        "int: an object has to have state_dict()",
    ),
    "reduction": (lambda: Accelerator(cpu=True).reduce(torch.ones(1), "max"), ConfigError, "sum, mean or none"),
    "processes of a notebook": (
        lambda: notebook_launcher(print, (), num_processes=2),
        ConfigError,
        "mt launch --num_processes N FILE",
    ),
    "machines": (
        lambda: launch_command({"num_processes": 3, "num_machines": 2}, None, []),
        ConfigError,
        "num_machines=2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_to_change(case: str) -> None:
    call, kind, words = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


def test_fields_come_from_the_launchers_variables_unless_the_program_gives_them(monkeypatch) -> None:
    values = {
        "megatron_lm_config": {
            "megatron_lm_tp_degree": 4,
            "megatron_lm_no_load_optim": False,
            "megatron_lm_pp_degree": 2,
        }
    }
    for name, text in launch_variables(values).items():
        monkeypatch.setenv(name, text)
    plugin = MegatronLMPlugin(pp_degree=1)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.no_load_optim) == (4, 1, False)
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "many")
    with pytest.raises(ConfigError, match="MEGATRON_LM_TP_DEGREE='many'"):
        MegatronLMPlugin()


def test_what_the_fields_are_in_a_configuration() -> None:
    plugin = MegatronLMPlugin(
        tp_degree=2,
        sequence_parallelism=True,
        use_distributed_optimizer=True,
        gradient_clipping=0.5,
        recompute_activations=True,
    )
    assert plugin.sections("bf16") == {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
        "optimizer": {"clip_grad": 0.5},
        "recompute": {"recompute_granularity": "selective"},
        "precision": {"dtype": "bf16"},
    }
