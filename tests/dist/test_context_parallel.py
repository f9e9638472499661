"""Context-parallel attention on gloo ranks against attention written out on the whole sequence, in fp64.

Each rank compares its own tokens of the output and of the gradients of q, k and v with the reference, and counts
the bytes it hands to torch.distributed. One launch checks a whole table of cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mt_core.nn.attention import AttentionPattern, eager_attention, sdpa_attention
from mt_core.nn.context_parallel import context_parallel_attention, shard_sequence, unshard_sequence
from mt_core.nn.context_parallel.blocks import BackwardPass, ForwardPass
from mt_core.nn.context_parallel.core import build_hierarchical_axes
from mt_core.nn.context_parallel.masks import BlockMask, SegmentGatherer, ShardedPattern
from mt_core.nn.context_parallel.p2p import Rounds
from mt_core.parallel.context import Axis, AxisSizes, axis_members, build_parallel_context
from mt_core.testing import run_ranks

pytestmark = pytest.mark.dist

BATCH, CHUNK, HEAD_DIM = 2, 6, 8
LIMIT = 1e-5


@dataclass(frozen=True)
class Case:
    method: str
    heads: int = 4
    groups: int = 4
    causal: bool = True
    documents: bool = False
    alibi: bool = False
    window: int | None = None
    sinks: bool = False
    value_dim: int = HEAD_DIM
    backend: str = "auto"
    dtype: torch.dtype = torch.float32


KEYS_TRAVEL = ["p2p", "all_gather"]
CASES = [
    *(Case(method) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, documents=True) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, heads=8, groups=2, alibi=True) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, causal=False) for method in [*KEYS_TRAVEL, "a2a"]),
    *(Case(method, causal=False, documents=True, alibi=True) for method in KEYS_TRAVEL),
    *(Case(method, heads=3, groups=1, documents=True) for method in KEYS_TRAVEL),
    *(Case(method, heads=3, groups=3, value_dim=5) for method in KEYS_TRAVEL),
    *(Case(method, heads=6, groups=3, documents=True, alibi=True, backend="math") for method in KEYS_TRAVEL),
    *(Case(method, heads=12, groups=6, value_dim=4) for method in ["a2a", "a2a+p2p"]),
    *(Case(method, window=5) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, heads=8, groups=2, sinks=True) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, documents=True, window=3, sinks=True) for method in [*KEYS_TRAVEL, "a2a", "a2a+p2p"]),
    *(Case(method, heads=8, groups=2, dtype=torch.bfloat16) for method in [*KEYS_TRAVEL, "a2a"]),
]


# -- one case --------------------------------------------------------------------------------------


def document_ids(length: int) -> torch.Tensor:
    """[2, S]: many short documents, whole chunks of which see nothing of most others; two documents and padding."""
    positions = torch.arange(length)
    long = torch.where(positions < length // 3, 4, 9).masked_fill(positions >= length - 5, -1)
    return torch.stack([positions // 5, long])


def inputs(case: Case, size: int) -> tuple[list[torch.Tensor], AttentionPattern]:
    """q, k, v, gradient of the result: [B, S, heads, dim] of the whole sequence, alike on every rank; the pattern."""
    generator, length = torch.Generator().manual_seed(11), 2 * size * CHUNK
    shapes = [(case.heads, HEAD_DIM), (case.groups, HEAD_DIM), (case.groups, case.value_dim)]
    tensors = [
        torch.randn(BATCH, length, *shape, generator=generator).to(case.dtype)
        for shape in [*shapes, (case.heads, case.value_dim)]
    ]
    pattern = AttentionPattern(
        case.causal,
        document_ids(length) if case.documents else None,
        torch.linspace(0.05, 0.5, case.heads) if case.alibi else None,
        window=case.window,
    )
    return tensors, pattern


def sinks_of(case: Case) -> list[torch.Tensor]:
    """[heads], as large as the largest scores; none where the case has none."""
    return [torch.linspace(-1.0, 3.0, case.heads)] if case.sinks else []


def results(core, tensors, pattern, sinks) -> list[torch.Tensor]:
    """Output, and gradients of q, k, v and the sinks"""
    *leaves, grad = (x.detach().clone().requires_grad_() for x in tensors)
    further = [x.detach().clone().requires_grad_() for x in sinks]
    out = core(*leaves, pattern, 0.0, *further)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *further], grad)]


def run_case(case: Case, cp: Axis, axes: list[Axis]) -> list[float]:
    """Largest difference in this rank's output, dq, dk, dv, each relative to the largest value in the whole; and of the
    gradients of the sinks, to which all ranks add."""
    (tensors, pattern), sinks = inputs(case, cp.size), sinks_of(case)
    # The reference in fp64, on the whole sequence on every rank.
    wide = [[x.double() for x in given] for given in (tensors, sinks)]
    expected = results(eager_attention(softmax_in_fp32=False), wide[0], pattern, wide[1])
    core = eager_attention() if case.sinks else sdpa_attention
    core = context_parallel_attention(case.method, axes, core=core, backend=case.backend)
    shards = [shard_sequence(x, 1, cp) for x in tensors]
    if pattern.segment_ids is not None:
        # The mask is computed lazily from the whole sequence: without it, the shard would inherit it.
        pattern = replace(pattern, segment_ids=shard_sequence(pattern.segment_ids, 1, cp), _mask=None)
    found = results(core, shards, replace(pattern, _mask=None), sinks)
    for gradient in found[4:]:
        dist.all_reduce(gradient, group=cp.group)
    wholes = [shard_sequence(whole, 1, cp) if place < 4 else whole for place, whole in enumerate(expected)]
    return [
        ((mine.double() - own).abs().max() / whole.abs().max()).item()
        for mine, own, whole in zip(found, wholes, expected, strict=True)
    ]


# -- counting what is sent -------------------------------------------------------------------------


@contextmanager
def counted(axis_size: int) -> Iterator[dict[str, int]]:
    """Bytes that leave this rank, by kind of call; a ring or a tree sends as much for a collective."""
    sent = {"p2p": 0, "all_gather": 0, "reduce_scatter": 0, "a2a": 0}
    calls = dist.batch_isend_irecv, dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single

    def batch_isend_irecv(operations):
        sent["p2p"] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return calls[0](operations)

    def all_gather_into_tensor(output, own, group=None):
        sent["all_gather"] += own.nbytes * (axis_size - 1)
        return calls[1](output, own, group=group)

    def reduce_scatter_tensor(output, pieces, group=None):
        sent["reduce_scatter"] += output.nbytes * (axis_size - 1)
        return calls[2](output, pieces, group=group)

    def all_to_all_single(output, pieces, group=None):
        sent["a2a"] += pieces.nbytes * (axis_size - 1) // axis_size
        return calls[3](output, pieces, group=group)

    with patch.multiple(
        dist,
        batch_isend_irecv=batch_isend_irecv,
        all_gather_into_tensor=all_gather_into_tensor,
        reduce_scatter_tensor=reduce_scatter_tensor,
        all_to_all_single=all_to_all_single,
    ):
        yield sent


def visible_chunks(source: int, reader: int, size: int) -> int:
    """How many of the source's two chunks some query of the reader may see, from the causal mask itself."""
    # Rank r has chunks r and 2 size - 1 - r (zigzag): the later one sees all chunks up to itself.
    last_query = 2 * size - 1 - reader
    return sum(chunk <= last_query for chunk in (source, 2 * size - 1 - source))


