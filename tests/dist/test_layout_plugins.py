"""A pipeline schedule and a context-parallel method of a third party, trained on two ranks."""

from __future__ import annotations

import types
from collections.abc import Sequence

import pytest
import torch
from tests.dist.in_turn import InTurn
from torch import Tensor

from mt_core.config.checks import as_world
from mt_core.config.loading import LoadedConfig, load_config
from mt_core.errors import ConfigError, PluginError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.context_parallel.zigzag import in_order, shard_sequence
from mt_core.parallel.collectives import gather_from
from mt_core.parallel.context import Axis
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ScheduleTable
from mt_core.parallel.pipeline.schedules import PipelineSchedule
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.specs import ContextParallelMethodSpec, PipelineScheduleSpec
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = pytest.mark.dist

SETTINGS = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.vocab_size=263",
    "data.corpus_bytes=1000000",
    "data.seq_length=16",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.eval_iters=1",
    "logging.progress=none",
)
LAST_FIRST_ON_2 = ("parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=last_first")
WHOLE_ON_2 = ("parallel.context_parallel_size=2", "parallel.cp_comm_type=gather_everything")


def last_first(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> ScheduleTable:
    """All forward passes, then the backward passes from the last micro-batch to the first."""
    numbers = range(num_micro_batches)
    passes = [(Kind.FORWARD, n) for n in numbers] + [(Kind.BACKWARD, n) for n in reversed(numbers)]
    return [[Action(kind, rank, number) for kind, number in passes] for rank in range(num_ranks)]


LAST_FIRST = PipelineSchedule("last_first", "loop", last_first)


def gather_everything(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore:
    """Every rank computes the attention of all tokens, and keeps that of its own."""
    (axis,) = axes

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
        whole = [in_order(gather_from(x, 1, axis), 1, axis.size) for x in (q, k, v)]
        return shard_sequence(core(*whole, pattern, dropout), 1, axis)

    return attend


@hookimpl
def mt_register_pipeline_schedules() -> list[PipelineScheduleSpec]:
    return [PipelineScheduleSpec(name="last_first", doc="A stack", schedule=Lazy(f"{__name__}:LAST_FIRST"))]


@hookimpl
def mt_register_context_parallel_methods() -> list[ContextParallelMethodSpec]:
    build: Lazy[object] = Lazy(f"{__name__}:gather_everything")
    return [ContextParallelMethodSpec(name="gather_everything", doc="All on all", build=build, whole_sequences=True)]


def host() -> PluginHost:
    found = load_plugins()
    module = types.SimpleNamespace(
        mt_register_pipeline_schedules=mt_register_pipeline_schedules,
        mt_register_context_parallel_methods=mt_register_context_parallel_methods,
    )
    found.add(module, Plugin("third-party", "nowhere", "third-party", "1.0"))
    return found


def config(plugins: PluginHost, *settings: str) -> LoadedConfig:
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *settings], host=plugins)


def run(rank: int, world: int, settings: tuple[str, ...]) -> RunRecord | None:
    torch.set_num_threads(1)
    plugins = host()
    record = record_run(config(plugins, *settings), 2, host=plugins)
    return record if rank == 0 else None


RUNS = InTurn(run, [(2, LAST_FIRST_ON_2), (2, WHOLE_ON_2), (1, ())])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LAST_FIRST_ON_2, WHOLE_ON_2], ids=["schedule", "method"])
def test_a_third_partys_layout_computes_what_one_process_computes(settings: tuple[str, ...]) -> None:
    found, reference = RUNS.result(2, settings), RUNS.result(1, ())
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    for name, gradient in reference.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_names_that_nobody_registers_are_refused_before_anything_starts() -> None:
    with as_world(2):
        for setting, words in (
            ("parallel.pipeline_schedule=last_frist", 'a pipeline schedule.*did you mean "last_first"'),
            ("parallel.cp_comm_type=ring", "a context-parallel method.*a2a, a2a[+]p2p, all_gather"),
        ):
            with pytest.raises(PluginError, match=words):
                config(host(), setting)
        with pytest.raises(ConfigError, match=r"sizes=\[1, 2\] is used with parallel.cp_comm_type=a2a[+]p2p only"):
            config(host(), *WHOLE_ON_2, "parallel.hierarchical_context_parallel_sizes=[1, 2]")
