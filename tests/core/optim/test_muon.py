"""Muon against the singular value decomposition, a formula written out, and torch's own."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, initialize, normal, parameter_layouts, zeros
from mt_core.optim.base import OptimizerBuildContext
from mt_core.optim.configs import MuonConfig
from mt_core.optim.master_weights import Fp32Weights
from mt_core.optim.muon import Muon, Update, build_muon, orthogonalize, scale_factor
from mt_core.optim.optimizers import AdamW
from mt_core.optim.param_groups import param_groups
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train.build import build_model

JORDAN = (3.4445, -4.7750, 2.0315)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def by_decomposition(matrix: Tensor, polynomials) -> Tensor:
    """Singular vectors kept, each singular value sent through the odd polynomials: in fp64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in polynomials:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12), (1, 7)])
@pytest.mark.parametrize(("kind", "polynomials"), [("simple", (JORDAN,) * 5), ("quintic", YOU)])
def test_singular_values_go_through_the_polynomials(shape, kind, polynomials) -> None:
    matrix = random(*shape)
    expected = by_decomposition(matrix, polynomials)
    torch.testing.assert_close(orthogonalize(matrix, 5, kind).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["simple", "quintic"])
def test_the_result_is_about_orthogonal_whatever_the_size_of_the_gradient(kind) -> None:
    for factor in (1e-6, 1.0, 1e6):
        values = torch.linalg.svdvals(orthogonalize(random(16, 48) * factor, 5, kind))
        assert values.min() > 0.6, factor
        assert values.max() < 1.3, factor


def test_a_batch_is_made_orthogonal_matrix_by_matrix_and_zero_stays_zero() -> None:
    batch = torch.stack([random(4, 9), 100 * random(4, 9, seed=1), torch.zeros(4, 9)])
    together = orthogonalize(batch, 5, "quintic")
    for one, expected in zip(batch, together, strict=True):
        torch.testing.assert_close(orthogonalize(one, 5, "quintic"), expected)
    assert (together[2] == 0).all()


@pytest.mark.parametrize(
    ("mode", "tall", "wide"), [("spectral", 3.0, 3.0), ("unit_rms_norm", 1.5, 1 / 1.5), ("shape_scaling", 1.5, 1.0)]
)
def test_scale_factors(mode, tall, wide) -> None:
    assert scale_factor(9, 4, mode) == pytest.approx(tall)
    assert scale_factor(4, 9, mode) == pytest.approx(wide)


# -- steps ----------------------------------------------------------------------------------------


class TwoMatrices(LayoutModule):
    """A tall and a wide matrix, a vector, and a table."""

    def __init__(self) -> None:
        super().__init__(ParallelContext())
        for name, shape in {"tall": (12, 5), "wide": (3, 8), "bias": (5,)}.items():
            self.declare(name, ParameterLayout(shape, normal(1.0)))
        self.word_embeddings = Table()


class Table(LayoutModule):
    def __init__(self) -> None:
        super().__init__(ParallelContext())
        self.declare("weight", ParameterLayout((7, 4), normal(1.0)))


def build(model: nn.Module, config: MuonConfig, weight_decay: float = 0.0):
    weights, layouts = Fp32Weights(model), parameter_layouts(model)
    environment = OptimizerBuildContext(model, weights, layouts)
    groups = param_groups(weights.named_parameters(), weight_decay, environment.shapes)
    return build_muon(config, groups, environment)


def initialized(model: nn.Module) -> nn.Module:
    initialize(model, 1, ParallelContext())
    return model


def set_gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    gradients = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.grad = random(*parameter.shape, seed=100 * seed + number)
        gradients[name] = parameter.grad.clone()
    return gradients


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_steps_are_the_formula(nesterov, mode) -> None:
    """m <- 0.8 m + 0.2 g, an orthogonal direction of it (or of 0.8 m + 0.2 g again), decay apart."""
    model = initialized(TwoMatrices())
    config = MuonConfig(
        lr=0.1, muon_momentum=0.8, muon_nesterov=nesterov, muon_scale_mode=mode, muon_extra_scale_factor=0.5
    )
    optimizer = build(model, config, weight_decay=0.3)
    weights = {name: getattr(model, name).detach().double().clone() for name in ("tall", "wide")}
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(3):
        gradients = set_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
        for name, weight in weights.items():
            gradient = gradients[name].double()
            moments[name] = 0.8 * moments[name] + 0.2 * gradient
            used = 0.2 * gradient + 0.8 * moments[name] if nesterov else moments[name]
            rows, columns = weight.shape
            scale = {
                "spectral": max(rows, columns) ** 0.5,
                "unit_rms_norm": (rows / columns) ** 0.5,
                "shape_scaling": max(1, rows / columns) ** 0.5,
            }[mode]
            lr = 0.01 * (step + 1)
            weights[name] = weight * (1 - lr * 0.3) - lr * 0.5 * scale * by_decomposition(used, YOU)
    for name, weight in weights.items():
        torch.testing.assert_close(getattr(model, name).double(), weight, atol=1e-5, rtol=0)
        state = optimizer.state[getattr(model, name)]
        torch.testing.assert_close(state["momentum_buffer"].double(), moments[name], atol=1e-6, rtol=0)


