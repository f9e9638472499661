"""An Accelerator with the plugin: one model of mt, whose call is a whole step, and the export of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mt_accelerate.even_batches import evenly
from mt_accelerate.megatron_lm.configuration import data_parallel_size
from mt_accelerate.megatron_lm.data_loaders import (
    DataParallelLoader,
    SkippedLoader,
    dataset_iterators,
    require_splittable,
)
from mt_accelerate.megatron_lm.engine import MegatronEngine
from mt_accelerate.megatron_lm.optimizers import MegatronLMOptimizerWrapper
from mt_accelerate.megatron_lm.preparation import Prepared, build_engine
from mt_accelerate.megatron_lm.random_states import EngineRandom, load_program_state, save_program_state
from mt_accelerate.megatron_lm.schedulers import (
    MegatronLMDummyScheduler,
    MegatronLMSchedulerWrapper,
    OrdinaryScheduler,
    is_ordinary,
    load_rates,
    save_rates,
)
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.operations import RANKS, data_parallel_ranks, on_first_rank
from mt_accelerate.state import AcceleratorState, GradientState
from mt_ckpt.convert.engine import convert
from mt_ckpt.files.sizes import parse_bytes
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError
from mt_core.parallel.context import SINGLE
from mt_core.paths import remove_tree
from mt_core.plugins import PluginHost
from mt_core.train import Engine


class MegatronRun:
    """The prepared objects of a program, and what its loop does with them."""

    def __init__(self, state: AcceleratorState, gradients: GradientState, host: PluginHost) -> None:
        assert state.megatron_lm_plugin is not None
        self.plugin: MegatronLMPlugin = state.megatron_lm_plugin
        self.state, self.gradients, self._host = state, gradients, host
        self._model: MegatronEngine | None = None
        self._loaders: list[DataParallelLoader] = []
        self._iterators: list[Iterator[Any]] = []
        self._scheduler: OrdinaryScheduler | None = None
        self._batches = 0
        # Those of the model, once there is one.
        RANKS.set(SINGLE)

    @property
    def num_processes(self) -> int:
        """Data-parallel ranks: those that a batch is divided over."""
        return data_parallel_size(self.plugin)

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, accelerator: Any, objects: Sequence[Any]) -> list[Any]:
        if self._model is not None:
            return [self._prepare_later(value) for value in objects]
        parts = Prepared.of(tuple(objects))
        program = torch.get_rng_state()  # the engine seeds torch's generator for dropout
        engine = build_engine(parts, self.state, accelerator, self._host)
        engine.random = EngineRandom(program)
        engine.gradients = self.gradients
        self._model = engine
        # For the functions of accelerate.utils, which programs call without a model.
        RANKS.set(engine.engine.ctx.dp)
        # By identity: objects are returned in the order in which they were given, and modules have no useful equality.
        prepared: dict[int, Any] = {id(parts.model): engine}
        followed = None if isinstance(parts.scheduler, MegatronLMDummyScheduler) else parts.optimizer
        optimizer = MegatronLMOptimizerWrapper(engine.engine, self._end_step, self._drop_step, followed)
        engine.optimizer_wrapper = prepared[id(parts.optimizer)] = optimizer
        if followed is not None:
            engine.follow(followed)
        if is_ordinary(parts.scheduler):
            self._scheduler = OrdinaryScheduler(
                parts.scheduler, self.gradients, data_parallel_ranks().size, lambda: optimizer.step_was_skipped
            )
            prepared[id(parts.scheduler)] = self._scheduler
        elif parts.scheduler is not None:
            prepared[id(parts.scheduler)] = MegatronLMSchedulerWrapper(engine.engine)
        prepared |= {id(loader): self.prepare_loader(loader) for loader in parts.loaders}
        results = [prepared.get(id(value), value) for value in objects]
        if parts.dummy is not None:
            self._iterators = dataset_iterators(engine, self._host)
            iterators = iter(self._iterators)
            # The one dummy stands three times, for training, validation and test in this order.
            results = [next(iterators) if value is parts.dummy else value for value in results]
        return results

    def _prepare_later(self, value: Any) -> Any:
        if isinstance(value, DataLoader):
            return self.prepare_loader(value)
        if isinstance(value, DataParallelLoader):
            return value
        raise ConfigError(
            f"prepare() of a {type(value).__name__}: an Accelerator prepares one model, and this one has one; make "
            "another Accelerator"
        )

    def prepare_loader(self, loader: DataLoader[Any]) -> DataParallelLoader:
        """A loader of the prepared model. Raises ConfigError for one whose samples have no index."""
        require_splittable(loader)
        prepared = DataParallelLoader(loader, self.prepared.engine, self.gradients)
        self._loaders.append(prepared)
        return prepared

    @property
    def prepared(self) -> MegatronEngine:
        if self._model is None:
            raise ConfigError("there is no prepared model; call prepare(model, optimizer, ...) first")
        return self._model

    # -- in the loop ------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        gradients = self.gradients
        at_end = gradients.sync_with_dataloader and gradients.end_of_dataloader
        self._batches = 0 if at_end else self._batches + 1
        gradients.sync_gradients = self._batches % gradients.num_steps == 0
        gradients.in_accumulation = True
        try:
            yield
        finally:
            gradients.in_accumulation = False

    def no_sync(self, model: Any) -> Any:
        """Calls of the model add to a step that the program's optimizer ends."""
        return self.prepared.no_sync()

    def join(self, joinables: Sequence[Any], even_batches: bool | None) -> Any:
        """Every rank has as many batches, so that none waits for others."""
        return evenly((loader.batch_sampler for loader in self._loaders), even_batches)

    def _end_step(self) -> None:
        # As Accelerate's optimizers, which do nothing in the other batches of `accumulate`.
        if self.gradients.sync_gradients:
            self.prepared.finish_program_step()

    def _drop_step(self) -> None:
        if self.gradients.sync_gradients:
            self.prepared.drop_program_step()

    def autocast(self, options: Any = None) -> Any:
        """The precision is the engine's; changes nothing."""
        return nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The model's call has run the backward passes. Raises ConfigError for a loss that is not the model's."""
        if loss.requires_grad:
            loss.backward(**options)
        elif self._model is not None:
            raise ConfigError(
                "backward() was given a loss that is not the output of the model's call: with Megatron-LM the call has "
                "run the backward passes of outputs.loss; give MegatronLMPlugin(custom_loss_function=...)"
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        limit = self.plugin.gradient_clipping
        if max_norm != limit or norm_type != 2.0:
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm:g}, norm_type={norm_type:g}): the step has clipped to the L2 norm "
                f"{limit:g} already; set MegatronLMPlugin(gradient_clipping=...)"
            )
        # The norm is known when all batches of a step are summed, and clipping and update follow it.
        if self.gradients.sync_gradients:
            self.prepared.finish_program_step(clipped=True)
        return torch.tensor(self.prepared.last_grad_norm, device=self.state.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ConfigError("clip_grad_value_: the step clips to a norm; set MegatronLMPlugin(gradient_clipping=...)")

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.prepared.optimizer_wrapper.step_was_skipped)

    def without_repetitions(self, value: Any) -> Any:
        # The loader in whose last batch the loop is; its filled-up samples are repetitions that metrics must not count.
        at_end = [loader for loader in self._loaders if loader.at_end and loader.remainder]
        if not at_end or not isinstance(value, Tensor) or len(value) != at_end[0].total_batch_size:
            return value
        return value[at_end[0].kept_rows()]

    def unwrap(self, model: Any, keep_fp32_wrapper: bool) -> Any:
        return model

    def skip_first_batches(self, loader: DataParallelLoader, count: int) -> SkippedLoader:
        return SkippedLoader(loader, count)

    def free(self) -> None:
        self._close_iterators()
        self._model, self._loaders, self._scheduler = None, [], None

    def _close_iterators(self) -> None:
        """Ends their threads, which otherwise read ahead until the interpreter collects the iterators."""
        for iterator in self._iterators:
            iterator.close()  # type: ignore[attr-defined]
        self._iterators = []

    @property
    def iteration(self) -> int | None:
        return None if self._model is None else self._model.iteration

    @property
    def consumed_samples(self) -> int:
        return 0 if self._model is None else self._model.consumed_samples

    # -- states -----------------------------------------------------------------------------------

    def save_state(self, folder: str, own_models: Any = None) -> None:
        self.prepared.save_checkpoint(folder)
        save_program_state(folder)
        if self.prepared.program_optimizer is not None:
            save_rates(folder, self.prepared.program_optimizer.param_groups)
        if self._scheduler is not None:
            self._scheduler.save(folder)

    def load_state(self, folder: str, own_models: Any = None, *, strict: bool = True) -> None:
        self.prepared.load_checkpoint(folder)
        load_program_state(folder)
        if self._scheduler is not None:
            self._scheduler.load(folder)
        if self.prepared.program_optimizer is not None and not self.plugin.no_load_optim:
            load_rates(folder, self.prepared.program_optimizer.param_groups)

    def save_model(self, model: Any, folder: str, max_shard_size: str) -> None:
        export(self.prepared.engine, Path(folder), max_shard_size, self._host)

    def state_dict_of(self, model: Any) -> dict[str, Any]:
        raise ConfigError(
            "get_state_dict: no process has all weights; save_model(model, DIR), called by all processes, writes them, "
            "and AutoModel.from_pretrained(DIR).state_dict() reads them"
        )

    def close(self) -> None:
        self._close_iterators()
        if self._model is not None:
            self._model.close()

    def refuse(self, name: str) -> Any:
        """Raises ConfigError for a method of the facade that needs the program's own modules."""
        raise ConfigError(f"{name} is for programs without the plugin: with Megatron-LM the model's call is the step")

    def prepare_model(self, *args: Any, **options: Any) -> nn.Module:
        return self.refuse("prepare_model")


