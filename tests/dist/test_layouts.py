"""Every layout computes what one process computes: loss, each gradient, gradient norm, weights after two steps."""

from __future__ import annotations

import math
from functools import cache
from operator import itemgetter

import pytest
import torch
from tests.covering import EXHAUSTIVE, uncovered_pairs
from tests.dist.in_turn import InTurn

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import PluginHost, load_plugins
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SETTINGS = (
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.vocab_size=263",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.eod_mask_loss=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
)
TP2, TP4 = (f"parallel.tensor_model_parallel_size={size}" for size in (2, 4))
SP = "parallel.sequence_parallel=true"
CP2, CP4 = "parallel.context_parallel_size=2", "parallel.context_parallel_size=4"
ZERO = "parallel.use_distributed_optimizer=true"
MOE = (
    "model.moe={num_experts = 4, moe_router_topk = 2, moe_router_load_balancing_type = ['aux_loss'], "
    "moe_aux_loss_coeff = [0.01], moe_z_loss_coeff = 0.001}"
)
DROPOUT = ("model.hidden_dropout=0.2", "model.attention_dropout=0.0")
BOTH_DROPOUTS = ("model.hidden_dropout=0.2", "model.attention_dropout=0.1", "model.attention_backend=eager")
EP2 = "parallel.expert_model_parallel_size=2"
PP2, PP4 = "parallel.pipeline_model_parallel_size=2", "parallel.pipeline_model_parallel_size=4"
FULL, SELECTIVE = "recompute.recompute_granularity=full", "recompute.recompute_granularity=selective"
FSDP = "parallel.use_torch_fsdp2=true"
WHOLE_WEIGHTS = "parallel.fsdp_reshard_after_forward=false"
SMALL_BUCKETS = "parallel.ddp_bucket_size=3000"
GATHER = "parallel.overlap_param_gather=true"


def schedule(name: str) -> str:
    return f"parallel.pipeline_schedule={name}"


INTERLEAVED = schedule("interleaved_1f1b")
STEPS = 2
"""The second has the weights and the moments of the first, and weights that were collected late."""


def config(*more: str, host: PluginHost | None = None) -> LoadedConfig:
    torch.set_num_threads(1)
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *more], host=host)


