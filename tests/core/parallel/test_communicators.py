"""Options of process groups, which need no GPU to be built, and their groups over gloo."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.optim.finalize_grads import TiedWeights
from mt_core.parallel import communicators
from mt_core.parallel.communicators import CommunicatorOptions, group_arguments, nccl_options, user_buffers
from mt_core.parallel.context import Axis, AxisSizes, ParallelContext, build_parallel_context
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train.build import build_context, build_weights


def test_what_is_set_stands_in_nccls_options_and_the_rest_is_its_default() -> None:
    untouched = dist.ProcessGroupNCCL.Options()
    options = CommunicatorOptions(True, 2.5, min_ctas=4, max_ctas=16, cga_cluster_size=2, net_name="IB")
    made = nccl_options(options, options.timeout)
    assert made.is_high_priority_stream
    assert made._timeout == timedelta(minutes=2, seconds=30)
    set_here = ("min_ctas", "max_ctas", "cga_cluster_size", "net_name")
    assert [getattr(made.config, name) for name in set_here] == [4, 16, 2, "IB"]
    plain = nccl_options(CommunicatorOptions(max_ctas=8), None)
    assert (plain.config.max_ctas, plain.is_high_priority_stream) == (8, False)
    for name in ("min_ctas", "cga_cluster_size", "blocking", "split_share"):
        assert getattr(plain.config, name) == getattr(untouched.config, name)


def groups(rank: int, world: int) -> dict[str, Any]:
    limits = {"dp_cp": CommunicatorOptions(timeout_minutes=0.5)}
    ctx = build_parallel_context(AxisSizes(pp=2), communicators=limits, pipeline_backward_communicator=True)
    axes = {name: ctx.axis(name) for name in ("pp", "pp_backward", "dp", "dp_cp")}
    received = _exchange(P2PCommunicator(ctx.pp, ctx.device, ctx.axis("pp_backward")), ctx.pp)
    of_nccl = group_arguments(CommunicatorOptions(min_ctas=2), dist.group.WORLD)["pg_options"]
    return {
        "limits": {name: _limit(axis) for name, axis in axes.items()},
        "limit of the world": _limit(ctx.world),
        "limit in options of nccl": of_nccl._timeout,
        "groups": len({axis.group.group_name for axis in axes.values()}),
        "received": received,
    }


def _limit(axis: Axis) -> timedelta:
    return axis.group._get_backend(torch.device("cpu")).options._timeout


def _exchange(p2p: P2PCommunicator, axis: Axis) -> tuple[list[str], float]:
    """The groups used by hidden states and by their gradients, and a number that went there and back."""
    used: list[str] = []
    start = dist.batch_isend_irecv

    def recording(operations: list[dist.P2POp]) -> list[dist.Work]:
        used.extend("forward" if op.group is axis.group else "backward" for op in operations)
        return start(operations)

    dist.batch_isend_irecv = recording
    hidden = torch.full((2,), 3.0, requires_grad=True)
    if axis.rank == 0:
        p2p.send_hidden(hidden, 1, "key")
        from mt_core.parallel.pipeline.stage import form_of

        (back,) = p2p.receive_gradients(form_of(hidden), 1).wait()
    else:
        (back,) = p2p.receive_hidden(0, "key").wait()
        p2p.send_gradients([back * 2], 0)
    p2p.finish()
    dist.batch_isend_irecv = start
    return used, float(back[0])


@pytest.mark.dist
def test_axes_with_options_have_groups_of_their_own_and_gradients_another_than_activations() -> None:
    first, second = run_ranks(4, groups)[::2]
    for found in (first, second):
        world = found["limit of the world"]
        assert found["limits"] == {"pp": world, "pp_backward": world, "dp": world, "dp_cp": timedelta(seconds=30)}
        assert found["limit in options of nccl"] == world
        assert found["groups"] == 4
        assert found["received"][0] == ["forward", "forward", "backward"]  # header, hidden states; gradients
    assert (first["received"][1], second["received"][1]) == (6.0, 3.0)


def test_registered_memory_is_that_of_the_groups_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fakes of NCCL and CUDA."""
    events: list[Any] = []

    class Backend:
        mem_allocator = "nccl's allocator"

        def register_mem_pool(self, pool: Any) -> None:
            events.append(("registered", pool))

    @contextmanager
    def use(pool: Any, device: Any) -> Any:
        events.append(("allocated in", pool))
        yield

    monkeypatch.setattr(communicators, "backend_of", lambda group, device: Backend())
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    with user_buffers(None, torch.device("cpu")) as pool:
        pass
    assert events == [("allocated in", pool), ("registered", pool)]
    assert pool == "pool of nccl's allocator"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nccl_communicators.tp={max_ctas=4}", r"nccl_communicators\.tp\.max_ctas=4 is an option of NCCL, and gloo"),
        ("nccl_communicators.ep={timeout_minutes=3}", r"nccl_communicators\.ep has .* one rank in this layout; remove"),
        ("nccl_communicators.pp_backward={timeout_minutes=3}", r"nccl_communicators\.pp_backward has .* one rank"),
        (
            "pipeline_backward_communicator=true",
            r"pipeline_backward_communicator=true is for .*size is 1;",
        ),
        ("nccl_ub=true", r"nccl_ub=true: buffers are registered with NCCL, and gloo"),
        ("nccl_communicators.tq={max_ctas=4}", r"nccl_communicators.*tq"),
        ("nccl_communicators.tp={ctas=4}", r"nccl_communicators\.tp\.ctas"),
    ],
)
def test_what_gloo_or_one_process_does_not_have_is_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _context(f"parallel.{override}")


@pytest.mark.parametrize("more", ["use_torch_fsdp2=true", "use_distributed_optimizer=true", "sequence_parallel=false"])
def test_registered_buffers_without_ranks_to_reduce_with_are_refused(more: str) -> None:
    overrides = ["parallel.nccl_ub=true", f"parallel.{more}"]
    config = load_config(preset="gpt-tiny", overrides=overrides, host=load_plugins()).config
    with pytest.raises(ConfigError, match=r"parallel\.nccl_ub=true .* has one rank; set it to false"):
        build_weights(config, nn.Linear(2, 2), ParallelContext(), TiedWeights(), load_plugins())


def _context(override: str) -> ParallelContext:
    config = load_config(preset="gpt-tiny", overrides=[override], host=load_plugins()).config
    return build_context(config, torch.device("cpu"))