# -- `Accelerator.save_model`: weights in Hugging Face's format --------------------------------------


def export(engine: Engine, folder: Path, max_shard_size: str, host: PluginHost) -> None:
    """Write what `from_pretrained` loads: whole weights, in the precision of training. Every rank writes its shards
    beside the folder; the first one converts and removes them. Collective. Raises ConfigError and CheckpointError."""
    options = ConvertOptions(
        dtype=engine.config.precision.dtype,
        max_shard_size=parse_bytes(max_shard_size, "save_model(max_shard_size=...)"),
    )
    folder = folder.absolute()  # "." has no name
    # No rank holds the whole weights, so that they pass through a sharded
    # checkpoint beside the folder, on the same disk.
    shards, written = (folder.with_name(f".{folder.name}.{part}") for part in ("shards", "export"))
    checkpoint = engine.save_state(shards, with_optimizer=False)

    def write() -> None:
        try:
            convert(checkpoint, written, saver="hf", options=options, host=host)
            _replace_files(written, folder)
        finally:
            remove_tree(shards)
            if written.exists():
                remove_tree(written)

    on_first_rank(write)


def _replace_files(written: Path, folder: Path) -> None:
    """Into a folder that may have files, as Accelerate does: those of the same names, and the weights of an export
    before, are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
        for before in folder.glob(pattern):
            before.unlink()
    for file in written.iterdir():
        file.replace(folder / file.name)
