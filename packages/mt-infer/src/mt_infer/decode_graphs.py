"""CUDA graphs of decode steps: one for each of a few batch sizes, captured when it is first used.

A step with as many sequences as no graph has is filled up with rows that compute a token of no sequence, and write to a
place of the cache that none has. All graphs share a memory pool: they are replayed one at a time, and their logits are
read before the next replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import SynchronizesHost
from mt_core.nn.cache import MemoryState, PositionState
from mt_core.nn.model import as_generator
from mt_core.parallel.context import ParallelContext
from mt_core.train.cuda_graphs.capture import CudaRecorder, Recorder
from mt_infer.cache.batch import Chunk
from mt_infer.cache.decode_batch import DecodeBatch, DecodeInputs
from mt_infer.cache.manager import CacheManager
from mt_infer.cache.paged_attention import paged_attention_by_row
from mt_infer.config import InferenceConfig
from mt_infer.quantization.int8_product import Int8Matrix
from mt_infer.recorded_steps import CpuRecorder, RecordedStep
from mt_infer.runner import ModelRunner

# Few sizes, since each is a capture of its own; small ones are closer together, as there a row of filler costs
# relatively more.
POWERS = (1, 2, 4)
STEP = 8
"""Sizes from here on are multiples of it."""


class DecodeGraph:
    """A captured step. logits: [rows, vocab] in fp32, overwritten by each replay."""

    def __init__(self, rows: int, runner: ModelRunner, manager: CacheManager, recorder: Recorder, pool: object) -> None:
        self.inputs = DecodeInputs(rows, manager, runner.ctx.device)
        # Rows of filler alone: the warm-up run below computes on valid places without touching a sequence.
        self.inputs.fill([])
        if not isinstance(recorder, CpuRecorder):
            # Eager, on the capture stream: at a first call Triton compiles and cuBLAS allocates a workspace, which
            # cannot be part of a graph.
            with recorder.aside():
                runner.logits(DecodeBatch(self.inputs, manager))
        # Recorded, and on a GPU not run. Every tensor it reads has to stay where it is: the inputs, the weights and the
        # cache.
        with recorder.capture(pool) as self._graph:
            attention = None
            if isinstance(self._graph, RecordedStep):
                attention = self._graph.whole(paged_attention_by_row)
            logits = runner.logits(DecodeBatch(self.inputs, manager, attention))
        assert logits is not None
        if isinstance(recorder, CpuRecorder):
            assert isinstance(self._graph, RecordedStep)
            self._graph.finish([logits], recorder.packs)
        self.logits = logits

    def replay(self, chunks: Sequence[Chunk]) -> Tensor:
        """[chunks, vocab]: of the position of each chunk."""
        self.inputs.fill([chunk.sequence for chunk in chunks])
        self._graph.replay()
        # A view, without the rows of filler.
        return self.logits[: len(chunks)]


class DecodeGraphs:
    """The graphs of an engine. In place of ModelRunner.logits for batches that they serve."""

    def __init__(self, runner: ModelRunner, manager: CacheManager, recorder: Recorder) -> None:
        self.runner, self.manager, self.recorder = runner, manager, recorder
        most = manager.limits.max_requests
        # A recording is one pass: each number of sequences has its own, without rows of filler.
        self.sizes = tuple(range(1, most + 1)) if isinstance(recorder, CpuRecorder) else batch_sizes(most)
        self._pool = recorder.new_pool()
        self.captured: dict[int, DecodeGraph] = {}
        self.last: DecodeGraph | None = None
        """The graph of the last step."""
        self._weights: list[int] = []

    def serves(self, chunks: Sequence[Chunk]) -> bool:
        """Whether each sequence computes one position, and samples from it."""
        # A step with a chunk of a prompt in it is computed eagerly as a whole.
        return 0 < len(chunks) <= self.sizes[-1] and all(chunk.count == chunk.logits == 1 for chunk in chunks)

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """[chunks, vocab] in fp32, valid until the next call."""
        # 9 sequences run in the graph of 16 rows.
        rows = next(size for size in self.sizes if size >= len(chunks))
        # Graphs read weights by address.
        if not self.captured:
            self._weights = self._addresses()
        if rows not in self.captured:
            self.captured[rows] = DecodeGraph(rows, self.runner, self.manager, self.recorder, self._pool)
        self.last = self.captured[rows]
        return self.last.replay(chunks)

    def weights_changed(self) -> None:
        """Values may have changed in place. Weights at other addresses, and copies of weights, need new graphs."""
        has_copies = isinstance(self.recorder, CpuRecorder)
        if isinstance(self.recorder, CpuRecorder):
            self.recorder.packs.clear()
        if self.captured and (has_copies or self._weights != self._addresses()):
            self.captured.clear()
            self.last = None

    def _addresses(self) -> list[int]:
        model = self.runner.model
        assert isinstance(model, torch.nn.Module)
        # A parameter whose `data` was replaced has another address; one that was written in place has the same.
        return [tensor.data_ptr() for tensors in (model.parameters(), model.buffers()) for tensor in tensors]


def batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, up to the first that holds `most` sequences."""
    sizes = [*POWERS, *range(STEP, most + STEP, STEP)]
    return tuple(sizes[: next(place for place, size in enumerate(sizes) if size >= most) + 1])


