"""Meta's and Mistral's own layout: files cut over ranks, rotary order, parameters that only code knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import tensors_of
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.meta.reader import open_checkpoint as open_meta
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import CheckpointError, ConfigError

DIM, HEADS, GROUPS, LAYERS, VOCAB, FFN = 32, 4, 2, 2, 60, 48
HEAD = DIM // HEADS
PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS, "norm_eps": 1e-5, "vocab_size": VOCAB}
PARAMS |= {"multiple_of": 16, "rope_theta": 500000.0}


def make_state(*, tied: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    state = {"tok_embeddings.weight": random(VOCAB, DIM), "norm.weight": random(DIM), "rope.freqs": random(HEAD // 2)}
    if not tied:
        state["output.weight"] = random(VOCAB, DIM)
    for i in range(LAYERS):
        state |= {
            f"layers.{i}.attention.wq.weight": random(DIM, DIM),
            f"layers.{i}.attention.wk.weight": random(GROUPS * HEAD, DIM),
            f"layers.{i}.attention.wv.weight": random(GROUPS * HEAD, DIM),
            f"layers.{i}.attention.wo.weight": random(DIM, DIM),
            f"layers.{i}.feed_forward.w1.weight": random(FFN, DIM),
            f"layers.{i}.feed_forward.w2.weight": random(DIM, FFN),
            f"layers.{i}.feed_forward.w3.weight": random(FFN, DIM),
            f"layers.{i}.attention_norm.weight": random(DIM),
            f"layers.{i}.ffn_norm.weight": random(DIM),
        }
    return state


def cut(name: str, tensor: Tensor, ranks: int, embedding_dim: int) -> list[Tensor]:
    """As fairscale's layers do: columns of wo and w2, rows of the other matrices, whole vectors."""
    if tensor.ndim == 1:
        return [tensor] * ranks
    dim = embedding_dim if "tok_emb" in name else 1 if ".wo." in name or ".w2." in name else 0
    return [part.contiguous() for part in tensor.chunk(ranks, dim)]


