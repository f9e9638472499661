"""A steady step waits for nothing, launches no more than a loop written by hand, and may defer its metrics."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.errors import ConfigError, TrainingError
from mt_core.optim.optimizers import AdamW
from mt_core.train import Callback, Trainer
from mt_core.train.host_transfer import DelayedAllReduceFlag
from mt_core.train.step.batches import begin_micro_batch
from mt_moe.layer import require_room
from mt_moe.routing.router import require_finite

DEFERRED = ["optimizer.exp_avg_dtype=bf16", "train.deferred_metrics=always"]
PREDICTS_MORE = ["model.family=deepseek", "model.mtp_num_layers=1"]
BALANCED = [
    "model.moe={num_experts=4, moe_router_topk=2, moe_router_load_balancing_type=['aux_loss'], "
    "moe_aux_loss_coeff=[0.1], moe_router_enable_expert_bias=true, moe_router_score_function='sigmoid'}",
]
DELAYED_FP8 = [
    "precision.dtype=bf16",
    "precision.fp8_format=hybrid",
    "precision.fp8_recipe=delayed",
    "precision.fp8_min_features=1",
]
TIMED = ("iteration_time", "tokens_per_second")
TENSORWISE_FP8 = [*DELAYED_FP8[:2], "precision.fp8_recipe=tensorwise", DELAYED_FP8[3]]
GROUPED = [
    "model.moe.moe_grouped_gemm=grouped",
    "model.moe.moe_router_load_balancing_type=['aux_loss', 'seq_aux_loss']",
    "model.moe.moe_aux_loss_coeff=[0.1, 0.1]",
]
PADDED = ["model.moe.moe_expert_capacity_factor=1.0", "model.moe.moe_pad_expert_input_to_capacity=true"]


def waits_for_the_device(func, args, kwargs) -> bool:
    """Whether the host has to see a result of the operator: item(), float(), bool(), nonzero(), bincount() and every
    other whose output has a size that depends on values, masks as indices among them."""
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        if func is torch.ops.aten.index.Tensor:
            return any(index is not None and index.dtype == torch.bool for index in args[1])
        return kwargs.get("output_size") is None
    return False


COPIES_TO_HOST = ("tolist", "numpy", "cpu")
"""Methods that wait too, but for tensors on a CPU are no operators."""
READS_OF_THE_HOST = {
    begin_micro_batch.__code__: "the number of a micro-batch's first sample, which is never on the device",
    require_finite.__code__: "logits of a router, which are read on a CPU alone",
    require_room.__code__: "whether rows had no room, which is read on a CPU alone",
    DelayedAllReduceFlag.__call__.__code__: "a flag whose copy to the host was started by the step before",
    Trainer._report_pending.__code__: "numbers whose copy to the host was started by the step before",
}
"""Functions in which reading is no waiting, and why."""


def reads_of_the_host() -> bool:
    """Whether one of those functions is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in READS_OF_THE_HOST:
            return True
        frame = frame.f_back
    return False


class SpyOnMethods(TorchFunctionMode):
    """Counts methods of tensors that copy to the host."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in COPIES_TO_HOST and not reads_of_the_host():
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Spy(TorchDispatchMode):
    """Counts operators; those that only make views are left out, as they launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.methods: Counter[str] = Counter()
        self._waits = 0
        self._on_methods = SpyOnMethods(self.methods)

    def __enter__(self) -> Spy:
        self._on_methods.__enter__()
        return super().__enter__()

    def __exit__(self, *raised) -> None:
        super().__exit__(*raised)
        self._on_methods.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = waits_for_the_device(func, args, kwargs or {})
        if not func.is_view and not (waits and reads_of_the_host()):
            self.counts[func.__name__.split(".")[0]] += 1
            self._waits += waits
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return self._waits + self.methods.total()


class StepRecorder(Callback):
    """The metrics of each step."""

    def __init__(self) -> None:
        self.steps: list[dict] = []

    def on_step_end(self, run, metrics) -> None:
        self.steps.append(dict(metrics))


def spy_on_step(trainer: Trainer, warm: int = 2) -> Spy:
    """The step after `warm` others."""
    steps = trainer.engine.remaining_steps()
    trainer.model.train()
    for number, rank_batch in enumerate(trainer.engine.read_batches(trainer.train_data, steps)):
        if number == warm:
            with Spy() as spy:
                trainer.take_step(rank_batch)
            return spy
        trainer.take_step(rank_batch)
    raise AssertionError("too few steps")


def trained(config, **parts) -> tuple[Trainer, list[dict]]:
    recorder = StepRecorder()
    trainer = Trainer(config, callbacks=[recorder], **parts)
    trainer.train()
    return trainer, recorder.steps


