"""The torch format as Megatron writes it, from files made by torch.save: names, stages, ranks, what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.handmade import HEADS, HIDDEN, VOCAB, arguments, gpt, part_of_rank, run_of, save_rank

from mt_ckpt.megatron.reader import open_checkpoint
from mt_core import checkpoint_lookup
from mt_core.errors import CheckpointError, ConfigError


def assert_is(reader, tensors: dict[str, torch.Tensor]) -> None:
    names = {name.removeprefix("model.") for name in reader.shapes() if name.startswith("model.")}
    assert names == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(f"model.{name}"), tensor), name


def save_gpt(
    folder: Path, tensors, *, tp: int = 1, pp: int = 1, vpp: int = 1, rename=lambda name: name, **changes
) -> None:
    """All ranks of a GPT. Part v of stage p is the (v pp + p)-th run of layers."""
    args = arguments(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **changes)
    runs = pp * vpp
    layers = [list(range(run * 4 // runs, (run + 1) * 4 // runs)) for run in range(runs)]
    for stage in range(pp):
        for rank in range(tp):
            parts = []
            for part in range(vpp):
                run = part * pp + stage
                whole = run_of(tensors, layers[run], first=run == 0, last=run == runs - 1)
                parts.append({rename(name): part_of_rank(name, t, rank, tp) for name, t in whole.items()})
            models = {"model": parts[0]} if vpp == 1 else {f"model{i}": part for i, part in enumerate(parts)}
            suffix = f"_{stage:03d}" if pp > 1 else ""
            save_rank(folder, f"mp_rank_{rank:02d}{suffix}", {"args": args, **models})


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 4, 1), (2, 2, 2)])
def test_ranks_stages_and_virtual_stages(tp, pp, vpp, tmp_path, host) -> None:
    tensors = gpt()
    save_gpt(tmp_path, tensors, tp=tp, pp=pp, vpp=vpp)
    reader = checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    assert reader.metadata["iteration"] == 5
    assert reader.metadata["consumed_samples"] == 12


def te_name(name: str) -> str:
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


@pytest.mark.parametrize(
    "rename", [te_name, lambda name: f"module.{name}", lambda name: f"module.module.{te_name(name)}"]
)
def test_names_of_transformer_engine_and_of_wrapped_models(rename, tmp_path, host) -> None:
    tensors = gpt()
    save_gpt(tmp_path, tensors, tp=2, rename=rename)
    assert_is(open_checkpoint(tmp_path, host), tensors)


def test_stages_of_different_sizes(tmp_path, host) -> None:
    tensors = gpt()
    args = arguments(
        pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=1
    )
    for stage, layers in enumerate([[0], [1, 2], [3]]):
        run = run_of(tensors, layers, first=stage == 0, last=stage == 2)
        save_rank(tmp_path, f"mp_rank_00_{stage:03d}", {"args": args, "model": run})
    assert_is(open_checkpoint(tmp_path, host), tensors)


def llama_like(**changes):
    """Arguments and tensors of one layer of a gated model, gate rows first."""
    generator = torch.Generator().manual_seed(3)
    args = arguments(
        num_layers=1,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=2,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        **changes,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    stem = "decoder.layers.0."
    tensors = {
        "embedding.word_embeddings.weight": random(VOCAB, HIDDEN),
        f"{stem}input_layernorm.weight": random(HIDDEN),
        f"{stem}self_attention.linear_proj.weight": random(HIDDEN, HIDDEN),
        f"{stem}self_attention.linear_qkv.weight": random(HIDDEN + 2 * 2 * (HIDDEN // HEADS), HIDDEN),
        f"{stem}pre_mlp_layernorm.weight": random(HIDDEN),
        "decoder.final_layernorm.weight": random(HIDDEN),
        "output_layer.weight": random(VOCAB, HIDDEN),
    }
    return args, tensors, random


def test_the_halves_of_a_gated_matrix(tmp_path, host) -> None:
    """Rank r holds its share of the gate rows, then its share of the up rows."""
    args, tensors, random = llama_like(tensor_model_parallel_size=2)
    gate, up, down = random(24, HIDDEN), random(24, HIDDEN), random(HIDDEN, 24)
    for rank in range(2):
        model = {name: part_of_rank(name, tensor, rank, 2) for name, tensor in tensors.items()}
        model["decoder.layers.0.mlp.linear_fc1.weight"] = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        model["decoder.layers.0.mlp.linear_fc2.weight"] = down.chunk(2, 1)[rank]
        save_rank(tmp_path, f"mp_rank_{rank:02d}", {"args": args, "model": model})
    reader = open_checkpoint(tmp_path, host)
    assert reader.metadata["config"]["model"]["family"] == "llama"
    assert torch.equal(reader.read("model.decoder.layers.0.mlp.linear_fc1.weight"), torch.cat([gate, up]))
    assert torch.equal(reader.read("model.decoder.layers.0.mlp.linear_fc2.weight"), down)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_one_by_one_and_in_groups(grouped, tmp_path, host) -> None:
    """Four experts on two ranks, numbered from 0 on each."""
    args, tensors, random = llama_like(num_experts=4, expert_model_parallel_size=2, moe_ffn_hidden_size=24)
    fc1, fc2, router = random(4, 48, HIDDEN), random(4, HIDDEN, 24), random(4, HIDDEN)
    stem = "decoder.layers.0.mlp."
    for rank in range(2):
        model = {**tensors, f"{stem}router.weight": router}
        for local in range(2):
            expert = 2 * rank + local
            for leaf, value in (("linear_fc1", fc1), ("linear_fc2", fc2)):
                sequential = f"{stem}experts.local_experts.{local}.{leaf}.weight"
                model[f"{stem}experts.{leaf}.weight{local}" if grouped else sequential] = value[expert].clone()
        save_rank(tmp_path, f"mp_rank_00_{rank:03d}", {"args": args, "model": model})
    reader = open_checkpoint(tmp_path, host)
    assert torch.equal(reader.read(f"model.{stem}experts.linear_fc1.weight"), fc1)
    assert torch.equal(reader.read(f"model.{stem}experts.linear_fc2.weight"), fc2)
    assert torch.equal(reader.read(f"model.{stem}router.weight"), router)
    assert reader.metadata["config"]["model"]["moe"]["num_experts"] == 4


# -- the vocabulary ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "given", "rows"),
    [
        ({}, None, VOCAB),
        ({"vocab_size": 33}, None, 33),
        ({"vocab_size": 33}, 37, 37),
        ({"vocab_size": 33, "tokenizer_type": "NullTokenizer"}, None, 34),
        ({"vocab_size": 33, "tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": None}, None, 33),
    ],
)
def test_rows_of_the_vocabulary(said, given, rows, tmp_path, host) -> None:
    """The NullTokenizer of old added its end of document to the size that it was given."""
    tensors = gpt()
    save_gpt(tmp_path, tensors, tp=2, **said)
    reader = open_checkpoint(tmp_path, host, given)
    words = "embedding.word_embeddings.weight"
    assert torch.equal(reader.read(f"model.{words}"), tensors[words][:rows])
    assert reader.metadata["config"]["model"]["vocab_size"] == rows


def test_more_rows_than_there_are(tmp_path, host) -> None:
    save_gpt(tmp_path, gpt())
    with pytest.raises(ConfigError, match=f"vocab_size=99: .* has {VOCAB} rows; it can be 1 to {VOCAB}"):
        open_checkpoint(tmp_path, host, 99)


# -- what is missing or does not fit ----------------------------------------------------------------


def test_a_missing_rank_is_named(tmp_path, host) -> None:
    save_gpt(tmp_path, gpt(), tp=2, pp=2)
    missing = tmp_path / "iter_0000005/mp_rank_01_001/model_optim_rng.pt"
    missing.unlink()
    with pytest.raises(
        CheckpointError, match=f"{missing}: missing; its run had tensor_model_parallel_size=2, pipeline"
    ):
        open_checkpoint(tmp_path, host)


def resave(file: Path, change) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c["model"].pop("decoder.layers.2.mlp.linear_fc2.bias"),
            "decoder.layers.2.mlp.linear_fc2.bias is missing",
        ),
        (
            lambda c: c["model"].update({"decoder.adapter.weight": torch.ones(2)}),
            "decoder.adapter.weight is there and unknown",
        ),
        (
            lambda c: c["model"].update({"decoder.layers.1.input_layernorm.bias": torch.ones(3)}),
            r"a rank's part of decoder.layers.1.input_layernorm.bias has shape \[3\], by the args it is \[16\]",
        ),
        (lambda c: c.pop("args"), "it has no args, which say how the model and its ranks are made"),
        (lambda c: c.pop("model"), "no checkpoint of Megatron: it has no model"),
        (lambda c: delattr(c["args"], "hidden_size"), "its args do not have hidden_size"),
    ],
)
def test_a_file_that_is_not_the_model_of_its_args(change, words, tmp_path, host) -> None:
    save_gpt(tmp_path, gpt())
    resave(tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path, host)


def test_one_rank_that_lacks_a_parameter(tmp_path, host) -> None:
    save_gpt(tmp_path, gpt(), tp=2)
    resave(
        tmp_path / "iter_0000005/mp_rank_01/model_optim_rng.pt",
        lambda content: content["model"].pop("decoder.layers.0.self_attention.linear_qkv.weight"),
    )
    with pytest.raises(CheckpointError, match="linear_qkv.weight is not in the files of all ranks that share it"):
        open_checkpoint(tmp_path, host)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seven", "holds 'seven', expected the number of an iteration"),
        ("9", "names 9, but .*iter_0000009 does not exist"),
    ],
)
def test_a_tracker_that_names_nothing(text, words, tmp_path, host) -> None:
    save_gpt(tmp_path, gpt())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path, host)


def test_a_release_and_a_folder_of_an_iteration(tmp_path, host) -> None:
    tensors = gpt()
    save_gpt(tmp_path, tensors)
    assert_is(open_checkpoint(tmp_path / "iter_0000005", host), tensors)
    (tmp_path / "iter_0000005").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_is(checkpoint_lookup.open_checkpoint(tmp_path, host), tensors)


def test_nothing_there(tmp_path, host) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "none", host)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no mp_rank_NN folders"):
        open_checkpoint(tmp_path / "empty", host)


def test_a_malicious_rank_is_refused_and_named(tmp_path, host) -> None:
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    save_gpt(tmp_path, gpt(), tp=2)
    file = tmp_path / "iter_0000005/mp_rank_01/model_optim_rng.pt"
    resave(file, lambda content: content.update(rng_state=Attack()))
    with pytest.raises(
        CheckpointError, match=f"{file}: refused, nothing in it was executed: it refers to posix.system"
    ):
        checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert not (tmp_path / "executed").exists()


def test_an_unknown_name_gets_a_suggestion(tmp_path, host) -> None:
    save_gpt(tmp_path, gpt())
    with pytest.raises(CheckpointError, match='did you mean "model.decoder.final_layernorm.weight"'):
        open_checkpoint(tmp_path, host).read("model.decoder.final_layernorm.weigth")


# -- arguments that change what is computed ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"multi_latent_attention": True}, "swiglu=False is not read of a model with multi-latent attention"),
        ({"experimental_attention_variant": "dsa"}, "variant='dsa' stands for an experimental attention"),
        ({"attention_output_gate": True}, "attention_output_gate=True stands for a gate on the attention's output"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p=True stands for norm weights stored less one"),
        ({"hybrid_layer_pattern": "M*", "norm_epsilon": 1e-6}, "norm_epsilon=1e-06 is not read of a model with Mamba"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one' stands for a softmax with a sink"),
        (
            {"position_embedding_type": "yarn"},
            "position_embedding_type='yarn' is not read; it can be learned_absolute, rope",
        ),
        ({"normalization": "L2"}, "normalization='L2' is not read"),
        ({"window_size": (4, 4)}, r"window_size=\(4, 4\) is read of models with rotary positions"),
        ({"use_rope_scaling": True}, "use_rope_scaling=True is read of models with rotary positions"),
    ],
)
def test_a_model_that_is_none_of_ours_is_refused_by_its_argument(changes, words, tmp_path, host) -> None:
    save_gpt(tmp_path, gpt(), **changes)
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path, host)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "gelu"),
        ({"openai_gelu": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": True}, "gelu_tanh"),
        ({"squared_relu": True}, "squared_relu"),
    ],
)
def test_the_activation_that_megatron_computes(changes, activation, tmp_path, host) -> None:
    """Its fused bias and GELU is the tanh approximation."""
    save_gpt(tmp_path, gpt(), **changes)
    assert open_checkpoint(tmp_path, host).metadata["config"]["model"]["activation"] == activation