KEY = "inference.cuda_graphs"
INVARIANT = "numerics.batch_invariant=true computes sequences one by one; set it to false"


def step_recorder(
    model: nn.Module, options: InferenceConfig, ctx: ParallelContext, is_batch_invariant: bool = False
) -> Recorder | None:
    """What captures decode steps: CUDA graphs on a GPU, lists of operators on a CPU; None where they are computed
    eagerly. Raises ConfigError where graphs are requested and cannot be."""
    if options.cuda_graphs == "auto" and ctx.device.type == "cpu":
        is_quantized = any(is_not_recordable(getattr(module, "weight", None)) for module in model.modules())
        is_eager = is_batch_invariant or is_quantized or any(layer_objections(model, options, ctx))
        return None if is_eager else CpuRecorder()
    return CudaRecorder() if uses_graphs(model, options, ctx, is_batch_invariant) else None


def is_not_recordable(weight: object) -> bool:
    """Quantized weights are subclasses of Tensor, whose operators are not those of their values. What int8 matrices
    call are plain operators; those of experts read on the CPU which rows there are."""
    if isinstance(weight, Int8Matrix):
        return weight.ndim == 3
    return isinstance(weight, Tensor) and type(weight) not in (nn.Parameter, Tensor)


def uses_graphs(
    model: nn.Module, options: InferenceConfig, ctx: ParallelContext, is_batch_invariant: bool = False
) -> bool:
    """Whether decode steps are captured as CUDA graphs. Raises ConfigError where that is requested and cannot be."""
    if options.cuda_graphs == "none":
        return False
    objections = graph_objections(model, options, ctx)
    if is_batch_invariant:
        objections = chain([INVARIANT], objections)
    reason = next(objections, None)
    if reason is not None and options.cuda_graphs == "decode":
        raise ConfigError(f"{KEY}=decode cannot be: {reason}; or {KEY}=auto, which does without graphs")
    return reason is None


def graph_objections(model: nn.Module, options: InferenceConfig, ctx: ParallelContext) -> Iterator[str]:
    """Why decode steps cannot be captured, and what to set instead."""
    if ctx.device.type != "cuda":
        yield f"graphs are CUDA's, and this engine is on {ctx.device.type}; use a GPU"
    yield from layer_objections(model, options, ctx)


def layer_objections(model: nn.Module, options: InferenceConfig, ctx: ParallelContext) -> Iterator[str]:
    """Why decode steps cannot be recorded on any device, and what to set instead."""
    # The asserts of decoding.batch rely on these.
    for axis, key in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        if (size := ctx.axis(axis).size) > 1:  # type: ignore[arg-type]
            yield f"parallel.{key}_model_parallel_size={size} communicates in each step; set it to 1"
    if options.cache_dtype != "auto":
        yield f"inference.cache_dtype={options.cache_dtype} is dequantized sequence by sequence; set it to auto"
    if options.speculative_method is not None:
        yield f"inference.speculative_method={options.speculative_method} computes several positions; leave it out"
    inputs = as_generator(model).conditioned_by
    if inputs:
        yield f"{type(model).__name__} takes {' and '.join(inputs)} beside tokens; use a model of text alone"
    for layer in as_generator(model).cached_layers():
        state = layer.cached_state()
        if isinstance(state, MemoryState) or (isinstance(state, PositionState) and not state.is_paged):
            yield f"{type(layer).__name__} has no attention over a paged cache; use another family"
    for module in model.modules():
        reason = module.host_wait() if isinstance(module, SynchronizesHost) else None
        if reason is not None:
            yield reason