def test_where_they_agree_it_is_torchs_muon() -> None:
    """torch iterates in bf16, so its directions are those of fp32 to about a hundredth."""
    model, reference = initialized(TwoMatrices()), initialized(TwoMatrices())
    config = MuonConfig(
        lr=0.02,
        muon_momentum=0.95,
        muon_nesterov=True,
        muon_coefficient_type="simple",
        muon_scale_mode="shape_scaling",
    )
    ours = build(model, config, weight_decay=0.1)
    theirs = torch.optim.Muon([reference.tall, reference.wide], lr=0.02, momentum=0.95, weight_decay=0.1)
    before = {name: getattr(model, name).detach().clone() for name in ("tall", "wide")}
    for step in range(4):
        set_gradients(model, step)
        set_gradients(reference, step)
        ours.step()
        theirs.step()
    for name, start in before.items():
        moved, expected = getattr(model, name) - start, getattr(reference, name) - start
        assert (moved - expected).norm() < 0.03 * expected.norm(), name


@pytest.mark.parametrize("kind", ["adam", "lion"])
def test_tables_and_vectors_are_updated_by_the_other_optimizer(kind) -> None:
    model, reference = initialized(TwoMatrices()), initialized(TwoMatrices())
    options = {"adam_beta1": 0.8, "adam_beta2": 0.9} if kind == "adam" else {"lion_beta1": 0.7, "lion_beta2": 0.6}
    optimizer = build(model, MuonConfig(lr=0.1, muon_scalar_optimizer=kind, **options))
    others = [reference.bias, reference.word_embeddings.weight]
    moments = [torch.zeros_like(parameter) for parameter in others]
    adam = torch.optim.AdamW(others, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0)
    for step in range(3):
        set_gradients(model, step)
        set_gradients(reference, step)
        optimizer.step()
        if kind == "adam":
            adam.step()
            continue
        for parameter, moment in zip(others, moments, strict=True):
            with torch.no_grad():
                parameter -= 0.1 * torch.sign(0.7 * moment + 0.3 * parameter.grad)
            moment.copy_(0.6 * moment + 0.4 * parameter.grad)
    torch.testing.assert_close(model.bias, reference.bias)
    torch.testing.assert_close(model.word_embeddings.weight, reference.word_embeddings.weight)


# -- parts of a model -----------------------------------------------------------------------------


def small(family: str, *more: str) -> nn.Module:
    overrides = [
        f"model.family={family}",
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.num_attention_heads=4",
        "model.vocab_size=11",
        "train.train_iters=1",
        *more,
    ]
    host = load_plugins()
    config = load_config(overrides=overrides, host=host).config
    return initialized(build_model(config, ParallelContext(), host))


