"""`Accelerator`: the object that a program written for Accelerate's Megatron-LM plugin drives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mt_accelerate.configuration import data_parallel_size, dataset_section, training_sections
from mt_accelerate.data_loaders import (
    DataParallelLoader,
    MegatronLMDummyDataLoader,
    SkippedLoader,
    micro_batch_size,
    require_splittable,
)
from mt_accelerate.data_parallel import CONTEXT
from mt_accelerate.distributed_type import DistributedType
from mt_accelerate.megatron_engine import MegatronEngine
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.optimizers import MegatronLMOptimizerWrapper
from mt_accelerate.schedulers import MegatronLMDummyScheduler, MegatronLMSchedulerWrapper, schedule_sections
from mt_ckpt.hugging_face.module import read_module
from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.data import building
from mt_core.errors import ConfigError
from mt_core.launch.environment import read_environment
from mt_core.launch.process_group import initialize
from mt_core.parallel.context import wait_for_all
from mt_core.plugins import load_plugins
from mt_core.train.build import resolve_device

PRECISIONS = ("no", "fp16", "bf16", "fp8")
METRICS = "metrics.jsonl"


@dataclass
class AcceleratorState:
    """What programs read of `accelerator.state`."""

    megatron_lm_plugin: MegatronLMPlugin
    mixed_precision: str
    device: torch.device
    num_processes: int
    process_index: int
    distributed_type: DistributedType = DistributedType.MEGATRON_LM


class Accelerator:
    """Brings a program's model, optimizer, scheduler and loaders under the layout of a MegatronLMPlugin.

    Without megatron_lm_plugin its fields are those that the launcher's variables say. mixed_precision: no, fp16, bf16
    or fp8; default: ACCELERATE_MIXED_PRECISION. Raises ConfigError for what Accelerate's plugin cannot do either.
    """

    def __init__(
        self,
        *,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        project_dir: str | None = None,
        log_with: str | None = None,
    ) -> None:
        plugin = MegatronLMPlugin() if megatron_lm_plugin is None else megatron_lm_plugin
        if not isinstance(plugin, MegatronLMPlugin):
            raise ConfigError(f"megatron_lm_plugin is a {type(plugin).__name__}; it must be a MegatronLMPlugin")
        if gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}: micro-batches accumulate gradients; set "
                "MegatronLMPlugin(num_micro_batches=...)"
            )
        if log_with is not None:
            raise ConfigError(f"log_with={log_with!r} is not known; `log` writes {METRICS} into project_dir")
        precision = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
        if precision not in PRECISIONS:
            raise ConfigError(f"mixed_precision={precision!r}; it can be {', '.join(PRECISIONS)}")
        on_cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
        device = resolve_device("cpu" if on_cpu else "auto")
        if not dist.is_initialized():
            initialize(read_environment(), device.type)
        alone = not dist.is_initialized()
        number = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
        self.state = AcceleratorState(plugin, precision, device, *number)
        self.project_dir = project_dir
        self.sync_gradients = True
        self.gradient_accumulation_steps = 1
        self._host = load_plugins()
        self._model: MegatronEngine | None = None
        self._loaders: list[DataParallelLoader] = []

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
        return read_environment().local_rank

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def mixed_precision(self) -> str:
        return self.state.mixed_precision

    @property
    def is_main_process(self) -> bool:
        """The last rank, which has the last pipeline stage."""
        return self.process_index == self.num_processes - 1

    @property
    def is_last_process(self) -> bool:
        return self.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        environment = read_environment()
        return (
            environment.local_rank == environment.local_world_size - 1
            if environment.world_size > 1
            else self.is_main_process
        )

    def wait_for_everyone(self) -> None:
        wait_for_all()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The block runs on the main process before it runs on the others."""
        if not self.is_main_process:
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
        engine = self._build(given)
        self._model = engine
        CONTEXT.set(engine.engine.ctx)
        made: dict[int, Any] = {id(given.model): engine}
        engine.optimizer_wrapper = made[id(given.optimizer)] = MegatronLMOptimizerWrapper(engine.engine)
        if given.scheduler is not None:
            made[id(given.scheduler)] = MegatronLMSchedulerWrapper(engine.engine)
        for loader in given.loaders:
            made[id(loader)] = self._split(loader, engine)
        results = [made.get(id(value), value) for value in objects]
        if given.dummy is not None:
            iterators = iter(self._dataset_iterators(engine))
            results = [next(iterators) if value is given.dummy else value for value in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _build(self, given: Prepared) -> MegatronEngine:
        _share_weights(given.model)
        plugin, reader = self.state.megatron_lm_plugin, read_module(given.model, self._host)
        sections, dp = reader.metadata["config"], data_parallel_size(plugin)
        size = self._micro_batch_size(given)
        plugin.global_batch_size = size * plugin.num_micro_batches * dp
        configured = training_sections(
            {**sections["model"], **_families_dropout(reader, self._host)},
            sections["tokenizer"],
            plugin,
            given.optimizer,
            mixed_precision=self.mixed_precision,
            micro_batch_size=size,
            dp_size=dp,
            seed=_shared(torch.initial_seed() % 2**31),
            device=self.device.type,
            schedule=schedule_sections(plugin, given.scheduler, dp, self._steps(given)),
            data=self._data(given, sections["model"]["family"]),
        )
        with as_world(self.num_processes):
            loaded = load_config(sections=configured, host=self._host)
        external = {**given.model.config.to_dict()}
        engine = MegatronEngine(loaded, plugin, reader, external, self, self._host)
        engine.engine.state.consumed_samples = (plugin.consumed_samples or [0])[0]
        return engine

    def _micro_batch_size(self, given: Prepared) -> int:
        if given.dummy is not None:
            return int(given.dummy.dataset_args.get("micro_batch_size", 1))
        if not given.loaders:
            raise ConfigError("prepare needs a DataLoader beside the model: its batch_size is the micro-batch's")
        return micro_batch_size(given.loaders, self.state.megatron_lm_plugin.is_train_batch_min)

    def _steps(self, given: Prepared) -> int | None:
        batch = self.state.megatron_lm_plugin.global_batch_size
        return max(len(given.loaders[0].dataset) // (batch or 1), 1) if given.loaders else None  # type: ignore[arg-type]

    def _data(self, given: Prepared, family: str) -> dict[str, Any]:
        plugin = self.state.megatron_lm_plugin
        length = plugin.seq_length or plugin.encoder_seq_length
        if given.dummy is not None:
            plugin.megatron_dataset_flag = True
            section = dataset_section(given.dummy.dataset_args, family)
            return {**section, **({"seq_length": length} if length else {})}
        if length is None:
            loader = given.loaders[0]
            collate = loader.collate_fn
            length = int(collate([loader.dataset[0]])["input_ids"].shape[1])
        return {"seq_length": length}

    def _split(self, loader: DataLoader[Any], engine: MegatronEngine) -> DataParallelLoader:
        plugin = self.state.megatron_lm_plugin
        micro = engine.config.train.micro_batch_size
        found = DataParallelLoader(loader, engine.engine.ctx, micro, plugin.num_micro_batches)
        self._loaders.append(found)
        return found

    def _dataset_iterators(self, engine: MegatronEngine) -> list[Iterator[dict[str, Tensor]]]:
        """Of training, validation and test."""
        parts, config = engine.engine, engine.config
        provider = self.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        if provider is not None:
            steps = parts.total_samples
            evaluated = config.train.eval_iters * parts.batch_size.full
            datasets = list(provider((steps, evaluated, evaluated)))
        else:
            train = building.build_train_data(config, parts.tokenizer, self._host)
            later = [building.build_datasets(config, parts.tokenizer, split, self._host) for split in ("valid", "test")]
            datasets = [train, *(next(iter(found.values()), None) for found in later)]
        return [_batches(engine, dataset, training=number == 0) for number, dataset in enumerate(datasets)]

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
        if isinstance(tensor, Mapping):
            return {name: self.gather(value) for name, value in tensor.items()}
        if isinstance(tensor, list | tuple):
            return type(tensor)(self.gather(value) for value in tensor)
        return self._prepared.engine.gather(tensor[None] if tensor.ndim == 0 else tensor)

    def gather_for_metrics(self, tensor: Any) -> Any:
        """As `gather`, without the samples that fill up the last batch of a loader. Rows are in the ranks' order."""
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
        self._prepared.engine.save_state(output_dir)
        return output_dir

    def load_state(self, input_dir: str) -> None:
        """What `save_state` wrote, under any layout. Collective."""
        self._prepared.engine.load_state(input_dir)

    def skip_first_batches(self, loader: DataParallelLoader, num_batches: int = 0) -> SkippedLoader:
        return SkippedLoader(loader, num_batches)

    def init_trackers(self, project_name: str, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Writes the program's configuration as the first line of metrics.jsonl."""
        self.log({"project": project_name, "config": dict(config or {})})

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """A line of metrics.jsonl in project_dir, by the main process. Nothing without project_dir."""
        if self.project_dir is None or not self.is_main_process:
            return
        folder = Path(self.project_dir)
        folder.mkdir(parents=True, exist_ok=True)
        line = {**({} if step is None else {"step": step}), **values}
        with (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=_number) + "\n")

    def end_training(self) -> None:
        """Waits for all processes, and closes their connection."""
        wait_for_all()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _prepared(self) -> MegatronEngine:
        if self._model is None:
            raise ConfigError("there is no prepared model; call prepare(model, optimizer, ...) first")
        return self._model


@dataclass
class Prepared:
    """What `prepare` was given. dummy: its MegatronLMDummyDataLoader, three times the same."""

    model: Any
    optimizer: Any
    scheduler: Any
    loaders: list[DataLoader[Any]]
    dummy: MegatronLMDummyDataLoader | None

    @classmethod
    def of(cls, objects: tuple[Any, ...]) -> Prepared:
        """Raises ConfigError for no model or several, no optimizer or several, and what cannot be prepared."""
        models = [value for value in objects if isinstance(value, nn.Module)]
        loaders = [value for value in objects if isinstance(value, DataLoader)]
        dummies = [value for value in objects if isinstance(value, MegatronLMDummyDataLoader)]
        kinds = (nn.Module, DataLoader, MegatronLMDummyDataLoader)
        others = [value for value in objects if not isinstance(value, kinds)]
        optimizers = [value for value in others if hasattr(value, "param_groups")]
        schedulers = [value for value in others if value not in optimizers and _is_scheduler(value)]
        unknown = [value for value in others if value not in optimizers and value not in schedulers]
        for what, found in (("model", models), ("optimizer", optimizers)):
            if len(found) != 1:
                raise ConfigError(f"prepare needs one {what} with Megatron-LM, and was given {len(found)}")
        if len(schedulers) > 1 or unknown:
            told = unknown[0] if unknown else schedulers[1]
            raise ConfigError(f"prepare cannot take this {type(told).__name__} beside the others")
        if dummies and (len(dummies) != 3 or len({id(one) for one in dummies}) != 1 or loaders):
            raise ConfigError("give one MegatronLMDummyDataLoader three times: for training, validation and test")
        for loader in loaders:
            require_splittable(loader)
        if not hasattr(getattr(models[0], "config", None), "to_dict"):
            raise ConfigError(f"the model is a {type(models[0]).__name__}, which has no config of transformers")
        return cls(models[0], optimizers[0], next(iter(schedulers), None), loaders, next(iter(dummies), None))


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, MegatronLMDummyScheduler) or (hasattr(value, "step") and hasattr(value, "get_last_lr"))


def _share_weights(model: nn.Module) -> None:
    """Every rank gets the first rank's weights: programs need not seed them alike. In place."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def _shared(value: int) -> int:
    """The first rank's."""
    held = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(held, src=0)
    return held[0]


def _families_dropout(reader: Any, host: Any) -> dict[str, Any]:
    """The dropout keys that the family has, with the model's own values."""
    section = reader.metadata["config"]["model"]
    fields = host.models.get(section["family"]).config_type.load().model_fields
    names = ("attention_dropout", "hidden_dropout", "position_embedding_type")
    return {name: section.get(name, fields[name].default) for name in names if name in fields}


def _batches(engine: MegatronEngine, dataset: Any, *, training: bool) -> Iterator[dict[str, Tensor]]:
    """This rank's batches: of the remaining steps, or of the evaluation again and again."""
    parts = engine.engine
    if dataset is None:
        return
    while True:
        size, count = parts.batch_size.full, parts.evaluated_samples(dataset)
        steps = (
            parts.remaining_steps()
            if training
            else [(first, min(size, count - first)) for first in range(0, count, size)]
        )
        for batch in parts.read_batches(dataset, steps):
            names = batch.micro_batches[0]
            yield {name: torch.cat([torch.from_numpy(one[name]) for one in batch.micro_batches]) for name in names}
        if training:
            return


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else str(value)
