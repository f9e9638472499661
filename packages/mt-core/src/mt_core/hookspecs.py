"""The hooks of mt. A plugin is a module named under the entry-point group `mt` that implements some of them:

    # pyproject.toml                          # my_plugin/plugin.py
    [project]                                 from mt_core import Lazy, TokenizerSpec, hookimpl
    dependencies = ["mt-core>=0.1,<0.2"]
    [project.entry-points.mt]
    my-plugin = "my_plugin.plugin"            @hookimpl
                                              def mt_register_tokenizers():
                                                  return [TokenizerSpec(name="mine", ...)]

Implementations may take fewer arguments than the hook has; hooks only ever gain arguments.
A plugin module should import nothing heavy: specs point to code with `Lazy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mt_core.specs import (
        AttentionBackendSpec,
        CallbackSpec,
        CheckpointLoaderSpec,
        CheckpointSaverSpec,
        CommandSpec,
        ContextParallelMethodSpec,
        DatasetSpec,
        EvaluatorSpec,
        FeedForwardSpec,
        KeyNamesSpec,
        LossSpec,
        LRScheduleSpec,
        ModelSpec,
        MoeDispatcherSpec,
        OptimizerSpec,
        PassageRetrieverSpec,
        PipelineScheduleSpec,
        TextScorerSpec,
        TokenizerSpec,
    )

PROJECT = "mt"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of the functions by which a plugin implements hooks."""


@hookspec
def mt_register_models() -> list[ModelSpec]:
    """Model families, selected by `model.family`."""
    raise NotImplementedError


@hookspec
def mt_register_tokenizers() -> list[TokenizerSpec]:
    """Tokenizers, selected by `tokenizer.tokenizer_type`."""
    raise NotImplementedError


@hookspec
def mt_register_datasets() -> list[DatasetSpec]:
    """Data sets, selected by `data.dataset_type`."""
    raise NotImplementedError


@hookspec
def mt_register_checkpoint_loaders() -> list[CheckpointLoaderSpec]:
    """Checkpoint formats that can be read; `auto` calls each one's `detect`."""
    raise NotImplementedError


@hookspec
def mt_register_checkpoint_savers() -> list[CheckpointSaverSpec]:
    """Checkpoint formats that can be written, selected by `checkpoint.ckpt_format`."""
    raise NotImplementedError


@hookspec
def mt_register_moe_dispatchers() -> list[MoeDispatcherSpec]:
    """Methods that send tokens to the ranks of their experts and back."""
    raise NotImplementedError


@hookspec
def mt_register_feed_forwards() -> list[FeedForwardSpec]:
    """Feed-forward blocks of a layer: "dense", "moe" and others."""
    raise NotImplementedError


@hookspec
def mt_register_attention_backends() -> list[AttentionBackendSpec]:
    """Implementations of attention, selected by `model.attention_backend`."""
    raise NotImplementedError


@hookspec
def mt_register_pipeline_schedules() -> list[PipelineScheduleSpec]:
    """Orders of passes over pipeline stages, selected by `parallel.pipeline_schedule`."""
    raise NotImplementedError


@hookspec
def mt_register_context_parallel_methods() -> list[ContextParallelMethodSpec]:
    """Methods of attention over sequences that several ranks share, selected by `parallel.cp_comm_type`."""
    raise NotImplementedError


@hookspec
def mt_register_optimizers() -> list[OptimizerSpec]:
    """Optimizers, selected by `optimizer.optimizer`."""
    raise NotImplementedError


@hookspec
def mt_register_lr_schedules() -> list[LRScheduleSpec]:
    """Learning-rate schedules, selected by `lr_schedule.lr_decay_style`."""
    raise NotImplementedError


@hookspec
def mt_register_losses() -> list[LossSpec]:
    """Losses, selected by `train.loss`."""
    raise NotImplementedError


@hookspec
def mt_register_callbacks() -> list[CallbackSpec]:
    """Observers of training: sinks for metrics, early stops, profilers; selected by `train.callbacks`."""
    raise NotImplementedError


@hookspec
def mt_register_evaluators() -> list[EvaluatorSpec]:
    """Measurements of the model during training, which the section [eval] turns on."""
    raise NotImplementedError


@hookspec
def mt_register_text_scorers() -> list[TextScorerSpec]:
    """Judges of generated texts, selected by `--scorer` of `mt eval toxicity` and `mt eval detoxify`."""
    raise NotImplementedError


@hookspec
def mt_register_passage_retrievers() -> list[PassageRetrieverSpec]:
    """Searches for passages, selected by `--retriever` of `mt eval qa`."""
    raise NotImplementedError


@hookspec
def mt_register_commands() -> list[CommandSpec]:
    """Sub-commands of `mt`."""
    raise NotImplementedError


@hookspec
def mt_register_key_names() -> list[KeyNamesSpec]:
    """Names that keys of the configuration have in other software, for `mt config explain`."""
    raise NotImplementedError


@hookspec
def mt_check_config(config: Any, host: Any) -> None:
    """Check the whole resolved configuration; raise ConfigError if it cannot work.

    config: a mt_core.config.Config. host: the PluginHost, for values that name what other plugins register.
    Called before any process group, model or data set exists.
    """
