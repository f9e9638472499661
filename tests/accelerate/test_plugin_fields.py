"""Every field of MegatronLMPlugin has its effect, or is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.accelerate.programs import build, samples, torch_batch
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.megatron_lm.preparation import Prepared, data_section
from mt_accelerate.megatron_lm.train_steps import ClassificationTrainStep, mean_classification_loss
from mt_accelerate.utils import GPTTrainStep, MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from mt_core.errors import CheckpointError, ConfigError, DataError
from mt_core.specs import MODELS

ROWS, END = 4, 95

KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp_degree": ({"tp_degree": 2}, {"parallel.tensor_model_parallel_size": 2}),
    "pp_degree": ({"pp_degree": 2}, {"parallel.pipeline_model_parallel_size": 2}),
    "gradient_clipping": ({"gradient_clipping": 0.5}, {"optimizer.clip_grad": 0.5}),
    "sequence_parallelism": ({"sequence_parallelism": True, "tp_degree": 2}, {"parallel.sequence_parallel": True}),
    "recompute_activations": ({"recompute_activations": True}, {"recompute.recompute_granularity": "selective"}),
    "recompute_granularity": ({"recompute_granularity": "full"}, {"recompute.recompute_granularity": "full"}),
    "recompute_method": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"recompute.recompute_method": "block"},
    ),
    "recompute_num_layers": (
        {"recompute_granularity": "full", "recompute_num_layers": 2},
        {"recompute.recompute_num_layers": 2},
    ),
    "use_distributed_optimizer": ({"use_distributed_optimizer": True}, {"parallel.use_distributed_optimizer": True}),
    "context_parallel_size": ({"context_parallel_size": 2}, {"parallel.context_parallel_size": 2}),
    "expert_model_parallel_size": ({"expert_model_parallel_size": 2}, {"parallel.expert_model_parallel_size": 2}),
    "expert_tensor_parallel_size": ({"expert_tensor_parallel_size": 2}, {"parallel.expert_tensor_parallel_size": 2}),
    "decoder_last_pipeline_num_layers": (
        {"decoder_last_pipeline_num_layers": 3},
        {"parallel.num_layers_in_last_pipeline_stage": 3},
    ),
    "use_custom_fsdp": ({"use_custom_fsdp": True}, {"parallel.use_torch_fsdp2": True}),
    "attention_softmax_in_fp32": (
        {"attention_softmax_in_fp32": False},
        {"precision.attention_softmax_in_fp32": False},
    ),
    "eval_iters": ({"eval_iters": 7}, {"train.eval_iters": 7}),
    "eval_interval": ({"eval_interval": 9}, {"train.eval_interval": 9}),
}
"""Field -> the plugin's fields, and keys that follow from them whatever model and data are."""
PREPARED: dict[str, tuple[Any, str, Any]] = {
    "num_micro_batches": (2, "train.global_batch_size", ROWS),
    "attention_dropout": (0.1, "model.attention_dropout", 0.1),
    "hidden_dropout": (0.2, "model.hidden_dropout", 0.2),
    "use_rotary_position_embeddings": (False, "model.position_embedding_type", "learned_absolute"),
    "train_iters": (30, "train.train_iters", 30),
    "lr_warmup_iters": (3, "lr_schedule.lr_warmup_iters", 3),
    "lr_decay_style": ("cosine", "lr_schedule.lr_decay_style", "cosine"),
    "lr_decay_iters": (20, "lr_schedule.lr_decay_iters", 20),
    "min_lr": (1e-4, "optimizer.min_lr", 1e-4),
    "weight_decay_incr_style": ("linear", "optimizer.weight_decay_incr_style", "linear"),
    "start_weight_decay": (0.0, "optimizer.start_weight_decay", 0.0),
    "end_weight_decay": (0.1, "optimizer.end_weight_decay", 0.1),
    "seq_length": (8, "data.seq_length", 8),
    "use_precision_aware_optimizer": (True, "optimizer.exp_avg_dtype", "bf16"),
    "other_megatron_args": ({"exp_avg_dtype": "bf16"}, "optimizer.exp_avg_dtype", "bf16"),
}
"""Field -> its value, a key of the prepared model, and what that is; all fields at once."""
OTHER_PREPARED: dict[str, tuple[Any, str, Any]] = {
    "train_samples": (400, "train.train_samples", 400),
    "lr_warmup_samples": (40, "lr_schedule.lr_warmup_samples", 40),
    "lr_decay_samples": (200, "lr_schedule.lr_decay_samples", 200),
    "encoder_seq_length": (8, "data.seq_length", 8),
    "is_train_batch_min": (False, "train.micro_batch_size", ROWS),
}
FRACTION = {"lr_warmup_fraction": (0.25, "lr_schedule.lr_warmup_fraction", 0.25)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer_cpu_offload": ({"optimizer_cpu_offload": True}, "use_distributed_optimizer shards it"),
    "overlap_cpu_optimizer_d2h_h2d": ({"overlap_cpu_optimizer_d2h_h2d": True}, "optimizer_cpu_offload"),
    "pipeline_model_parallel_split_rank": ({"pipeline_model_parallel_split_rank": 1}, "encoder and decoder together"),
    "attention_backend": ({"attention_backend": False}, "names no kernel"),
    "no_wd_decay_cond": ({"no_wd_decay_cond": len}, "biases and norms never"),
    "scale_lr_cond": ({"scale_lr_cond": len}, "decoupled_lr"),
    "lr_mult": ({"lr_mult": 2.0}, "scale_lr_cond"),
}
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "counts only with recompute_granularity='full'": {"recompute_method": "uniform"},
    "counts only with tensorboard_dir": {"set_all_logging_options": True},
    "counts only with custom_train_step_class": {"custom_train_step_kwargs": {"alpha": 1}},
    "counts only with custom_model_provider_function": {"custom_prepare_model_function": len},
    "other_megatron_args={'exp_avg_dtype': ...}": {"use_precision_aware_optimizer": True},
    "has train_iters and train_samples": {"train_iters": 1, "train_samples": 1},
    "two lengths of the same input": {"seq_length": 8, "encoder_seq_length": 16},
    "those of validation and test to 0": {"consumed_samples": [8, 4]},
}
UNDER_LAYOUTS = ("num_layers_per_virtual_pipeline_stage", "custom_megatron_datasets_provider_function")
"""Fields of tests/accelerate/programs.py, which test_programs.py runs."""
SHOWN = {
    "no_load_optim": "test_states_without_the_optimizer",
    "no_save_optim": "test_states_without_the_optimizer",
    "eod_mask_loss": "test_losses_of_other_means",
    "calculate_per_token_loss": "test_losses_of_other_means",
    "consumed_samples": "test_training_goes_on_from_consumed_samples",
    "megatron_dataset_flag": "test_functions_of_the_program_are_called",
    "custom_train_step_class": "test_functions_of_the_program_are_called",
    "custom_train_step_kwargs": "test_functions_of_the_program_are_called",
    "custom_get_batch_function": "test_functions_of_the_program_are_called",
    "custom_loss_function": "test_functions_of_the_program_are_called",
    "custom_prepare_model_function": "test_functions_of_the_program_are_called",
    "custom_model_provider_function": "test_functions_of_the_program_are_called",
    "decoder_seq_length": "test_the_length_of_a_decoder_is_that_of_data_sets",
    "tensorboard_dir": "test_event_files_have_the_steps",
    "set_all_logging_options": "test_event_files_have_the_steps",
    "return_logits": "test_event_files_have_the_steps",
}


