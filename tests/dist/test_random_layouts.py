"""Layouts drawn at random, of small models drawn at random, compute what one process computes.

A draw is a function of its number. To run one again: pytest tests/dist/test_random_layouts.py -k "draw-17"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn

from mt_core.config.checks import as_world
from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import PluginHost, load_plugins
from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

DEFAULT_DRAWS, DEFAULT_MOE_DRAWS = (1, 4, 11, 12, 16, 21, 35), (1, 2, 7, 16)
"""Chosen so that together they have every axis with few processes: one of each has three axes, on 8 ranks."""
MORE_DRAWS, MORE_MOE_DRAWS = sorted({*range(36)} - {*DEFAULT_DRAWS}), sorted({*range(20)} - {*DEFAULT_MOE_DRAWS})
STEPS = 2
LARGEST_WORLD = 8
WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved_1f1b")
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adam": {"lr": 1e-3, "adam_eps": 1e-4},
    "sgd": {"lr": 0.1},
    "muon": {"lr": 1e-3, "adam_eps": 1e-4},
    # A sign turns on rounding where a gradient is 0 but for that: small steps, and no biases that begin at 0.
    "lion": {"lr": 1e-6},
}
COMMON = {
    "data.dataset_type": "builtin",
    "data.corpus_bytes": 1_000_000,
    "train.micro_batch_size": 1,
    "train.train_iters": 5,
    "train.eval_interval": "null",
    "train.eval_iters": 1,
    "train.sample_prompt": "null",
    "train.device": "cpu",
    "lr_schedule.lr_decay_style": "constant",
    "checkpoint.save_interval": "null",
    "logging.progress": "none",
}


@dataclass(frozen=True)
class Draw:
    """model: what both runs have. layout: what the one on `world` ranks has besides."""

    world: int
    model: Mapping[str, Any]
    layout: Mapping[str, Any]

    def __str__(self) -> str:
        keys = [f"{key}={value}" for key, value in {**self.model, **self.layout}.items()]
        return f"on {self.world} ranks:\n  " + "\n  ".join(keys)

    # Mappings are not hashable, and draws are keys of InTurn.
    def __hash__(self) -> int:
        return hash(str(self))


def draw(number: int) -> Draw:
    rng = Random(number)
    tp, cp, pp, dp = _axes(rng)
    parallel = _parallel(rng, tp, cp, pp, dp)
    heads, groups = _heads(rng, tp, cp, parallel.get("cp_comm_type"))
    family = rng.choice(("gpt", "llama", "qwen"))
    # cp takes two chunks of each rank, and sequence parallelism cuts these over tp.
    length = 2 * tp * cp * rng.choice((2, 3))
    optimizer = rng.choice(tuple(OPTIMIZERS) if family == "llama" else ("adam", "sgd", "muon"))
    model = {
        "model.family": family,
        # A layer at least for each of two stages of a pipeline rank, which some schedules have.
        "model.num_layers": max(rng.choice((1, 2, 3, 5)), 2 * pp if pp > 1 else 1),
        "model.num_attention_heads": heads,
        "model.num_query_groups": groups,
        "model.hidden_size": heads * rng.choice((4, 8)),
        "model.ffn_hidden_size": 4 * rng.choice((3, 5, 8)),
        "model.vocab_size": rng.choice((263, 307, 509)),
        "model.make_vocab_size_divisible_by": rng.choice((1, 8)),
        "model.untie_embeddings_and_output_weights": rng.choice(("true", "false")),
        **_of_family(rng, family, length),
        "data.seq_length": length,
        # Micro-batches of one sample: 2 or 3 on each data-parallel rank.
        "train.global_batch_size": dp * rng.choice((2, 2, 3)),
        "optimizer.optimizer": optimizer,
        **{f"optimizer.{key}": value for key, value in OPTIMIZERS[optimizer].items()},
    }
    layout = {f"parallel.{key}": value for key, value in parallel.items()}
    return Draw(tp * cp * pp * dp, model, {**layout, **_recompute(rng, tp, parallel)})


def draw_moe(number: int) -> Draw:
    """The same with experts, which ranks of a stage divide in a way of their own."""
    plain, rng = draw(1000 + number), Random(number)
    # Ranks of a pipeline stage, which experts are sharded over apart from the dense layers: ep * etp divides them.
    stage = plain.world // plain.layout.get("parallel.pipeline_model_parallel_size", 1)
    tp = plain.layout["parallel.tensor_model_parallel_size"]
    etp = rng.choice([size for size in {1, 2, tp} if stage % size == 0])
    ep = rng.choice([size for size in (1, 2, 4) if stage % (size * etp) == 0])
    options = {
        "num_experts": 4,
        "moe_router_topk": rng.choice((1, 2, 3)),
        "moe_router_pre_softmax": "true",
        "moe_ffn_hidden_size": 4 * rng.choice((2, 3)),
        "moe_layer_freq": rng.choice((1, 2)),
        "moe_token_dispatcher_type": rng.choice(('"alltoall"', '"allgather"')),
        "moe_router_load_balancing_type": rng.choice(('["aux_loss"]', '["seq_aux_loss"]', '["none"]')),
        "moe_z_loss_coeff": rng.choice((0.0, 0.001)),
    }
    kept = ("num_layers", "num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size", "vocab_size")
    shape = {f"model.{key}": plain.model[f"model.{key}"] for key in kept}
    rest = {key: value for key, value in plain.model.items() if key.split(".")[0] not in ("model", "optimizer")}
    model = {
        "model.family": "mixtral",
        **shape,
        "model.moe": "{" + ", ".join(f"{key} = {value}" for key, value in options.items()) + "}",
        **rest,
        "optimizer.optimizer": "adam",
        **{f"optimizer.{key}": value for key, value in OPTIMIZERS["adam"].items()},
    }
    layout = {key: value for key, value in plain.layout.items() if not key.endswith("_instances")}
    experts = {"parallel.expert_model_parallel_size": ep, "parallel.expert_tensor_parallel_size": etp}
    return Draw(plain.world, model, {**layout, **experts})


def _axes(rng: Random) -> tuple[int, int, int, int]:
    """Sizes of the axes tp, cp, pp and dp: more than one process, and at most LARGEST_WORLD."""
    while True:
        sizes = (rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 2, 4)))
        world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        if 1 < world <= LARGEST_WORLD:
            return sizes


def _parallel(rng: Random, tp: int, cp: int, pp: int, dp: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    if tp > 1 and rng.random() < 0.7:
        keys["sequence_parallel"] = "true"
    if cp > 1:
        keys["cp_comm_type"] = rng.choice(("p2p", "all_gather", "a2a"))
    if pp > 1:
        keys["pipeline_model_parallel_size"] = pp
        keys["pipeline_schedule"] = rng.choice(WHOLE_BACKWARD + SPLIT_BACKWARD)
    sharing = rng.choice(("none", "use_distributed_optimizer", "use_torch_fsdp2"))
    if sharing != "use_torch_fsdp2":
        keys["ddp_bucket_size"] = rng.choice((1000, 5000, 40_000_000))
    if sharing == "none":
        return keys
    keys[sharing] = "true"
    if sharing == "use_torch_fsdp2":
        # Between the halves of a backward pass that is done in two, weights stay whole.
        split = keys.get("pipeline_schedule") in SPLIT_BACKWARD
        keys["fsdp_reshard_after_forward"] = "false" if split else rng.choice(("true", "false"))
    else:
        keys["overlap_param_gather"] = rng.choice(("true", "false"))
    # Two instances cut the axis of replicas, of dp and cp together, in half.
    if dp * cp % 2 == 0 and rng.random() < 0.3:
        keys["num_distributed_optimizer_instances"] = 2
    return keys


def _heads(rng: Random, tp: int, cp: int, exchange: str | None) -> tuple[int, int]:
    """Query heads and their groups: whole groups on a tensor-parallel rank, or one group on several."""
    # a2a shards heads over cp as well.
    unit = tp * cp if exchange == "a2a" else tp
    heads = unit * rng.choice((1, 2)) * (2 if unit == 1 else 1)
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    return heads, rng.choice(legal)


def _of_family(rng: Random, family: str, length: int) -> dict[str, Any]:
    if family == "gpt":
        position = rng.choice(("learned_absolute", "rope", "alibi"))
        learned = {"model.max_position_embeddings": length} if position == "learned_absolute" else {}
        return {"model.position_embedding_type": position, **learned}
    if family == "qwen":
        return {
            "model.add_qkv_bias": rng.choice(("true", "false")),
            "model.qk_layernorm": rng.choice(("true", "false")),
        }
    return {}


def _recompute(rng: Random, tp: int, parallel: Mapping[str, Any]) -> dict[str, Any]:
    kind = rng.choice(("none", "selective", "full"))
    if kind == "none":
        return {}
    keys: dict[str, Any] = {"recompute.recompute_granularity": kind}
    if kind == "full":
        keys["recompute.recompute_method"] = rng.choice(("block", "uniform"))
        keys["recompute.recompute_num_layers"] = rng.choice((1, 2))
        if tp > 1 and "sequence_parallel" not in parallel:
            keys["recompute.distribute_saved_activations"] = rng.choice(("true", "false"))
    return keys


def loaded(keys: Mapping[str, Any], host: PluginHost) -> LoadedConfig:
    torch.set_num_threads(1)
    return load_config(overrides=[f"{key}={value}" for key, value in {**COMMON, **keys}.items()], host=host)


def run_divided(rank: int, world: int, drawn: Draw) -> RunRecord | None:
    return run(rank, {**drawn.model, **drawn.layout})


def run_alone(rank: int, world: int, drawn: Draw) -> RunRecord | None:
    return run(rank, drawn.model)


def run(rank: int, keys: Mapping[str, Any]) -> RunRecord | None:
    host = load_plugins()
    record = record_run(loaded(keys, host), STEPS, host=host)
    return record if rank == 0 else None


DRAWN = [
    [*map(draw, numbers), *map(draw_moe, moe_numbers)]
    for numbers, moe_numbers in ((DEFAULT_DRAWS, DEFAULT_MOE_DRAWS), (MORE_DRAWS, MORE_MOE_DRAWS))
]
DIVIDED = InTurn(run_divided, *([(one.world, one) for one in drawn] for drawn in DRAWN))
ALONE = InTurn(run_alone, *([(1, one) for one in drawn] for drawn in DRAWN))


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [*DEFAULT_DRAWS, *(pytest.param(number, marks=EXHAUSTIVE) for number in MORE_DRAWS)],
    ids="draw-{}".format,
)
def test_a_random_layout_computes_what_one_process_computes(number: int) -> None:
    require_equal(number, draw(number))


@pytest.mark.parametrize(
    "number",
    [*DEFAULT_MOE_DRAWS, *(pytest.param(number, marks=EXHAUSTIVE) for number in MORE_MOE_DRAWS)],
    ids="draw-{}".format,
)
def test_a_random_layout_of_experts_computes_what_one_process_computes(number: int) -> None:
    require_equal(number, draw_moe(number))


def require_equal(number: int, drawn: Draw) -> None:
    print(f"draw {number}", drawn)
    reference, found = ALONE.result(1, drawn), DIVIDED.result(drawn.world, drawn)
    assert found.evaluation == pytest.approx(reference.evaluation, rel=1e-5)
    different = [str(difference) for difference in compare(found, reference) if difference.too_large]
    assert not different, f"draw {number} {drawn}\ndiffers in " + "; ".join(different)


def test_every_draw_is_legal_and_together_they_have_every_axis() -> None:
    default_dense, default_moe = [*map(draw, DEFAULT_DRAWS)], [*map(draw_moe, DEFAULT_MOE_DRAWS)]
    assert {one.layout["parallel.expert_model_parallel_size"] for one in default_moe} == {1, 2, 4}
    assert {one.layout["parallel.expert_tensor_parallel_size"] for one in default_moe} >= {1, 2}
    host = load_plugins()
    for one in [*default_dense, *default_moe, *map(draw, MORE_DRAWS), *map(draw_moe, MORE_MOE_DRAWS)]:
        with as_world(one.world):
            loaded({**one.model, **one.layout}, host)
    default = [{**one.model, **one.layout} for one in default_dense]
    assert {keys["optimizer.optimizer"] for keys in default} == set(OPTIMIZERS)
    assert {keys["model.family"] for keys in default} == {"gpt", "llama", "qwen"}
    for key in (
        "parallel.sequence_parallel",
        "parallel.cp_comm_type",
        "parallel.pipeline_schedule",
        "parallel.use_distributed_optimizer",
        "parallel.use_torch_fsdp2",
        "parallel.num_distributed_optimizer_instances",
        "recompute.recompute_granularity",
    ):
        assert any(key in keys for keys in default), key
