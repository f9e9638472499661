"""Layers as graphs: the same losses and weights as without, whatever is in flight; when they are captured, and not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from tests.core.train.cuda_graphs.replayed import TapeRecorder
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.dropout import Dropout
from mt_core.nn.model import NumberedLayers
from mt_core.parallel.pipeline.stage import Stage
from mt_core.plugins import load_plugins
from mt_core.train import Callback, Trainer
from mt_core.train.checkpoint.resume import differences
from mt_core.train.cuda_graphs.capture import form_of, replaced
from mt_core.train.cuda_graphs.rules import outermost_stacks, reason_against, rows_of_layers
from mt_core.train.cuda_graphs.runs import BlockGraphs, GraphPoolSlot, LayerRun, unchanged_buffers


class StepRecorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.of_layers: list[dict[str, float]] = []
        self.messages: list[str] = []

    def on_step_end(self, run, metrics) -> None:
        self.losses.append(metrics["loss"])
        self.of_layers.append({name: value for name, value in metrics.items() if name.startswith("moe/")})

    def on_message(self, run, text) -> None:
        self.messages.append(text)


def trained(config, recorder: TapeRecorder | None, warmup: int = 2) -> tuple[Trainer, StepRecorder]:
    steps = StepRecorder()
    trainer = Trainer(config, callbacks=[steps])
    if recorder is not None:
        rows = rows_of_layers(trainer.model, None)
        trainer.engine.graphs = BlockGraphs([LayerRun(row, recorder, warmup) for row in rows])
    trainer.train()
    return trainer, steps


SETTINGS = {
    "fp32": [],
    "several micro-batches": ["train.global_batch_size=8"],
    "bf16 with fp32 copies": ["precision.dtype=bf16"],
    "bf16, gradients in bf16": ["precision.dtype=bf16", "precision.accumulate_allreduce_grads_in_fp32=false"],
    "buckets": ["precision.dtype=bf16", "parallel.use_distributed_optimizer=true"],
    "remainders": ["precision.dtype=bf16", "optimizer.main_weights=remainders"],
    "remainders, gradients in bf16": [
        *("precision.dtype=bf16", "optimizer.main_weights=remainders"),
        "precision.accumulate_allreduce_grads_in_fp32=false",
    ],
    "deferred metrics": ["optimizer.exp_avg_dtype=bf16", "train.deferred_metrics=always"],
    "alibi, a mask of the pattern": ["model.position_embedding_type=alibi"],
    "evaluated": ["train.eval_interval=2"],
    "learned positions": [
        "model.position_embedding_type=learned_absolute",
        "model.max_position_embeddings=16",
    ],
    "fp8": ["precision.dtype=bf16", "precision.fp8_format=hybrid"],
    "fp8 by a history": ["precision.dtype=bf16", "precision.fp8_format=hybrid", "precision.fp8_recipe=delayed"],
    "experts": [
        "model.moe={num_experts=4, moe_router_score_function='sigmoid', moe_router_enable_expert_bias=true, "
        "moe_router_load_balancing_type=['aux_loss', 'global_aux_loss'], moe_aux_loss_coeff=[0.1, 0.1], "
        "moe_grouped_gemm='grouped', moe_shared_expert_intermediate_size=16}",
        "train.global_batch_size=8",
    ],
    "padded experts": [
        "model.moe={num_experts=4, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=true, "
        "moe_z_loss_coeff=0.1, moe_grouped_gemm='grouped'}",
    ],
    "compiled": ["train.compile=blocks"],
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_graphs_is_the_run_without(name, tiny, monkeypatch) -> None:
    if name == "compiled":  # traced, and not made into code, which takes a minute
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    recorder = TapeRecorder()
    plain, expected = trained(tiny(*SETTINGS[name]), None)
    graphed, found = trained(tiny(*SETTINGS[name]), recorder)
    assert found.losses == expected.losses
    assert found.of_layers == expected.of_layers
    weights = dict(graphed.model.named_parameters())
    assert all(torch.equal(p, weights[key]) for key, p in plain.model.named_parameters())
    (pool,) = recorder.pools
    assert len(pool) == 4  # forward and backward of two layers
    passes = 4 * plain.config.train.global_batch_size // plain.config.train.micro_batch_size
    assert {graph.replays for graph in pool} == {passes}
    assert "CUDA graphs of 2 layers captured, for 1 micro-batch at a time" in found.messages


@pytest.mark.slow
def test_the_tape_would_show_numbers_of_the_capture(tiny, monkeypatch) -> None:
    """What is not fed anew stays as it was captured: the comparison above can fail."""
    monkeypatch.setattr(GraphPoolSlot, "_feed", lambda self, inputs, tensors: None)
    _, found = trained(tiny(), TapeRecorder())
    assert found.losses != trained(tiny(), None)[1].losses


# -- passes in flight ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x + torch.tanh(self.linear(x)) * factor


def blocks(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def through(layers: list[nn.Module], x: Tensor, **more: float) -> Tensor:
    for layer in layers:
        x = layer(x, **more)
    return x


def gradients(layers: list[nn.Module]) -> list[Tensor]:
    found = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return found


def inputs(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


ONE_F_ONE_B = "F0 F1 F2 B0 F3 B1 B2 B3"
GPIPE = "F0 F1 F2 F3 B0 B1 B2 B3"


def start_times(layers: list[nn.Module], order: str, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """A step: gradients of the weights, and of each micro-batch's input."""
    live: dict[str, tuple[Tensor, Tensor]] = {}
    given: list[Tensor] = []
    for kind, number in order.split():
        if kind == "F":
            x = inputs(seed * 10 + int(number))
            live[number] = x, through(layers, x)
        else:
            x, out = live.pop(number)
            out.square().sum().backward()
            assert x.grad is not None
            given.append(x.grad)
    return gradients(layers), given