def write(folder: Path, state: dict[str, Tensor], params: dict, ranks: int = 1, embedding_dim: int = 0) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        part = {name: cut(name, tensor, ranks, embedding_dim)[rank] for name, tensor in state.items()}
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def reference(state: dict[str, Tensor], tokens: Tensor, base: float) -> Tensor:
    """Llama by Meta's formulas: neighbouring channels are complex numbers that turn. [B, S] -> [B, S, vocab]"""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * state[name]

    def turn(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).float(), base ** -(torch.arange(0, HEAD, 2).float() / HEAD))
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]).flatten(-2)

    x = state["tok_embeddings.weight"][tokens]
    mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
    for i in range(LAYERS):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in state.items()}
        y = norm(x, f"layers.{i}.attention_norm.weight")
        q, k, v = (
            (y @ layer[f"attention.w{kind}.weight"].T).unflatten(-1, (heads, HEAD))
            for kind, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
        )
        q, k = turn(q), turn(k).repeat_interleave(HEADS // GROUPS, 2)
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / HEAD**0.5 + mask
        mixed = torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v.repeat_interleave(HEADS // GROUPS, 2))
        x = x + mixed.flatten(-2) @ layer["attention.wo.weight"].T
        y = norm(x, f"layers.{i}.ffn_norm.weight")
        gate = torch.nn.functional.silu(y @ layer["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ layer["feed_forward.w3.weight"].T)) @ layer["feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ state.get("output.weight", state["tok_embeddings.weight"]).T


def logits(checkpoint: Path, host, tokens: Tensor) -> Tensor:
    from mt_core.train.trained_model import load_trained_model

    with torch.no_grad():
        return load_trained_model(checkpoint, host, device="cpu").model(tokens)


@pytest.mark.parametrize(
    ("ranks", "embedding_dim", "tied"), [(1, 0, False), (2, 0, False), (2, 1, False), (1, 0, True)]
)
def test_llama_computes_what_metas_formulas_say(
    host, tmp_path: Path, ranks: int, embedding_dim: int, tied: bool
) -> None:
    state = make_state(tied=tied)
    folder = write(tmp_path / "meta", state, PARAMS, ranks, embedding_dim)
    report = convert(folder, tmp_path / "mt", saver="mt", host=host)
    assert report.family == "llama"
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = reference(state, tokens, 500000.0)
    torch.testing.assert_close(logits(tmp_path / "mt", host, tokens), expected, atol=2e-4, rtol=1e-4)


def test_files_together_hold_what_one_holds(host, tmp_path: Path) -> None:
    state = make_state()
    results = []
    for ranks in (1, 2):
        folder = write(tmp_path / f"meta{ranks}", state, PARAMS, ranks)
        convert(folder, tmp_path / f"mt{ranks}", saver="mt", host=host)
        results.append(tensors_of(open_checkpoint(tmp_path / f"mt{ranks}")))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_mistrals_own_layout(host, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = make_state()
    del state["rope.freqs"]
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size")
    params = {**{key: PARAMS[key] for key in keys}, "head_dim": HEAD, "hidden_dim": FFN, "rope_theta": 1e6}
    (tmp_path / "mistral").mkdir()
    save_file(state, tmp_path / "mistral" / "consolidated.safetensors")
    (tmp_path / "mistral" / "params.json").write_text(json.dumps(params))
    assert convert(tmp_path / "mistral", tmp_path / "mt", saver="mt", host=host).family == "mistral"
    tokens = torch.randint(0, VOCAB, (1, 6), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        logits(tmp_path / "mt", host, tokens), reference(state, tokens, 1e6), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("place", ["m/tokenizer.model", "tokenizer.model", "m/tokenizer.model.v3"])
def test_the_tokenizer_is_named_where_it_lies(host, tmp_path: Path, place: str) -> None:
    folder = write(tmp_path / "m", make_state(), PARAMS)
    (tmp_path / place).write_bytes(b"\n\x00")  # as a SentencePiece model begins
    reader = open_meta(folder, host)
    assert reader.metadata["config"]["tokenizer"]["tokenizer_model"] == str(tmp_path / place)
    assert reader.files() == {"tokenizer.model": b"\n\x00"}


def test_scaled_positions(host, tmp_path: Path) -> None:
    convert(
        write(tmp_path / "m", make_state(), {**PARAMS, "use_scaled_rope": True}), tmp_path / "mt", saver="mt", host=host
    )
    model = open_checkpoint(tmp_path / "mt").metadata["config"]["model"]
    assert (model["rope_scaling_type"], model["rope_scaling_factor"]) == ("llama3", 32.0)  # as small as Llama 3.2
    assert (model["original_max_position_embeddings"], model["max_position_embeddings"]) == (8192, 131072)


def refusal(host, folder: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        convert(folder, folder.with_name("x"), saver="mt", loader="meta", host=host)
    return str(caught.value)


def test_refusals(host, tmp_path: Path) -> None:
    state = make_state()
    assert "params.json: quantization=1 is not known" in refusal(
        host, write(tmp_path / "a", state, {**PARAMS, "quantization": 1}), ConfigError
    )
    assert "params.json: n_heads is missing" in refusal(
        host, write(tmp_path / "b", state, {k: v for k, v in PARAMS.items() if k != "n_heads"}), ConfigError
    )
    assert "vocab_size=59, but tok_embeddings.weight has 60 rows" in refusal(
        host, write(tmp_path / "c", state, {**PARAMS, "vocab_size": 59}), CheckpointError
    )
    folder = write(tmp_path / "d", state, PARAMS, 2)
    (folder / "consolidated.00.pth").unlink()
    assert "some are missing; there are numbers [1]" in refusal(host, folder, CheckpointError)
    assert "layers.0.attention.wz.weight is not one of Llama's" in refusal(
        host, write(tmp_path / "e", {**state, "layers.0.attention.wz.weight": torch.zeros(2)}, PARAMS), CheckpointError
    )
    folder = write(tmp_path / "f", state, PARAMS, 2)
    other = {**torch.load(folder / "consolidated.01.pth"), "norm.weight": torch.zeros(DIM)}
    torch.save(other, folder / "consolidated.01.pth")
    assert "norm.weight: the shards' copies of this tensor differ" in refusal(host, folder, CheckpointError)
