"""Programs as users of Accelerate's Megatron-LM plugin write them. They run on ranks: nothing slow is imported here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mt_core.specs import MODELS

STEPS, TOTAL, LR, DECAY = 3, 40, 1e-2, 0.1
GLOBAL_BATCH = 8
FAMILIES = ("gpt2", "llama", "bert", "t5")
KEY_TOKENS = (3, 5, 7)


def build(family: str, layers: int = 2) -> Any:
    """A small model of transformers with random weights, the same each time."""
    import torch
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_layer": layers, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 96}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=95))
    if family == "llama":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, intermediate_size=48, vocab_size=96, max_position_embeddings=16)
        return transformers.LlamaForCausalLM(config)
    if family == "mixtral":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        # The loss of the router's balance is one of a micro-batch, and micro-batches have other sizes in other layouts.
        experts = {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.0,
            "intermediate_size": 48,
        }
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, vocab_size=96))
    if family.startswith("bert"):
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.BertConfig(**sizes, vocab_size=96, max_position_embeddings=16)
        kinds = {"bert": transformers.BertForMaskedLM, "bert of classes": transformers.BertForSequenceClassification}
        return kinds.get(family, transformers.BertForPreTraining)(config)
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 96}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def samples(family: str, count: int = 24) -> list[dict[str, Any]]:
    """Texts of ids with padding behind them; BERT's have masked positions, T5's a target of another length."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 90, (count, 16), generator=generator)
    seen = (torch.arange(16) < torch.randint(8, 17, (count, 1), generator=generator)).long()
    labels = ids.masked_fill(seen == 0, -100)
    if family == "bert of classes":
        labels = ids[:, 0] % 2
    elif family.startswith("bert"):
        labels = labels.masked_fill(torch.rand(ids.shape, generator=generator) > 0.3, -100)
    elif family == "t5":
        labels = labels[:, :12]
    fields = {"input_ids": ids, "attention_mask": seen, "labels": labels}
    if family == "bert of pairs":
        fields["next_sentence_label"] = torch.randint(0, 2, (count,), generator=generator)
    return [{name: rows[number] for name, rows in fields.items()} for number in range(count)]


def torch_batch(family: str, rows: slice) -> dict[str, Any]:
    """Samples as one batch."""
    import torch

    found = samples(family)[rows]
    return {name: torch.stack([row[name] for row in found]) for name in found[0]}


def plugin_of(fields: Mapping[str, Any], world: int) -> tuple[Any, int, int]:
    """The plugin, its batch size and the data-parallel size: every layout has the same global batch."""
    from mt_accelerate.utils import MegatronLMPlugin

    axes = ("tp_degree", "pp_degree", "context_parallel_size")
    dp = world // math.prod(fields.get(axis, 1) for axis in axes)
    return MegatronLMPlugin(num_micro_batches=2, **fields), GLOBAL_BATCH // (2 * dp), dp


def start(family: str, fields: Mapping[str, Any], world: int, **options: Any) -> tuple[Any, ...]:
    """accelerator, model, optimizer, loader, scheduler"""
    import torch
    from torch.utils.data import DataLoader

    from mt_accelerate import Accelerator
    from mt_accelerate.utils import MegatronLMDummyScheduler

    plugin, size, dp = plugin_of({**fields, **options}, world)
    accelerator = Accelerator(megatron_lm_plugin=plugin, cpu=True)
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=TOTAL * dp, warmup_num_steps=0)
    loader = DataLoader(samples(family), batch_size=size)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def written_by_main_process(accelerator: Any, file: Path) -> None:
    """The main process writes the file before another one looks for it."""
    assert accelerator.is_last_process == accelerator.is_main_process
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            file.touch()
        assert file.exists()
    accelerator.wait_for_everyone()


