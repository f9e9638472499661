"""`Accelerator`: the object that a program written for Accelerate drives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_accelerate import operations
from mt_accelerate.checkpointing import load_states, newest_folder, next_folder, require_states, save_states
from mt_accelerate.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Handlers,
    ProfileKwargs,
    ProjectConfiguration,
    require_plugin_options,
)
from mt_accelerate.megatron_lm.run import MegatronRun
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.operations import (
    RANKS,
    gather_object,
    on_first_rank,
    on_tensors,
    world_ranks,
)
from mt_accelerate.read_attributes import ReadAttributes
from mt_accelerate.refused_names import refuse_attribute, refuse_options
from mt_accelerate.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    Processes,
    start_processes,
    with_megatron,
)
from mt_accelerate.tracking import GeneralTracker, build_tracker, chosen_trackers
from mt_accelerate.without_plugin.run import OwnModules
from mt_core.errors import ConfigError
from mt_core.parallel.context import wait_for_all
from mt_core.parallel.reductions import all_reduce_
from mt_core.plugins import load_plugins

METRICS = "metrics.jsonl"


class Accelerator(ReadAttributes, Processes):
    """Runs a program's model, optimizer, scheduler and loaders on all ranks.

    With megatron_lm_plugin, or where the launcher has requested Megatron-LM, the model is one of mt under the layout of
    the plugin, and its call is a whole step. Else the program's own modules are data-parallel.

    mixed_precision: no, fp16, bf16 or fp8; default: ACCELERATE_MIXED_PRECISION. gradient_accumulation_steps: batches of
    a step, under `accumulate`. log_with: trackers (see `LoggerType`), one or several; each a name or a GeneralTracker.
    dataloader_config, gradient_accumulation_plugin, kwargs_handlers: see `mt_accelerate.utils`. rng_types: ignored, all
    ranks follow the order of samples that the first one draws. Raises ConfigError for options of other engines.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        refuse_options(
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            dynamo_backend=None if str(dynamo_backend).lower() in ("none", "no") else dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
        )
        plugin = MegatronLMPlugin() if megatron_lm_plugin is None and with_megatron() else megatron_lm_plugin
        if plugin is not None and not isinstance(plugin, MegatronLMPlugin):
            raise ConfigError(f"megatron_lm_plugin is a {type(plugin).__name__}; it must be a MegatronLMPlugin")
        self._host = load_plugins()
        self.project_configuration = ProjectConfiguration.of(project_config, project_dir)
        self.log_with = chosen_trackers(log_with, self.logging_dir, self._host)
        self.trackers: list[GeneralTracker] = []
        handlers = Handlers.of(kwargs_handlers or ())
        self.state: AcceleratorState = start_processes(
            plugin, mixed_precision, cpu=cpu, timeout=handlers.processes.timeout
        )
        self._handlers, self.device_placement = handlers, device_placement
        self._config = _loader_config(dataloader_config, split_batches)
        self.gradient_state = _gradient_state(gradient_accumulation_plugin, gradient_accumulation_steps)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        # None: all ranks, for programs that make Accelerators with and without a plugin.
        RANKS.set(None)
        self._run: MegatronRun | OwnModules = self._build_run()
        self._registered: list[Any] = []
        self._save_hooks: list[Callable[..., Any]] = []
        self._load_hooks: list[Callable[..., Any]] = []
        self._trigger = False

    def _build_run(self) -> MegatronRun | OwnModules:
        if self.state.megatron_lm_plugin is not None:
            require_plugin_options(self._config, self._handlers, step=self.step_scheduler_with_optimizer)
            return MegatronRun(self.state, self.gradient_state, self._host)
        return OwnModules(
            self.state,
            self.gradient_state,
            self._handlers,
            self._config,
            place=self.device_placement,
            step_scheduler_with_optimizer=self.step_scheduler_with_optimizer,
        )

    def __getattr__(self, name: str) -> Any:
        return refuse_attribute(name)

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
    def main_process_index(self) -> int:
        return self.state.main_process_index

    @property
    def num_processes(self) -> int:
        """Processes that a batch is divided over: the data-parallel ranks of the plugin's layout, else all."""
        return self._run.num_processes if isinstance(self._run, MegatronRun) else self.state.num_processes

    @property
    def multi_device(self) -> bool:
        return self.use_distributed

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def mixed_precision(self) -> str:
        return self.state.mixed_precision

    @property
    def save_iteration(self) -> int:
        return self.project_configuration.iteration

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and loaders, in any order -> what stands for each, in the same order.
        Collective: models have the first rank's weights.

        With Megatron-LM one model and one optimizer; raises ConfigError for a model without a name map, and for an
        optimizer, a scheduler or a loader that cannot be used.
        """
        if isinstance(self._run, MegatronRun):
            results = self._run.prepare(self, objects)
        else:
            places = device_placement or [self.device_placement] * len(objects)
            results = self._run.prepare(objects, places)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        run = self._own_modules("prepare_model")
        place = self.device_placement if device_placement is None else device_placement
        return run.prepare_model(model, place, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        return self._own_modules("prepare_optimizer").prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self._own_modules("prepare_scheduler").prepare_scheduler(scheduler)

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None) -> Any:
        if isinstance(self._run, MegatronRun):
            return self._run.prepare_loader(data_loader)
        place = self.device_placement if device_placement is None else device_placement
        return self._run.prepare_loader(data_loader, place)

    def _own_modules(self, name: str) -> OwnModules:
        if isinstance(self._run, MegatronRun):
            self._run.refuse(name)
        assert isinstance(self._run, OwnModules)
        return self._run

    # -- in the loop ------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer's step counts."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.num_steps = value

    def accumulate(self, *models: Any) -> Any:
        """A batch of gradient_accumulation_steps: the optimizer's step counts in the last one."""
        return self._run.accumulate(*models)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients are not summed over ranks. With Megatron-LM the model's calls add to a step that the program's
        `optimizer.step()` ends."""
        with self._run.no_sync(model):
            yield

    def trigger_sync_in_backward(self, model: Any) -> Any:
        """The next backward pass sums gradients over ranks."""
        return self._own_modules("trigger_sync_in_backward").trigger_sync_in_backward(model)

    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """Ranks whose batches end earlier take part in the reductions of the others."""
        return self._run.join(joinables, even_batches)

    def autocast(self, autocast_handler: Any = None) -> Any:
        """The precision of the program; with Megatron-LM the engine has it."""
        return self._run.autocast(autocast_handler)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """With Megatron-LM the model's call has run the backward passes."""
        self._run.backward(loss, **options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides gradients by the loss scale of fp16."""
        self._own_modules("unscale_gradients").unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm before clipping. With Megatron-LM that of the last step, which has clipped; raises ConfigError there
        for another limit than that of the plugin."""
        return self._run.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._run.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return self._run.step_was_skipped

    def set_trigger(self) -> None:
        """Lets `check_trigger` be true on all ranks."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger`; clears it. Collective."""
        value = torch.tensor([int(self._trigger)], device=self.device)
        all_reduce_(value, world_ranks(), "max")
        self._trigger = False
        return bool(value.item())

    def gather(self, tensor: Any) -> Any:
        """[rows, ...] -> those of all data-parallel ranks, on every rank; a scalar counts as a row."""
        return operations.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean (reduction="mean") over all data-parallel ranks, on every rank, times scale."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Filled up with pad_index along dim to the largest size of all data-parallel ranks, so that `gather` can."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that fill up the last batch of a loader; other objects than tensors as a
        list. Rows are in the ranks' order."""
        if use_gather_object or not _only_tensors(input_data):
            return self._run.without_repetitions(gather_object(input_data))
        gathered = self.gather(input_data)
        if isinstance(self._run, OwnModules):
            return self._run.without_repetitions(gathered)
        return on_tensors(self._run.without_repetitions, gathered)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The program's own module; with Megatron-LM the engine."""
        return self._run.unwrap(model, keep_fp32_wrapper)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        return self._run.skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Lets prepared objects go."""
        self._run.free()
        return [None] * len(objects)

    clear = free_memory

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch.profiler with the options of ProfileKwargs."""
        handler = profile_handler or self._handlers.profile
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            Path(handler.output_trace_dir).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(handler.output_trace_dir) / f"profile_{self.process_index}.json"))

    # -- states and logs --------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """torch.save on the main process of the run; tensors by name as safetensors with safe_serialization."""
        if self.is_main_process:
            from mt_accelerate.utils import save

            save(obj, f, save_on_each_node=True, safe_serialization=safe_serialization)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Collective. With Megatron-LM a run directory, for every command of mt; else Accelerate's files. output_dir:
        default, the next number below project_dir with ProjectConfiguration(automatic_checkpoint_naming=True)."""
        folder = str(next_folder(self.project_configuration) if output_dir is None else output_dir)
        hooked = [] if isinstance(self._run, MegatronRun) else list(self._run.models)
        weights = self._run.weights() if isinstance(self._run, OwnModules) and self._save_hooks else []
        for hook in self._save_hooks:
            # A hook takes away those models that it saves itself.
            hook(hooked, weights, folder)
        self._run.save_state(folder, hooked)
        on_first_rank(lambda: save_states(self._registered, folder))
        if self.project_configuration.automatic_checkpoint_naming:
            object.__setattr__(self.project_configuration, "iteration", self.project_configuration.iteration + 1)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """What `save_state` wrote; with Megatron-LM under any layout. Collective. input_dir: default, the newest below
        project_dir."""
        folder = str(input_dir) if input_dir is not None else str(newest_folder(self.project_configuration.project_dir))
        hooked = [] if isinstance(self._run, MegatronRun) else list(self._run.models)
        for hook in self._load_hooks:
            hook(hooked, folder)
        self._run.load_state(folder, hooked, strict=bool(options.get("strict", True)))
        load_states(self._registered, folder)

    def load_checkpoint(self, input_dir: str) -> None:
        """The same as `load_state`."""
        self.load_state(input_dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with state_dict and load_state_dict that `save_state` writes (the first rank's) and `load_state`
        reads. Raises ConfigError for others."""
        require_states(objects)
        self._registered += objects

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """hook(models, weights, folder): called before `save_state` writes; models that it removes from the list are
        its own to save."""
        self._save_hooks.append(hook)
        return _Handle(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """hook(models, folder): as `register_save_state_pre_hook`, before `load_state` reads."""
        self._load_hooks.append(hook)
        return _Handle(self._load_hooks, hook)

    def save_model(
        self, model: Any, save_directory: str, max_shard_size: str = "10GB", safe_serialization: bool = True
    ) -> None:
        """The whole weights as safetensors: what `from_pretrained` loads. Collective. Raises ConfigError for
        safe_serialization=False, and with Megatron-LM for a model without a name map."""
        if not safe_serialization:
            raise ConfigError("save_model(safe_serialization=False) would write a pickle; leave it out")
        self._run.save_model(model, str(save_directory), str(max_shard_size))

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Raises ConfigError with Megatron-LM: no process has all weights."""
        return self._run.state_dict_of(model)

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
                    samples=lambda: self._run.consumed_samples,
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
        tracker = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if tracker is None:
            known = ", ".join(tracker.name for tracker in self.trackers) or "none"
            raise ConfigError(f"get_tracker({name!r}): started are {known}; name it in Accelerator(log_with=...)")
        return tracker.tracker if unwrap else tracker

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """To all trackers, and with project_dir as a line of its metrics.jsonl; by the main process. step: default, the
        model's. log_kwargs: options by tracker."""
        if step is None:
            step = self._run.iteration
        for tracker in self.trackers:
            if self._reaches(tracker):
                tracker.log(values, step=step, **dict(log_kwargs or {}).get(tracker.name, {}))
        self._write_line({**({} if step is None else {"step": step}), **values})

    def end_training(self) -> None:
        """Closes the trackers, waits for all processes, and closes their connection."""
        for tracker in self.trackers:
            if self._reaches(tracker):
                tracker.finish()
        self._run.close()
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


class _Handle:
    """Handle of a registered hook."""

    def __init__(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        self._hooks.remove(self._hook)


def _loader_config(
    dataloader_config: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    config = dataloader_config or DataLoaderConfiguration()
    if split_batches is not None:
        config.split_batches = split_batches
    return config


def _gradient_state(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientState:
    """Raises ConfigError for both, with other numbers."""
    if plugin is not None and steps not in (1, plugin.num_steps):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} and GradientAccumulationPlugin(num_steps={plugin.num_steps}); give "
            "one of them"
        )
    # The launcher's, as Accelerate reads it, where the program gives none.
    launched = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps))
    options = plugin or GradientAccumulationPlugin(num_steps=steps if steps != 1 else launched)
    return GradientState.begin(
        options.num_steps,
        adjust_scheduler=options.adjust_scheduler,
        sync_with_dataloader=options.sync_with_dataloader,
        sync_each_batch=options.sync_each_batch,
    )


def _only_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_only_tensors, value.values()))
    return all(map(_only_tensors, value)) if isinstance(value, list | tuple) else isinstance(value, Tensor)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else str(value)
