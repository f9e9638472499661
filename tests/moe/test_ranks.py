"""What needs several ranks beside the layouts: overlap, DeepEP's interface, a third party's dispatcher, traffic."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.moe.moe_cases import EXPERTS, HIDDEN, Shape, build_layer, fp64, options, tokens_of
from torch import Tensor

from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.testing import run_ranks
from mt_moe.dispatchers.flex import DeepEPDispatcher
from mt_moe.dispatchers.interface import expert_placement
from mt_moe.layer import MoeLayer
from mt_moe.permutation import RowKernels
from mt_moe.routing.selection import expert_capacity, keep_within
from mt_moe.tokens import share_tokens

pytestmark = pytest.mark.dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "mt-dispatcher-example" / "src"


def run_layer(layer: MoeLayer, x: Tensor) -> list[Tensor]:
    """Output, and gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *parameters])]


# -- overlap ----------------------------------------------------------------------------------------


def overlapped(rank: int, world: int, dispatcher: str) -> tuple[bool, list[str]]:
    """Whether overlap, the default, changes no bit; and the order of things in its forward and backward pass."""
    ctx, x = build_parallel_context(AxisSizes(ep=world)), tokens_of(2, 8, torch.float32, seed=rank)
    keys = {"moe_shared_expert_intermediate_size": 6, "moe_token_dispatcher_type": dispatcher}
    plain, overlap = (build_layer(options(**keys, moe_shared_expert_overlap=on), ctx) for on in (False, None))
    same = all(torch.equal(a, b) for a, b in zip(run_layer(plain, x), run_layer(overlap, x), strict=True))
    events: list[str] = []
    watch(overlap, events)
    run_layer(overlap, x)
    return same, events


