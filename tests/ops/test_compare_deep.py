"""mt compare --deep: the first tensor that differs, and rounding that does not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mt_ops.deep.differences import differences, first_of_each_part
from mt_ops.deep.models import mt_module
from mt_ops.deep.noise import OtherOrder, step_of_one_unit
from mt_ops.deep.recording import RecordedModel, record
from mt_ops.deep.tolerance import TWINS, allowed_error, effective_dimension, f_quantile

TOKENS = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, reorder: bool) -> None:
        super().__init__()
        self.up, self.down, self.reorder = nn.Linear(8, 32), nn.Linear(32, 8), reorder

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.reorder:
            # The same sum in two halves, in the other order.
            halves = [hidden[..., 16:] @ self.down.weight[:, 16:].T, hidden[..., :16] @ self.down.weight[:, :16].T]
            return x + (halves[0] + halves[1] + self.down.bias)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, *, reorder: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(reorder) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compared(a: Model, b: Model) -> list[str]:
    """The first of each part, as words."""
    mine, theirs = RecordedModel(a, a), RecordedModel(b, b)
    twins = [record(mine, TOKENS, twin=number) for number in range(TWINS)]
    found = first_of_each_part(differences(record(mine, TOKENS), record(theirs, TOKENS), twins))
    return [f"{each.part} {each.name}" for each in found]


def test_another_order_of_a_sum_is_rounding() -> None:
    assert compared(Model(), Model(reorder=True)) == []


def test_a_changed_weight_is_found_where_it_is_used() -> None:
    wrong = Model()
    with torch.no_grad():
        wrong.layers[1].down.weight[0, 0] += 1e-3
    first, *others = compared(Model(), wrong)
    assert first == "output of layers.1.down"
    assert others[0].startswith("gradient at the output of")


def test_a_wrong_backward_pass_alone_is_found_where_it_begins() -> None:
    wrong = Model()
    wrong.layers[1].up.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.001,))
    # The gradient at layer 1's output is right; what passed through `up` is not.
    assert compared(Model(), wrong)[0] == "gradient at the output of layers.0"


def test_one_unit_in_the_last_place() -> None:
    x = torch.tensor([1.0, -3.0, 0.5, 0.0])
    moved = x + step_of_one_unit(x, torch.Generator().manual_seed(0))
    assert (moved != x).tolist() == [True, True, True, False]
    assert (
        (moved == torch.nextafter(x, torch.tensor(torch.inf)))
        | (moved == torch.nextafter(x, torch.tensor(-torch.inf)))
        | (x == 0)
    ).all()


def test_products_in_another_order_are_the_same_but_for_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in ((6, 200), (5, 200)))
    linear = nn.Linear(200, 5)
    with torch.no_grad():
        linear.weight.copy_(w)
    plain = linear(x)
    with OtherOrder(generator):
        other = linear(x)
    assert not torch.equal(plain, other)
    assert torch.allclose(plain, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("numerator", "denominator", "probability", "tabulated"),
    [(1, 8, 0.999, 25.41), (5, 40, 0.999, 5.128), (10, 80, 0.99, 2.551), (120, 120, 0.99, 1.533)],
)
def test_quantiles_of_f(numerator: float, denominator: float, probability: float, tabulated: float) -> None:
    assert f_quantile(numerator, denominator, probability) == pytest.approx(tabulated, rel=0.04)


def test_limits_of_random_errors_are_exceeded_as_rarely_as_they_say() -> None:
    """3,000 draws in 3 of 50 directions, each with a limit of one in a thousand: about 3 exceed it."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(3, 50, generator=generator).double()
    reference, exceeded = torch.ones(50).double(), 0
    for _ in range(3000):
        errors = 1e-6 * torch.randn(TWINS + 1, 3, generator=generator).double() @ directions
        *twins, other = reference + errors
        exceeded += float((other - reference).norm() / reference.norm()) > allowed_error(reference, twins, 1)
    assert exceeded <= 12
    errors = [torch.randn(400, generator=generator) for _ in range(40)]
    assert effective_dimension(errors, [float(e.norm()) for e in errors]) == pytest.approx(400, rel=0.2)


def test_names_of_transformers() -> None:
    assert mt_module("model.layers.3.mlp.down_proj") == "decoder.layers.3.mlp.linear_fc2"
    assert mt_module("transformer.h.0.attn") == "decoder.layers.0.self_attention"
    assert mt_module("model.rotary_emb") is None


@pytest.mark.slow  # 6 s: a training, a conversion and transformers
def test_a_checkpoint_and_its_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    from mt_cli.main import run

    small = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "data.seq_length=16"]
    steps = ["train.train_iters=2", "data.corpus_bytes=100000", "train.eval_iters=1"]
    settings = [part for setting in [*small, *steps] for part in ("--set", setting)]
    assert run(["train", "--preset", "gpt-tiny", "--run-dir", str(tmp_path / "run"), *settings]) == 0
    assert (
        run(["convert", "--load-dir", str(tmp_path / "run"), "--saver", "hf", "--save-dir", str(tmp_path / "hf")]) == 0
    )
    assert run(["compare", "--deep", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.01
    save_file(weights, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert run(["compare", "--deep", str(tmp_path / "run"), str(tmp_path / "hf")]) == 1
    assert "output of decoder.layers.1.mlp.linear_fc2: relative" in capsys.readouterr().out