def least_bytes(case: Case, rank: int, size: int) -> dict[str, int]:
    """What has to leave this rank in a forward and backward pass, by hand."""
    chunk = BATCH * CHUNK * 4  # bytes of one feature of one chunk
    kv = case.groups * (HEAD_DIM + case.value_dim) * chunk
    others = [other for other in range(size) if other != rank]
    shown = sum(visible_chunks(rank, other, size) for other in others)
    read = sum(visible_chunks(other, rank, size) for other in others)
    everything = 2 * kv * (size - 1)
    features = case.heads * 2 * (HEAD_DIM + case.value_dim)  # of q, k, v and the result, a head having its own k, v
    a2a = 2 * 2 * chunk * features * (size - 1) // size  # forward and backward, two chunks
    return {
        # Keys and values go out in the forward and again in the backward pass, to ranks that see them; gradients go
        # back for those that this rank has read.
        "p2p": {"p2p": 2 * shown * kv + read * kv},
        "all_gather": {"all_gather": 2 * everything, "reduce_scatter": everything},
        "a2a": {"a2a": a2a},
    }[case.method]


# -- what the ranks do -----------------------------------------------------------------------------


Axes = dict[str, list[Axis]]


def context_axes(world: int) -> tuple[Axis, Axes]:
    """The context-parallel axis of all ranks, and what each method takes."""
    cp = build_parallel_context(AxisSizes(cp=world)).cp
    nested = build_hierarchical_axes(axis_members(world, AxisSizes(cp=world))["cp"], (2, world // 2))
    return cp, {"p2p": [cp], "all_gather": [cp], "a2a": [cp], "a2a+p2p": list(nested)}


def all_cases(cp: Axis, axes: Axes) -> dict[Case, list[float]]:
    world = cp.size
    whole = torch.arange(4 * 2 * world).view(4, 2 * world)
    assert torch.equal(unshard_sequence(shard_sequence(whole, -1, cp), -1, cp), whole)
    return {case: run_case(case, cp, axes[case.method]) for case in CASES}


def bytes_sent(cp: Axis, axes: Axes) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Method -> (counted, least)"""
    table = {}
    for case in [Case("p2p", groups=2), Case("all_gather", groups=2), Case("a2a")]:
        with counted(cp.size) as sent:
            run_case(case, cp, axes[case.method])
        table[case.method] = ({kind: n for kind, n in sent.items() if n}, least_bytes(case, cp.rank, cp.size))
    return table


def order_of_events(cp: Axis, axes: Axes) -> list[str]:
    """Transfers started and blocks computed in a forward pass of the point-to-point method."""
    events = []
    start, add = Rounds._start_block, ForwardPass.add

    def started(self, step, kv):
        events.append(f"send {step}")
        return start(self, step, kv)

    def added(self, sources, kv):
        events.append(f"compute {(cp.rank - sources[0]) % cp.size}")
        return add(self, sources, kv)

    q = torch.randn(1, 4, 2, 8)
    with patch.object(Rounds, "_start_block", started), patch.object(ForwardPass, "add", added):
        context_parallel_attention("p2p", [cp])(q, q, q, AttentionPattern(), 0.0)
    return events


def gathers_of_segment_ids(cp: Axis, axes: Axes) -> int:
    """Collectives that two layers with the same documents cost, besides those for keys."""
    core, q = context_parallel_attention("a2a+p2p", axes["a2a+p2p"]), torch.randn(1, 4, 2, 8)
    pattern, calls, gather = AttentionPattern(segment_ids=torch.zeros(1, 4)), [], dist.all_gather_into_tensor
    with patch.object(dist, "all_gather_into_tensor", lambda *a, **k: (calls.append(1), gather(*a, **k))[1]):
        core(core(q, q, q, pattern, 0.0), q, q, pattern, 0.0)
    return len(calls)


# -- mutations -------------------------------------------------------------------------------------


def _without_block(self, sources, kv, add=ForwardPass.add):
    if list(sources) != [0] or self.pattern.axis.rank == 0:
        add(self, sources, kv)


def _own_ids_for_all(self, segment_ids):
    return None if segment_ids is None else segment_ids[None].expand(self.axis.size, -1, -1)


def _unmasked(self):
    return BlockMask()


def _documents_forgotten(self, sources, mask=ShardedPattern.mask):
    block = mask(self, sources)
    return block if block.bias is None else BlockMask(bias=torch.zeros_like(block.bias))


def _sinks_forgotten(self, sinks, finish=ForwardPass.finish):
    return finish(self)


def _lost_return(self, step, dkv, start=Rounds.start_return):
    return start(self, step, torch.zeros_like(dkv))


MUTATIONS = {
    "a block of another rank is left out": (ForwardPass, "add", _without_block, Case("p2p")),
    "own tokens are not masked": (ShardedPattern, "own_mask", _unmasked, Case("all_gather")),
    "documents of other ranks are not told apart": (
        ShardedPattern,
        "mask",
        _documents_forgotten,
        Case("all_gather", documents=True),
    ),
    "segment ids are not gathered": (SegmentGatherer, "__call__", _own_ids_for_all, Case("p2p", documents=True)),
    "sinks do not take part": (ForwardPass, "finish", _sinks_forgotten, Case("p2p", sinks=True)),
    "gradients of keys do not come home": (Rounds, "start_return", _lost_return, Case("p2p")),
}


def mutated_cases(cp: Axis, axes: Axes) -> dict[str, float]:
    worst = {}
    for name, (owner, attribute, replacement, case) in MUTATIONS.items():
        with patch.object(owner, attribute, replacement):
            worst[name] = max(run_case(case, cp, axes[case.method]))
    return worst


# -- tests -----------------------------------------------------------------------------------------


def everything(rank: int, world: int) -> dict[str, Any]:
    cp, axes = context_axes(world)
    checks = [all_cases, bytes_sent, order_of_events, gathers_of_segment_ids, mutated_cases]
    return {check.__name__: check(cp, axes) for check in checks}


def known_gradients(queries: BackwardPass, sources: Sequence[int], kv: torch.Tensor) -> torch.Tensor:
    """Stands for BackwardPass.add: 1 for a rank's own keys and 2^-9 for those of another rank."""
    return torch.full_like(kv, 1.0 if list(sources) == [queries.pattern.axis.rank] else 2.0**-9)


def summed_key_gradients(rank: int, world: int) -> list[list[float]]:
    """The different values in the gradients of this rank's keys and values."""
    q, k, v = (torch.ones(1, 2 * CHUNK, 2, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cp = build_parallel_context(AxisSizes(cp=world)).cp
    with patch.object(BackwardPass, "add", known_gradients):
        context_parallel_attention("p2p", [cp])(q, k, v, AttentionPattern(causal=False), 0.0).sum().backward()
    return [x.grad.unique().tolist() for x in (k, v)]


def cases_only(rank: int, world: int) -> dict[str, Any]:
    return {"all_cases": all_cases(*context_axes(world))}


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, cases_only)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_every_method_computes_what_one_process_computes(ranks, request) -> None:
    for rank, answers in enumerate(request.getfixturevalue(ranks)):
        assert answers["all_cases"].keys() == set(CASES)
        for case, errors in answers["all_cases"].items():
            limit = LIMIT if case.dtype == torch.float32 else 2e-2
            assert max(errors) < limit, f"rank {rank}, {case}: out, dq, dk, dv differ by {errors}"


def test_ranks_send_the_least_that_is_needed(four_ranks) -> None:
    for rank, answers in enumerate(four_ranks):
        for method, (sent, least) in answers["bytes_sent"].items():
            assert sent == least, f"rank {rank}, {method}"


def test_a_transfer_is_under_way_while_a_block_is_computed(four_ranks) -> None:
    # The next block is sent before the present one is computed. Block k is of the rank k places before.
    expected = ["send 1", "compute 0", "send 2", "compute 1", "send 3", "compute 2", "compute 3"]
    assert [answers["order_of_events"] for answers in four_ranks] == [expected] * 4


def test_segment_ids_are_gathered_once_for_each_axis(four_ranks) -> None:
    assert [answers["gathers_of_segment_ids"] for answers in four_ranks] == [2] * 4


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices(name, four_ranks) -> None:
    assert max(answers["mutated_cases"][name] for answers in four_ranks) > 100 * LIMIT


def test_gradients_of_keys_are_summed_in_fp32() -> None:
    """2^-9 is a quarter of the last bit of 1 in bf16: each of three would be lost in a sum of 16 bits."""
    assert run_ranks(4, summed_key_gradients) == [[[1.0 + 2.0**-7]] * 2] * 4