def test_which_optimizer_a_parameter_of_gpt_gets() -> None:
    model = small("gpt", "model.untie_embeddings_and_output_weights=true", "model.max_position_embeddings=128")
    chained = build(model, MuonConfig())
    muon, adam = chained.optimizers
    assert isinstance(muon, Muon)
    assert isinstance(adam, AdamW)
    layer = "decoder.layers.0."
    assert {name for group in muon.param_groups for name in group["names"]} == {
        f"{layer}self_attention.linear_qkv.weight",
        f"{layer}self_attention.linear_proj.weight",
        f"{layer}mlp.linear_fc1.weight",
        f"{layer}mlp.linear_fc2.weight",
    }
    others = {name for group in adam.param_groups for name in group["names"]}
    assert {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"} < others
    assert len(chained.param_groups) == 3, "matrices, tables with decay, vectors without"


@pytest.mark.parametrize("split", [True, False])
def test_queries_keys_and_values_are_matrices_of_their_own(split) -> None:
    """2 groups of 2 query heads, a key and a value head, of 4 rows each."""
    model = small("llama", "model.num_query_groups=2")
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    optimizer = build(model, MuonConfig(lr=0.1, muon_split_qkv=split))
    gradients = set_gradients(model, 0)
    before = weight.detach().clone()
    optimizer.step()
    gradient = gradients["decoder.layers.0.self_attention.linear_qkv.weight"]
    group = torch.arange(32) // 16
    head = torch.arange(32) % 16 // 4
    kinds = [head < 2, head == 2, head == 3] if split else [group >= 0]
    for rows in kinds:
        expected = 0.1 * max(int(rows.sum()), 16) ** 0.5 * by_decomposition(gradient[rows], YOU)
        torch.testing.assert_close((before - weight)[rows].double(), expected, atol=1e-5, rtol=0)


class ThreeExperts(LayoutModule):
    def __init__(self) -> None:
        super().__init__(ParallelContext())
        split = (Split(0, "ep"), Split(1, "etp"))
        self.declare("weight", ParameterLayout((3, 6, 4), normal(1.0), split, replicas="edp"))
        self.declare("bias", ParameterLayout((3, 6), zeros, (Split(0, "ep"),), replicas="edp"))


def test_each_expert_is_a_matrix() -> None:
    model = initialized(ThreeExperts())
    optimizer = build(model, MuonConfig(lr=0.1))
    before = model.weight.detach().clone()
    gradients = set_gradients(model, 0)
    model.weight.grad[1] *= 1000
    optimizer.step()
    for expert, gradient in enumerate(gradients["weight"]):
        expected = 0.1 * 6**0.5 * by_decomposition(gradient, YOU)
        torch.testing.assert_close((before - model.weight)[expert].double(), expected, atol=1e-5, rtol=0)


class ForeignAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = Table()


def test_an_attention_of_unknown_rows_is_refused() -> None:
    model = initialized(ForeignAttention())
    model = nn.ModuleDict({"attention": model})
    with pytest.raises(ConfigError, match=r"attention \(ForeignAttention\) does not define heads_per_group") as raised:
        build(model, MuonConfig())
    assert "set optimizer.muon_split_qkv=false" in str(raised.value)
    build(model, MuonConfig(muon_split_qkv=False))


def test_steps_that_the_coefficients_are_not_made_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.muon_num_ns_steps=6 is no multiple of the 5 steps"):
        load_config(preset="gpt-tiny", overrides=["optimizer.optimizer=muon", "optimizer.muon_num_ns_steps=6"])
    more = ["optimizer.optimizer=muon", "optimizer.muon_num_ns_steps=6", "optimizer.muon_coefficient_type=simple"]
    load_config(preset="gpt-tiny", overrides=more)


def test_options_of_the_optimizer_that_is_not_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="only counts when optimizer.muon_scalar_optimizer is lion"):
        load_config(preset="gpt-tiny", overrides=["optimizer.optimizer=muon", "optimizer.lion_beta1=0.5"])


class CountedMatrix:
    """Stands for a ShardedMatrix of which this rank has half of the rows."""

    heads = None

    def __init__(self, events: Events) -> None:
        self.events = events

    def unshard(self, part: Tensor) -> Tensor:
        return self.events.add("unshard", torch.cat([part, part]))

    def shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(2)[0].clone()


class Events:
    """What one rank of a team of four does, in order, and how many whole matrices exist each time."""

    size = 4

    def __init__(self) -> None:
        self.order: list[str] = []
        self.counts: list[int] = []
        self._matrices: list[weakref.ref[Tensor]] = []

    def add(self, event: str, whole: Tensor) -> Tensor:
        self.order.append(event)
        if all(known() is not whole for known in self._matrices):
            self._matrices.append(weakref.ref(whole))
        self.counts.append(sum(known() is not None for known in self._matrices))
        return whole

    def owns(self, number: int) -> bool:
        return number == 1

    def broadcast(self, whole: Tensor, number: int) -> None:
        self.add("broadcast", whole.zero_())


def test_a_round_gathers_then_computes_then_broadcasts_with_two_whole_matrices_at_once(monkeypatch) -> None:
    events = Events()
    matrices = [nn.Parameter(random(4, 6, seed=seed)) for seed in range(events.size)]
    monkeypatch.setattr("mt_core.optim.muon.orthogonalize", lambda x, *_: events.add("orthogonalize", x.clone()))
    muon = Muon(param_groups([("weight", matrices[0])], 0.0), MuonConfig(), {})
    round_of_four = [Update(weight, torch.ones_like(weight), CountedMatrix(events)) for weight in matrices]
    with torch.no_grad():
        muon._update_together(round_of_four, events, 0.1, 0.0)
    assert events.order == ["unshard"] * 4 + ["orthogonalize"] + ["broadcast"] * 4
    assert max(events.counts) == 2