def train(family: str, fields: Mapping[str, Any], world: int, folder: str) -> dict[str, Any]:
    """Losses of the steps, of an evaluation, and of the same after more steps and a restored state."""
    import torch

    accelerator, model, optimizer, loader, scheduler = start(family, fields, world, return_logits=True)
    model.train()
    losses, norms = [], []
    for batch, _ in zip(loader, range(STEPS), strict=False):
        with accelerator.accumulate(model), accelerator.autocast():
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            assert not accelerator.optimizer_step_was_skipped
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
    reduced(accelerator)
    model.eval()
    batch, second = islice(loader, 2)
    assert torch.equal(next(iter(accelerator.skip_first_batches(loader, 1)))["input_ids"], second["input_ids"])
    evaluated = model(**batch)
    accelerator.save_state(folder)
    written_by_main_process(accelerator, Path(folder) / "note")
    model.train()
    model(**batch)
    accelerator.load_state(folder)
    model.eval()
    logits = None if evaluated.logits is None else accelerator_rows(accelerator, evaluated.logits, batch["input_ids"])
    restored = accelerator.unwrap_model(model)(**batch).loss.item()
    assert accelerator.free_memory(model, optimizer) == [None, None]
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated.loss.item(),
        "restored": restored,
        "logits": logits,
        "size": accelerator.state.megatron_lm_plugin.global_batch_size,
        "main": accelerator.is_main_process,
    }


class ShiftedSamples:
    """The script's samples, again and again, as mt's data sets have them."""

    def __init__(self) -> None:
        self.rows = samples("gpt2")

    def __len__(self) -> int:
        return TOTAL * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        row = self.rows[index % len(self.rows)]
        labels = np.append(row["labels"].numpy()[1:], -100)
        return {"tokens": row["input_ids"].numpy(), "labels": labels, "loss_mask": (labels != -100).astype(np.float32)}


def trainer_losses(config: Any, folder: str, data: Any = None) -> list[float]:
    """Of `mt train` with this configuration, from the weights in the folder; rounded to float32, as a script's are."""
    import torch

    from mt_core.config.loading import LoadedConfig
    from mt_core.train import Callback, Trainer

    class Losses(Callback):
        found: list[float]

        def on_step_end(self, run: Any, metrics: Any) -> None:
            self.found.append(torch.tensor(metrics["loss"]).item())

    losses = Losses()
    losses.found = []
    keys = {"exit_iteration": STEPS, "eval_interval": None, "eval_iters": 0}
    parts = {
        "checkpoint": config.checkpoint.model_copy(update={"load": folder}),
        "train": config.train.model_copy(update=keys),
    }
    loaded = LoadedConfig(config.model_copy(update=parts), {}, None)
    Trainer(loaded, train_data=data, valid_data={}, callbacks=[losses]).train()
    return losses.found


def losses_of_mt_train(fields: Mapping[str, Any], world: int, folder: str) -> list[float]:
    """On the data and layout of the script `train("gpt2", ...)`."""
    from mt_core.parallel.context import wait_for_all

    weights = f"{folder}/weights"
    build("gpt2").save_pretrained(weights)  # transformers writes on the first rank alone
    wait_for_all()
    model = start("gpt2", fields, world)[1]
    return trainer_losses(model.config, weights, ShiftedSamples())


def accelerator_rows(accelerator: Any, logits: Any, ids: Any) -> list[list[float]]:
    """The first logits of each sample, ordered by the sample's ids: as one process has them."""
    found = zip(accelerator.gather(ids).tolist(), accelerator.gather(logits[:, 0, :5]).tolist(), strict=True)
    return [row for _, row in sorted(found)]


def weighted_step() -> type:
    """The step with a loss of its own of Accelerate's guide: samples with key tokens weigh more."""
    import torch

    from mt_accelerate.utils import GPTTrainStep, avg_losses_across_data_parallel_group

    class WeightedStep(GPTTrainStep):
        def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
            super().__init__(megatron_args)
            self.kwargs = kwargs

        def get_loss_func(self) -> Any:
            def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
                each = (output_tensor.float() * loss_mask).sum(1) / loss_mask.sum(1)
                keys = torch.stack([(inputs == key).float() for key in self.kwargs["keys"]]).sum(dim=[0, 2])
                loss = (each * (1.0 + self.kwargs["alpha"] * keys)).mean()
                return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

            return loss_func

        def get_forward_step_func(self) -> Any:
            def forward_step(data_iterator: Any, model: Any) -> Any:
                tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
                output = model(tokens, position_ids, attention_mask, labels=labels)
                return output, partial(self.loss_func, tokens, loss_mask)

            return forward_step

    return WeightedStep


