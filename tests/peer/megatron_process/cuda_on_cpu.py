"""Lets Megatron-Core run where there is no CUDA: to be applied before `megatron.core` is imported, and once after.

Everything that asks for a CUDA device gets the CPU, and streams, events and synchronization do nothing. Only torch's
and Megatron's namespaces in this process change; no file does.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = """
tensor as_tensor zeros ones empty full arange linspace eye rand randn randint randperm empty_strided tril_indices
zeros_like ones_like empty_like full_like rand_like randn_like
"""


class _Nothing:
    """A stream or an event."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record_event(self, *args: object) -> _Nothing:
        return _Nothing()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


def apply_before_import() -> None:
    _replace_devices()
    _replace_streams()
    _replace_random_state()
    for name in FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda module, *args, **kwargs: module  # type: ignore[method-assign]
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.type = _type(torch.Tensor.type)  # type: ignore[method-assign]


def apply_after_import() -> None:
    _norms_with_sequence_parallel()
    _dispatcher_moves_to_numpy()
    _random_state_of_megatron()
    _distributed_optimizer_steps()
    _checkpoints_are_written_here()
    _attention_with_values_of_another_width()


def _on_cpu(function: Any) -> Any:
    """The function, with the CPU where a CUDA device is asked for."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_cuda(value) else value for value in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if function.__name__ == "empty":
            kwargs.pop("strides", None)  # a property of a stored tensor in new versions of torch
        return function(*args, **kwargs)

    return call


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _type(original: Any) -> Any:
    """Optimizers compare the name of a tensor's type with that of one on a GPU."""

    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of


def _replace_devices() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (9, 0)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, name="cpu")
    cuda.get_device_properties = lambda *args: properties  # type: ignore[assignment]
    cuda.get_device_name = lambda *args: "cpu"
    cuda.device = lambda *args: contextlib.nullcontext()  # type: ignore[assignment,misc]
    for name in ["set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "_lazy_init"]:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.mem_get_info = lambda *args: (1 << 34, 1 << 34)
    for name in ["range_push", "range_pop", "mark"]:
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)


def _replace_streams() -> None:
    cuda = torch.cuda
    cuda.Stream = cuda.Event = _Nothing  # type: ignore[assignment,misc]
    cuda.stream = lambda *args: contextlib.nullcontext()  # type: ignore[assignment]
    cuda.current_stream = cuda.default_stream = lambda *args: _Nothing()  # type: ignore[assignment,return-value]
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[method-assign,assignment]


def _replace_random_state() -> None:
    cuda = torch.cuda
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed  # type: ignore[assignment]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


# -- what Megatron keeps itself -------------------------------------------------------------------------


def _random_state_of_megatron() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _norms_with_sequence_parallel() -> None:
    """Torch's norms are refused with sequence parallelism: built without the flag, their parameters marked after."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        asked, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = asked
        for parameter in norm.parameters():
            parameter.sequence_parallel = asked
        return norm

    WrappedTorchNorm.__new__ = new


def _dispatcher_moves_to_numpy() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _distributed_optimizer_steps() -> None:
    """torch's AdamW has a `step` for each parameter, Apex's and Transformer Engine's (which Megatron expects) for a
    group."""
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    load, state_dict_of, set_tensors = cls.load_state_dict, cls.state_dict, cls._set_main_param_and_optimizer_states

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_tensors(self, model_param, {"step": None, **tensors})  # None: as it is, since no file has it

    def state_dict(self: Any) -> Any:
        self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        return state_dict_of(self)

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        with torch.no_grad():  # fp32 weights are their own main copies, and are written in place
            result = load(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                step = group.get("step", state.get("step", 0))
                state["step"] = torch.as_tensor(float(step))
        return result

    cls.load_state_dict, cls.state_dict = load_state_dict, state_dict
    cls._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


def _checkpoints_are_written_here() -> None:
    """A rank writes its files itself, so that no process has to be started to collect the results of writers."""
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *args, **kwargs: results


def _attention_with_values_of_another_width() -> None:
    """Latent attention's values are not as wide as its keys, and Megatron's own attention takes one width."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__

    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init
