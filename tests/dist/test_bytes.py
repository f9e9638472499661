"""Bytes that a rank holds for each parameter, and bytes that it sends in a step: counted, against the formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist.in_turn import InTurn
from torch import Tensor

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.optim.fully_sharded_weights import ends_when_told
from mt_core.train import Callback, Trainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LAYERS, HIDDEN, FFN, VOCAB, SEQUENCE, MICRO_BATCH = 2, 256, 128, 320, 16, 2
PARAMETERS = (
    2 * VOCAB * HIDDEN  # embedding and output layer
    + LAYERS * (3 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN)
    + HIDDEN
)
"""Of a llama without biases. Every weight has a multiple of 4 x 64 elements, so that the shards of 4 ranks are aligned
without padding."""
ZERO, FSDP = "parallel.use_distributed_optimizer=true", "parallel.use_torch_fsdp2=true"
TP, SP, PP = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "pipeline_model_parallel_size=2",
)
WHOLE_WEIGHTS = "parallel.fsdp_reshard_after_forward=false"
SMALL_BUCKETS = "parallel.ddp_bucket_size=100000"


def config(data_parallel: int, micro_batches: int, *more: str) -> LoadedConfig:
    torch.set_num_threads(1)
    settings = {
        "model.family": "llama",
        "model.num_layers": LAYERS,
        "model.hidden_size": HIDDEN,
        "model.ffn_hidden_size": FFN,
        "model.num_attention_heads": 4,
        "model.vocab_size": VOCAB,
        "model.make_vocab_size_divisible_by": 1,
        "data.dataset_type": "builtin",
        "data.corpus_bytes": 1_000_000,
        "data.seq_length": SEQUENCE,
        "train.micro_batch_size": MICRO_BATCH,
        "train.global_batch_size": MICRO_BATCH * micro_batches * data_parallel,
        "train.train_iters": 2,
        "train.eval_interval": "null",
        "train.eval_iters": 0,
        "train.sample_prompt": "null",
        "checkpoint.save_interval": "null",
        "logging.progress": "none",
    }
    return load_config(overrides=[*(f"{key}={value}" for key, value in settings.items()), *more])


# -- held -----------------------------------------------------------------------------------------

FORMATS: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("precision.dtype=bf16",),
    "remainders": ("precision.dtype=bf16", "optimizer.main_weights=remainders"),
    "fp16": (
        "precision.dtype=fp16",
        "precision.accumulate_allreduce_grads_in_fp32=false",
        "precision.initial_loss_scale=1",
    ),
}


def storages(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind tensors, each piece of memory once."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            # Shards and views share the storage of a buffer.
            memory = local.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def held(trainer: Trainer) -> int:
    """Weights, gradients, master weights with their gradients, and the moments of Adam."""
    model = list(trainer.model.parameters())
    # Where master weights are the model's own, storages() counts them once.
    main = [parameter for _, parameter in trainer.engine.weights.named_parameters()]
    states = [value for state in trainer.engine.optimizer.state.values() for value in state.values() if value.ndim]
    every = [*model, *main, *(parameter.grad for parameter in (*model, *main)), *states]
    return storages([tensor for tensor in every if tensor is None or tensor.numel()])


def bytes_held(rank: int, world: int, more: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for name, precision in FORMATS.items():
        if FSDP in more and name in ("remainders", "fp16"):
            continue
        trainer = Trainer(config(world, 1, *precision, *more))
        trainer.train()
        found[name] = held(trainer)
    return found


HELD = InTurn(
    bytes_held, [*((ranks, (ZERO, SMALL_BUCKETS)) for ranks in (1, 2, 4)), (2, (SMALL_BUCKETS,)), (4, (FSDP,))]
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_distributed_optimizer_holds_megatrons_bytes(ranks: int) -> None:
    """fp32 4 (weight) + 4 (gradient) + 8/d (moments); bf16 2 + 4 + (4 main + 8)/d, with remainders 2 + 4 + (2 + 8)/d;
    fp16 2 + 2 + (4 + 4 + 8)/d."""
    expected = {
        "fp32": PARAMETERS * 8 + PARAMETERS * 8 // ranks,
        "bf16": PARAMETERS * 6 + PARAMETERS * 12 // ranks,
        "remainders": PARAMETERS * 6 + PARAMETERS * 10 // ranks,
        "fp16": PARAMETERS * 4 + PARAMETERS * 16 // ranks,
    }
    for found in HELD.of_ranks(ranks, (ZERO, SMALL_BUCKETS)):
        assert found == expected


def test_without_it_every_rank_holds_all_of_the_state() -> None:
    expected = {"fp32": 16, "bf16": 18, "remainders": 16, "fp16": 20}
    for found in HELD.of_ranks(2, (SMALL_BUCKETS,)):
        assert found == {name: PARAMETERS * size for name, size in expected.items()}


def test_fsdp_divides_weights_and_gradients_too() -> None:
    """fp32 weights, gradients and moments whatever the format of computation: 16/d."""
    for found in HELD.of_ranks(4, (FSDP,)):
        assert found == {"fp32": PARAMETERS * 16 // 4, "bf16": PARAMETERS * 16 // 4}


# -- sent -----------------------------------------------------------------------------------------

Call = tuple[str, int]
"""(operation, bytes of the whole tensor: what is reduced, what is gathered, what a message holds)"""


class Recorder(Callback):
    """Counts the calls of the second step. Numbers that control training (fp64, int64) are left out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """patch: for the functions of torch.distributed."""
        self.patch = patch
        self.calls: Counter[Call] = Counter()
        self.on = False

    def note(self, operation: str, tensor: Tensor) -> None:
        if self.on and tensor.dtype not in (torch.float64, torch.int64):
            self.calls[operation, tensor.numel() * tensor.element_size()] += 1

    def on_step_end(self, run: Trainer, metrics: Mapping[str, Any]) -> None:
        self.on = run.state.iteration == 1

    def install(self) -> None:
        self._wrap("all_reduce", lambda tensor, *_: [tensor])
        self._wrap("reduce_scatter_tensor", lambda output, whole, *_: [whole])
        self._wrap("all_gather_into_tensor", lambda whole, *_: [whole])
        # FSDP2 of newer torch calls the same by other names.
        self._wrap("reduce_scatter_single", lambda output, whole, *_: [whole], noted_as="reduce_scatter_tensor")
        self._wrap("all_gather_single", lambda whole, *_: [whole], noted_as="all_gather_into_tensor")
        isend = dist.isend
        self._wrap(
            "batch_isend_irecv", lambda messages: [message.tensor for message in messages if message.op is isend]
        )
        for unexpected in ("broadcast", "reduce", "send", "all_to_all_single"):
            self._wrap(unexpected, lambda tensor, *_: [tensor])

    def _wrap(self, name: str, tensors: Callable[..., list[Tensor]], noted_as: str | None = None) -> None:
        function = getattr(dist, name, None)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # Callers give tensors by position or by name.
            named = [value for value in kwargs.values() if isinstance(value, (Tensor, list))]
            for tensor in tensors(*args, *named):
                self.note(noted_as or name, tensor)
            return function(*args, **kwargs)

        if function is not None:
            self.patch.setattr(dist, name, recorded)


