"""Pruning: parts that carry nothing are found and removed without a change of any logit, the smaller checkpoint is an
ordinary one, and what cannot be pruned is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.config import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.train import Engine
from mt_core.train.trained_model import load_trained_model
from mt_tune.pruning.prune import Pruned, prune
from mt_tune.pruning.sizes import Sizes

HOST = load_plugins()
TOKENS = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(3))
MOE = "model.moe={num_experts = 5, moe_router_topk = 2, moe_ffn_hidden_size = 16}"


def checkpoint(folder: Path, change: Callable[[nn.Module], None], *keys: str, family: str = "llama") -> Path:
    """Of a decoder of three layers, two key-value heads with two query heads each, after a change of its weights."""
    sizes = ("num_layers=3", "hidden_size=32", "num_attention_heads=4", "num_query_groups=2", "ffn_hidden_size=24")
    # The mean square that a norm divides by is that of fewer channels; its epsilon is not.
    common = (*(f"model.{size}" for size in sizes), "model.norm_epsilon=1e-12", "model.init_method_std=0.3")
    config = load_config(overrides=[f"model.family={family}", *common, "train.train_iters=1", *keys], host=HOST)
    engine = Engine.build(config, host=HOST)
    with torch.no_grad():
        change(engine.model)
    return engine.save_state(folder, with_optimizer=False)


def pruned_logits(path: Path, sizes: Sizes, folder: Path) -> tuple[Tensor, Tensor, Pruned]:
    """Logits of the larger and of the smaller model."""
    from mt_ckpt.convert.source import Source
    from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions

    pruned = prune(open_checkpoint(path, HOST), [TOKENS], sizes, HOST)
    saver: Any = HOST[CHECKPOINT_SAVERS].get("mt").convert
    saver.load()(folder, Source(pruned.checkpoint, "test"), ConvertOptions(), HOST)
    with torch.no_grad():
        large, small = (load_trained_model(place, HOST, device="cpu").model(tokens=TOKENS) for place in (path, folder))
    return large, small, pruned


def layers_of(model: Any) -> list[Any]:
    return list(model.decoder.layers)


def without_channels(model: Any) -> None:
    gone = torch.tensor([0, 5, 17, 30])
    model.embedding.word_embeddings.weight[:, gone] = 0
    for layer in layers_of(model):
        layer.self_attention.linear_proj.weight[gone] = 0
        layer.mlp.linear_fc2.weight[gone] = 0


def without_inner_channels(model: Any) -> None:
    for number, layer in enumerate(layers_of(model)):
        # Others in each layer, of the up rows.
        layer.mlp.linear_fc1.weight[24 + number : 24 + number + 8] = 0


def without_heads(model: Any) -> None:
    for layer in layers_of(model):
        # Query heads 1 and 2: one of each key-value head. Keys of those heads stay.
        layer.self_attention.linear_proj.weight[:, 8:24] = 0


def without_values(model: Any) -> None:
    for layer in layers_of(model):
        # Rows of heads of 8: query, key, value of each. Values of heads 1 and 2.
        rows = layer.self_attention.linear_qkv.weight.view(4, 3, 8, 32)
        rows[1:3, 2] = 0


def without_a_layer(model: Any) -> None:
    layers_of(model)[1].self_attention.linear_proj.weight.zero_()
    layers_of(model)[1].mlp.linear_fc2.weight.zero_()


def without_an_expert(model: Any) -> None:
    for layer in layers_of(model):
        router = layer.mlp.router.weight
        # Logits a, -a, b, -b and 0: the last is never one of the two largest.
        router[1], router[3], router[4] = -router[0], -router[2], 0


CASES: dict[str, tuple[Callable[[Any], None], Sizes, tuple[str, ...], str]] = {
    "width": (without_channels, Sizes(width=28), (), "llama"),
    "width, tied": (without_channels, Sizes(width=28), ("model.untie_embeddings_and_output_weights=false",), "qwen"),
    "ffn": (without_inner_channels, Sizes(ffn=16), (), "mistral"),
    "key-value heads": (without_values, Sizes(heads=2), ("model.num_query_groups=4",), "llama"),
    "depth": (without_a_layer, Sizes(depth=2), (), "qwen"),
    "experts": (without_an_expert, Sizes(experts=4), (MOE,), "mixtral"),
    "width of experts": (
        lambda model: [
            model.embedding.word_embeddings.weight[:, :4].zero_(),
            *(layer.self_attention.linear_proj.weight[:4].zero_() for layer in layers_of(model)),
            *(layer.mlp.experts.linear_fc2.weight[:, :4].zero_() for layer in layers_of(model)),
        ],
        Sizes(width=28),
        (MOE,),
        "qwen_moe",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_without_influence_are_found_and_change_no_logit(name: str, tmp_path: Path) -> None:
    change, sizes, keys, family = CASES[name]
    large, small, _ = pruned_logits(checkpoint(tmp_path / "large", change, *keys, family=family), sizes, tmp_path / "s")
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-4 * float(large.abs().max()))


def test_heads_of_a_group_are_the_most_active_ones(tmp_path: Path) -> None:
    def quieter(model: Any) -> None:
        for layer in layers_of(model):
            # Query heads of a group share their values: sharper attention gives a larger mean of squares.
            rows = layer.self_attention.linear_qkv.weight.view(2, 4, 8, 32)
            rows[0, 0], rows[1, 1] = 0, 0

    path = checkpoint(tmp_path / "large", quieter)
    _, small, pruned = pruned_logits(path, Sizes(heads=2), tmp_path / "small")
    assert {tuple(layer.heads.tolist()) for layer in pruned.kept.of_layers.values() if layer.heads is not None} == {
        (1, 2)
    }
    # A computation by hand: the larger model in which the pruned heads' outputs are 0.
    reference = load_trained_model(path, HOST, device="cpu").model
    with torch.no_grad():
        for layer in layers_of(reference):
            layer.self_attention.linear_proj.weight.view(32, 4, 8)[:, [0, 3]] = 0
        torch.testing.assert_close(small, reference(tokens=TOKENS), rtol=1e-4, atol=1e-4)


def test_all_sizes_together_give_a_model_that_transformers_computes(tmp_path: Path) -> None:
    keys = ("model.norm_epsilon=1e-6", "tokenizer.tokenizer_type=ByteLevelTokenizer")
    path = checkpoint(tmp_path / "large", lambda model: None, *keys, family="qwen")
    sizes = Sizes(depth=2, width=24, ffn=16, heads=2)
    _, small, pruned = pruned_logits(path, sizes, tmp_path / "small")
    from mt_ckpt.convert.source import Source
    from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions

    saver: Any = HOST[CHECKPOINT_SAVERS].get("hf").convert
    saver.load()(tmp_path / "hf", Source(pruned.checkpoint, "test"), ConvertOptions(), HOST)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert (theirs.config.num_hidden_layers, theirs.config.hidden_size, theirs.config.head_dim) == (2, 24, 8)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits[..., : small.shape[-1]], small, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(), "give --depth, --width, --ffn, --heads or --experts"),
        (Sizes(depth=3), r"--depth 3: the model has 3 layers .*; give a number from 1 to 2"),
        (Sizes(heads=3), "each of the 2 key-value heads keeps as many query heads; give 2"),
        (Sizes(experts=2), "--experts 2: model.family=llama is a dense model"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: Sizes, words: str, tmp_path: Path) -> None:
    source = open_checkpoint(checkpoint(tmp_path, lambda model: None), HOST)
    with pytest.raises(ConfigError, match=words):
        prune(source, [TOKENS], sizes, HOST)


def test_models_that_cannot_be_are_refused(tmp_path: Path) -> None:
    def refuse(family: str, sizes: Sizes, words: str, *keys: str) -> None:
        place = tmp_path / f"{family}{len(keys)}{sizes}".replace(" ", "")
        source = open_checkpoint(checkpoint(place, lambda model: None, *keys, family=family), HOST)
        with pytest.raises(ConfigError, match=words):
            prune(source, [TOKENS], sizes, HOST)

    refuse("olmo", Sizes(depth=2), "model.family=olmo: mt tune prune knows")
    refuse("mixtral", Sizes(ffn=8), "has experts, whose widths are not pruned", MOE)
    two = "model.moe={num_experts = 4, moe_router_topk = 2}"
    refuse("mixtral", Sizes(experts=1), "a token goes to 2 experts", two)


def test_the_command_prunes_and_distill_repairs(tmp_path: Path) -> None:
    from mt_tune.commands.app import app

    path = checkpoint(tmp_path / "large", lambda model: None, family="llama")
    words = ["prune", str(path), "--depth", "2", "--ffn", "16", "--save-dir", str(tmp_path / "small"), "--samples", "4"]
    result = CliRunner().invoke(app, [*words, "--seq-length", "16"], obj=None, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "layers" in result.output
    assert f"mt tune distill {tmp_path / 'small'}" in result.output
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b c d"}\n' * 8)
    options = ["--teacher", str(path), "--steps", "2", "--seq-length", "16", "--run-dir", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["distill", str(tmp_path / "small"), str(chats), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert find_checkpoint(tmp_path / "run").name == "iter_0000002"
