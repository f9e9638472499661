"""What rl.routing_replay does not go together with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mt_core.errors import ConfigError
from mt_infer.config import InferenceConfig
from mt_tune.rl.config import RLConfig

WHOLE = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def check_routing_replay(config: Any, keys: RLConfig) -> None:
    """Raises ConfigError, with the key to change."""
    if not keys.routing_replay:
        return
    for problem in (*_of_generation(config, keys), *_of_training(config)):
        raise ConfigError(f"rl.routing_replay=true: {problem}")


def _of_generation(config: Any, keys: RLConfig) -> Iterator[str]:
    inference = config.section(InferenceConfig)
    if inference.cuda_graphs != "none":
        yield 'recorded steps do not say which experts they chose; set inference.cuda_graphs="none"'
    if inference.speculative_method is not None:
        yield "guessed tokens go through experts, too; leave out inference.speculative_method"
    layout = _layout(config, keys)
    if max(layout.get(key, 1) for key in WHOLE) > 1:
        yield "a process that generates notes whole tokens of all layers; set rl.generation_parallel={}"


def _layout(config: Any, keys: RLConfig) -> Mapping[str, Any]:
    parallel = config.parallel
    if keys.generation_parallel is not None:
        return keys.generation_parallel
    has_copy = keys.asynchronous or keys.generator_processes > 0
    alone = parallel.use_torch_fsdp2 or parallel.context_parallel_size > 1 or has_copy
    whole: Mapping[str, Any] = {} if alone else parallel.model_dump()
    return whole


def _of_training(config: Any) -> Iterator[str]:
    parallel = config.parallel
    if parallel.context_parallel_size > 1:
        yield f"parallel.context_parallel_size={parallel.context_parallel_size} divides sequences; set it to 1"
    if parallel.sequence_parallel:
        yield "parallel.sequence_parallel=true divides sequences; set it to false"
    if config.train.cuda_graphs != "none":
        yield 'a recorded step would take the same experts each time; set train.cuda_graphs="none"'
    if parallel.pipeline_model_parallel_size > 1 and config.recompute.recompute_granularity != "none":
        yield 'stages recompute when other rows have come; set recompute.recompute_granularity="none"'
