"""A user's configuration made small enough for a few CPU processes, with everything kept that a layout can break."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mt_core.config.checks import smallest_world
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config, ParallelConfig
from mt_core.plugins import PluginHost
from mt_core.specs import CAUSAL_LM_SAMPLE

Tree = dict[str, dict[str, Any]]

LARGEST_WORLD = 8
AXES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
HEAD_DIM = 8
FEW_EXPERTS = 8
SAME_EVERYWHERE = {"global_aux_loss": "aux_loss"}
VOCAB = 509
"""A prime: no number of ranks divides it."""
STEPS = 3


def shrink(config: Config, host: PluginHost) -> Config:
    """The same family, options and axes with few and narrow layers, short sequences, made-up data, in fp32.

    Axes are at most halved until the model fits on LARGEST_WORLD processes. Dropout is off: what is dropped depends
    on the layout. Raises ConfigError if the small configuration breaks a rule.
    """
    tree = config.to_dict()
    _shrink_axes(tree["parallel"])
    _shrink_model(tree["model"], tree["parallel"])
    if tree["model"].get("moe"):
        _shrink_experts(tree["model"], tree["parallel"])
    length = _short_length(tree)
    family = host.models.get(config.model.family, key="model.family")
    if family.shrink is not None:
        tree["model"] |= family.shrink.load()(tree["model"], length)
    _replace_data(tree, length, config, host)
    _shrink_training(tree)
    return config_from_dict(tree, host)


def processes(parallel: ParallelConfig) -> int:
    """Ranks of a small run: one copy of the model, or two where copies share work."""
    needed = smallest_world(parallel)
    # A layout that divides nothing has nothing to show but data parallelism.
    shares = needed > 1 or parallel.use_distributed_optimizer or parallel.use_torch_fsdp2
    return needed * 2 if shares and needed * 2 <= LARGEST_WORLD else needed


def _shrink_axes(parallel: dict[str, Any]) -> None:
    while math.prod(parallel[axis] for axis in AXES) > LARGEST_WORLD:
        widest = max(AXES, key=lambda axis: parallel[axis])
        parallel[widest] = parallel[widest] // 2 if parallel[widest] % 2 == 0 else 1
    if parallel["expert_model_parallel_size"] > LARGEST_WORLD:
        parallel["expert_model_parallel_size"] = 2
    if parallel["cp_comm_type"] == "a2a+p2p":
        size = parallel["context_parallel_size"]
        parallel["hierarchical_context_parallel_sizes"] = [2, size // 2] if size % 2 == 0 else [1, size]
    parallel["num_distributed_optimizer_instances"] = 1
    parallel["ddp_bucket_size"] = 5000  # so that there are several buckets


def _shrink_model(model: dict[str, Any], parallel: Mapping[str, Any]) -> None:
    tp, pp = parallel["tensor_model_parallel_size"], parallel["pipeline_model_parallel_size"]
    stages = pp * (parallel["virtual_pipeline_model_parallel_size"] or 2)
    if "num_layers" in model and parallel["pipeline_model_parallel_layout"] is None:
        model["num_layers"] = min(model["num_layers"], max(2, stages))
    if "num_attention_heads" in model:
        groups = model.get("num_query_groups") or model["num_attention_heads"]
        per_group = min(model["num_attention_heads"] // groups, 2)
        groups = math.lcm(tp, 2) if groups >= tp else groups
        heads = groups * per_group
        heads = heads * tp // math.gcd(heads, tp)
        model["num_attention_heads"] = heads
        if model.get("num_query_groups"):
            model["num_query_groups"] = groups
        if model.get("kv_channels"):
            model["kv_channels"] = HEAD_DIM
        model["hidden_size"] = heads * HEAD_DIM
    if model.get("ffn_hidden_size"):
        model["ffn_hidden_size"] = 16 * tp
    if "vocab_size" in model:
        model["vocab_size"] = VOCAB
        model["make_vocab_size_divisible_by"] = 4
    for key in model:
        if key.endswith("dropout"):
            model[key] = 0.0


def _shrink_experts(model: dict[str, Any], parallel: Mapping[str, Any]) -> None:
    """Few and narrow experts, of which a token chooses as it did: from groups, or with shared ones."""
    moe = model["moe"]
    experts = math.lcm(FEW_EXPERTS, parallel["expert_model_parallel_size"])
    if moe["num_experts"] > experts:
        moe["num_experts"] = experts
        moe["moe_router_topk"] = min(moe.get("moe_router_topk", 2), 2)
        if moe.get("moe_router_num_groups"):
            # Two of four groups, of two experts or more each.
            moe |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
            if moe.get("moe_router_group_score_topk"):
                moe["moe_router_group_score_topk"] = min(moe["moe_router_group_score_topk"], 2)
    narrow = 16 * parallel["tensor_model_parallel_size"]
    for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"):
        if moe.get(key):
            moe[key] = narrow
    losses = moe.get("moe_router_load_balancing_type", [])
    # The global loss is another one for another number of data-parallel ranks: what it counts comes in another order.
    moe["moe_router_load_balancing_type"] = [SAME_EVERYWHERE.get(loss, loss) for loss in losses] or ["aux_loss"]
    if isinstance(moe.get("moe_layer_freq"), str):
        dense = 1 if re.search(r"(?<!\d)0(?!\d)", moe["moe_layer_freq"]) else 0
        moe["moe_layer_freq"] = f"[0]*{dense}+[1]*{model['num_layers'] - dense}"


def _short_length(tree: Tree) -> int:
    """Of samples: a few tokens for each rank that shares a sequence."""
    parallel = tree["parallel"]
    unit = 2 * parallel["context_parallel_size"] * parallel["tensor_model_parallel_size"]
    return int(max(unit, min(tree["data"]["seq_length"], 16) // unit * unit))


def _replace_data(tree: Tree, length: int, config: Config, host: PluginHost) -> None:
    """Made-up samples, or those of a family's own data set, which follow the model in the keys that both have."""
    data = tree["data"]
    data |= {key: value for key, value in tree["model"].items() if key in data}
    spec = host.datasets.get(config.data.dataset_type, key="data.dataset_type")
    if spec.sample == CAUSAL_LM_SAMPLE:
        kept = {key: data[key] for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
        tree["data"] = {"dataset_type": "mock", **kept}
        tree["tokenizer"] = {"tokenizer_type": "ByteLevelTokenizer"}
    tree["data"]["seq_length"] = length
    for key in ("max_position_embeddings", "max_sequence_length"):
        if tree["model"].get(key):
            tree["model"][key] = max(length, 32)


def _shrink_training(tree: Tree) -> None:
    train = tree["train"]
    train.update(
        micro_batch_size=1,
        global_batch_size=8,
        rampup_batch_size=None,
        train_iters=2 * STEPS,
        train_samples=None,
        eval_interval=None,
        eval_iters=1,
        exit_iteration=None,
        device="cpu",
        callbacks=[],
        deterministic=False,
        sample_prompt=None,
    )
    if "adam_eps" in tree["optimizer"]:
        # Adam makes a step of the learning rate's size out of any gradient, also of the rounding that is left of one
        # that is truly 0 (of a bias on keys). With a larger eps such a gradient stays small.
        tree["optimizer"]["adam_eps"] = 1e-4
    tree["lr_schedule"] = {"lr_decay_style": "constant"}
    tree["precision"] = {"dtype": "fp32"}
    tree["checkpoint"] = {"save_interval": None}
    tree["logging"] = {"progress": "none"}
    train["num_threads"] = 1
