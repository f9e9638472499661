"""What an Accelerator does without the plugin: the program's modules, optimizers and schedulers, data-parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mt_accelerate import checkpointing
from mt_accelerate.even_batches import evenly
from mt_accelerate.handlers import DataLoaderConfiguration, Handlers
from mt_accelerate.megatron_lm.schedulers import MegatronLMDummyScheduler
from mt_accelerate.operations import data_parallel_ranks, on_first_rank
from mt_accelerate.state import AcceleratorState, GradientState
from mt_accelerate.without_plugin import models
from mt_accelerate.without_plugin.loaders import PreparedLoader, rows_without_repetitions
from mt_accelerate.without_plugin.optimizers import PreparedOptimizer, PreparedScheduler
from mt_ckpt.files.sizes import parse_bytes
from mt_core.errors import ConfigError
from mt_core.parallel.context import wait_for_all


class OwnModules:
    """The prepared objects of a program, and what its loop does with them."""

    def __init__(
        self,
        state: AcceleratorState,
        gradients: GradientState,
        handlers: Handlers,
        config: DataLoaderConfiguration,
        *,
        place: bool,
        step_scheduler_with_optimizer: bool,
    ) -> None:
        if state.mixed_precision == "fp8":
            raise ConfigError("mixed_precision=fp8 is of the models of mt; give MegatronLMPlugin, or bf16")
        self.state, self.gradients, self.handlers, self.config = state, gradients, handlers, config
        self.place, self.step_scheduler_with_optimizer = place, step_scheduler_with_optimizer
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.scaler = None
        if state.mixed_precision == "fp16":
            self.scaler = torch.amp.GradScaler(state.device.type, **handlers.scaler.to_kwargs())
        self._batches = 0

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool]) -> list[Any]:
        """Collective. Schedulers last: they move with the optimizers."""
        placed = list(zip(objects, placements, strict=True))
        prepared = [obj if _is_scheduler(obj) else self.prepare_one(obj, place) for obj, place in placed]
        return [self.prepare_scheduler(obj) if _is_scheduler(obj) else obj for obj in prepared]

    def prepare_one(self, obj: Any, place: bool) -> Any:
        """Anything else stays as it is."""
        if isinstance(obj, DataLoader):
            return self.prepare_loader(obj, place)
        if isinstance(obj, nn.Module):
            return self.prepare_model(obj, place)
        return self.prepare_optimizer(obj) if isinstance(obj, Optimizer) else obj

    def prepare_model(self, model: nn.Module, place: bool, evaluation: bool = False) -> nn.Module:
        prepared = models.prepare(
            model,
            self.state.device,
            self.state.mixed_precision,
            self.handlers.autocast,
            self.handlers.ddp,
            place=place,
            evaluation=evaluation,
        )
        if all(prepared is not other for other in self.models):
            self.models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(optimizer, self.gradients, self.scaler)
        self.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        if isinstance(scheduler, MegatronLMDummyScheduler):
            raise ConfigError(
                "MegatronLMDummyScheduler needs the plugin: give MegatronLMPlugin(...), or start the program with "
                "mt launch --use_megatron_lm; without it give a scheduler of torch"
            )
        moves = 1 if self.config.split_batches else self.state.num_processes
        with_optimizer = self.step_scheduler_with_optimizer
        prepared = PreparedScheduler(scheduler, self.optimizers, self.gradients, moves, with_optimizer=with_optimizer)
        self.schedulers.append(prepared)
        return prepared

    def prepare_loader(self, loader: Any, place: bool) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            return loader
        device = self.state.device if place else None
        prepared = PreparedLoader(loader, data_parallel_ranks(), device, self.gradients, self.config)
        self.loaders.append(prepared)
        return prepared

    # -- in the loop ------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *modules: nn.Module) -> Iterator[None]:
        gradients = self.gradients
        self._batches = 0 if gradients.sync_with_dataloader and gradients.end_of_dataloader else self._batches + 1
        gradients.sync_gradients = self._batches % gradients.num_steps == 0
        synchronized = gradients.sync_gradients or gradients.sync_each_batch
        with ExitStack() as stack:
            for model in modules:
                stack.enter_context(nullcontext() if synchronized else self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients stay on the ranks."""
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """The next backward pass sums gradients over ranks, also of a forward pass under `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        # As at the end of a forward pass that synchronizes: the reducer waits for all gradients of this pass.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def join(self, joinables: Sequence[nn.Module], even_batches: bool | None) -> Any:
        """Ranks with fewer batches take part in the reductions of the others."""
        joined: list[Any] = [model for model in joinables if isinstance(model, DistributedDataParallel)]
        return self._uneven(Join(joined) if joined else nullcontext(), even_batches)

    @contextmanager
    def _uneven(self, context: Any, even_batches: bool | None) -> Iterator[None]:
        before = self.config.even_batches
        if even_batches is not None:
            self.config.even_batches = even_batches
        try:
            with context, evenly((loader.batch_sampler for loader in self.loaders), even_batches):
                yield
        finally:
            self.config.even_batches = before

    def autocast(self, options: Any = None) -> Any:
        return models.autocast(self.state.device, self.state.mixed_precision, options or self.handlers.autocast)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss = loss / self.gradients.num_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        chosen = self.optimizers if optimizer is None else optimizer if isinstance(optimizer, list) else [optimizer]
        if self.scaler is None:
            return
        for opt in chosen:
            self.scaler.unscale_(opt.optimizer if isinstance(opt, PreparedOptimizer) else opt)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @property
    def step_was_skipped(self) -> bool:
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def without_repetitions(self, value: Any) -> Any:
        return rows_without_repetitions(value, self.gradients.active_dataloader)

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool) -> nn.Module:
        return models.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper)

    def skip_first_batches(self, loader: Any, count: int) -> PreparedLoader:
        prepared = loader if isinstance(loader, PreparedLoader) else self.prepare_loader(loader, self.place)
        return prepared.skipped(count)

    def free(self) -> None:
        self.models, self.optimizers, self.schedulers, self.loaders = [], [], [], []
        self._batches = 0

    @property
    def iteration(self) -> int | None:
        """None: the program counts its steps."""
        return None

    @property
    def consumed_samples(self) -> int:
        return 0

    # -- states -----------------------------------------------------------------------------------

    def weights(self) -> list[dict[str, Tensor]]:
        """State dicts of the prepared models, for hooks of the program."""
        return [self.unwrap(model, True).state_dict() for model in self.models]

    def save_state(self, folder: str, own_models: Sequence[nn.Module]) -> None:
        """own_models: those whose weights a hook of the program has not saved itself."""
        path = Path(folder)
        on_first_rank(lambda: self._save(path, own_models))
        name = f"{checkpointing.RNG_STATE_NAME}_{self.state.process_index}.pkl"
        torch.save(checkpointing.random_states(), path / name)
        wait_for_all()

    def _save(self, path: Path, own_models: Sequence[nn.Module]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        checkpointing.save_models([self.unwrap(model, True) for model in own_models], path)
        checkpointing.save_parts(self._parts(), path)

    def load_state(self, folder: str, own_models: Sequence[nn.Module], *, strict: bool = True) -> None:
        path = Path(folder)
        checkpointing.load_models([self.unwrap(model, True) for model in own_models], path, strict=strict)
        checkpointing.load_parts(self._parts(), path)
        states = path / f"{checkpointing.RNG_STATE_NAME}_{self.state.process_index}.pkl"
        # More ranks than wrote the state: theirs go on as they are.
        if states.is_file():
            checkpointing.set_random_states(checkpointing.read(states))

    def _parts(self) -> dict[str, Any]:
        name = checkpointing.numbered
        parts: dict[str, Any] = {
            name(checkpointing.OPTIMIZER_NAME, i, ".bin"): o for i, o in enumerate(self.optimizers)
        }
        parts |= {name(checkpointing.SCHEDULER_NAME, i, ".bin"): s for i, s in enumerate(self.schedulers)}
        return parts | ({} if self.scaler is None else {checkpointing.SCALER_NAME: self.scaler})

    def save_model(self, model: nn.Module, folder: str, max_shard_size: str) -> None:
        """What `from_pretrained` loads, by the module's own save_pretrained where it has one."""
        unwrapped: Any = self.unwrap(model, True)
        path = Path(folder)

        def write() -> None:
            path.mkdir(parents=True, exist_ok=True)
            if hasattr(unwrapped, "save_pretrained"):
                # Bytes, as for models of mt: a number without a unit is one of bytes there, too.
                unwrapped.save_pretrained(
                    path, max_shard_size=parse_bytes(max_shard_size, "save_model(max_shard_size=...)")
                )
            else:
                checkpointing.save_models([unwrapped], path)

        on_first_rank(write)

    def state_dict_of(self, model: nn.Module) -> dict[str, Any]:
        return dict(self.unwrap(model, True).state_dict())

    def close(self) -> None:
        """Nothing is open."""


def _is_scheduler(obj: Any) -> bool:
    return isinstance(obj, MegatronLMDummyScheduler | PreparedScheduler) or (
        hasattr(obj, "step") and hasattr(obj, "get_last_lr") and not isinstance(obj, Optimizer)
    )