def watch(layer: MoeLayer, events: list[str]) -> None:
    from mt_moe.dispatchers.exchange import AllToAll

    begin, end = AllToAll.begin, AllToAll.end

    def recorded_begin(self: AllToAll, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        if x.shape[1:] == (HIDDEN,):
            events.append("send")
        return begin(self, x, send, receive)

    def recorded_end(self: AllToAll) -> Tensor:
        arrived = end(self)
        if arrived.shape[1:] == (HIDDEN,):
            events.append("arrived")
        return arrived

    AllToAll.begin, AllToAll.end = recorded_begin, recorded_end  # type: ignore[method-assign]
    assert layer.shared_experts is not None
    layer.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared_experts.linear_fc2.weight.register_hook(lambda _: events.append("shared backward"))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_shared_experts_work_while_tokens_are_on_their_way(dispatcher) -> None:
    for same, events in run_ranks(2, overlapped, dispatcher):
        assert same
        assert events[:3] == ["send", "shared", "arrived"]
        backward = events[events.index("shared backward") - 1 :]
        assert backward == ["send", "shared backward", "arrived"]


# -- traffic ----------------------------------------------------------------------------------------


def traffic(rank: int, world: int) -> dict[str, int]:
    """Elements that one forward and backward pass sends to other ranks, and what has to travel."""
    ctx = build_parallel_context(AxisSizes(ep=world))
    layer = build_layer(options(), ctx)
    sent = {"rows": 0, "weights": 0}
    send = dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, receive: list[int], to: list[int], **rest: Any) -> Any:
        others = sum(to) - to[rank]
        sent["rows" if x.dim() == 2 else "weights"] += others * (x.shape[1] if x.dim() == 2 else 1)
        return send(out, x, receive, to, **rest)

    dist.all_to_all_single = counted
    x = tokens_of(2, 8, torch.float32, seed=rank)
    experts = layer.router(share_tokens(x, ctx)).experts
    leaving = int((experts // (EXPERTS // world) != rank).sum())
    run_layer(layer, x)
    total = torch.tensor([leaving, sent["rows"], sent["weights"]])
    dist.all_reduce(total)
    return {"leaving": int(total[0]), "rows": int(total[1]), "weights": int(total[2])}


def test_alltoall_sends_each_row_there_and_back_and_nothing_else() -> None:
    """Forward and backward, each there and back; the weights there, and their gradients back."""
    (found, *_) = run_ranks(4, traffic)
    assert found["leaving"] > 0
    assert found["rows"] == 4 * found["leaving"] * HIDDEN
    assert found["weights"] == 2 * found["leaving"]


# -- waiting ----------------------------------------------------------------------------------------

DROPPING_SOME = {"moe_expert_capacity_factor": 0.75}
CASES: dict[str, dict[str, Any]] = {
    "": {},
    " dropping": DROPPING_SOME,
    " padded": {**DROPPING_SOME, "moe_pad_expert_input_to_capacity": True},
    " with biases": {},
}
STATIC: dict[str, dict[str, Any]] = {
    "": {},
    " static": {"static_shape": True},
    " bounded": {"static_shape": True, "expert_rank_capacity_factor": 1.9},
}


def waits_of_a_layer(
    rank: int, world: int, sizes: AxisSizes, cases: Sequence[str]
) -> dict[str, tuple[int, bool, bool]]:
    """Host waits of a forward and a backward pass; whether computed sizes change no bit; whether rows did not fit."""
    from tests.core.train.test_steady_step import Spy

    ctx, x = build_parallel_context(sizes), tokens_of(2, 8, torch.float32, seed=rank)
    found = {}
    for name in ("alltoall", "allgather"):
        for case in cases:
            values: list[list[Tensor]] = []
            for static, own in STATIC.items():
                chosen = options(
                    moe_token_dispatcher_type=name,
                    moe_dispatcher_options=own,
                    moe_grouped_gemm="grouped",
                    **CASES[case],
                )
                layer = build_layer(chosen, ctx, Shape(ffn_size=16, add_bias_linear="biases" in case))
                with Spy() as spy:
                    values.append(run_layer(layer, x))
                same = all(torch.equal(a, b) for a, b in zip(values[0], values[-1], strict=True))
                found[f"{name}{case}{static}"] = (spy.waits, same, bool(layer.had_overflow))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes", "cases"),
    [(2, AxisSizes(ep=2), [*CASES]), (4, AxisSizes(ep=2, etp=2), [" dropping"])],
    ids=["ep", "ep and etp"],
)
def test_experts_of_several_ranks_with_static_shapes_wait_for_nothing(world, sizes, cases) -> None:
    """Else the host reads how many rows come (alltoall), or how many tokens and of these how many are its own."""
    waits = dict.fromkeys(
        (f"{name}{case}{static}" for name in ("alltoall", "allgather") for case in cases for static in STATIC), 0
    )
    for case in cases:
        waits[f"alltoall{case}"] = 1
        waits[f"allgather{case}"] = world // 2 + (case != " padded")
    for found in run_ranks(world, waits_of_a_layer, sizes, cases):
        assert found == {name: (number, True, False) for name, number in waits.items()}


def order_of_sending(rank: int, world: int) -> list[str]:
    """Of a layer with shared experts whose ranks exchange how many rows there are."""
    from mt_core.train.host_transfer import HostTransfer
    from mt_moe.dispatchers import alltoall

    ctx, x = build_parallel_context(AxisSizes(ep=world)), tokens_of(2, 8, torch.float32, seed=rank)
    layer, events = build_layer(options(moe_shared_expert_intermediate_size=6), ctx), []
    watch(layer, events)

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    alltoall.HostTransfer.start = noted("copy of sizes", HostTransfer.start)  # type: ignore[method-assign]
    HostTransfer.result = noted("wait", HostTransfer.result)  # type: ignore[method-assign]
    alltoall.permute_numbers = noted("permute", alltoall.permute_numbers)
    layer(x)
    return events


def test_the_host_waits_when_the_device_has_rows_to_permute() -> None:
    for events in run_ranks(2, order_of_sending):
        assert events == ["copy of sizes", "permute", "wait", "send", "shared", "arrived", "permute", "send", "arrived"]


TRAINED = [
    "model.family=mixtral",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.vocab_size=263",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.train_iters=3",
    "train.eval_interval=null",
    "train.deferred_metrics=always",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "parallel.expert_model_parallel_size=2",
]


def training_with_room_for(rank: int, world: int) -> tuple[int, bool, list[str]]:
    """Host waits of a step with room for twice the rows; whether losses are those of exact sizes; and the errors of a
    run with too little room, where the flag is read at once, as on a CPU, and where it is not, as on a GPU."""
    from tests.core.train.test_steady_step import StepRecorder, spy_on_step

    from mt_core.config.loading import load_config
    from mt_core.errors import TrainingError
    from mt_core.train import Trainer

    def trainer(own: str, *callbacks: Any) -> Trainer:
        moe = f"model.moe={{num_experts=4, moe_router_topk=2, moe_grouped_gemm='grouped'{own}}}"
        return Trainer(load_config(overrides=[*TRAINED, moe]), callbacks=callbacks)

    bounded = ", moe_dispatcher_options={{static_shape=true, expert_rank_capacity_factor={}}}"
    losses = []
    for own in ("", bounded.format(2.0)):
        recorder = StepRecorder()
        trainer(own, recorder).train()
        losses.append([step["loss"] for step in recorder.steps])
    waits = spy_on_step(trainer(bounded.format(2.0))).waits
    errors = []
    for names in ((), ("layer.require_room", "routing.router.require_finite")):
        with ExitStack() as patches:
            for name in names:
                patches.enter_context(mock.patch(f"mt_moe.{name}"))
            with pytest.raises(TrainingError) as failed:
                trainer(bounded.format(0.5)).train()
        errors.append(str(failed.value))
    return waits, losses[0] == losses[1] and len(losses[0]) == 3, errors


@pytest.mark.slow
def test_a_step_waits_for_nothing_and_rows_without_room_stop_the_run() -> None:
    """Although metrics are read a step later."""
    key = r"more (rows for one rank )?than model\.moe\.moe_dispatcher_options\.expert_rank_capacity_factor has room for"
    for waits, same, (at_once, late) in run_ranks(2, training_with_room_for):
        assert waits == 0
        assert same
        assert re.search(rf"^decoder\.layers\.0\.mlp: there are {key}; set it higher", at_once)
        assert re.search(
            rf"loss is not finite at iteration 1 .*the rows of decoder\.layers\.0\.mlp for one rank, which are {key}",
            late,
        )


# -- dropping ---------------------------------------------------------------------------------------


def dropped(rank: int, world: int) -> dict[str, float]:
    """Each rank drops among its own tokens, whatever the dispatcher; compared with this rank's tokens alone."""
    ctx, x = build_parallel_context(AxisSizes(ep=world), params_dtype=torch.float64), tokens_of(2, 8, seed=rank)
    found = {}
    for name in ("alltoall", "allgather"):
        for padded in (False, True):
            keys = {
                "moe_expert_capacity_factor": 0.75,
                "moe_pad_expert_input_to_capacity": padded,
                "moe_token_dispatcher_type": name,
            }
            mine, alone = (
                run_layer(build_layer(options(**keys), ctx), x),
                run_layer(build_layer(options(**keys), fp64()), x),
            )
            found[f"{name} {padded} out"] = (mine[0] - alone[0]).abs().max().item()
            found[f"{name} {padded} dx"] = (mine[1] - alone[1]).abs().max().item()
    weights, experts = torch.rand(16, 2), torch.randint(EXPERTS, (16, 2))
    assert not keep_within(experts, weights, EXPERTS, expert_capacity(16, 2, EXPERTS, 0.75), "probs").all()
    return found


@pytest.mark.slow
def test_capacity_is_that_of_a_ranks_own_tokens() -> None:
    for found in run_ranks(4, dropped):
        assert max(found.values()) < 1e-10, found


# -- DeepEP -----------------------------------------------------------------------------------------


class StandInBuffer:
    """deep_ep.Buffer's calls over gloo: a token goes once to every rank that has some of its experts. Expert -1 means
    no selection, as the library documents it."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        owner = topk_idx // (num_experts // self.world)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.world)], 1)
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **layout: Any) -> tuple[Any, ...]:
        everyone: list[Any] = [None] * self.world
        mine = (x, layout.get("topk_idx"), layout.get("topk_weights"), layout.get("is_token_in_rank"))
        dist.all_gather_object(everyone, mine, group=self.group)
        if handle is None:
            handle = [in_rank for *_, in_rank in everyone]
        rows = torch.cat([x[in_rank[:, self.rank]] for (x, *_), in_rank in zip(everyone, handle, strict=True)])
        if layout.get("topk_idx") is None:
            return rows, None, None, None, None, None
        first = self.rank * self.num_experts // self.world
        experts = torch.cat([ids[keep[:, self.rank]] for _, ids, _, keep in everyone]) - first
        here = (experts >= 0) & (experts < self.num_experts // self.world)
        weights = torch.cat([values[keep[:, self.rank]] for _, _, values, keep in everyone]).where(here, 0.0)
        return rows, experts.where(here, -1), weights, here.sum(0).tolist(), handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (x, topk_weights), group=self.group)
        kept = handle[self.rank]
        total = x.new_zeros(len(kept), x.shape[1])
        weights = None if topk_weights is None else topk_weights.new_zeros(len(kept), topk_weights.shape[1])
        for rank, (rows, row_weights) in enumerate(everyone):
            before = sum(int(handle[other][:, rank].sum()) for other in range(self.rank))
            own = slice(before, before + int(kept[:, rank].sum()))
            total[kept[:, rank]] += rows[own]
            if weights is not None:
                weights[kept[:, rank]] += row_weights[own]
        return total, weights, None


def through_deepep(rank: int, world: int, sizes: AxisSizes, keys: dict[str, Any]) -> list[float]:
    ctx, x = build_parallel_context(sizes), tokens_of(2, 8, torch.float32, seed=rank)
    layer, reference = (build_layer(options(**keys), ctx) for _ in range(2))
    assert ctx.ep.group is not None
    placement = expert_placement(EXPERTS, ctx, RowKernels())
    layer.dispatcher = DeepEPDispatcher(placement, StandInBuffer(ctx.ep.group, EXPERTS))
    pairs = zip(run_layer(layer, x), run_layer(reference, x), strict=True)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]


DROPPING = {"moe_expert_capacity_factor": 0.5}
"""Half of all choices go, and all of some tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes", "keys"),
    [
        (2, AxisSizes(ep=2), {}),
        (4, AxisSizes(ep=2, etp=2), {}),
        (2, AxisSizes(ep=2), DROPPING),
        (4, AxisSizes(ep=2, etp=2), {**DROPPING, "moe_token_drop_policy": "position"}),
    ],
    ids=["ep", "ep and etp", "capacity", "capacity by position"],
)
def test_flex_keeps_to_deepeps_interface(world, sizes, keys) -> None:
    """Outputs and every gradient are those of alltoall."""
    for found in run_ranks(world, through_deepep, sizes, keys):
        assert max(found) < 1e-5, found


