"""What `Accelerator.prepare` gives for a model: its call is a whole training step, or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_accelerate.megatron_lm.accumulation import AccumulatedStep, ProgramStep
from mt_accelerate.megatron_lm.batches import ToFields, fields_for
from mt_accelerate.megatron_lm.optimizers import keys_and_decays, programs_rate
from mt_accelerate.megatron_lm.random_states import EngineRandom, with_engine_random
from mt_accelerate.megatron_lm.step_loss import StepLoss, step_batch
from mt_accelerate.megatron_lm.train_steps import batch_function, build_handler
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.operations import is_first_rank, on_first_rank
from mt_accelerate.state import GradientState
from mt_accelerate.tracking import TrainingRecord
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import LoadedConfig
from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import ConfigError
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train import Engine
from mt_core.train.build import ModelProvider
from mt_core.train.step.optimizer_step import StepOutcome
from mt_infer.megatron_generate import megatron_generate
from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class ModelOutput:
    """loss: [], the mean over the counted tokens of all ranks. logits: [rows, S, vocabulary] with return_logits, on
    ranks of the last pipeline stage."""

    loss: Tensor
    logits: Tensor | None = None
    """None without return_logits, and on other ranks."""

    def __getitem__(self, key: str | int) -> Any:
        return (self.loss, self.logits)[key] if isinstance(key, int) else getattr(self, key)


class _Computed(torch.autograd.Function):
    """A loss whose backward passes have run. scaled_by: takes the factor with which the program gives it to
    `backward`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, scaled_by: Callable[[float], None]) -> Tensor:
        ctx.scaled_by = scaled_by
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.scaled_by(grads[0].item())
        return None, None, None


