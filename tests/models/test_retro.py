"""RETRO against loops over chunks, what may see what, retro-fitting, presets and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.infer.engines import logprobs_of, run, tokens_of
from tests.models.bert_reference import built, canonical_size
from tests.models.retro_reference import Retro
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, DataError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.retro.attention import attending_chunks, chunks, from_attending_chunks
from mt_models.retro.config import PRESETS

CHUNK, K, R = 4, 2, 8
DATA = ["data.dataset_type=builtin_retro", f"data.retro_chunk_length={CHUNK}"]
SHAPE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "retro_chunk_length": CHUNK,
    "retro_cross_attention_layers": "[2, 4]",
}
LEARNED = {"max_position_embeddings": 24}
ROPE = {"position_embedding_type": "rope"}


def samples(length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Two sequences; neighbours of all lengths, and a chunk without any."""
    generator = torch.Generator().manual_seed(seed)
    whole = length // CHUNK
    tokens = torch.randint(101, (2, length), generator=generator)
    neighbors = torch.randint(101, (2, whole, K, R), generator=generator)
    mask = torch.ones_like(neighbors)
    mask[0, :1, 1, 5:] = 0  # a short neighbour
    mask[0, 1:2, 1] = 0  # one neighbour only
    mask[1, 1:2] = 0  # none
    return {"tokens": tokens, "neighbor_tokens": neighbors, "neighbor_mask": mask}


@pytest.fixture
def retro(build, randomize):
    def make(*options: str, **keys) -> nn.Module:
        model = build(*DATA, *options, family="retro", **(SHAPE | keys))
        randomize(model, scale=0.2)
        return model

    return make


