"""Text in, text out: the engine with a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mt_core.config.parallel import ParallelConfig
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import build
from mt_core.train.engine import Engine
from mt_core.train.pipelining import Stages, build_stages
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.adapters import build_adapter_set
from mt_infer.completions import BestOf, Completion, TextEvent
from mt_infer.config import InferenceConfig
from mt_infer.detokenizer import Detokenizer
from mt_infer.engine import InferenceEngine
from mt_infer.job_record import checkpoint_fingerprint
from mt_infer.lm_head import store_by_columns
from mt_infer.lockstep import LockstepEngine
from mt_infer.prompts import Prompt, PromptEncoder
from mt_infer.quantization.weights import quantize_weights
from mt_infer.refit import Refit
from mt_infer.requests import TEXT_FAILED, FinishReason, TokenEvent
from mt_infer.runner import placed_stages
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.speculation.building import DraftModel, load_draft_model

log = logging.getLogger(__name__)


class TextGenerator:
    """Generates text. `generate` and `stream` serve one caller; `submit` and `step` many at a time.

    With several ranks, rank 0 makes these calls, and the others `follow`. Close it to let them go.
    """

    def __init__(self, engine: LockstepEngine, tokenizer: Tokenizer, config: Config) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.prompts = PromptEncoder(tokenizer, config, engine.engine.runner.model.conditioned_by)
        self._open: dict[tuple[int, int], Detokenizer] = {}
        self._refit: Refit | None = None
        self._best: dict[int, BestOf] = {}
        self._has_stepped = False
        self._kept: list[TextEvent] = []
        """Events of requests that were open while `generate` or `stream` stepped the engine for another."""
        self.checkpoint: Path | None = None
        """That the weights are from; None without one."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        host: PluginHost | None = None,
        device: str = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> TextGenerator:
        """From a run directory or a checkpoint of any format.

        settings: section -> values in place of the checkpoint's; those of "inference" configure the engine, and
        "parallel" is the layout of the ranks that call this together. Raises CheckpointError and ConfigError.
        """
        host = host or load_plugins()
        trained = load_trained_model(path, host, device=device, settings=settings)
        return cls.of_trained(trained, host, device=device, settings=settings)

    @classmethod
    def of_trained(
        cls,
        trained: TrainedModel,
        host: PluginHost,
        *,
        device: str = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> TextGenerator:
        """Generator of a model that was loaded with these settings: its weights are stored for decoding, and its draft
        model is loaded."""
        # Order: weights are quantized and stored first, so that the cache is sized by the memory that they leave free.
        prepare_weights(trained)
        longest = longest_sequence(trained.config, trained.model)
        draft = load_draft_model(trained, longest, host, device=device, settings=settings or {})
        generator = cls.of_model(trained.model, trained.tokenizer, trained.config, trained.ctx, trained.stages, draft)
        generator.checkpoint = trained.checkpoint
        return generator

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: Config,
        ctx: ParallelContext,
        stages: Stages | None = None,
        draft_model: DraftModel | None = None,
    ) -> TextGenerator:
        """Generator of a model in memory, in the layout and with the weights that it has. stages: of its pipeline."""
        engine = InferenceEngine(
            model,
            tokenizer,
            ctx,
            config.section(InferenceConfig),
            longest=longest_sequence(config, model),
            placed=placed_stages(stages, ctx),
            draft_model=draft_model,
            batch_invariant=config.numerics.batch_invariant,
        )
        return cls(LockstepEngine(engine), tokenizer, config)

    @classmethod
    def of_engine(cls, training: Engine, parallel: Mapping[str, Any] | None = None) -> TextGenerator:
        """Generates with the weights of a training engine (`trainer.engine`). After steps of training call `refit`.
        Collective over the world.

        parallel: the section [parallel] of a layout of its own, in which the engine has a copy of the weights. Default:
        the training engine's layout, and its memory; FSDP2, which keeps weights in pieces, needs a layout. Raises
        ConfigError for that, for inference.quantize_weights and for a draft model.
        """
        refuse_quantized_training(training.config.section(InferenceConfig))
        refuse_draft_model_in_training(training.config.section(InferenceConfig))
        if parallel is None:
            # Without a layout of its own generation computes with the modules that are trained, whose weights FSDP2
            # reshards between layers.
            if training.config.parallel.use_torch_fsdp2:
                raise ConfigError(
                    "parallel.use_torch_fsdp2=true keeps pieces of weights on each rank; give a layout for generation, "
                    'such as parallel={"tensor_model_parallel_size": 1}'
                )
            return cls.of_model(training.model, training.tokenizer, training.config, training.ctx, training.stages)
        # A second model in the same world: another mesh over the same ranks, and weights of its own.
        config = with_parallel(training.config, parallel)
        ctx = build.build_context(config, training.device)
        stages = build_stages(config, ctx, training.host)
        model = build.build_model(config, ctx, training.host, None if stages is None else stages.own)
        generator = cls.of_model(model, training.tokenizer, config, ctx, stages)
        # Collective, and with a check that both models have the same weights: before the first request.
        generator._refit = Refit(training.weights, training.layouts, training.ctx, model, ctx)
        generator.refit(training)
        return generator

    def refit(self, training: Engine) -> None:
        """Takes over the weights of the training engine after a step. Collective over the world; no request may be
        running."""
        # First, since it raises on all ranks while requests run, before weights are touched.
        self.engine.weights_changed()
        # A generator that shares the trained modules reads their weights in place: they must have arrived.
        training.weights.finish_gather()
        if self._refit is not None:
            self._refit()

    # -- many requests at a time ------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        adapter: str | None = None,
    ) -> int:
        """The number of the new request. Raises ConfigError for one that cannot be served. See PromptEncoder.encode.
        adapter: a name of `load_adapter`; None: the base alone."""
        sampling = sampling or SamplingParameters()
        self._check_tokens(sampling)
        if not sampling.ignore_eod:
            # An encoder-decoder's text ends with eos; the tokenizer's end of document may be another token.
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.prompts.end_tokens()))
        best = BestOf(sampling) if sampling.best_of is not None else None
        tokens, beside = self.prompts.encode(prompt, inputs or {})
        request = self.engine.add(tokens, sampling if best is None else best.generated, beside, adapter)
        # All sequences among which the best are chosen, or n beams: whatever has events.
        for index in range(sampling.sequences):
            self._open[request, index] = Detokenizer(self.tokenizer, sampling.stop)
        if best is not None:
            self._best[request] = best
        return request

    def load_adapter(self, name: str, folder: Path, host: PluginHost | None = None) -> None:
        """Let requests name the adapter of a PEFT folder, also while others run. On every rank before the first step,
        later on one process alone. Raises ConfigError and CheckpointError for one that is not of this model."""
        engine = self.engine.engine
        if engine.adapters is None:
            engine.use_adapters(build_adapter_set(engine.model, self.config, engine.ctx, host or load_plugins()))
        (self.engine if self._has_stepped else engine).load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Raises ConfigError for one that is not there, and while requests with it run."""
        self.engine.unload_adapter(name)

    def compile_constraint(self, sampling: SamplingParameters) -> None:
        """Compiles the constraint of a request to come, in seconds for a large one; from any thread. `submit`
        then has it.

        Raises ConfigError for a constraint that is not valid.
        """
        self.engine.engine.new_sequences.constraints.matcher(sampling)

    def step(self) -> list[TextEvent]:
        """What one forward pass brings; of a request for the best of several sequences, all with its end. Before it,
        what came of open requests while `generate` and `stream` served others."""
        kept, self._kept = self._kept, []
        # Also without work: other ranks wait in each step of a server.
        return [*kept, *self._stepped()]

    def _stepped(self) -> list[TextEvent]:
        self._has_stepped = True
        events = [text for event in self.engine.step() if (text := self._text(event)) is not None]
        return [chosen for event in events for chosen in self._chosen(event)]

    def _chosen(self, event: TextEvent) -> list[TextEvent]:
        best = self._best.get(event.request)
        if best is None:
            return [event]
        chosen = best.add(event)
        if chosen:
            del self._best[event.request]
        return chosen

    def cancel(self, request: int) -> None:
        self.engine.cancel(request)
        self._best.pop(request, None)
        self._kept = [event for event in self._kept if event.request != request]
        for key in [key for key in self._open if key[0] == request]:
            del self._open[key]

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle and not self._kept

    @property
    def longest(self) -> int:
        """Positions of a sequence, prompt included."""
        return self.engine.engine.longest

    @property
    def model(self) -> nn.Module:
        """The model, with the weights that the engine computes with."""
        return self.engine.engine.model

    @property
    def ctx(self) -> ParallelContext:
        """The layout of the model, and its device."""
        return self.engine.ctx

    # -- one caller -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParameters | Sequence[SamplingParameters] | None = None,
        inputs: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[list[Completion]]:
        """For each prompt its n sequences. sampling: the same for all, or one for each. inputs: what the model takes
        beside text, of each prompt.

        Requests that are open already go on meanwhile; their events are those of the next `step`.
        """
        each = sampling if isinstance(sampling, Sequence) else [sampling or SamplingParameters()] * len(prompts)
        beside = inputs or [{}] * len(prompts)
        # All at once: the engine batches them.
        numbers = [self.submit(*request) for request in zip(prompts, each, beside, strict=True)]
        completions = {
            number: [Completion() for _ in range(parameters.n)]
            for number, parameters in zip(numbers, each, strict=True)
        }
        for event in self._events_of(completions):
            completions[event.request][event.index].add(event)
        return [completions[number] for number in numbers]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Iterator[str]:
        """The text of one sequence, as it comes. Ending the iteration cancels the request.

        Raises ConfigError for several sequences, for one that is chosen among several at their end, and for a
        constraint that cannot be followed to its end.
        """
        refuse_to_stream(sampling or SamplingParameters())
        request = self.submit(prompt, sampling, inputs)
        try:
            for event in self._events_of([request]):
                if event.text:
                    yield event.text
                if event.error is not None:
                    raise ConfigError(event.error)
        finally:
            self.cancel(request)

    def _events_of(self, requests: Iterable[int]) -> Iterator[TextEvent]:
        """Steps until these requests have ended. Events of others are kept for their callers."""
        awaited = set(requests)
        while not self.engine.is_idle and any(request in awaited for request, _ in self._open):
            yield from self._taken(awaited)
            self._kept += self._stepped()
        yield from self._taken(awaited)

    def _taken(self, requests: Set[int]) -> list[TextEvent]:
        """The kept events of these requests, which are kept no longer."""
        mine = [event for event in self._kept if event.request in requests]
        self._kept = [event for event in self._kept if event.request not in requests]
        return mine

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """The log-probability of each token of each text but its first, given those before it."""
        # No token is generated; the probabilities of the prompt are taken of its prefill.
        scoring = SamplingParameters(max_tokens=0, prompt_logprobs=0)
        completions = [of_prompt[0] for of_prompt in self.generate(prompts, scoring)]
        return [
            [logprobs.token for logprobs in (completion.prompt_logprobs or ())[1:] if logprobs is not None]
            for completion in completions
        ]

    # -- several ranks ----------------------------------------------------------------------------

    def follow(self) -> None:
        """On ranks other than 0: takes part until rank 0 closes."""
        self.engine.follow()

    def close(self) -> None:
        self.engine.close()

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; an empty text starts a document. Raises ConfigError for ids that the model lacks."""
        return self.prompts.tokens(prompt)

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of the checkpoint's files, all of which are read; None without a checkpoint."""
        return None if self.checkpoint is None else checkpoint_fingerprint(self.checkpoint)

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.config.model.vocab_size or self.tokenizer.vocab_size

    def _check_tokens(self, sampling: SamplingParameters) -> None:
        for name, token in sampling.named_tokens():
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"{name} has the token {token}; ids go from 0 to {self.vocab_size - 1}")

    def _text(self, event: TokenEvent) -> TextEvent | None:
        key = event.request, event.index
        detokenizer = self._open.get(key)
        # The sequence ended with a stop text in the events of this step, and the rest of its drafts follow, or it was
        # cancelled.
        if detokenizer is None:
            return None
        try:
            return self._decoded(event, detokenizer)
        except Exception:
            # Of a tokenizer, with the tokens of this sequence: the others go on.
            log.exception("a request failed as its tokens were decoded")
            self.engine.finish(*key)
            del self._open[key]
            return TextEvent(*key, "", event.token, event.logprobs, FinishReason.ERROR, error=TEXT_FAILED)

    def _decoded(self, event: TokenEvent, detokenizer: Detokenizer) -> TextEvent:
        key = event.request, event.index
        text = "" if event.token is None else detokenizer.add(event.token)
        finish = event.finish
        # The engine ends sequences by tokens. Stop texts are found here, and their sequences ended afterwards.
        if detokenizer.stopped_by is not None and finish is None:
            self.engine.finish(*key)
        # Also where the token that completed the stop text was the last one by length.
        if detokenizer.stopped_by is not None:
            finish = FinishReason.STOP
        if finish is not None:
            text += detokenizer.finish()
            del self._open[key]
        return TextEvent(
            *key, text, event.token, event.logprobs, finish, event.prompt_logprobs, event.score, event.error
        )