def _require_unscaled(factor: float) -> None:
    # The gradients are those of the loss itself: a factor of the program would be left out without a word.
    if factor != 1.0:
        raise ConfigError(
            f"the program scales the loss by {factor:g} before backward(), and with Megatron-LM the "
            "model's call has run the backward passes; accumulate with Accelerator(gradient_accumulation_steps=...)"
            " and `with accelerator.accumulate(model)`, which divide by the number of batches, or call the model in "
            "`with accelerator.no_sync(model)` for all batches of a step but the last"
        )


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
        # None for most programs: the engine then reads batches by `fields_for` and trains on the model's own loss.
        self.handler = build_handler(loaded.config, plugin, accelerator, external, host)
        self._get_batch = batch_function(self.handler, plugin, accelerator) if self.handler is not None else None
        self._step_loss: StepLoss | None = None
        provider = _model_provider(plugin)
        # Weights that a provider's model does not have are its own.
        self.engine = Engine.build(
            loaded,
            host=host,
            model_provider=provider,
            # With a train step of the program the loss is a scalar of each
            # micro-batch, which needs logits of the whole vocabulary.
            wrap_loss=self._wrap if self.handler is not None else None,
            weights=weights if provider is None else None,
            return_logits=plugin.return_logits,
        )
        # From the model that was built, which a provider may have replaced, and not from the configuration's family.
        self._fields: ToFields = fields_for(self.engine.model, external, eod_mask_loss=plugin.eod_mask_loss)
        _require_means(plugin, self.engine)
        self._record = (
            TrainingRecord(self.engine, with_speed=plugin.set_all_logging_options)
            if plugin.tensorboard_dir is not None
            else None
        )
        self.optimizer_wrapper: Any = None
        self.random: EngineRandom | None = None
        """None while it is built: the generator then has the engine's state."""
        self.gradients: GradientState | None = None
        """The state of the Accelerator that prepared the model."""
        self.program_optimizer: Any = None
        """The optimizer of the program, whose rate each step has; None: the engine's schedule decides it."""
        self._prepared_keys: dict[str, Any] = {}
        """What `keys_and_decays` said of it then."""
        self._accumulated: AccumulatedStep | None = None
        self._program_step: ProgramStep | None = None
        self._clipped = self._in_no_sync = False
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
        """Training samples so far, over all ranks."""
        return self.engine.state.consumed_samples

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The shards of this rank, of its pipeline stage."""
        return self.engine.model.parameters(recurse)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with mt's names."""
        return self.engine.model.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of this rank, with mt's names. `Accelerator.save_model` writes the whole ones."""
        return self.engine.model.state_dict()

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        """Raises ConfigError: programs call it on one process, and every process has a part of the weights."""
        raise ConfigError(
            f"save_pretrained({save_directory!r}): every process has a part of the weights; let all processes call "
            "accelerator.save_model(model, DIR), whose folder from_pretrained loads"
        )

    def train(self, mode: bool = True) -> MegatronEngine:
        """Sets training mode: calls of the engine are training steps. Shows what the evaluation before found."""
        if mode and not self.training:
            self.log_eval_results()
        self.training = mode
        self.engine.model.train(mode)
        return self

    def eval(self) -> MegatronEngine:
        """Sets evaluation mode: calls of the engine return the loss and change no weights."""
        return self.train(False)

    @with_engine_random
    def __call__(
        self, *, num_items_in_batch: float | Tensor | None = None, use_cache: bool | None = None, **batch: Tensor
    ) -> ModelOutput:
        """In training one step: all micro-batches, the optimizer and the schedule. Else the loss.

        With num_items_in_batch, and in `no_sync` and after it, passes of a step that the program's `optimizer.step()`
        ends; the loss is then the sum over this rank's tokens divided by num_items_in_batch. use_cache: without effect.
        """
        if not self.training:
            self._require_no_count(num_items_in_batch, "an evaluation")
            return ModelOutput(self.eval_step(**batch)["loss"], self.engine.take_logits())
        if num_items_in_batch is None and not self._accumulates_itself:
            return self._output(self.train_step(**batch)[0]["loss"], _require_unscaled)
        step = self._step_of_program()
        loss = step.add(self._rank_batch(batch), None if num_items_in_batch is None else float(num_items_in_batch))
        return self._output(self._losses(loss)["loss"], step.scaled_by)

    def _output(self, loss: Tensor, scaled_by: Callable[[float], None]) -> ModelOutput:
        handle: Tensor = _Computed.apply(torch.zeros((), requires_grad=True), loss, scaled_by)
        return ModelOutput(handle, self.engine.take_logits())

    # -- steps of a program that accumulates itself -----------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls of the model add to a step that `optimizer.step()` ends."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    @property
    def _accumulates_itself(self) -> bool:
        if self.gradients is not None and self.gradients.in_accumulation and self._program_step is None:
            return False  # `accumulate` says where a step ends
        return self._in_no_sync or self._program_step is not None

    def _step_of_program(self) -> ProgramStep:
        if self._clipped:
            raise ConfigError(
                "the model is called after clip_grad_norm_ without an optimizer.step() between them; with Megatron-LM "
                "clip_grad_norm_ has updated the weights, and a step cannot be left out after it"
            )
        if self._program_step is None:
            if self.handler is not None:
                self._require_no_count(1, "a train step, batch function or loss of the program")
            self._program_step = ProgramStep(self.engine, 1 if self.gradients is None else self.gradients.num_steps)
        return self._program_step

    def follow(self, optimizer: Any) -> None:
        """Take the rate of each step from the program's optimizer, where it or a scheduler of torch sets it."""
        self.program_optimizer, self._prepared_keys = optimizer, keys_and_decays(optimizer)
        # The whole model would stay in memory beside the shards that are trained: the first group shows those.
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = list(self.parameters()) if number == 0 else []

    def _require_no_count(self, count: Any, where: str) -> None:
        if count is not None:
            raise ConfigError(f"num_items_in_batch and no_sync cannot be given with {where}: leave them out")

    @with_engine_random
    def finish_program_step(self, *, clipped: bool = False) -> None:
        """Update the weights by the batches that the program has summed, if there are any. clipped: before the
        program's `optimizer.step()`, which then changes nothing."""
        step, self._program_step = self._program_step, None
        if step is not None:
            self._keep(step.finish(self._learning_rate()))
        self._clipped = clipped and (step is not None or self._clipped)

    def drop_program_step(self) -> None:
        """Forget the batches that the program has summed: it clears the gradients before an update."""
        self._program_step = None

    # -- whole steps --------------------------------------------------------------------------------

    @with_engine_random
    def train_step(self, **batch: Tensor) -> tuple[dict[str, Tensor], int, float, int | None]:
        """({name: value}, 1 if the step was skipped, gradient norm before clipping, its zeros if counted)"""
        # One call is a whole step: `backward`, `optimizer.step` and
        # `scheduler.step` of the program do nothing afterwards.
        if self.gradients is not None and self.gradients.num_steps > 1:
            return self._accumulate(self._rank_batch(batch))
        record = self.engine.launch_step(self._rank_batch(batch), self._learning_rate())
        # Waits for the device: programs read the loss and the gradient norm right after the call.
        outcome = record.pending.result()
        if self._record is not None:
            self._record.add_step(record, outcome)
        return self._losses(outcome.loss), *self._keep(outcome)

    def _keep(self, outcome: StepOutcome) -> tuple[int, float, int | None]:
        self.last_grad_norm = outcome.grad_norm
        if self.optimizer_wrapper is not None:
            self.optimizer_wrapper.step_was_skipped = not outcome.updated
        return int(not outcome.updated), outcome.grad_norm, outcome.zeros_in_grad

    def _learning_rate(self) -> float | None:
        """What the program or its scheduler has set; None: the engine's schedule."""
        return None if self.program_optimizer is None else programs_rate(self.program_optimizer, self._prepared_keys)

    def _accumulate(self, batch: RankBatch) -> tuple[dict[str, Tensor], int, float, int | None]:
        """A batch of several of one step; updates the weights with the last one."""
        gradients = self.gradients
        assert gradients is not None
        if not gradients.in_accumulation:
            raise ConfigError(
                f"gradient_accumulation_steps={gradients.num_steps}: call the model within "
                "`with accelerator.accumulate(model)`, which says which batch ends a step"
            )
        if self._accumulated is None:
            left = gradients.active_dataloader.batches_left if gradients.in_dataloader else gradients.num_steps
            batches = min(gradients.num_steps, left) if gradients.sync_with_dataloader else gradients.num_steps
            self._accumulated = AccumulatedStep(self.engine, gradients.num_steps, batches)
        loss = self._accumulated.add(batch)
        if not gradients.sync_gradients:
            return self._losses(loss), 0, self.last_grad_norm, None
        step, self._accumulated = self._accumulated, None
        return self._losses(loss), *self._keep(step.finish(self._learning_rate()))

    @with_engine_random
    def eval_step(self, **batch: Tensor) -> dict[str, Tensor]:
        loss = self.engine.eval_step(self._rank_batch(batch))
        self._evaluated.append(loss)
        return self._losses(loss)

    def log_eval_results(self) -> dict[str, float]:
        """The mean loss of the evaluation so far, and its perplexity; clears it."""
        if not self._evaluated:
            return {}
        mean, self._evaluated = sum(self._evaluated) / len(self._evaluated), []
        # Bounded as in Megatron: exp(20) is far above any vocabulary, and exp of an early loss may overflow.
        results = {"eval_loss": mean, "eval_ppl": math.exp(min(20.0, mean))}
        if self._record is not None:
            self._record.add_evaluation(mean)
        if self.engine.ctx.is_writer:
            print(f"validation loss at iteration {self.iteration}: {mean:.6f}, perplexity {results['eval_ppl']:.6f}")
        return results

    @with_engine_random
    def save_checkpoint(self, output_dir: str) -> None:
        """Does what `Accelerator.save_state` does for the model."""
        self.engine.save_state(output_dir, with_optimizer=not self.plugin.no_save_optim)

    @with_engine_random
    def load_checkpoint(self, input_dir: str) -> None:
        """Does what `Accelerator.load_state` does for the model."""
        self.engine.load_state(input_dir, with_optimizer=not self.plugin.no_load_optim)

    def close(self) -> None:
        """Closes the event files of tensorboard_dir."""
        if self._record is not None:
            self._record.close()

    @with_engine_random
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
        # The distributed optimizer may still be gathering the weights of the last step.
        engine.weights.finish_gather()
        engine.model.eval()
        try:
            # On every rank, since the pages of the cache are made for the shards of each.
            generator = TextGenerator.of_model(engine.model, engine.tokenizer, engine.config, engine.ctx, engine.stages)
            return _on_all_ranks(generator, lambda: megatron_generate(generator, inputs, attention_mask, **options))
        finally:
            # As the program left it, and not `True`: generation may be called within an evaluation.
            engine.model.train(self.training)

    # -- inside -----------------------------------------------------------------------------------

    def _wrap(self, loss: Loss, config: Config, ctx: ParallelContext) -> Loss:
        if ctx.cp.size > 1:
            raise ConfigError(
                f"context_parallel_size={ctx.cp.size}: no process has the logits of a whole sequence, which a "
                "program's train step, batch function or loss and calculate_per_token_loss=False need; set it to 1"
            )
        assert self.handler is not None
        self._step_loss = StepLoss(self.handler.get_forward_step_func(), config, ctx, lambda: self.engine.model)
        return self._step_loss

    def _rank_batch(self, batch: Mapping[str, Tensor]) -> RankBatch:
        if self._get_batch is None:
            return self.engine.rank_batch(self._fields(batch))
        assert self.handler is not None
        # Train steps take an iterator over batches, as in Megatron; a call of the model has one.
        values = self._get_batch(iter([batch]))
        named = {name: value for name, value in zip(self.handler.fields, values, strict=True) if value is not None}
        fields = {name: value for name, value in named.items() if name in contract(self.engine.model).inputs}
        # The forward step reads the program's batch again, micro-batch by micro-batch, so that its own rows go along.
        raw = {name: value.detach().cpu().numpy() for name, value in batch.items()}
        rank_batch = self.engine.rank_batch(fields)
        return step_batch(rank_batch, lambda start, end: {name: value[start:end] for name, value in raw.items()})

    def _losses(self, loss: float) -> dict[str, Tensor]:
        reports = self._step_loss.take_reports() if self._step_loss is not None else {}
        return {**reports, "loss": torch.tensor(loss, device=self.engine.device)}


