"""Checkpoints from before Megatron-Core, with the names and orders of their years."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.handmade import (
    HEADS,
    HIDDEN,
    POSITIONS,
    VOCAB,
    arguments,
    gpt,
    part_of_rank,
    run_of,
    save_rank,
)
from tests.ckpt.megatron.test_rank_files import assert_is

from mt_ckpt.megatron_legacy.reader import open_checkpoint, to_grouped
from mt_core import checkpoint_lookup
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS
from mt_core.errors import CheckpointError, ConfigError

OLDEST = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
NEWEST = {
    **OLDEST,
    "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "post_attention_norm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
}


def in_order_of(version: float, rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Today's rows, head by head q, k, v, in the order of an older version, a row at a time."""
    size = len(rows) // (3 * heads)
    row = {
        (head, kind, i): rows[(head * 3 + kind) * size + i]
        for head in range(heads)
        for kind in range(3)
        for i in range(size)
    }
    if version == 0:
        order = [(head, kind, i) for kind in range(3) for head in range(heads) for i in range(size)]
    elif version == 1.0:
        order = [(head, kind, i) for head in range(heads) for i in range(size) for kind in range(3)]
    else:
        order = list(row)
    return torch.stack([row[key] for key in order])


def old_model(tensors, version: float, heads: int, *, stack: str, parts: dict[str, str], final: str) -> dict:
    """Nested dictionaries. stack: name of the layers' module."""
    language: dict = {"embedding": {}, stack: {}}
    model: dict = {"language_model": language}
    for name, tensor in tensors.items():
        if ".linear_qkv." in name:
            tensor = in_order_of(version, tensor, heads)
        if name.startswith("embedding."):
            _, table, leaf = name.split(".")
            language["embedding"][table] = {leaf: tensor}
        elif name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            part, _, leaf = rest.rpartition(".")
            language[stack][f"layers.{number}.{parts[part]}.{leaf}"] = tensor
        elif name == "output_layer.weight":
            model["word_embeddings_for_head"] = {"weight": tensor}
        else:
            language[stack][f"{final}.{name.rpartition('.')[2]}"] = tensor
    return model


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_every_version_over_ranks(version, tp, pp, tmp_path, host) -> None:
    tensors = gpt()
    args = arguments(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    for stage in range(pp):
        layers = list(range(stage * 4 // pp, (stage + 1) * 4 // pp))
        for rank in range(tp):
            run = run_of(tensors, layers, first=stage == 0, last=stage == pp - 1)
            own = {name: part_of_rank(name, tensor, rank, tp) for name, tensor in run.items()}
            model = old_model(own, version, HEADS // tp, stack="transformer", parts=OLDEST, final="final_layernorm")
            content = {"args": args, "model": model, "checkpoint_version": version}
            if version == 0:
                del content["checkpoint_version"]
            suffix = f"_{stage:03d}" if pp > 1 else ""
            file = save_rank(tmp_path, f"mp_rank_{rank:02d}{suffix}", content)
            if version == 0:
                stored = torch.load(file, weights_only=False)
                del stored["checkpoint_version"]
                torch.save(stored, file, _use_new_zipfile_serialization=False)
    assert_is(checkpoint_lookup.open_checkpoint(tmp_path, host), tensors)


def torch_state(states, version: float, heads: int, *, mixed: bool) -> dict:
    """What Megatron-LM saved of Adam: parameters numbered in the order of the model, the decayed ones first; of mixed
    precision with fp32 copies."""
    names = list(states["main"])
    groups = [[n for n in names if n.endswith(".weight") and "layernorm" not in n]]
    groups.append([n for n in names if n not in groups[0]])

    def stored(state: str, name: str) -> torch.Tensor:
        tensor = states[state][name]
        return in_order_of(version, tensor, heads) if ".linear_qkv." in name else tensor

    ordered = [name for group in groups for name in group]
    moments = {i: {m: stored(m, name) for m in ("exp_avg", "exp_avg_sq")} for i, name in enumerate(ordered)}
    count = len(groups[0])
    numbers = [list(range(count)), list(range(count, len(ordered)))]
    decay = [{"params": numbers[i], "weight_decay": (0.1, 0.0)[i], "step": 9} for i in range(2)]
    inner = {"state": moments, "param_groups": decay}
    if not mixed:
        return inner
    keys = ("optimizer", "fp32_from_fp16_params") if version else ("optimizer_state_dict", "fp32_from_fp16")
    return dict(zip(keys, (inner, [[stored("main", n) for n in group] for group in groups]), strict=True))


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_optimizer_is_in_the_order_of_its_version_too(version, mixed, tmp_path, host) -> None:
    states = {"main": gpt(), "exp_avg": gpt(seed=1), "exp_avg_sq": gpt(seed=2)}
    weights = {name: t.half() if mixed else t for name, t in states["main"].items()}
    for rank in range(2):
        own = {s: {n: part_of_rank(n, t, rank, 2) for n, t in tensors.items()} for s, tensors in states.items()}
        model = {n: part_of_rank(n, t, rank, 2) for n, t in weights.items()}
        content = {
            "args": arguments(tensor_model_parallel_size=2, params_dtype=torch.float16 if mixed else torch.float32),
            "model": old_model(model, version, HEADS // 2, stack="encoder", parts=OLDEST, final="final_layernorm"),
            "optimizer": torch_state(own, version, HEADS // 2, mixed=mixed),
            "checkpoint_version": version,
        }
        save_rank(tmp_path, f"mp_rank_{rank:02d}", content)
    reader = checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert_is(reader, weights)
    for state in ("exp_avg", "exp_avg_sq", *(["main"] if mixed else [])):
        for name, tensor in states[state].items():
            assert torch.equal(reader.read(f"optimizer.{state}.{name}"), tensor), name
    assert reader.read("optimizer.step.decoder.final_layernorm.bias") == 9
    assert "optimizer_left_out" not in reader.metadata["megatron"]


def test_an_optimizer_of_another_kind_is_left_out_with_the_reason(tmp_path, host) -> None:
    tensors = gpt()
    model = old_model(tensors, 3.0, HEADS, stack="encoder", parts=OLDEST, final="final_layernorm")
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0], "weight_decay": 0.1}]}
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model, "optimizer": optimizer})
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    assert not any(name.startswith("optimizer.") for name in reader.shapes())
    reason = reader.metadata["megatron"]["optimizer_left_out"]
    assert "a group with weight decay has 1 parameters, the model 18" in reason


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"language_model": {"encoder": {}, "decoder": {"layers.0.mlp.dense_h_to_4h.weight": torch.ones(2, 2)}}},
            r"has parameters language_model.decoder.\*, of the T5 from before Megatron-Core, which is not read",
        ),
        (
            {"query_model": {"language_model": {"embedding": {"word_embeddings": {"weight": torch.ones(2, 2)}}}}},
            r"has parameters query_model.\*, of two encoders of questions and texts, which is not read",
        ),
        (
            {"vision_model.class_token": torch.ones(2), "language_model.decoder.final_layernorm.weight": torch.ones(2)},
            r"has parameters vision_model.\*, of a model of images and text, which is not read",
        ),
    ],
)
def test_models_of_other_kinds_are_refused_by_what_they_are(model, words, tmp_path, host) -> None:
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model})
    with pytest.raises(ConfigError, match=words):
        checkpoint_lookup.open_checkpoint(tmp_path, host)