# -- against the loops --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 18, 7, 4])
@pytest.mark.parametrize("positions", [LEARNED, ROPE], ids=["learned", "rope"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_logits_equal_those_of_loops_over_chunks(retro, positions, length, backend) -> None:
    """Also of lengths that end within a chunk."""
    model = retro(**positions, attention_backend=backend)
    batch = samples(length)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    reference = Retro(weights, heads=4, chunk=CHUNK, layers=4, retrieving=[1, 3], rope=positions is ROPE)
    with torch.no_grad():
        logits = model(**batch)
    for row in range(2):
        expected = reference.logits(*(batch[name][row] for name in batch))[:, :101]
        assert (logits[row] - expected).abs().max() < 1e-4
        assert (logits[row] - expected).abs().mean() < 1e-5


def test_gradients_of_every_parameter_equal_those_of_the_loops(retro) -> None:
    model = retro(**LEARNED)
    batch = samples()
    target = torch.randn(2, 16, 101, generator=torch.Generator().manual_seed(1))
    (model(**batch) * target).sum().backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference = Retro(weights, heads=4, chunk=CHUNK, layers=4, retrieving=[1, 3], rope=False)
    rows = [reference.logits(*(batch[name][row] for name in batch)) for row in range(2)]
    (torch.stack(rows)[..., :101] * target).sum().backward()
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        assert expected.abs().max() > 1e-6, f"{name} takes no part"
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item(), msg=name
        )


def test_attending_chunks_by_hand() -> None:
    x = torch.arange(1, 10)[None, :, None]
    assert chunks(x, 4)[..., 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert attending_chunks(x, 4)[..., 0].tolist() == [[4, 5, 6, 7], [8, 9, 0, 0]]
    back = from_attending_chunks(attending_chunks(x, 4), 1, 9)
    assert back[0, :, 0].tolist() == [0, 0, 0, 4, 5, 6, 7, 8, 9]


# -- what sees what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [LEARNED, ROPE], ids=["learned", "rope"])
def test_a_token_changes_no_logit_before_it(retro, positions) -> None:
    model = retro(**positions).double()
    batch = samples()
    with torch.no_grad():
        before = model(**batch)
        for place in range(16):
            changed = {**batch, "tokens": batch["tokens"].clone()}
            changed["tokens"][:, place] = (changed["tokens"][:, place] + 1) % 101
            differs = (model(**changed) - before).abs().amax(-1) > 1e-9
            assert not differs[:, :place].any()
            assert differs[:, place].all()


def test_neighbours_of_a_chunk_change_nothing_before_its_last_token(retro) -> None:
    """The last token of a chunk predicts the first of the next: from there on they may be seen."""
    model = retro(**ROPE).double()
    batch = samples() | {"neighbor_mask": torch.ones(2, 4, K, R, dtype=torch.int64)}
    with torch.no_grad():
        before = model(**batch)
        for chunk in range(4):
            changed = {**batch, "neighbor_tokens": batch["neighbor_tokens"].clone()}
            changed["neighbor_tokens"][:, chunk] = (changed["neighbor_tokens"][:, chunk] + 1) % 101
            differs = (model(**changed) - before).abs().amax(-1) > 1e-9
            first = (chunk + 1) * CHUNK - 1
            assert not differs[:, :first].any()
            assert differs[:, first : first + CHUNK].all()


def test_padding_of_neighbours_changes_nothing(retro) -> None:
    model = retro(**LEARNED)
    batch = samples()
    filled = batch["neighbor_tokens"].masked_fill(batch["neighbor_mask"] == 0, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(**{**batch, "neighbor_tokens": filled}), model(**batch))


# -- retro-fitting ------------------------------------------------------------------------------------


def test_without_neighbours_it_is_the_gpt_of_its_weights(retro, build) -> None:
    """What retro-fitting begins from: the GPT's parameters by the GPT's names."""
    model = retro(**LEARNED)
    shape = {key: value for key, value in SHAPE.items() if not key.startswith("retro_")}
    gpt = build(family="gpt", **shape, **LEARNED)
    own = dict(model.named_parameters())
    added = set(own) - {name for name, _ in gpt.named_parameters()}
    assert all("cross_att" in name or name.startswith("encoder.") for name in added)
    gpt.load_state_dict({name: own[name] for name, _ in gpt.named_parameters()})
    batch = samples()
    with torch.no_grad():
        assert torch.equal(model(batch["tokens"]), gpt(batch["tokens"]))
        none = {**batch, "neighbor_mask": torch.zeros_like(batch["neighbor_mask"])}
        torch.testing.assert_close(model(**none), gpt(batch["tokens"]))


def test_freezing_the_gpt_leaves_what_retrieval_adds(retro) -> None:
    model = retro(**ROPE, retro_freeze_gpt=True, untie_embeddings_and_output_weights=True)
    model(**samples()).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if "cross_att" in name or name.startswith("encoder.")
    }
    assert all(model.get_parameter(name).grad is not None for name in trained)
    layouts = parameter_layouts(model)
    assert {name for name, layout in layouts.items() if layout.trained} == trained


# -- recomputation and dropout ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["recompute.recompute_granularity=full"],
        ["recompute.recompute_granularity=full", "recompute.recompute_num_layers=2"],
        ["recompute.recompute_granularity=selective"],
    ],
)
def test_recomputation_changes_no_gradient(retro, options) -> None:
    gradients = []
    for extra in ([], options):
        model = retro(*extra, **LEARNED, hidden_dropout=0.1, retro_encoder_attention_dropout=0.2).train()
        torch.manual_seed(3)
        model(**samples()).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, msg=name)


def test_the_encoder_has_dropouts_of_its_own(retro) -> None:
    model = retro(**LEARNED, hidden_dropout=0.3, retro_encoder_hidden_dropout=0.0, retro_encoder_attention_dropout=0.2)
    assert [layer.mlp_dropout.rate for layer in model.encoder.layers] == [0.0, 0.0]
    assert [layer.self_attention.dropout.rate for layer in model.encoder.layers] == [0.2, 0.2]
    assert {layer.mlp_dropout.rate for layer in model.decoder.layers} == {0.3}