def custom_loss(fields: Mapping[str, Any], world: int, family: str = "gpt2") -> dict[str, Any]:
    """Losses of steps with a loss of the program's own; what its loss function reported."""
    options = {
        "custom_train_step_class": weighted_step(),
        "custom_train_step_kwargs": {"keys": KEY_TOKENS, "alpha": 0.5},
    }
    _, model, _, loader, _ = start(family, fields, world, **options)
    found = [model.train_step(**batch)[0] for batch, _ in zip(loader, range(STEPS), strict=False)]
    return {
        "losses": [one["loss"].item() for one in found],
        "reported": [one["lm loss"].item() for one in found if "lm loss" in one],
    }


def all_samples(fields: Mapping[str, Any], world: int) -> list[int]:
    """The first ids of what `gather_for_metrics` gives of an epoch whose last batch is not full."""
    import torch
    from torch.utils.data import DataLoader

    from mt_accelerate import Accelerator

    plugin, size, _ = plugin_of(fields, world)
    accelerator = Accelerator(megatron_lm_plugin=plugin, cpu=True)
    model = build("gpt2")
    rows = [{"input_ids": torch.full((16,), number)} for number in range(21)]
    # Shuffled by the first rank's random numbers, so that the ranks' own seeds do not matter.
    loader = DataLoader(rows, batch_size=size, shuffle=True)
    model, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    return [int(row) for batch in loader for row in accelerator.gather_for_metrics(batch["input_ids"])[:, 0]]


def generate(fields: Mapping[str, Any], world: int) -> list[list[int]]:
    """Greedy continuations of two prompts after training, and after errors that the first rank alone finds."""
    import pytest
    import torch

    from mt_core.errors import ConfigError

    _, model, _, loader, _ = start("llama", fields, world)
    for batch, _ in zip(loader, range(STEPS), strict=False):
        model(**batch)
    prompts = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(ConfigError, match="give one of max_length"):
        model.megatron_generate(prompts, mask)
    with pytest.raises((TypeError, RuntimeError), match="unsupported operand"):
        model.megatron_generate(prompts, mask, max_new_tokens="4")
    return model.megatron_generate(prompts, mask, max_new_tokens=4).tolist()


class ProgramData:
    """A data set of a program: ids that follow from the number of the sample."""

    def __init__(self, count: int, offset: int = 0) -> None:
        self.count, self.offset = count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        tokens = (np.arange(17) * (index + self.offset + 3)) % 90 + 1
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(16, dtype=np.float32)}


def provided(family: str, fields: Mapping[str, Any], world: int) -> list[float]:
    """Losses of training and of an evaluation with a model and data sets of the program's own."""
    import torch

    from mt_accelerate import Accelerator
    from mt_accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

    built: list[str] = []
    counts: list[tuple[int, ...]] = []

    def model_provider(section: Any, environment: Any) -> Any:
        built.append(section.family)
        return environment.host[MODELS].get(section.family).build.load()(section, environment)

    def data_provider(samples_of_splits: tuple[int, ...]) -> tuple[Any, ...]:
        counts.append(samples_of_splits)
        return ProgramData(samples_of_splits[0]), ProgramData(samples_of_splits[1], 7), None

    own = {
        "custom_megatron_datasets_provider_function": data_provider,
        "custom_model_provider_function": model_provider,
    }
    plugin, size, dp = plugin_of({**fields, **own, "eval_iters": 1}, world)
    accelerator = Accelerator(megatron_lm_plugin=plugin, cpu=True)
    model = build(family, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=TOTAL * dp)
    data = MegatronLMDummyDataLoader(micro_batch_size=size, seq_length=16)
    model, _, _, train, valid, _ = accelerator.prepare(model, optimizer, scheduler, data, data, data)
    assert built
    assert counts == [(TOTAL * GLOBAL_BATCH, GLOBAL_BATCH, GLOBAL_BATCH)]
    losses = [model(**next(train)).loss.item() for _ in range(STEPS)]
    return [*losses, model.eval()(**next(valid)).loss.item()]