Case = tuple[int, int, tuple[str, ...]]
"""Ranks that have other samples, micro-batches of each, and further keys."""


def calls_of_a_step(rank: int, world: int, case: Case) -> Counter:
    data_parallel, micro_batches, more = case
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        recorder.install()
        Trainer(config(data_parallel, micro_batches, *more), callbacks=[recorder]).train()
    return recorder.calls


BF16, IN_A_PIPELINE = "precision.dtype=bf16", f"parallel.{PP}"
SCHEDULES = ("1f1b", "zbv_zero_bubble")
CASES: Mapping[str, tuple[int, Case]] = {
    "copies, 1 micro-batch": (4, (4, 1, (SMALL_BUCKETS,))),
    "copies, 4 micro-batches": (4, (4, 4, (SMALL_BUCKETS,))),
    "zero": (4, (4, 3, (ZERO, SMALL_BUCKETS))),
    "zero, bf16": (2, (2, 2, (ZERO, BF16))),
    "zero, gradients in bf16": (2, (2, 2, (ZERO, BF16, "precision.grad_reduce_in_bf16=true"))),
    "tp": (2, (1, 3, (TP,))),
    "tp, sp": (2, (1, 3, (TP, SP))),
    "fsdp": (2, (2, 3, (FSDP,))),
    "fsdp, reduced in each": (2, (2, 3, (FSDP, "parallel.fsdp_reduce_each_micro_batch=true"))),
    "fsdp, whole weights": (2, (2, 3, (FSDP, WHOLE_WEIGHTS))),
    "pp": (2, (1, 4, (IN_A_PIPELINE,))),
    **{
        f"fsdp, {schedule}": (4, (2, 4, (FSDP, WHOLE_WEIGHTS, IN_A_PIPELINE, f"parallel.pipeline_schedule={schedule}")))
        for schedule in (SCHEDULES if ends_when_told() else ())
    },
}
RUNS = InTurn(calls_of_a_step, CASES.values())


def calls_of(name: str) -> list[Counter]:
    """Of each rank."""
    return RUNS.of_ranks(*CASES[name])


def totals(calls: Mapping[Call, int]) -> dict[str, int]:
    """Bytes of each operation."""
    found: Counter[str] = Counter()
    for (operation, size), times in calls.items():
        found[operation] += size * times
    return dict(found)


def sent(calls: Mapping[Call, int], ranks: int) -> float:
    """Bytes that leave a rank with the best algorithms: a reduction, or a gathering, of n bytes over p ranks sends
    (p - 1) / p n; an all-reduce is both."""
    shares = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}
    return sum(shares[operation] * size * (ranks - 1) / ranks for operation, size in totals(calls).items())