@pytest.mark.parametrize(("order", "lanes"), [(ONE_F_ONE_B, 3), (GPIPE, 4), ("F0 B0 F1 B1", 1)])
def test_micro_batches_in_flight_have_lanes_of_their_own(order: str, lanes: int) -> None:
    plain, graphed, recorder = blocks(), blocks(), TapeRecorder()
    run = LayerRun(graphed, recorder, warmup_steps=1)
    for step in range(7):
        captured = run.begin_step()
        assert captured == (1 <= step <= lanes)
        for found, expected in zip(start_times(graphed, order, step), start_times(plain, order, step), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(recorder.pools) == lanes
    assert all(graph.replays for pool in recorder.pools for graph in pool)


def test_a_chain_copies_its_first_input_and_nothing_else() -> None:
    """Layer i + 1 reads the output of layer i where it is, and leaves its gradient where layer i looks for it."""
    layers, recorder = blocks(), TapeRecorder()
    run = LayerRun(layers, recorder, warmup_steps=1)
    start_times(layers, "F0 B0", 0)
    run.begin_step()
    (state,) = run.forms.values()
    (lane,) = state.lanes
    for before, after in zip(lane.calls, lane.calls[1:], strict=False):
        assert after.inputs[0].data_ptr() == before.outputs[0].data_ptr()
        assert before.output_gradients[0] is after.gradients[0]


def test_gradients_of_weights_are_not_the_memory_of_the_graph() -> None:
    layers, recorder = blocks(1), TapeRecorder()
    run = LayerRun(layers, recorder, warmup_steps=1)
    start_times(layers, "F0 B0", 0)
    run.begin_step()
    through(layers, inputs(1)).sum().backward()
    first = layers[0].linear.weight.grad.clone()
    kept = layers[0].linear.weight.grad
    (state,) = run.forms.values()
    assert all(kept.data_ptr() != g.data_ptr() for g in state.lanes[0].calls[0].gradients)
    layers[0].zero_grad()
    through(layers, inputs(2)).sum().backward()
    assert torch.equal(kept, first)


def test_forms_have_graphs_of_their_own_and_few_of_them() -> None:
    plain, graphed, recorder = blocks(), blocks(), TapeRecorder()
    run = LayerRun(graphed, recorder, warmup_steps=1)
    for step in range(3):
        run.begin_step()
        for rows in range(1, 8):
            x = inputs(step, rows)
            assert torch.equal(through(graphed, x, factor=0.5), through(plain, x, factor=0.5))
            through(graphed, x, factor=0.5).sum().backward()
    assert len(run.forms) == 4


def test_a_constant_is_part_of_the_form() -> None:
    graphed, plain = blocks(), blocks()
    run = LayerRun(graphed, TapeRecorder(), warmup_steps=1)
    for step in range(3):
        run.begin_step()
        for factor in (1.0, 2.0):
            out = through(graphed, inputs(step), factor=factor)
            assert torch.equal(out, through(plain, inputs(step), factor=factor))
            out.sum().backward()
    assert len(run.forms) == 2


def test_weights_that_moved_or_are_frozen_are_captured_anew() -> None:
    plain, graphed, recorder = blocks(), blocks(), TapeRecorder()
    run = LayerRun(graphed, recorder, warmup_steps=1)
    for step in range(6):
        if step == 2:
            for layer in graphed:
                layer.linear.weight.data = layer.linear.weight.data.clone()
        if step == 4:
            for layer in (graphed[0], plain[0]):
                layer.requires_grad_(False)
        run.begin_step()
        for layers in (plain, graphed):
            through(layers, inputs(step)).sum().backward()
        for a, b in zip(plain, graphed, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
    assert len(recorder.pools) == 3


def test_layers_before_the_trained_ones_free_the_lane() -> None:
    """A frozen first layer and an input without a gradient: the lane is free after the backward pass of the second."""
    layers, recorder = blocks(), TapeRecorder()
    layers[0].requires_grad_(False)
    run = LayerRun(layers, recorder, warmup_steps=1)
    for _ in range(3):
        run.begin_step()
        for _ in range(2):
            through(layers, inputs(0).detach()).sum().backward()
    assert len(recorder.pools) == 1


def test_without_gradients_and_in_evaluation_layers_are_plain() -> None:
    layers, recorder = blocks(), TapeRecorder()
    run = LayerRun(layers, recorder, warmup_steps=1)
    for _ in range(3):
        run.begin_step()
        with torch.no_grad():
            through(layers, inputs(0))
        for layer in layers:
            layer.eval()
        through(layers, inputs(0)).sum().backward()
        for layer in layers:
            layer.train()
    assert not recorder.pools


def test_layers_that_are_not_called_in_a_row_are_refused() -> None:
    layers = blocks()
    run = LayerRun(layers, TapeRecorder(), warmup_steps=1)
    through(layers[:2], inputs(0)).sum().backward()
    with pytest.raises(ConfigError, match=r"cuda_graphs=blocks: of 3 layers .* first 2 only.*cuda_graphs=none"):
        run.begin_step()


class Pair(NamedTuple):
    left: Tensor
    right: tuple[Tensor, str]


def test_a_named_tuple_stays_one() -> None:
    pair = Pair(inputs(0), (inputs(1), "sum"))
    found = replaced(pair, torch.clone, {})
    assert form_of(found) == form_of(pair)
    assert found.left is not pair.left
    assert torch.equal(found.right[0], pair.right[0])


def test_arguments_of_other_types_are_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, how: object) -> Tensor:
            return x

    layer = Odd()
    LayerRun([layer], TapeRecorder(), warmup_steps=1)
    with pytest.raises(ConfigError, match=r"Odd is called with a function, .*cuda_graphs=none"):
        layer(inputs(0), lambda: None)


# -- rules --------------------------------------------------------------------------------------------


def test_on_a_cpu_graphs_are_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"train.cuda_graphs=blocks cannot be: graphs are CUDA's, .* on cpu"):
        Trainer(tiny("train.cuda_graphs=blocks"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.reset_attention_mask=true"], "data.reset_attention_mask=true packs documents"),
        (["recompute.recompute_granularity=full"], "recompute_granularity=full"),
        (["recompute.cpu_offloading_num_layers=1"], "cpu_offloading_num_layers=1 moves"),
        (["recompute.offload_modules=['attn_proj']"], "recompute.offload_modules=['attn_proj'] moves"),
        (["parallel.use_torch_fsdp2=true"], "use_torch_fsdp2=true"),
        (["model.hidden_dropout=0.1"], "model.hidden_dropout=0.1 is seeded by the host"),
        (["model.attention_dropout=0.1"], "model.attention_dropout=0.1 is seeded by the host"),
        (["precision.fp8_format=hybrid", "precision.fp8_implementation=te"], "fp8_implementation=te"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_key(overrides, words, tiny) -> None:
    trainer = Trainer(tiny())
    on_gpu = replace(trainer.ctx, device=torch.device("cuda"))
    assert reason_against(trainer.model, trainer.config, on_gpu) is None
    reason = reason_against(trainer.model, tiny(*overrides).config, on_gpu)
    assert reason is not None
    assert words in reason


FP8 = ("precision.dtype=bf16", "precision.fp8_format=hybrid", "precision.fp8_implementation=emulated")


@pytest.mark.parametrize(
    ("product", "overrides", "words"),
    [
        ("loop", (), "model.moe.moe_grouped_gemm=loop reads the number of rows"),
        ("grouped", FP8, "precision.fp8_implementation=emulated reads the number of rows"),
    ],
)
def test_experts_that_the_host_multiplies_one_by_one_are_refused(product, overrides, words, tiny) -> None:
    trainer = Trainer(tiny(f"model.moe={{num_experts=4, moe_grouped_gemm='{product}'}}", *overrides))
    reason = reason_against(trainer.model, trainer.config, replace(trainer.ctx, device=torch.device("cuda")))
    assert reason is not None
    assert words in reason


def test_a_capture_that_fails_restores_buffers() -> None:
    layer = nn.BatchNorm1d(2)

    def capture() -> None:
        with unchanged_buffers([layer]):
            layer(torch.ones(4, 2))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        capture()
    assert not layer.running_mean.any()


def test_a_dropout_that_no_key_of_the_decoder_names_is_refused(tiny) -> None:
    trainer = Trainer(tiny())
    name, dropout = next((n, m) for n, m in trainer.model.named_modules() if isinstance(m, Dropout))
    dropout.rate = 0.1
    reason = reason_against(trainer.model, trainer.config, replace(trainer.ctx, device=torch.device("cuda")))
    assert reason == f"{name} drops elements with a seed of the host (rate 0.1); set that rate to 0"


def test_warm_up_steps_are_for_graphs(tiny) -> None:
    with pytest.raises(ConfigError, match="cuda_graph_warmup_steps"):
        tiny("train.cuda_graph_warmup_steps=5")


def test_a_run_goes_on_with_graphs_or_without(tiny) -> None:
    stored = tiny().config.to_dict()
    graphs = tiny("train.cuda_graphs=blocks", "train.cuda_graph_warmup_steps=5").config
    assert list(differences(stored, graphs, load_plugins())) == []


def test_rows_follow_stages_and_leave_inner_stacks_out() -> None:
    model = nn.Module()
    inner = nn.Module()
    inner.stack = NumberedLayers([(0, Block())])
    model.layers = NumberedLayers([(2, inner), (3, Block()), (6, Block())])
    assert outermost_stacks(model) == [model.layers]
    assert rows_of_layers(model, None) == [list(model.layers)]
    stages = [Stage(range(2, 4), first=False), Stage(range(6, 7), first=False), Stage(range(7, 7))]
    assert rows_of_layers(model, stages) == [[model.layers[2], model.layers[3]], [model.layers[6]]]
