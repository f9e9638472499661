"""The optimizer's state is tied to the right parameters, in every way in which Megatron stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.handmade import HIDDEN, arguments, gpt, part_of_rank, run_of, save_rank
from tests.ckpt.megatron.test_rank_files import llama_like

from mt_ckpt.megatron.flat_buffers import Bucketing, FlatParameter, buckets_of
from mt_ckpt.megatron.names import Style
from mt_ckpt.megatron.rank_plan import in_order
from mt_ckpt.megatron.reader import open_checkpoint
from mt_core.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")


def assert_states(reader, expected: Mapping[str, Mapping[str, torch.Tensor]], step: float) -> None:
    """expected: state -> parameter -> tensor."""
    names = {name for name in reader.shapes() if name.startswith("optimizer.")}
    wanted = {f"optimizer.{state}.{name}" for state, tensors in expected.items() for name in tensors}
    assert names == wanted | {f"optimizer.step.{name}" for name in expected["exp_avg"]}
    for state, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(f"optimizer.{state}.{name}"), tensor), (state, name)
    assert reader.read(f"optimizer.step.{next(iter(expected['exp_avg']))}") == step


def decays(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and not name.endswith("bias")


# -- torch's own state in the file -------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_state_that_adamw_made(mixed, tp, pp, vpp, tmp_path, host) -> None:
    """torch.optim.AdamW over two groups, as Megatron makes them: with decay first; numbers count over the groups."""
    weights, moments = gpt(), {state: gpt(seed=seed) for seed, state in enumerate(MOMENTS, 10)}
    dtype = torch.bfloat16 if mixed else torch.float32
    args = arguments(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, params_dtype=dtype)
    runs = pp * vpp
    for stage in range(pp):
        for rank in range(tp):
            cut = {
                kind: [
                    {
                        name: part_of_rank(name, tensor, rank, tp)
                        for name, tensor in run_of(
                            tensors,
                            list(range(run * 4 // runs, (run + 1) * 4 // runs)),
                            first=run == 0,
                            last=run == runs - 1,
                        ).items()
                    }
                    for part in range(vpp)
                    for run in [part * pp + stage]
                ]
                for kind, tensors in {"weights": weights, **moments}.items()
            }
            listed = [(part, name) for part, model in enumerate(cut["weights"]) for name in model]
            groups, parameters = [], {}
            for decayed in (True, False):
                chosen = [(p, n) for p, n in listed if decays(n, cut["weights"][p][n]) == decayed]
                for part, name in chosen:
                    parameters[part, name] = torch.nn.Parameter(cut["weights"][part][name].clone())
                group = [parameters[key] for key in chosen]
                groups.append({"params": group, "weight_decay": 0.1 * decayed, "wd_mult": float(decayed)})
            optimizer = torch.optim.AdamW(groups)
            for (part, name), parameter in parameters.items():
                own = {state: cut[state][part][name] for state in MOMENTS}
                optimizer.state[parameter] = {"step": torch.tensor(9.0), **own}
            copies = [[p.data for p in group["params"]] for group in optimizer.param_groups]
            state = optimizer.state_dict()
            stored = {"optimizer": state, "fp32_from_fp16_params": copies} if mixed else state
            parts = [{name: tensor.to(dtype) for name, tensor in model.items()} for model in cut["weights"]]
            models = {"model": parts[0]} if vpp == 1 else {f"model{i}": part for i, part in enumerate(parts)}
            suffix = f"_{stage:03d}" if pp > 1 else ""
            save_rank(tmp_path, f"mp_rank_{rank:02d}{suffix}", {"args": args, **models, "optimizer": stored})
    reader = open_checkpoint(tmp_path, host)
    assert_states(reader, {**moments, "main": weights} if mixed else moments, 9.0)
    assert set(reader.dtypes().values()) == ({torch.bfloat16, torch.float32} if mixed else {torch.float32})


def test_a_group_of_another_size_than_the_model_calls_for(tmp_path, host) -> None:
    tensors = gpt()
    group = {"params": [0, 1], "weight_decay": 0.1, "wd_mult": 1.0}
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [group]}
    save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": tensors, "optimizer": state})
    with pytest.raises(CheckpointError, match="a group with weight decay has 2 parameters, the model 18"):
        open_checkpoint(tmp_path, host)


# -- flat buffers ------------------------------------------------------------------------------------


def megatrons_buffer(
    tensors: Mapping[str, torch.Tensor], *, bucket_size: int | None, data_parallel: int, alone: tuple[str, ...] = ()
) -> torch.Tensor:
    """The buffer of a model part as the data-parallel code of Megatron lays it out, then without padding at the ends of
    buckets; written from its description: parameters backwards, each at a multiple of 64 elements, a bucket closed when
    it has at least bucket_size elements, its end at a multiple of lcm(data parallel size, 128)."""
    stored: list[torch.Tensor] = []
    bucket: list[torch.Tensor] = []
    length = 0
    for name in reversed(tensors):
        value = tensors[name].flatten()
        if name in alone and bucket:
            stored.append(torch.cat(bucket))
            bucket, length = [], 0
        gap = -length % 64
        bucket += [torch.full((gap,), 99.0), value]
        length += gap + len(value)
        if name in alone or (bucket_size is not None and length >= bucket_size):
            stored.append(torch.cat(bucket))
            bucket, length = [], 0
    assert math.lcm(data_parallel, 128) % 64 == 0  # so that buckets begin at a multiple of 64, as counted here
    return torch.cat([*stored, *([torch.cat(bucket)] if bucket else [])])


def distributed_optimizer(parts) -> dict:
    """distrib_optim.pt of one optimizer. parts: for each model part, state -> flat buffer."""
    return {
        "buckets_coalesced": True,
        **{
            i: {(torch.float32, torch.float32): {**part, "numel_unpadded": len(part["param"])}}
            for i, part in enumerate(parts)
        },
    }


def save_with_buffers(
    folder: Path,
    states,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype=torch.float32,
    bucket_size: int | None = None,
    wrong=None,
    **changes,
) -> None:
    """states: "param", "exp_avg", "exp_avg_sq" -> whole tensors by name."""
    args = arguments(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        data_parallel_size=3,
        **changes,
    )
    groups = [{"params": [], "wd_mult": 1.0, "step": 4.0}, {"params": [], "wd_mult": 0.0, "step": 4.0}]
    for stage in range(pp):
        layers = list(range(stage * 4 // pp, (stage + 1) * 4 // pp))
        for rank in range(tp):
            own = {
                state: {
                    name: part_of_rank(name, tensor, rank, tp)
                    for name, tensor in run_of(tensors, layers, first=stage == 0, last=stage == pp - 1).items()
                }
                for state, tensors in states.items()
            }
            alone = ("embedding.word_embeddings.weight", "output_layer.weight") if pp > 1 else ()
            size = bucket_size if stage == 0 else None
            buffers = {
                state: megatrons_buffer(tensors, bucket_size=size, data_parallel=3, alone=alone)
                for state, tensors in own.items()
            }
            suffix = f"_{stage:03d}" if pp > 1 else ""
            content = {
                "args": args,
                "model": {name: tensor.to(dtype) for name, tensor in own["param"].items()},
                "optimizer": {"optimizer": {"param_groups": groups}},
            }
            file = save_rank(folder, f"mp_rank_{rank:02d}{suffix}", content)
            value = distributed_optimizer([buffers])
            torch.save(wrong(value) if wrong else value, file.parent / "distrib_optim.pt")


@pytest.fixture
def states() -> dict[str, dict[str, torch.Tensor]]:
    return {"param": gpt(), "exp_avg": gpt(seed=1), "exp_avg_sq": gpt(seed=2)}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_flat_buffers(tp, pp, states, tmp_path, host) -> None:
    """Sizes here are no multiples of 64, so that there are gaps."""
    save_with_buffers(tmp_path, states, tp=tp, pp=pp)
    assert_states(open_checkpoint(tmp_path, host), {state: states[state] for state in MOMENTS}, 4.0)


@pytest.mark.parametrize("pp", [1, 2])
def test_several_buckets(pp, states, tmp_path, host) -> None:
    save_with_buffers(tmp_path, states, pp=pp, bucket_size=700, overlap_grad_reduce=True, ddp_bucket_size=700)
    assert_states(open_checkpoint(tmp_path, host), {state: states[state] for state in MOMENTS}, 4.0)


def test_copies_of_16_bit_weights(states, tmp_path, host) -> None:
    save_with_buffers(tmp_path, states, dtype=torch.bfloat16)
    expected = {"main": states["param"], **{state: states[state] for state in MOMENTS}}
    assert_states(open_checkpoint(tmp_path, host), expected, 4.0)


def shorter(value):
    for state in ("param", "exp_avg", "exp_avg_sq"):
        value[0][torch.float32, torch.float32][state] = value[0][torch.float32, torch.float32][state][:-1]
    value[0][torch.float32, torch.float32]["numel_unpadded"] -= 1
    return value


def shifted(value):
    buffers = value[0][torch.float32, torch.float32]
    buffers["param"] = buffers["param"].roll(64)
    return value


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (shorter, "the optimizer's state does not fit the model: distrib_optim.pt has a buffer of"),
        (shifted, "is not where the arguments of the run put it, or not that of the weights beside it"),
        (lambda value: {**value, "buckets_coalesced": False}, "written by a Megatron before 0.6"),
        (lambda value: [value, value], "has 2 optimizers, the model calls for 1"),
    ],
)
def test_buffers_that_do_not_fit(wrong, words, states, tmp_path, host) -> None:
    save_with_buffers(tmp_path, states, wrong=wrong)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path, host)


def test_layer_wise_optimizers_are_left_out_with_the_reason(tmp_path, host) -> None:
    file = save_rank(tmp_path, "mp_rank_00", {"args": arguments(), "model": gpt()})
    torch.save({}, file.parent / "layer_wise_optimizer_0.pt")
    reader = open_checkpoint(tmp_path, host)
    assert "layer-wise optimizers" in reader.metadata["megatron"]["optimizer_left_out"]
    assert not any(name.startswith("optimizer.") for name in reader.shapes())


def test_experts_have_an_optimizer_of_their_own(tmp_path, host) -> None:
    """Two optimizers, the dense one first; experts one after another in the order of the file."""
    args, dense, random = llama_like(num_experts=2, moe_ffn_hidden_size=24, use_distributed_optimizer=True)
    dense["decoder.layers.0.mlp.router.weight"] = random(2, HIDDEN)
    leaves = [f"local_experts.{expert}.linear_fc{i}.weight" for expert in range(2) for i in (1, 2)]
    shapes = {"1": (48, HIDDEN), "2": (HIDDEN, 24)}
    experts = {f"decoder.layers.0.mlp.experts.{leaf}": random(*shapes[leaf[-8]]) for leaf in leaves}
    own = {
        state: ({n: t + offset for n, t in dense.items()}, {n: t + offset for n, t in experts.items()})
        for state, offset in {"param": 0, "exp_avg": 1, "exp_avg_sq": 2}.items()
    }
    flat = [
        distributed_optimizer(
            [{s: megatrons_buffer(t[kind], bucket_size=None, data_parallel=1) for s, t in own.items()}]
        )
        for kind in (0, 1)
    ]
    groups = {"optimizer": {"param_groups": [{"params": [], "wd_mult": 1.0, "step": 4.0}]}}
    file = save_rank(
        tmp_path, "mp_rank_00", {"args": args, "model": {**dense, **experts}, "optimizer": [groups, groups]}
    )
    torch.save(flat, file.parent / "distrib_optim.pt")
    reader = open_checkpoint(tmp_path, host)
    for state, offset in {"exp_avg": 1, "exp_avg_sq": 2}.items():
        for name in ("output_layer.weight", "decoder.layers.0.mlp.router.weight"):
            assert torch.equal(reader.read(f"optimizer.{state}.{name}"), dense[name] + offset)
        for i in (1, 2):
            stored = [experts[f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc{i}.weight"] for e in range(2)]
            found = reader.read(f"optimizer.{state}.decoder.layers.0.mlp.experts.linear_fc{i}.weight")
            assert torch.equal(found, torch.stack(stored) + offset)


def test_buckets_worked_out_by_hand() -> None:
    """c 0 to 100, b from 128 to 138: that is 138 of at least 130, so the bucket is closed, and a begins a new one."""
    parameters = [FlatParameter("a", 70), FlatParameter("b", 10), FlatParameter("c", 100)]
    whole = buckets_of(parameters, Bucketing(None, 128))
    assert [(bucket.first, bucket.numel) for bucket in whole] == [({"c": 0, "b": 128, "a": 192}, 262)]
    cut = buckets_of(parameters, Bucketing(130, 128))
    assert [(bucket.first, bucket.numel) for bucket in cut] == [({"c": 0, "b": 128}, 138), ({"a": 0}, 70)]
    shared = buckets_of(
        [FlatParameter("a", 70), FlatParameter("b", 10, alone=True), FlatParameter("c", 100)], Bucketing(None, 128)
    )
    assert [bucket.first for bucket in shared] == [{"c": 0}, {"b": 0}, {"a": 0}]


def test_the_order_of_megatrons_modules() -> None:
    names = list(gpt())
    assert in_order(sorted(names), Style("never", False, names)) == names
    fused = in_order(sorted(names), Style("beside", False, names))
    assert fused[2:8] == [
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.input_layernorm.bias",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
    ]