@pytest.mark.parametrize("micro_batches", ["1 micro-batch", "4 micro-batches"])
def test_data_parallel_sends_each_gradient_once_a_step(micro_batches: str) -> None:
    """However many micro-batches there are."""
    for calls in calls_of(f"copies, {micro_batches}"):
        assert totals(calls) == {"all_reduce": 4 * PARAMETERS}
        assert len(calls) > 1, "several buckets"


def test_the_distributed_optimizer_sends_no_more_than_an_all_reduce() -> None:
    for calls in calls_of("zero"):
        assert totals(calls) == {"reduce_scatter_tensor": 4 * PARAMETERS, "all_gather_into_tensor": 4 * PARAMETERS}
        assert sent(calls, 4) == 2 * 3 / 4 * 4 * PARAMETERS


def test_the_distributed_optimizer_gathers_16_bit_weights() -> None:
    for calls in calls_of("zero, bf16"):
        assert totals(calls) == {"reduce_scatter_tensor": 4 * PARAMETERS, "all_gather_into_tensor": 2 * PARAMETERS}


def test_gradients_that_are_sent_in_bf16_are_half_the_bytes() -> None:
    for calls in calls_of("zero, gradients in bf16"):
        assert totals(calls) == {"reduce_scatter_tensor": 2 * PARAMETERS, "all_gather_into_tensor": 2 * PARAMETERS}


ACTIVATION = MICRO_BATCH * SEQUENCE * HIDDEN * 4
POSITIONS = MICRO_BATCH * SEQUENCE * 4
REGIONS = 2 * LAYERS + 1
"""Of tensor parallelism: attention and feed-forward of each layer; the embedding ends and the output layer begins
another one."""


def test_tensor_parallel_reduces_one_activation_at_each_end_of_a_region() -> None:
    """Forward where it ends, backward where it began; and of each position's loss the largest logit and two sums."""
    for calls in calls_of("tp"):
        assert totals(calls) == {"all_reduce": 3 * (2 * REGIONS * ACTIVATION + 3 * POSITIONS)}
        assert calls["all_reduce", ACTIVATION] == 3 * 2 * REGIONS


def test_sequence_parallel_sends_the_same_and_gathers_inputs_again() -> None:
    """Each all-reduce becomes a reduce-scatter and an all-gather. Of the input of a region a rank keeps its piece only,
    so backward gathers it once more: the least that can be sent with activations so divided. Gradients of norms, which
    saw a part of the positions, are summed once a step."""
    # Two norms a layer and the final one, in fp32.
    norms = (2 * LAYERS + 1) * HIDDEN * 4
    for calls in calls_of("tp, sp"):
        assert totals(calls) == {
            "reduce_scatter_tensor": 3 * 2 * REGIONS * ACTIVATION,
            "all_gather_into_tensor": 3 * 3 * REGIONS * ACTIVATION,
            "all_reduce": 3 * 3 * POSITIONS + norms,
        }


def test_fsdp_gathers_weights_for_each_pass_and_sends_gradients_once() -> None:
    """ZeRO-3, 3 micro-batches: weights before each forward and each backward pass, gradients at the end."""
    for calls in calls_of("fsdp"):
        assert totals(calls) == {
            "all_gather_into_tensor": 3 * 2 * 4 * PARAMETERS,
            "reduce_scatter_tensor": 4 * PARAMETERS,
        }


def test_gradients_that_are_accumulated_sharded_are_sent_with_each_micro_batch() -> None:
    for calls in calls_of("fsdp, reduced in each"):
        assert totals(calls) == {
            "all_gather_into_tensor": 3 * 2 * 4 * PARAMETERS,
            "reduce_scatter_tensor": 3 * 4 * PARAMETERS,
        }


def test_layers_that_stay_whole_are_gathered_once_a_micro_batch() -> None:
    """ZeRO-2."""
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN)
    for calls in calls_of("fsdp, whole weights"):
        assert calls["all_gather_into_tensor", layer] == 3 * LAYERS
        assert totals(calls)["reduce_scatter_tensor"] == 4 * PARAMETERS


def test_a_pipeline_sends_one_activation_forward_and_its_gradient_back() -> None:
    for calls in calls_of("pp"):
        assert calls == {("batch_isend_irecv", ACTIVATION): 4}


@pytest.mark.skipif(not ends_when_told(), reason="torch before 2.15 sends gradients with each pass of a stage")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fsdp_in_a_pipeline_sends_gradients_once_a_step(schedule: str) -> None:
    """Ranks 0 and 2 are two stages (or two pairs of them) of the same replica. With a backward pass in two halves
    weights stay whole until the last one, so they are gathered once, too."""
    first, _, second, _ = (totals(calls) for calls in calls_of(f"fsdp, {schedule}"))
    assert first["reduce_scatter_tensor"] + second["reduce_scatter_tensor"] == 4 * PARAMETERS
    if schedule == "zbv_zero_bubble":
        assert first["all_gather_into_tensor"] + second["all_gather_into_tensor"] == 4 * PARAMETERS