def test_half_a_capacity_drops_all_of_some_tokens() -> None:
    """So that the test above has such tokens."""
    for rank in range(2):
        layer, x = build_layer(options(**DROPPING), fp64()), tokens_of(2, 8, seed=rank)
        kept = layer.router(share_tokens(x, layer.ctx)).kept
        assert kept.sum() <= 16
        assert not kept.any(1).all()
        assert kept.any(1).any()


def test_flex_without_deepep_says_so() -> None:
    from mt_core.errors import ConfigError
    from mt_moe.dispatchers.config import FlexConfig
    from mt_moe.dispatchers.flex import build_flex
    from mt_moe.dispatchers.interface import ExpertPlacement

    words = r"flex needs DeepEP \(module deep_ep, .*not installed; use alltoall or allgather"
    with pytest.raises(ConfigError, match=words):
        build_flex(FlexConfig(), ExpertPlacement(4))


# -- a third party's dispatcher ---------------------------------------------------------------------


def counted(rank: int, world: int, path: str) -> list[bool]:
    sys.path.insert(0, str(EXAMPLE))
    from mt_dispatcher_example import plugin

    from mt_core.plugins import Plugin, load_plugins
    from mt_moe.layer import build_dispatcher

    host = load_plugins()
    if not any(entry.name == "dispatcher-example" for entry in host.plugins):
        host.add(plugin, Plugin("dispatcher-example", plugin.__name__, "mt-dispatcher-example", "0.1.0"))
    ctx, x = build_parallel_context(AxisSizes(ep=world)), tokens_of(2, 8, torch.float32, seed=rank)
    config = options(moe_token_dispatcher_type="counted", moe_dispatcher_options={"path": path})
    reference = build_layer(options(), ctx)
    layer = build_layer(options(), ctx)
    layer.dispatcher = build_dispatcher(config, ctx, host)
    return [torch.equal(a, b) for a, b in zip(run_layer(layer, x), run_layer(reference, x), strict=True)]


def test_the_example_dispatcher_counts_traffic_and_changes_nothing(tmp_path) -> None:
    path = tmp_path / "traffic.jsonl"
    for same in run_ranks(2, counted, str(path)):
        assert all(same)
    for rank in range(2):
        (line,) = Path(f"{path}.{rank}").read_text().splitlines()
        assert sum(json.loads(line)["rows_to_rank"]) == 16 * 2
