"""What `Accelerator.prepare` gives for a model: its call is a whole training step, or an evaluation."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_accelerate.batches import Fields, ToFields, fields_for
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.step_loss import KeptOutputs, StepLoss, step_batch, whole_vocabulary
from mt_accelerate.train_steps import AbstractTrainStep, BertTrainStep, GetBatch, GPTTrainStep, T5TrainStep
from mt_core.config.loading import LoadedConfig
from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import ConfigError
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader
from mt_core.train import Engine
from mt_infer.megatron_generate import megatron_generate
from mt_infer.text import TextGenerator

STEPS = {"bert": BertTrainStep, "t5": T5TrainStep}
"""Model family -> its train step; others have that of GPT."""

SPECIAL_IDS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")


@dataclass(frozen=True)
class ModelOutput:
    """loss: [], the mean over the counted tokens of all ranks. logits: [rows, S, vocabulary] with return_logits, on
    ranks of the last pipeline stage."""

    loss: Tensor
    logits: Tensor | None = None

    def __getitem__(self, key: str | int) -> Any:
        return (self.loss, self.logits)[key] if isinstance(key, int) else getattr(self, key)


class MegatronEngine:
    """The model of a program under the layout of the plugin."""

    def __init__(
        self,
        loaded: LoadedConfig,
        plugin: MegatronLMPlugin,
        weights: CheckpointReader,
        external: Mapping[str, Any],
        accelerator: Any,
        host: PluginHost,
    ) -> None:
        """external: the config.json of the program's model. Collective."""
        self.plugin, self.external, self.training = plugin, external, True
        self.handler = _train_step(loaded.config, plugin, accelerator, external)
        self._get_batch = _get_batch(self.handler, plugin, accelerator) if self.handler is not None else None
        self._step_loss: StepLoss | None = None
        self._kept: KeptOutputs | None = None
        provider = plugin.custom_model_provider_function
        # Weights that a provider's model does not have are its own.
        self.engine = Engine.build(
            loaded,
            host=host,
            model_provider=provider,
            wrap_loss=self._wrap if self.handler is not None or plugin.return_logits else None,
            weights=weights if provider is None else None,
        )
        self._fields: ToFields = fields_for(self.engine.model, external)
        self.optimizer_wrapper: Any = None
        self.last_grad_norm = 0.0
        self._evaluated: list[float] = []

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.engine.config

    @property
    def iteration(self) -> int:
        """Steps that were taken."""
        return self.engine.state.iteration

    @property
    def consumed_samples(self) -> int:
        """Of training, over all ranks."""
        return self.engine.state.consumed_samples

    def train(self, mode: bool = True) -> MegatronEngine:
        """Calls train from here on; shows what the evaluation before found."""
        if mode and not self.training:
            self.log_eval_results()
        self.training = mode
        self.engine.model.train(mode)
        return self

    def eval(self) -> MegatronEngine:
        """Calls evaluate from here on."""
        return self.train(False)

    def __call__(self, **batch: Tensor) -> ModelOutput:
        """In training one step: all micro-batches, the optimizer and the schedule. Else the loss."""
        losses = self.train_step(**batch)[0] if self.training else self.eval_step(**batch)
        return ModelOutput(losses["loss"], self._logits())

    def train_step(self, **batch: Tensor) -> tuple[dict[str, Tensor], int, float, int | None]:
        """({name: value}, 1 if the step was skipped, gradient norm before clipping, its zeros if counted)"""
        outcome = self.engine.train_step(self._rank_batch(batch))
        self.last_grad_norm = outcome.grad_norm
        if self.optimizer_wrapper is not None:
            self.optimizer_wrapper.step_was_skipped = not outcome.updated
        return self._losses(outcome.loss), int(not outcome.updated), outcome.grad_norm, outcome.zeros_in_grad

    def eval_step(self, **batch: Tensor) -> dict[str, Tensor]:
        loss = self.engine.eval_step(self._rank_batch(batch))
        self._evaluated.append(loss)
        return self._losses(loss)

    def log_eval_results(self) -> dict[str, float]:
        """The mean loss of the evaluation so far, and its perplexity; clears it."""
        if not self._evaluated:
            return {}
        mean, self._evaluated = sum(self._evaluated) / len(self._evaluated), []
        found = {"eval_loss": mean, "eval_ppl": math.exp(min(20.0, mean))}
        if self.engine.ctx.is_writer:
            print(f"validation loss at iteration {self.iteration}: {mean:.6f}, perplexity {found['eval_ppl']:.6f}")
        return found

    def save_checkpoint(self, output_dir: str) -> None:
        """As `Accelerator.save_state`."""
        self.engine.save_state(output_dir)

    def load_checkpoint(self, input_dir: str) -> None:
        """As `Accelerator.load_state`."""
        self.engine.load_state(input_dir)

    def megatron_generate(self, inputs: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """[B, S] prompts -> [B, longest] with their continuations, on every rank. Collective; see
        `mt_infer.megatron_generate`. Raises ConfigError with data parallelism and FSDP2."""
        engine = self.engine
        if engine.ctx.dp.size > 1 or engine.config.parallel.use_torch_fsdp2:
            raise ConfigError(
                f"megatron_generate needs one data-parallel rank and whole weights; there are {engine.ctx.dp.size} "
                f"ranks, use_custom_fsdp={self.plugin.use_custom_fsdp}: save_state, and mt generate takes the folder "
                "in any layout"
            )
        engine.weights.finish_gather()
        engine.model.eval()
        try:
            generator = TextGenerator.of_model(engine.model, engine.tokenizer, engine.config, engine.ctx, engine.stages)
            return _on_all_ranks(generator, lambda: megatron_generate(generator, inputs, attention_mask, **options))
        finally:
            engine.model.train(self.training)

    # -- inside -----------------------------------------------------------------------------------

    def _wrap(self, loss: Loss, config: Config, ctx: ParallelContext) -> Loss:
        if config.parallel.context_parallel_size > 1:
            raise ConfigError(
                f"context_parallel_size={ctx.cp.size}: no process has the logits of a whole sequence, which "
                "return_logits and a train step, batch function or loss of your own need; set it to 1"
            )
        if self.handler is not None:
            loss = self._step_loss = StepLoss(self.handler.get_forward_step_func(), config, ctx)
        if self.plugin.return_logits:
            loss = self._kept = KeptOutputs(loss)
        return loss

    def _logits(self) -> Tensor | None:
        if self._kept is None:
            return None
        logits = self._kept.take()
        if logits is None or hasattr(self.engine.model, "classification_head"):
            return logits
        return whole_vocabulary(logits, self.config, self.engine.ctx)

    def _rank_batch(self, batch: Mapping[str, Tensor]) -> RankBatch:
        if self._get_batch is None:
            return self.engine.rank_batch(self._used(self._fields(batch)))
        assert self.handler is not None
        values = self._get_batch(iter([batch]))
        named = {name: value for name, value in zip(self.handler.fields, values, strict=True) if value is not None}
        fields = {name: value for name, value in named.items() if name in contract(self.engine.model).inputs}
        raw = {name: value.detach().cpu().numpy() for name, value in batch.items()}
        rank_batch = self.engine.rank_batch(fields)
        return step_batch(rank_batch, lambda start, end: {name: value[start:end] for name, value in raw.items()})

    def _used(self, fields: Fields) -> Fields:
        """Without segments of a data set that masks nothing by them."""
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    def _losses(self, loss: float) -> dict[str, Tensor]:
        reports = self._step_loss.take_reports() if self._step_loss is not None else {}
        return {**reports, "loss": torch.tensor(loss, device=self.engine.device)}


def _train_step(
    config: Config, plugin: MegatronLMPlugin, accelerator: Any, external: Mapping[str, Any]
) -> AbstractTrainStep | None:
    """The program's own step, or that of the family where the program replaces a function of it; None without either.
    Raises ConfigError for a class that is no train step."""
    own = plugin.custom_train_step_class
    if own is None and plugin.custom_get_batch_function is None and plugin.custom_loss_function is None:
        return None
    kind: Any = own or STEPS.get(config.model.family, GPTTrainStep)
    if not issubclass(kind, AbstractTrainStep):
        raise ConfigError(f"custom_train_step_class={kind.__name__} is no subclass of AbstractTrainStep")
    handler: Any = kind(arguments(config, external), **(plugin.custom_train_step_kwargs or {}))
    handler.get_batch = _get_batch(handler, plugin, accelerator)
    handler.loss_func = plugin.custom_loss_function or _called(handler.get_loss_func, accelerator)
    assert isinstance(handler, AbstractTrainStep)
    return handler


def _get_batch(handler: AbstractTrainStep, plugin: MegatronLMPlugin, accelerator: Any) -> GetBatch:
    given: GetBatch | None = plugin.custom_get_batch_function
    return given or _called(handler.get_batch_func, accelerator, plugin.megatron_dataset_flag)


def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """With as many of the arguments as it takes: in Accelerate's documents these methods have none."""
    return method(*arguments[: len(signature(method).parameters)])


def arguments(config: Config, external: Mapping[str, Any]) -> Namespace:
    """All keys as attributes, as Megatron's arguments; and the ids of special tokens of the transformers model."""
    ids = {name: external.get(name) for name in SPECIAL_IDS}
    keys = {key: value for section in config.to_dict().values() for key, value in dict(section).items()}
    return Namespace(**ids, **keys)


def _on_all_ranks(generator: TextGenerator, generate: Callable[[], Tensor]) -> Tensor:
    """The first rank generates, the others take part and are given the result."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    found: list[Any] = [None]
    if world == 1 or dist.get_rank() == 0:
        try:
            found = [generate()]
        finally:
            generator.close()
    else:
        generator.follow()
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    result: Tensor = found[0]
    return result