def own_batches(fields: Mapping[str, Any], world: int, family: str = "gpt2") -> list[float]:
    """Losses with a batch function and a loss of the program's own: the second half of each sample counts."""

    def get_batch(data_iterator: Any) -> tuple[Any, ...]:
        import torch

        tokens = next(data_iterator)["input_ids"]
        mask = (torch.arange(tokens.shape[1]) >= 8).float().expand(tokens.shape).contiguous()
        return tokens, tokens.roll(-1, 1), mask, None, None

    def loss_of(loss_mask: Any, output_tensor: Any) -> Any:
        return (output_tensor.float() * loss_mask).sum() / loss_mask.sum(), {}

    functions = {"custom_get_batch_function": get_batch, "custom_loss_function": loss_of}
    _, model, _, loader, _ = start(family, fields, world, **functions)
    return [model(**batch).loss.item() for batch, _ in zip(loader, range(STEPS), strict=False)]


class Named(NamedTuple):
    """As transformers and torch return several values."""

    inner: Any


def reduced(accelerator: Any) -> None:
    """Sums, means and paddings over data-parallel ranks, of nested values."""
    import torch

    own = Named({"value": torch.tensor([1.0 + accelerator.process_index])})
    rows = accelerator.gather(own).inner["value"]
    assert torch.equal(accelerator.reduce(own).inner["value"], rows.sum()[None])
    assert torch.equal(accelerator.reduce(own, "mean", 2.0).inner["value"], 2 * rows.mean()[None])
    longest = int(rows.max())
    ragged = torch.ones(1, int(own.inner["value"]))
    padded = accelerator.pad_across_processes(Named([ragged]), dim=1, pad_index=-1, pad_first=True).inner[0]
    assert padded.shape == (1, longest)
    assert padded.sum() == 2 * ragged.numel() - longest


def everything(rank: int, world: int, case: tuple[Mapping[str, Any], str]) -> dict[str, Any]:
    """case: fields of the plugin, and a folder for checkpoints."""
    fields, folder = case
    _, _, dp = plugin_of(fields, world)
    families = FAMILIES if dp == 1 else FAMILIES[:1]  # what data-parallel ranks shard does not depend on the family
    found: dict[str, Any] = {family: train(family, fields, world, f"{folder}/{family}") for family in families}
    found["custom"] = custom_loss(fields, world)
    found["own batches"] = own_batches(fields, world)
    found["samples"] = all_samples(fields, world)
    found["generated"] = generate(fields, world) if dp == 1 else None
    found["mt train"] = losses_of_mt_train(fields, world, folder)
    return found


def families_and_styles(
    rank: int, world: int, families: Sequence[str], fields: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Losses of each family, of a loss and of batches of the program's own."""
    found = {family: train(family, fields, world, f"{folder}/{family}")["losses"] for family in families}
    return {**found, "custom": custom_loss(fields, world)["losses"], "own batches": own_batches(fields, world)}


def all_provided(rank: int, world: int, layouts: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """With models and data sets of the program."""
    found: dict[str, Any] = {name: provided(family, fields, world) for name, (family, fields) in layouts.items()}
    for name, (family, fields) in layouts.items():
        if family == "mixtral":
            found[name] += own_batches(fields, world, family)
            found[name] += custom_loss(fields, world, family)["losses"]
    found["refused"] = refusal(world, {"context_parallel_size": 2}) if world > 1 else None
    return found


def refusal(world: int, fields: Mapping[str, Any]) -> str:
    """Of a loss of the program's own."""
    from mt_core.errors import ConfigError

    try:
        own_batches(fields, world)
    except ConfigError as error:
        return str(error)
    return ""


def train_on_files(prefix: str, fields: Mapping[str, Any], world: int) -> list[float]:
    """Losses of a few steps and an evaluation on token files of `mt data preprocess`, whose ids are bytes."""
    import torch
    import transformers

    from mt_accelerate import Accelerator
    from mt_accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 264, "eos_token_id": 256}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=256))
    # The scheduler's steps are divided by the data-parallel size, and the order of samples follows from the length.
    plugin, size, _ = plugin_of({**fields, "train_iters": TOTAL}, world)
    accelerator = Accelerator(megatron_lm_plugin=plugin, cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=TOTAL)
    data = MegatronLMDummyDataLoader(data_path=prefix, splits_string="90,5,5", seq_length=16, micro_batch_size=size)
    model, _, _, train, valid, _ = accelerator.prepare(model, optimizer, scheduler, data, data, data)
    losses = [model(**next(train)).loss.item() for _ in range(STEPS)]
    model.eval()
    return [*losses, model(**next(valid)).loss.item()]