# -- presets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "millions"), [("retro-172m", 132), ("retro-425m", 368), ("retro-1.5b", 1309), ("retro-7.5b", 6982)]
)
def test_presets_have_the_papers_decoders(host, preset, millions) -> None:
    """Table 1 counts the matrices of the decoder without retrieval, one of relative positions a layer included."""
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    model = built(host, config, "meta")
    shapes = {name: layout.shape for name, layout in parameter_layouts(model).items() if len(layout.shape) == 2}
    names = [n for n in shapes if n.startswith("decoder.") and "cross_att" not in n]
    matrices = sum(shapes[name][0] * shapes[name][1] for name in names)
    shape = config.model
    positions = shape.num_layers * shape.hidden_size * shape.num_attention_heads * shape.head_dim
    assert (matrices + positions) / 1e6 == pytest.approx(millions, abs=4)


def test_presets_count_by_formula(host) -> None:
    config = load_config(
        preset="retro-megatron-353m", overrides=["model.vocab_size=1000", "train.train_iters=1"], host=host
    ).config
    h, ffn = 1024, 2688
    layer, cross = 4 * h * h + 3 * h * ffn, 4 * h * h
    assert config.model.cross_attention_layers == (8, 11, 14, 17, 20, 23)
    matrices = 26 * layer + 7 * cross
    norms = 2 * h * (2 * 26 + 7 + 1)
    assert canonical_size(host, config) == matrices + norms + 2 * 1000 * h
    assert matrices / 1e6 == pytest.approx(353, abs=1)


def test_every_preset_is_a_configuration_that_holds_together(host) -> None:
    for preset in PRESETS:
        assert load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config.model.family == "retro"


