"""Which processes draw completions, and in which layout, by [rl]."""

from __future__ import annotations

from typing import Any

from mt_core.data.training_length import global_batch_size
from mt_core.errors import ConfigError
from mt_core.train.batch_source import TrainingRun
from mt_infer.config import InferenceConfig
from mt_tune.rl.config import RLConfig
from mt_tune.rl.episodes import Episodes
from mt_tune.rl.generators.generator_drawer import GeneratorDrawer
from mt_tune.rl.trained_drawer import TrainedDrawer


def build_drawer(run: TrainingRun, keys: RLConfig, episodes: Episodes | None) -> TrainedDrawer | GeneratorDrawer:
    """episodes: for the processes that train. Raises ConfigError, and what building a model raises."""
    most = completions_at_once(run, keys)
    if keys.generator_processes:
        return GeneratorDrawer(run.engine, keys.generator_processes, keys.generation_parallel or {}, most)
    return TrainedDrawer(run.engine, generation_layout(run, keys), most, episodes, in_background=keys.asynchronous)


def generation_layout(run: TrainingRun, keys: RLConfig) -> dict[str, Any] | None:
    """None for the run's own layout and memory."""
    if keys.asynchronous:
        require_asynchronous(run)
    if keys.generation_parallel is not None or keys.asynchronous:
        return keys.generation_parallel or {}
    parallel = run.config.parallel
    alone = parallel.use_torch_fsdp2 or parallel.context_parallel_size > 1
    return {} if alone else None


def completions_at_once(run: TrainingRun, keys: RLConfig) -> int:
    """Those of a generation, with groups that are in progress beside it."""
    return global_batch_size(run.config) * keys.steps_per_generation + keys.extra_groups * keys.group_size


def require_asynchronous(run: TrainingRun) -> None:
    """Raises ConfigError where completions cannot be drawn in a thread beside training."""
    if run.ctx.world.size > 1:
        raise ConfigError(
            f"rl.asynchronous=true draws in a thread beside training, and {run.ctx.world.size} processes would mix the "
            "messages of both; set rl.generator_processes to have others draw, or rl.asynchronous to false"
        )
    if run.engine.device.type == "cuda" and run.config.section(InferenceConfig).cuda_graphs != "none":
        raise ConfigError(
            "rl.asynchronous=true: CUDA graphs cannot be captured while another thread trains; set "
            'inference.cuda_graphs (now "auto" or "decode") to "none"'
        )