def _require_means(plugin: MegatronLMPlugin, engine: Engine) -> None:
    """Raises ConfigError for a classifier without calculate_per_token_loss: its loss has no tokens to take means of."""
    if not plugin.calculate_per_token_loss and hasattr(engine.model, "classification_head"):
        raise ConfigError(
            "MegatronLMPlugin(calculate_per_token_loss=False) takes the mean of each micro-batch's tokens, and a "
            "classifier's loss has one value for each text; leave the field out"
        )


def _model_provider(plugin: MegatronLMPlugin) -> ModelProvider | None:
    """What builds the model in place of its family, None for the family itself."""
    provider, prepare = plugin.custom_model_provider_function, plugin.custom_prepare_model_function
    if provider is None or prepare is None:
        return provider
    # The program's function takes a provider without arguments; the engine calls with [model] and the environment.
    return lambda section, environment: prepare(partial(provider, section, environment))


def _on_all_ranks(generator: TextGenerator, generate: Callable[[], Tensor]) -> Tensor:
    """The first rank generates, the others take part and are given the result, or its error."""

    def generate_and_close() -> Tensor:
        try:
            return generate()
        finally:
            # Followers leave their loop when the first rank closes; without it they would wait after an error.
            generator.close()

    if not is_first_rank():
        generator.follow()
    return on_first_rank(generate_and_close)