@pytest.mark.parametrize(
    ("layers", "expected"), [(6, (5,)), (12, (5, 8, 11)), (15, (5, 8, 11, 14)), (18, (8, 11, 14, 17))]
)
def test_layers_that_attend_by_default(host, layers, expected) -> None:
    keys = [f"model.num_layers={layers}", "model.hidden_size=32", "model.num_attention_heads=4"]
    options = ["model.family=retro", "data.dataset_type=builtin_retro", "model.position_embedding_type=rope"]
    config = load_config(overrides=[*options, *keys, "data.seq_length=64", "train.train_iters=1"], host=host).config
    assert config.model.cross_attention_layers == expected


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["model.retro_cross_attention_layers=null"], "model.num_layers=4 has no 6th layer"),
        (["model.retro_cross_attention_layers=[2, 5]"], "retro_cross_attention_layers has 5, and model.num_layers=4"),
        (["data.seq_length=18"], "18 is not a multiple of .*retro_chunk_length=4"),
        (["data.dataset_type=builtin"], "builtin has no neighbours.*builtin_retro or retro"),
        (["data.retro_num_neighbors=3"], "data.retro_num_neighbors=3 and model.retro_num_neighbors=2 differ"),
        (["model.max_position_embeddings=24", "model.retro_num_retrieved_chunks=9"], "= 36 tokens, more than"),
        (["parallel.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size=2.*model.family=retro"),
        (["parallel.context_parallel_size=2"], "context_parallel_size=2.*model.family=retro"),
        (["data.reset_attention_mask=true"], "reset_attention_mask=true keeps documents apart"),
        (["model.parallel_residual=true"], "model.parallel_residual"),
        (["model.position_embedding_type=alibi"], "position_embedding_type.*learned_absolute"),
        (
            ["recompute.recompute_granularity=full", "recompute.recompute_method=uniform"],
            "recompute_method=uniform.*model.family=retro.*use recompute.recompute_method=block",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(host, options, words, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2" if any("parallel_size=2" in option for option in options) else "1")
    keys = [f"model.{key}={value}" for key, value in SHAPE.items()]
    base = ["model.family=retro", "model.max_position_embeddings=24", "data.seq_length=16", "train.train_iters=1"]
    data = [] if options == ["data.dataset_type=builtin"] else DATA
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=[*base, *keys, *data, *options], host=host)


def test_neighbours_of_another_number_of_chunks(retro) -> None:
    model = retro(**LEARNED)
    batch = samples()
    with pytest.raises(DataError, match=r"have 4 chunks of model.retro_chunk_length=4, so it must be \[2, 4, "):
        model(**{**batch, "neighbor_tokens": batch["neighbor_tokens"][:, :3]})


def test_a_model_that_nothing_checked_names_the_layers_that_are_missing(host) -> None:
    keys = [f"model.{key}={value}" for key, value in {**SHAPE, **LEARNED}.items()]
    base = ["model.family=retro", "data.seq_length=16", "train.train_iters=1"]
    config = load_config(overrides=[*base, *DATA, *keys], host=host).config
    model = config.model.model_copy(update={"retro_cross_attention_layers": None})
    with pytest.raises(ConfigError, match="model.num_layers=4 has no 6th layer"):
        host[MODELS].get("retro").build.load()(model, ModelBuildContext(config, ParallelContext(), host))


# -- generation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [LEARNED, ROPE], ids=["learned", "rope"])
@pytest.mark.parametrize("ends", [range(1, 19), (18,), (3, 4, 9, 18), (7, 8, 15, 16, 17, 18)], ids=str)
def test_decoding_in_pieces_equals_the_forward(retro, positions, ends) -> None:
    """Both rows together, and a third without neighbours. The loops above are the reference of the forward pass."""
    model = retro(**positions)
    batch = samples(18)
    tokens = torch.cat([batch["tokens"], batch["tokens"][:1]])
    inputs = [{name: batch[name][row : row + 1] for name in model.conditioned_by} for row in (0, 1)]
    with torch.no_grad():
        expected = torch.cat([model(**batch), model(batch["tokens"][:1])])
    decoded = cached_logits(model, tokens, ends, [*inputs, {}])
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-4)


def test_requests_of_one_engine_have_their_own_neighbours(retro) -> None:
    """Prompts in chunks of passes, prefixes in common, and chunks that are complete after the last neighbours."""
    model = retro(**ROPE)
    batch = samples(8)
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=3, max_tokens_per_step=5, max_requests=2)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=20)
    sampling = SamplingParameters(temperature=0.0, max_tokens=9, logprobs=0)
    prompts = [batch["tokens"][0, :6].tolist()] * 3
    inputs = [{name: batch[name][row : row + 1] for name in model.conditioned_by} for row in (0, 1)]
    for _ in range(2):
        found = run(engine, prompts, sampling, [*inputs, {}])
        for prompt, own, events in zip(prompts, [*inputs, {}], found, strict=True):
            tokens = torch.tensor([[*prompt, *tokens_of(events)]])
            whole = {name: F.pad(value, (0, 0, 0, 0, 0, 3 - 2)) for name, value in own.items()}
            with torch.no_grad():
                logs = model(tokens, **whole)[0, 5:-1].log_softmax(-1)
            assert tokens_of(events) == logs.argmax(-1).tolist()
            assert logprobs_of(events) == pytest.approx(logs.max(-1).values.tolist(), abs=1e-5)


def test_neighbours_that_do_not_fit_are_refused(retro) -> None:
    model = retro(**ROPE)
    tokens = torch.zeros(1, 2, K, R)
    for inputs, words in (
        ({"neighbor_tokens": tokens[..., :3]}, r"shape \[1, 2, 2, 3\]; it has to be \[1, chunks, 2, 8\]"),
        ({"neighbor_mask": tokens}, "goes with neighbor_tokens"),
        ({"neighbor_tokens": tokens, "neighbor_mask": tokens[:, :1]}, "has their shape"),
    ):
        with pytest.raises(ConfigError, match=words):
            model.check_request(torch.zeros(3), inputs)