def prepared(family: str = "gpt2", **fields: Any) -> tuple[Any, ...]:
    """accelerator, model; micro-batches of half the ROWS"""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields), cpu=True)
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=40)
    loaders = [DataLoader(samples(family), batch_size=size) for size in (ROWS // 2, ROWS)]
    return accelerator, accelerator.prepare(model, optimizer, scheduler, *loaders)[0]


def value_of(config: Any, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_every_field_is_looked_at() -> None:
    tables = (KEYS, PREPARED, OTHER_PREPARED, FRACTION, REFUSED, SHOWN)
    assert sorted([*UNDER_LAYOUTS, *(name for table in tables for name in table)]) == sorted(
        MegatronLMPlugin.model_fields
    )
    assert {test for test in SHOWN.values() if test not in globals()} == set()
    page = (Path(__file__).parents[2] / "docs" / "guides" / "from-accelerate.md").read_text(encoding="utf-8")
    assert [name for name in MegatronLMPlugin.model_fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize("field", KEYS)
def test_a_field_is_a_key(field: str) -> None:
    given, expected = KEYS[field]
    sections = MegatronLMPlugin(**given).sections("no")
    for key, value in expected.items():
        section, name = key.split(".")
        assert sections[section][name] == value


@pytest.mark.parametrize("table", [PREPARED, OTHER_PREPARED, FRACTION], ids=["steps", "samples", "fraction"])
def test_a_field_is_a_key_of_the_prepared_model(table: dict[str, tuple[Any, str, Any]]) -> None:
    _, model = prepared(**{name: value for name, (value, _, _) in table.items()})
    assert {key: value_of(model.config, key) for _, key, _ in table.values()} == {
        key: value for _, key, value in table.values()
    }


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_is_refused(field: str) -> None:
    given, words = REFUSED[field]
    with pytest.raises(ConfigError) as caught:
        MegatronLMPlugin(**given)
    assert field in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_field_without_another_is_refused(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronLMPlugin(**CONTRADICTIONS[words])
    assert words in str(caught.value)


def reference_losses(family: str = "gpt2") -> tuple[torch.Tensor, torch.Tensor]:
    """Of transformers: the losses of two micro-batches' tokens [4, S - 1], and which labels count."""
    batch, model = torch_batch(family, slice(0, ROWS)), build(family).eval()
    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != -100


def test_losses_of_other_means() -> None:
    losses, counted = reference_losses()
    half = ROWS // 2
    means = [losses[rows][counted[rows]].mean().item() for rows in (slice(0, half), slice(half, ROWS))]
    batch = torch_batch("gpt2", slice(0, ROWS))
    _, model = prepared(num_micro_batches=2, calculate_per_token_loss=False)
    assert model(**batch).loss.item() == pytest.approx(sum(means) / 2, rel=1e-5)

    ends = batch["input_ids"].clone()
    ends[:, 4] = END
    own = build("gpt2").eval()
    with torch.no_grad():
        logits = own(ends).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ends[:, 1:], reduction="none")
    expected = losses[ends[:, :-1] != END].mean().item()
    for means_of_tokens in (True, False):
        fields = {"eod_mask_loss": True, "calculate_per_token_loss": means_of_tokens}
        _, model = prepared(num_micro_batches=2, **fields)
        assert model(input_ids=ends).loss.item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="causal language models"):
        prepared(family="bert", eod_mask_loss=True)


def test_a_saved_model_is_that_of_transformers(tmp_path: Path) -> None:
    """Its logits are those of the prepared model; what was registered goes along with the state."""
    batch = torch_batch("gpt2", slice(0, ROWS // 2))
    accelerator, model = prepared(return_logits=True)
    counter = torch.nn.BatchNorm1d(2)
    accelerator.register_for_checkpointing(counter)
    counter.running_mean += 3.0
    model(**batch)
    accelerator.save_state(str(tmp_path / "state"))
    counter.running_mean.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert counter.running_mean.tolist() == [3.0, 3.0]
    accelerator.save_model(model, str(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    model.eval()
    with torch.no_grad():
        saved = GPT2LMHeadModel.from_pretrained(tmp_path / "model").eval()(batch["input_ids"]).logits
        torch.testing.assert_close(model(**batch).logits[..., : saved.shape[-1]], saved, atol=2e-5, rtol=1e-4)


def test_states_without_the_optimizer(tmp_path: Path) -> None:
    """The moments go on from those in memory, and a state without them is not continued as a whole."""
    batch = torch_batch("gpt2", slice(0, ROWS // 2))
    accelerator, model = prepared(no_save_optim=True, no_load_optim=True)
    for _ in range(2):
        model(**batch)
    moments = [state["exp_avg"].clone() for state in model.engine.optimizer.state.values()]
    model.eval()
    before = model(**batch).loss.item()
    accelerator.save_state(str(tmp_path))
    model.train()
    model(**batch)
    later = [state["exp_avg"].clone() for state in model.engine.optimizer.state.values()]
    accelerator.load_state(str(tmp_path))
    kept = [state["exp_avg"] for state in model.engine.optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(later, kept, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(moments, kept, strict=True))
    assert model.iteration == 2
    model.eval()
    assert model(**batch).loss.item() == before
    with pytest.raises(CheckpointError, match="without the optimizer's state"):
        model.engine.load_state(tmp_path)


def test_training_goes_on_from_consumed_samples() -> None:
    _, model = prepared(consumed_samples=[2 * ROWS], num_micro_batches=2)
    assert model.engine.next_learning_rate() == pytest.approx(1e-2 * (1 - 2 / 40))
    model(**torch_batch("gpt2", slice(0, ROWS)))
    assert (model.consumed_samples, model.iteration) == (3 * ROWS, 1)


class NamedStep(GPTTrainStep):
    """Reports the keyword that it was given, and whether the data is Megatron's."""

    def __init__(self, args: Any, scale: float) -> None:
        super().__init__(args)
        self.scale = scale

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        self.flag = megatron_dataset_flag
        return super().get_batch_func(accelerator, False)

    def get_loss_func(self, accelerator: Any) -> Any:
        def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
            loss = self.scale * (output * loss_mask).sum() / loss_mask.sum()
            return loss, {"flag": torch.tensor(float(self.flag))}

        return loss_func


def test_functions_of_the_program_are_called() -> None:
    losses, counted = reference_losses()
    mean, batch = losses[counted].mean().item(), torch_batch("gpt2", slice(0, ROWS))
    step = {"custom_train_step_class": NamedStep, "custom_train_step_kwargs": {"scale": 3.0}}
    fields = {**step, "is_train_batch_min": False}
    _, model = prepared(megatron_dataset_flag=True, **fields)
    found = model.train_step(**batch)[0]
    assert (found["loss"].item(), found["flag"].item()) == (pytest.approx(3 * mean, rel=1e-5), 1.0)

    def first_rows(data_iterator: Any) -> tuple[Any, ...]:
        tokens = next(data_iterator)["input_ids"]
        mask = torch.zeros(tokens.shape)
        mask[:, 0] = 1
        return tokens, tokens.roll(-1, 1), mask, None, None

    def largest(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        return (output * loss_mask).max(), {}

    made: list[Any] = []

    def provide(section: Any, environment: Any) -> torch.nn.Module:
        made.append(environment.host[MODELS].get(section.family).build.load()(section, environment))
        return made[-1]

    def freeze_embeddings(provider: Any) -> torch.nn.Module:
        module = provider()
        module.embedding.requires_grad_(False)
        return module

    functions = {
        "custom_get_batch_function": first_rows,
        "custom_loss_function": largest,
        "custom_model_provider_function": provide,
        "custom_prepare_model_function": freeze_embeddings,
        "is_train_batch_min": False,
    }
    _, model = prepared(**functions)
    assert model.engine.model is made[0]
    embedding = made[0].embedding.word_embeddings.weight
    before = embedding.detach().clone()
    with torch.no_grad():
        logits = made[0](tokens=batch["input_ids"])
    expected = torch.nn.functional.cross_entropy(logits[:, 0], batch["input_ids"][:, 1], reduction="none").max()
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(embedding, before)


@pytest.mark.slow
def test_a_loss_of_the_program_is_passed_classes_and_logits_of_texts() -> None:
    def smoothed(labels: torch.Tensor, logits: torch.Tensor) -> Any:
        return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.3), {}

    batch = torch_batch("bert of classes", slice(0, ROWS))
    with torch.no_grad():
        reference = build("bert of classes").eval()(**batch)
    expected = {"loss": reference.loss.item(), "smoothed": smoothed(batch["labels"], reference.logits)[0].item()}
    own_loss = {"custom_train_step_class": ClassificationTrainStep}
    for name, field in (("loss", own_loss), ("smoothed", {"custom_loss_function": smoothed})):
        _, model = prepared("bert of classes", num_micro_batches=2, **field)
        assert model(**batch).loss.item() == pytest.approx(expected[name], rel=1e-5)


def test_the_mean_of_a_classifier_leaves_out_texts_without_a_label() -> None:
    labels, logits = torch.tensor([1, -100, 0]), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    loss, _ = mean_classification_loss(labels, logits)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    number, _ = mean_classification_loss(torch.tensor([1.0, 3.0]), torch.tensor([[2.0], [1.0]]))
    assert number.item() == pytest.approx(2.5)
    with pytest.raises(DataError, match=r"labels are \[3, 2\]"):
        mean_classification_loss(torch.zeros(3, 2), logits)


def test_the_length_of_a_decoder_is_that_of_data_sets() -> None:
    with pytest.raises(ConfigError, match="decoder_seq_length=8"):
        prepared(decoder_seq_length=8)
    model = build("t5")
    data = MegatronLMDummyDataLoader(dataset_type="t5", data_path="absent", seq_length=16)
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = MegatronLMPlugin(decoder_seq_length=8, train_iters=1)
    found = Prepared.of((model, optimizer, MegatronLMDummyScheduler(optimizer), data, data, data))
    assert data_section(found, plugin, "t5") == {
        "dataset_type": "t5",
        "data_path": ["absent"],
        "seq_length": 16,
        "decoder_seq_length": 8,
    }


def test_event_files_have_the_steps(tmp_path: Path) -> None:
    fields = {"tensorboard_dir": str(tmp_path), "set_all_logging_options": True, "return_logits": True}
    accelerator, model = prepared(num_micro_batches=2, **fields)
    batch = torch_batch("gpt2", slice(0, ROWS))
    outputs = [model(**batch) for _ in range(3)]
    assert outputs[0].logits.shape == (ROWS, 16, 96)
    model.eval()
    evaluated = model(**batch).loss.item()
    model.train()
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert found["lm loss"] == pytest.approx({number: one.loss.item() for number, one in enumerate(outputs, 1)})
    assert found["learning-rate"] == pytest.approx({1: 1e-2, 2: 1e-2 * 39 / 40, 3: 1e-2 * 38 / 40})
    assert found["lm loss validation ppl"] == pytest.approx({3: math.exp(evaluated)})
    assert found["num-zeros"].keys() == found["iteration-time"].keys() == {1, 2, 3}