def refuse_to_stream(sampling: SamplingParameters) -> None:
    """Raises ConfigError for what is known only at the end of several sequences."""
    for name, several in (
        ("num_beams", sampling.num_beams > 1),
        ("best_of", sampling.best_of is not None),
        ("n", sampling.n > 1),
    ):
        if several:
            raise ConfigError(
                f"{name}={getattr(sampling, name)} makes several sequences, and one can be streamed; leave out one or "
                "the other"
            )


def refuse_quantized_training(options: InferenceConfig) -> None:
    if options.quantize_weights is not None:
        raise ConfigError(
            f'inference.quantize_weights="{options.quantize_weights}" replaces weights that training changes; leave it '
            "out, or load a checkpoint of the run with it (TextGenerator.load)"
        )


def refuse_draft_model_in_training(options: InferenceConfig) -> None:
    if options.speculative_method == "draft_model":
        raise ConfigError(
            'inference.speculative_method="draft_model" loads a second model beside the one that is trained; leave it '
            "out, or load a checkpoint of the run with it (TextGenerator.load)"
        )


def prepare_weights(trained: TrainedModel) -> None:
    """In place, as an engine on a loaded checkpoint has them: inference.quantize_weights, and the LM head for a CPU."""
    if trained.ctx.device.type == "cpu" and not trained.config.numerics.batch_invariant:
        store_by_columns(trained.model)
    quantize_weights(trained.model, trained.config.section(InferenceConfig))


def with_parallel(config: Config, parallel: Mapping[str, Any]) -> Config:
    """The configuration in another layout."""
    return config.model_copy(update={"parallel": ParallelConfig.model_validate(parallel)})


def longest_sequence(config: Config, model: Any) -> int:
    """inference.max_sequence_length, within the model's positions. Raises ConfigError for more than these."""
    positions: int | None = model.max_sequence_length
    asked = config.section(InferenceConfig).max_sequence_length
    if asked is not None and positions is not None and asked > positions:
        raise ConfigError(
            f"inference.max_sequence_length={asked}, but the model has {positions} positions; it can be at most that"
        )
    # A model without a limit (recurrent, or without positions): the length it was trained with.
    return asked or positions or config.data.seq_length