def test_the_last_names(tmp_path, host) -> None:
    tensors = gpt()
    model = old_model(tensors, 3.0, HEADS, stack="encoder", parts=NEWEST, final="final_norm")
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model})
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    assert reader.metadata["config"]["model"]["family"] == "gpt"


def bert_model() -> tuple[dict, dict[str, torch.Tensor]]:
    """What Megatron stored of BERT, and its canonical tensors."""
    body = {name.replace("decoder.", "encoder."): tensor for name, tensor in gpt().items()}
    heads = {
        "lm_head.dense.weight": torch.randn(HIDDEN, HIDDEN),
        "lm_head.dense.bias": torch.randn(HIDDEN),
        "lm_head.layer_norm.weight": torch.randn(HIDDEN),
        "lm_head.layer_norm.bias": torch.randn(HIDDEN),
        "output_layer.bias": torch.randn(VOCAB),
        "pooler.dense.weight": torch.randn(HIDDEN, HIDDEN),
        "pooler.dense.bias": torch.randn(HIDDEN),
        "binary_head.weight": torch.randn(2, HIDDEN),
        "binary_head.bias": torch.randn(2),
        "embedding.tokentype_embeddings.weight": torch.randn(2, HIDDEN),
    }
    model = old_model(gpt(), 1.0, HEADS, stack="transformer", parts=OLDEST, final="final_layernorm")
    language = model["language_model"]
    language["embedding"]["tokentype_embeddings"] = {"weight": heads["embedding.tokentype_embeddings.weight"]}
    language["pooler"] = {"dense.weight": heads["pooler.dense.weight"], "dense.bias": heads["pooler.dense.bias"]}
    model["lm_head"] = {
        "bias": heads["output_layer.bias"],
        "dense.weight": heads["lm_head.dense.weight"],
        "dense.bias": heads["lm_head.dense.bias"],
        "layernorm.weight": heads["lm_head.layer_norm.weight"],
        "layernorm.bias": heads["lm_head.layer_norm.bias"],
    }
    model["binary_head"] = {"weight": heads["binary_head.weight"], "bias": heads["binary_head.bias"]}
    return model, body | heads