def run(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    host = load_plugins()
    record = record_run(config(*more, host=host), STEPS, host=host)
    return record if rank == 0 else None


@cache
def one_process(model: tuple[str, ...]) -> RunRecord:
    return ALONE.result(1, model)


def of_one_process(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the keys that are no layout."""
    return tuple(key for key in keys if key.startswith(("model.", "train.")))


def small_enough(world: int, layout: tuple[str, ...]) -> tuple[str, ...]:
    """Two layers, unless a pipeline divides or recomputation groups them; and no more samples than two for each stage
    of each data-parallel rank."""
    model_axes = ("parallel.tensor_model_parallel_size", "parallel.context_parallel_size")
    of_model = math.prod(int(key.partition("=")[2]) for key in layout if key.startswith(model_axes))
    needs_layers = any(key.startswith(("parallel.pipeline", "recompute.")) for key in layout)
    layers = () if needs_layers else ("model.num_layers=2",)
    return (*layers, f"train.global_batch_size={2 * world // of_model}")


def require_equal(found: RunRecord, reference: RunRecord) -> None:
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    assert found.norms[0] == pytest.approx(reference.norms[0], rel=1e-6)
    # Looser after the first step: the weights differ by rounding by then.
    assert found.norms == pytest.approx(reference.norms, rel=1e-4)
    assert found.evaluation == pytest.approx(reference.evaluation, rel=1e-5)
    for kind, tolerance in (("gradients", 1e-5), ("weights", 1e-5)):
        mine, theirs = getattr(found, kind), getattr(reference, kind)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            off = (mine[name].float() - value.float()).norm() / value.float().norm().clamp(min=1e-12)
            assert off < tolerance, f"{kind} of {name} differ by {off:.1e}"


Layout = tuple[int, tuple[str, ...]]
LAYOUTS: list[Layout] = [
    (2, (MOE, EP2)),
    (1, (FULL,)),
    (2, (PP2,)),
    (2, (FSDP,)),
    (2, (ZERO,)),
    (2, (CP2,)),
    (2, (TP2,)),
    (2, (TP2, SP)),
    (2, (CP2, "parallel.cp_comm_type=a2a")),
    (4, (TP2, SP, CP2, "parallel.cp_comm_type=all_gather")),
    (4, (CP4, "parallel.cp_comm_type=a2a+p2p", "parallel.hierarchical_context_parallel_sizes=[2, 2]")),
    (4, (ZERO, SMALL_BUCKETS, "parallel.num_distributed_optimizer_instances=2")),
    (2, (FSDP, "parallel.fsdp_reduce_each_micro_batch=true")),
    (4, (FSDP, "parallel.num_distributed_optimizer_instances=2")),
    (4, (FSDP, "parallel.num_distributed_optimizer_instances=2", "parallel.outer_dp_sharding_strategy=optim")),
    (2, (PP2, "model.untie_embeddings_and_output_weights=true")),
    (2, (PP2, schedule("gpipe"))),
    (2, (PP2, INTERLEAVED, "parallel.virtual_pipeline_model_parallel_size=3", "model.num_layers=6")),
    (2, (PP2, "parallel.pipeline_model_parallel_layout=Ettt|tL")),
    (4, (PP4,)),
    (4, (PP2, ZERO, schedule("zbv_zero_bubble"))),
    (4, (PP2, TP2, SP, INTERLEAVED, SELECTIVE, "recompute.recompute_modules=['core_attn', 'layernorm']")),
    (4, (PP2, CP2, INTERLEAVED, SELECTIVE)),
    (4, (PP2, ZERO, SMALL_BUCKETS, GATHER, INTERLEAVED)),
    (4, (PP2, FSDP, INTERLEAVED)),
    (4, (PP2, FSDP, WHOLE_WEIGHTS, schedule("interleaved_zero_bubble"))),
    (4, (PP2, FSDP, WHOLE_WEIGHTS, schedule("dualpipe_v"))),
    (4, (PP2, TP2, SP, schedule("dualpipe_v"))),
    (4, (TP2, SP, FSDP, WHOLE_WEIGHTS)),
    (4, (MOE, EP2, PP2, FSDP, WHOLE_WEIGHTS, schedule("zbv_zero_bubble"))),
    (4, (CP2, FSDP, FULL)),
    (1, (FULL, "recompute.recompute_method=uniform", "recompute.recompute_num_layers=3")),
    (1, (SELECTIVE, "recompute.recompute_modules=['core_attn', 'layernorm', 'mlp']")),
    (1, ("recompute.cpu_offloading_num_layers=2",)),
    (2, (TP2, FULL, "recompute.distribute_saved_activations=true")),
    (4, (TP2, SP, FULL, ZERO, SMALL_BUCKETS)),
    (2, (PP2, FULL, "recompute.recompute_num_layers=1", schedule("interleaved_zero_bubble"))),
    (4, (MOE, EP2, TP2, SP)),
    (4, (MOE, EP2, TP2, "parallel.expert_tensor_parallel_size=1")),
    (4, (MOE, EP2, CP2, ZERO, SMALL_BUCKETS)),
    (4, (MOE, EP2, PP2, INTERLEAVED)),
    (4, (MOE, EP2, "parallel.expert_tensor_parallel_size=2")),
    (4, (MOE, "parallel.expert_model_parallel_size=4")),
    (2, (MOE, EP2, SELECTIVE, "recompute.recompute_modules=['moe']")),
    (4, (*DROPOUT, PP2, FULL, schedule("zbv_zero_bubble"))),
    (4, (*DROPOUT, CP2, TP2, SP)),
    (2, (*BOTH_DROPOUTS,)),
    (2, (*BOTH_DROPOUTS, PP2)),
    (1, (*BOTH_DROPOUTS, FULL)),
    (2, (TP2, "model.num_query_groups=1")),
    (4, (TP4, SP, "model.num_query_groups=2")),
    # 4 query heads and 1 group of heads of 3 have 18 rows, which 4 ranks do not divide.
    (4, (TP4, SP, "model.kv_channels=3", "model.num_query_groups=1")),
]
MORE_LAYOUTS: list[Layout] = [
    (2, (FSDP, WHOLE_WEIGHTS)),
    (2, (PP2, schedule("interleaved_zero_bubble"))),
    (2, (PP2, schedule("zbv_zero_bubble"))),
    (2, (PP2, schedule("dualpipe_v"))),
    (2, (*DROPOUT, TP2)),
    (4, (TP4, SP)),
    (4, (TP2, CP2)),
    (4, (ZERO, SMALL_BUCKETS, GATHER)),
    (8, (TP2, SP, CP2, ZERO)),
    (4, (FSDP, TP2, SP)),
    (4, (PP2, ZERO, SMALL_BUCKETS)),
    (4, (PP2, ZERO, SMALL_BUCKETS, GATHER)),
    (4, (PP2, FSDP)),
    (4, (PP2, TP2, SP)),
    (4, (PP2, CP2)),
    (8, (PP2, TP2, SP, ZERO)),
    (4, (PP2, TP2, INTERLEAVED)),
    (4, (PP2, FSDP, WHOLE_WEIGHTS, schedule("zbv_zero_bubble"))),
    (4, (TP2, FSDP, FULL)),
    (8, (PP2, TP2, SP, FSDP, WHOLE_WEIGHTS, schedule("dualpipe_v"))),
    (4, (MOE, EP2, PP2, schedule("zbv_zero_bubble"))),
    (4, (MOE, EP2, FSDP)),
    (4, (MOE, EP2, PP2, ZERO, SMALL_BUCKETS)),
    (8, (MOE, EP2, CP2, PP2)),
    (8, (MOE, EP2, TP2, SP, PP2, ZERO)),
    (2, (FSDP, FULL)),
    (4, (CP2, FULL, ZERO)),
    (2, (PP2, INTERLEAVED)),
    (2, (*DROPOUT,)),
    (2, (*DROPOUT, CP2)),
    (4, (*DROPOUT, TP2, SP, PP2)),
]
"""Keys that also meet, two by two, in LAYOUTS."""
LAYOUTS.sort(key=itemgetter(0))  # neighbours run in the same processes


def keys_of(world: int, layout: tuple[str, ...]) -> tuple[str, ...]:
    return (*small_enough(world, layout), *layout)


DIVIDED = InTurn(run, *([(one[0], keys_of(*one)) for one in layouts] for layouts in (LAYOUTS, MORE_LAYOUTS)))
ALONE = InTurn(run, *([(1, of_one_process(keys_of(*one))) for one in layouts] for layouts in (LAYOUTS, MORE_LAYOUTS)))


@pytest.mark.parametrize(
    ("world", "layout"),
    [*LAYOUTS, *(pytest.param(*layout, marks=EXHAUSTIVE) for layout in MORE_LAYOUTS)],
    ids=lambda value: (
        "+".join(key.split(".")[1].replace("parallel_", "") for key in value)
        if value and isinstance(value, tuple)
        else str(value)
    ),
)
def test_a_layout_computes_what_one_process_computes(world, layout) -> None:
    keys = keys_of(world, layout)
    require_equal(DIVIDED.result(world, keys), one_process(of_one_process(keys)))


def test_every_two_keys_meet_in_a_layout_that_runs_by_default() -> None:
    assert not uncovered_pairs([keys for _, keys in LAYOUTS], [keys for _, keys in MORE_LAYOUTS])
