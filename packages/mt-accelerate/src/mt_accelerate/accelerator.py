"""`Accelerator`: the object that a program written for Accelerate's Megatron-LM plugin drives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_accelerate.data_loaders import DataParallelLoader, SkippedLoader
from mt_accelerate.data_parallel import (
    CONTEXT,
    on_first_rank,
    on_tensors,
    pad_across_data_parallel_group,
    reduce_across_data_parallel_group,
)
from mt_accelerate.dataset_iterators import dataset_iterators
from mt_accelerate.distributed_type import DistributedType
from mt_accelerate.hugging_face_export import export
from mt_accelerate.megatron_engine import MegatronEngine
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.optimizers import MegatronLMOptimizerWrapper
from mt_accelerate.preparation import build_engine
from mt_accelerate.prepared import Prepared
from mt_accelerate.project import ProjectConfiguration
from mt_accelerate.registered_states import load_states, require_states, save_states
from mt_accelerate.schedulers import MegatronLMSchedulerWrapper
from mt_accelerate.state import start_processes
from mt_accelerate.tracking import GeneralTracker, build_tracker, chosen_trackers
from mt_core.errors import ConfigError
from mt_core.parallel.context import wait_for_all
from mt_core.plugins import load_plugins

METRICS = "metrics.jsonl"


class Accelerator:
    """Brings a program's model, optimizer, scheduler and loaders under the layout of a MegatronLMPlugin.

    Without megatron_lm_plugin its fields are those that the launcher's variables say. mixed_precision: no, fp16, bf16
    or fp8; default: ACCELERATE_MIXED_PRECISION. log_with: trackers (see `LoggerType`), one or several; each a name or a
    GeneralTracker. Raises ConfigError for what Accelerate's plugin cannot do either.
    """

    def __init__(
        self,
        *,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        project_dir: str | None = None,
        project_config: ProjectConfiguration | None = None,
        log_with: Any = None,
    ) -> None:
        plugin = MegatronLMPlugin() if megatron_lm_plugin is None else megatron_lm_plugin
        if not isinstance(plugin, MegatronLMPlugin):
            raise ConfigError(f"megatron_lm_plugin is a {type(plugin).__name__}; it must be a MegatronLMPlugin")
        if gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}: micro-batches accumulate gradients; set "
                "MegatronLMPlugin(num_micro_batches=...)"
            )
        self._host = load_plugins()
        self.project_configuration = ProjectConfiguration.of(project_config, project_dir)
        self.log_with = chosen_trackers(log_with, self.logging_dir, self._host)
        self.trackers: list[GeneralTracker] = []
        self.state = start_processes(plugin, mixed_precision, cpu=cpu)
        self.sync_gradients = True
        self.gradient_accumulation_steps = 1
        self._model: MegatronEngine | None = None
        self._loaders: list[DataParallelLoader] = []
        self._registered: list[Any] = []

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    # -- processes --------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def num_processes(self) -> int:
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        return self.state.local_process_index

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def mixed_precision(self) -> str:
        return self.state.mixed_precision

    @property
    def is_main_process(self) -> bool:
        """The last rank, which has the last pipeline stage."""
        return self.state.is_main_process

    @property
    def is_last_process(self) -> bool:
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.state.is_local_main_process

    def wait_for_everyone(self) -> None:
        wait_for_all()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The block runs on the main process before it runs on the others."""
        if not self.is_main_process:
            # The others wait for the main process, which waits behind the block: one barrier for each rank.
            wait_for_all()
        yield
        if self.is_main_process:
            wait_for_all()

    def print(self, *values: Any, **options: Any) -> None:
        """On the main process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Model, optimizer, scheduler and loaders, in any order -> what stands for each, in the same order. Collective.

        The model comes with its weights: those of the first rank. Raises ConfigError for a model without a name map,
        and for an optimizer, a scheduler or a loader that cannot be used.
        """
        if self._model is not None:
            raise ConfigError("an Accelerator prepares one model, and this one has one; make another Accelerator")
        given = Prepared.of(objects)
        engine = build_engine(given, self.state, self, self._host)
        self._model = engine
        # For the functions of accelerate.utils, which programs call without a model.
        CONTEXT.set(engine.engine.ctx)
        # By identity: objects are returned in the order in which they were given, and modules have no useful equality.
        made: dict[int, Any] = {id(given.model): engine}
        engine.optimizer_wrapper = made[id(given.optimizer)] = MegatronLMOptimizerWrapper(engine.engine)
        if given.scheduler is not None:
            made[id(given.scheduler)] = MegatronLMSchedulerWrapper(engine.engine)
        self._loaders = [DataParallelLoader(loader, engine.engine) for loader in given.loaders]
        made |= {id(loader): found for loader, found in zip(given.loaders, self._loaders, strict=True)}
        results = [made.get(id(value), value) for value in objects]
        if given.dummy is not None:
            iterators = iter(dataset_iterators(engine, self._host))
            # The one dummy stands three times, for training, validation and test in this order.
            results = [next(iterators) if value is given.dummy else value for value in results]
        return results[0] if len(results) == 1 else tuple(results)

    # -- in the loop ------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Every call of the model is a whole step: gradients are always synchronized."""
        yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision is the engine's; changes nothing."""
        yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Does nothing: the model's call has run the backward passes."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of the last step's gradient, before the step clipped it. Raises ConfigError for another limit than
        that of the plugin."""
        limit = self.state.megatron_lm_plugin.gradient_clipping
        if max_norm != limit or norm_type != 2.0:
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm:g}, norm_type={norm_type:g}): the step has clipped to the L2 norm "
                f"{limit:g} already; set MegatronLMPlugin(gradient_clipping=...)"
            )
        return torch.tensor(self._prepared.last_grad_norm, device=self.device)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return bool(self._prepared.optimizer_wrapper.step_was_skipped)

    def gather(self, tensor: Any) -> Any:
        """[rows, ...] -> those of all data-parallel ranks, on every rank; a scalar counts as a row."""
        engine = self._prepared.engine
        return on_tensors(lambda one: engine.gather(one[None] if one.ndim == 0 else one), tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean (reduction="mean") over all data-parallel ranks, on every rank, times scale."""
        return on_tensors(lambda one: reduce_across_data_parallel_group(one, reduction, scale), tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Filled up with pad_index along dim to the largest size of all data-parallel ranks, so that `gather` can."""
        return on_tensors(lambda one: pad_across_data_parallel_group(one, dim, pad_index, pad_first), tensor)

    def gather_for_metrics(self, tensor: Any) -> Any:
        """As `gather`, without the samples that fill up the last batch of a loader. Rows are in the ranks' order."""
        # The loader in whose last batch the loop is; its filled-up samples are repetitions that metrics must not count.
        found, at_end = self.gather(tensor), [loader for loader in self._loaders if loader.at_end and loader.remainder]
        if not at_end or not isinstance(found, Tensor) or len(found) != at_end[0].total_batch_size:
            return found
        return found[at_end[0].kept_rows()]

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Lets the prepared model go."""
        self._model = None
        self._loaders = []
        return [None] * len(objects)

    # -- states and logs --------------------------------------------------------------------------

    def save_state(self, output_dir: str) -> str:
        """Weights, optimizer, counters and random streams: a run directory, for every command of mt. Collective."""
        self._prepared.save_checkpoint(output_dir)
        on_first_rank(lambda: save_states(self._registered, output_dir))
        return output_dir

    def load_state(self, input_dir: str) -> None:
        """What `save_state` wrote, under any layout. Collective."""
        self._prepared.load_checkpoint(input_dir)
        load_states(self._registered, input_dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with state_dict and load_state_dict that `save_state` writes (the first rank's) and `load_state`
        reads. Raises ConfigError for others."""
        require_states(objects)
        self._registered += objects

    def save_model(
        self, model: Any, save_directory: str, max_shard_size: str = "10GB", safe_serialization: bool = True
    ) -> None:
        """The whole weights as safetensors, with the config.json: what `from_pretrained` loads. Collective. Raises
        ConfigError for safe_serialization=False, and for a model without a name map."""
        if not safe_serialization:
            raise ConfigError("save_model(safe_serialization=False) would write a pickle; leave it out")
        export(self._prepared.engine, Path(save_directory), max_shard_size, self._host)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Raises ConfigError: no process has all weights."""
        raise ConfigError(
            "get_state_dict: no process has all weights; save_model(model, DIR), called by all processes, writes them, "
            "and AutoModel.from_pretrained(DIR).state_dict() reads them"
        )

    def skip_first_batches(self, loader: DataParallelLoader, num_batches: int = 0) -> SkippedLoader:
        return SkippedLoader(loader, num_batches)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of log_with. config: the program's configuration. init_kwargs: options by tracker, for
        example {"wandb": {"entity": "team"}}; those of `mt_accelerate.tracking.KEYS`. Raises ConfigError for others."""
        options = dict(init_kwargs or {})
        for chosen in self.log_with:
            if isinstance(chosen, GeneralTracker):
                tracker: GeneralTracker = chosen
            else:
                tracker = build_tracker(
                    chosen,
                    project_name,
                    options.get(str(chosen), {}),
                    logging_dir=self.logging_dir,
                    config=config or {},
                    samples=lambda: 0 if self._model is None else self._model.consumed_samples,
                    host=self._host,
                )
            self.trackers.append(tracker)
            if self._reaches(tracker):
                tracker.start()
                if config is not None:
                    tracker.store_init_configuration(config)
        self._write_line({"project": project_name, "config": dict(config or {})})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """unwrap: the package's own object, None on processes other than the main one. Raises ConfigError for a tracker
        that `init_trackers` did not start."""
        found = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if found is None:
            known = ", ".join(tracker.name for tracker in self.trackers) or "none"
            raise ConfigError(f"get_tracker({name!r}): started are {known}; name it in Accelerator(log_with=...)")
        return found.tracker if unwrap else found

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """To all trackers, and with project_dir as a line of its metrics.jsonl; by the main process. step: default, the
        model's. log_kwargs: options by tracker."""
        if step is None and self._model is not None:
            step = self._model.iteration
        for tracker in self.trackers:
            if self._reaches(tracker):
                tracker.log(values, step=step, **dict(log_kwargs or {}).get(tracker.name, {}))
        self._write_line({**({} if step is None else {"step": step}), **values})

    def end_training(self) -> None:
        """Closes the trackers, waits for all processes, and closes their connection."""
        for tracker in self.trackers:
            if self._reaches(tracker):
                tracker.finish()
        if self._model is not None:
            self._model.close()
        wait_for_all()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reaches(self, tracker: GeneralTracker) -> bool:
        """Whether its methods are called on this process."""
        return self.is_main_process or not tracker.main_process_only

    def _write_line(self, values: Mapping[str, Any]) -> None:
        if self.project_dir is None or not self.is_main_process:
            return
        folder = Path(self.project_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, default=_number) + "\n")

    @property
    def _prepared(self) -> MegatronEngine:
        if self._model is None:
            raise ConfigError("there is no prepared model; call prepare(model, optimizer, ...) first")
        return self._model


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else str(value)