@pytest.mark.parametrize("more", [[], ["train.loss=linear_cross_entropy"], ["data.reset_position_ids=true"]])
def test_a_steady_step_waits_for_nothing(more, tiny) -> None:
    assert spy_on_step(Trainer(tiny(*DEFERRED, *more))).waits == 0


@pytest.mark.parametrize(
    "more",
    [[], PREDICTS_MORE, DELAYED_FP8, TENSORWISE_FP8, [*BALANCED, *GROUPED], [*BALANCED, *GROUPED, *PADDED]],
    ids=["dense", "multi-token", "delayed fp8", "tensorwise fp8", "experts", "padded experts"],
)
def test_nor_with_torchs_adam_losses_of_layers_and_what_layers_do_after_it(more, tiny) -> None:
    trainer = Trainer(tiny("train.deferred_metrics=always", *more))
    assert isinstance(trainer.engine.optimizer, AdamW)
    assert spy_on_step(trainer).waits == 0


@pytest.mark.parametrize("more", [[], PREDICTS_MORE])
def test_a_step_whose_metrics_are_read_at_once_waits_for_one_transfer(more, tiny) -> None:
    """Loss, norm, and the loss of a layer travel together."""
    assert spy_on_step(Trainer(tiny("train.deferred_metrics=never", *more))).waits == 1


def test_the_spy_sees_reads_of_integers_and_whole_tensors() -> None:
    numbers = torch.arange(3)
    with Spy() as spy:
        int(numbers[1])
        numbers.tolist()
        numbers.float().numpy()
        bool(numbers.any())
        numbers.bincount()
        numbers[numbers > 1]
        numbers.repeat_interleave(numbers)
        numbers.repeat_interleave(numbers, output_size=3)
        numbers[numbers]
    assert spy.waits == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["optimizer.exp_avg_dtype=bf16", "optimizer.clip_grad=0.5"],
        ["optimizer.clip_grad=0.5"],
        ["optimizer.clip_grad=0.0"],
        ["precision.dtype=bf16", "parallel.use_distributed_optimizer=true"],
        PREDICTS_MORE,
        BALANCED,
        DELAYED_FP8,
    ],
    ids=["16-bit moments", "torch's adam", "without clipping", "buckets", "multi-token", "experts", "delayed fp8"],
)
def test_deferred_metrics_differ_in_nothing_but_their_time(more, tiny, tmp_path) -> None:
    """To the last bit, the weights included."""
    more = [*more, "train.eval_interval=4", "checkpoint.save_interval=3"]
    now, at_once = trained(tiny("train.deferred_metrics=never", *more), run_dir=tmp_path / "now")
    later, deferred = trained(tiny("train.deferred_metrics=always", *more), run_dir=tmp_path / "deferred")
    assert not now.engine.step.deferred
    assert later.engine.step.deferred
    assert [step["iteration"] for step in deferred] == [1, 2, 3, 4, 5, 6]
    assert [without_time(step) for step in deferred] == [without_time(step) for step in at_once]
    assert later.last_evaluation == now.last_evaluation
    assert all(torch.equal(a, b) for a, b in zip(later.model.parameters(), now.model.parameters(), strict=True))


def without_time(step: dict) -> dict:
    return {key: value for key, value in step.items() if key not in TIMED}


@pytest.mark.parametrize("more", [PREDICTS_MORE, BALANCED], ids=["multi-token", "experts"])
def test_losses_of_layers_are_reported(more, tiny) -> None:
    _, steps = trained(tiny("train.deferred_metrics=always", "train.train_iters=2", *more))
    own = [name for name in steps[0] if name.startswith(("mtp_", "moe/")) and name.endswith("_loss")]
    assert own
    assert all(step[name] > 0.0 for step in steps for name in own)


@pytest.mark.slow
def test_resuming_goes_on_to_the_last_bit(tiny, tmp_path) -> None:
    _, whole = trained(tiny(*DEFERRED))
    _, first = trained(tiny(*DEFERRED, "train.exit_iteration=3"), run_dir=tmp_path)
    _, second = trained(tiny(*DEFERRED), run_dir=tmp_path)
    assert [step["loss"] for step in first + second] == [step["loss"] for step in whole]