def test_bert_with_its_heads(tmp_path, host) -> None:
    model, tensors = bert_model()
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model, "checkpoint_version": 1.0})
    reader = checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    section = reader.metadata["config"]["model"]
    assert (section["family"], section["num_tokentypes"], section["add_pooler"]) == ("bert", 2, True)


def test_a_published_model_without_arguments(tmp_path, host) -> None:
    """The shapes say all but the number of heads, whose size was 64 in those."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    stem = "decoder.layers.0."
    tensors = {
        "embedding.word_embeddings.weight": random(VOCAB, 128),
        "embedding.position_embeddings.weight": random(POSITIONS, 128),
        f"{stem}self_attention.linear_qkv.weight": random(384, 128),
        f"{stem}self_attention.linear_qkv.bias": random(384),
        f"{stem}self_attention.linear_proj.weight": random(128, 128),
        f"{stem}self_attention.linear_proj.bias": random(128),
        f"{stem}mlp.linear_fc1.weight": random(512, 128),
        f"{stem}mlp.linear_fc1.bias": random(512),
        f"{stem}mlp.linear_fc2.weight": random(128, 512),
        f"{stem}mlp.linear_fc2.bias": random(128),
        **{
            f"{stem}{norm}.{leaf}": random(128)
            for norm in ("input_layernorm", "pre_mlp_layernorm")
            for leaf in ("weight", "bias")
        },
        **{f"decoder.final_layernorm.{leaf}": random(128) for leaf in ("weight", "bias")},
    }
    model = old_model(tensors, 0, 2, stack="transformer", parts=OLDEST, final="final_layernorm")
    file = save_rank(tmp_path, "mp_rank_00", {"model": model, "checkpoint_version": 0})
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    assert reader.metadata["config"]["model"]["num_attention_heads"] == 2
    assert reader.metadata["megatron"]["args"]["inferred_from_shapes"] is True
    assert file.exists()


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_rows_of_each_version_come_in_todays_order(version, columns) -> None:
    rows = torch.arange(2 * 3 * 4 * max(1, *columns, 1)).view(24, *columns).float()
    old = in_order_of(version, rows, heads=2)
    assert torch.equal(to_grouped(old, 2, version), rows)


def test_a_version_that_is_not_known(tmp_path, host) -> None:
    model = old_model(gpt(), 3.0, HEADS, stack="encoder", parts=NEWEST, final="final_norm")
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model, "checkpoint_version": 4.0})
    with pytest.raises(CheckpointError, match=r"checkpoint_version=4\.0 is not known; it can be 0 to 3\.0"):
        open_checkpoint(tmp_path, host)


def test_a_parameter_that_no_old_model_had(tmp_path, host) -> None:
    model = old_model(gpt(), 3.0, HEADS, stack="encoder", parts=NEWEST, final="final_norm")
    model["language_model"]["encoder"]["layers.0.mlp.gate.weight"] = torch.ones(2)
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model})
    with pytest.raises(CheckpointError, match="language_model.encoder.layers.0.mlp.gate.weight is there and unknown"):
        open_checkpoint(tmp_path, host)


def test_one_parameter_under_two_names(tmp_path, host) -> None:
    model = old_model(gpt(), 3.0, HEADS, stack="encoder", parts=NEWEST, final="final_norm")
    model["language_model"]["transformer"] = {"final_layernorm.weight": torch.ones(HIDDEN)}
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": model})
    with pytest.raises(CheckpointError, match="and another tensor are both decoder.final_layernorm.weight"):
        open_checkpoint(tmp_path, host)


def test_files_are_named_by_what_is_in_them(tmp_path: Path, host) -> None:
    """Old and new names have the same folders; the loader that is chosen is the one that can read them."""
    save_rank(tmp_path / "new", "mp_rank_00", {"args": arguments(), "model": gpt()})
    model = old_model(gpt(), 3.0, HEADS, stack="encoder", parts=NEWEST, final="final_norm")
    save_rank(tmp_path / "old", "mp_rank_00", {"args": arguments(), "model": model})
    for folder, expected in (("new", "megatron"), ("old", "megatron-legacy")):
        assert [s.name for s in host[CHECKPOINT_LOADERS] if s.detect.load()(tmp_path / folder)] == [expected]