@pytest.mark.parametrize("more", [["optimizer.exp_avg_dtype=bf16"], []], ids=["16-bit moments", "torch's adam"])
def test_a_loss_that_is_not_finite_is_reported_one_step_later_and_changes_no_weight(more, tiny) -> None:
    """The second batch is bad; the third was launched when that is known, and is named as good."""
    trainer = Trainer(tiny("train.deferred_metrics=always", *more))
    loss_of = trainer.engine.forward_backward.forward_step
    before: dict[str, Tensor] = {}

    def bad_at_second(model: nn.Module, batch) -> Tensor:
        losses = loss_of(model, batch)
        if trainer.state.iteration != 1:
            return losses
        before.update({name: p.detach().clone() for name, p in model.named_parameters()})
        return losses * float("inf")

    trainer.engine.forward_backward.forward_step = bad_at_second
    trainer.engine.weights.copy_to_model = lambda: None
    steps = trainer.engine.remaining_steps()
    batches = trainer.engine.read_batches(trainer.train_data, steps)
    trainer.take_step(next(batches))
    trainer.take_step(next(batches))
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    with pytest.raises(TrainingError, match=r"loss is not finite at iteration 2 .*samples 4 to 7"):
        trainer.take_step(next(batches))
    assert trainer.state.iteration == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision.dtype=fp16"], "precision.dtype=fp16 chooses the next loss scale"),
        (["logging.log_num_zeros_in_grad=true"], "log_num_zeros_in_grad=true counts on the host"),
        (["optimizer.optimizer=sgd"], "optimizer.optimizer=sgd cannot skip a step on the device .adam can"),
    ],
)
def test_what_needs_its_numbers_at_once_is_refused(overrides, words, tiny) -> None:
    with pytest.raises(ConfigError, match=f"train.deferred_metrics=always is not possible: .*{words}"):
        Trainer(tiny("train.deferred_metrics=always", *overrides))


# -- operators against a loop written by hand ---------------------------------------------------------

PLAIN_GPT = [
    "model.normalization=LayerNorm",
    "model.activation=gelu",
    "model.position_embedding_type=learned_absolute",
    "model.add_bias_linear=true",
    "model.max_position_embeddings=16",
    "train.micro_batch_size=4",
]


class PlainBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """The same model with tied embeddings, as anybody would write it."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def operators_of_a_plain_step(config, vocabulary: int) -> Counter[str]:
    """Zero, forward, masked mean, backward, clip, AdamW, and a look at the loss."""
    model, ffn = config.model, config.model.ffn_size
    plain = PlainGPT(model.num_layers, model.hidden_size, model.num_attention_heads, ffn, vocabulary, 16)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    positions, mask = torch.arange(16).expand(4, 16), torch.ones(4, 16)
    for _ in range(2):
        with Spy() as spy:
            optimizer.zero_grad(set_to_none=True)
            logits = plain(tokens, positions)
            losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(mask)
            loss = (losses * mask).sum() / mask.sum().clamp(min=1.0)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            loss.item()
    return spy.counts


def test_no_more_operators_than_a_loop_written_by_hand(tiny) -> None:
    trainer = Trainer(tiny(*PLAIN_GPT, "train.deferred_metrics=never"))
    ours = spy_on_step(trainer).counts
    theirs = operators_of_a_plain_step(trainer.config, trainer.config.model.vocab_size)
    more = {name: (count, theirs[name]) for name, count in ours.items() if count > theirs[name]}
    assert ours.total() <= theirs.total(), more


# -- compiled layers ----------------------------------------------------------------------------------


LLAMA = ["model.family=llama", "model.num_query_groups=2"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], LLAMA, TENSORWISE_FP8], ids=["gpt", "llama", "tensorwise fp8"])
def test_compiled_layers_are_one_graph_each_and_train_alike(more, tiny, monkeypatch) -> None:
    """With a backend that only traces: making code takes a minute."""
    seen = []

    def tracing(graph, inputs):
        seen.append(graph)
        return graph.forward

    from functools import partial

    torch.compiler.reset()
    _, plain = trained(tiny("train.train_iters=2", *more))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=tracing, fullgraph=True))
    trainer, compiled = trained(tiny("train.train_iters=2", "train.compile=blocks", *more))
    assert 1 <= len(seen) <= trainer.config.model.num_layers
    assert [s["loss"] for s in compiled] == pytest.approx([s["loss"] for s in plain], rel=1e-6)


def test_experts_are_left_out_of_compiled_layers(tiny, monkeypatch) -> None:
    """Each layer is compiled, and in it the module of experts runs as it is."""
    kept_out = []
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: kept_out.append(function) or function)
    model = Trainer(tiny("train.compile=blocks", *BALANCED)).model
    assert kept_out == [layer.mlp.experts.forward for layer in model.decoder.layers]


def test_a_model_without_layers_is_not_compiled(tiny) -> None:
    with pytest.raises(ConfigError, match=r"train.compile=blocks compiles the layers of a stack"):
        Trainer(tiny("train.compile=blocks"), model=nn.Linear(2, 2))


@pytest.mark.parametrize("deferred", ["never", "always"])
def test_copies_are_compared_once_for_each_step_that_is_due(deferred, tiny, monkeypatch) -> None:
    compared: list[None] = []
    monkeypatch.setattr("mt_core.train.step_checks.check_replicas", lambda *_: compared.append(None))
    trained(tiny(f"train.deferred_metrics={deferred}", "train.verify_replicas_interval=2", "train.train_iters=5"))
    assert len(compared) == 2
