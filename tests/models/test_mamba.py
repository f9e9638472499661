"""Mamba-2 against `transformers`, its scan against the recurrence written out, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref
from tests.models.mamba_reference import build, configure, make_pair, segments_of

from mt_core.errors import ConfigError
from mt_infer.cache.layout import cache_layout
from mt_models.blocks.convolutions import causal_conv, causal_conv_of_segments
from mt_models.blocks.state_space import chunked_scan, recurrent_step
from mt_models.mamba.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}
OURS = {
    "family": "mamba",
    "num_layers": 2,
    "hidden_size": 32,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
    "vocab_size": VOCAB,
}


def mamba2(**keys):
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**SHAPE, **keys}))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_word_embeddings": True, "n_groups": 1},
        {"n_groups": 8, "chunk_size": 32},
        {"use_bias": True, "use_conv_bias": False, "conv_kernel": 2},
        {"num_heads": 4, "head_dim": 16, "conv_kernel": 1, "state_size": 5, "vocab_size": 41},
        {"time_step_limit": (0.2, 0.6), "expand": 3, "num_heads": 12},
    ],
    ids=str,
)
def test_the_function_equals_the_reference(host, randomize, keys) -> None:
    pair = make_pair(host, "mamba", mamba2(**keys), randomize)
    tokens = ref.random_tokens(pair.ours.config.vocab_size, 21)
    ref.assert_same_function(pair, tokens)
    # A recurrence and a scan by chunks sum in other orders; 6e-5 was seen.
    ref.assert_decoding_equals_forward(pair.ours, tokens, atol=1e-4)
    ref.assert_maps_round_trip(pair)


def test_right_padding_changes_nothing_before_it(host, randomize) -> None:
    pair = make_pair(host, "mamba", mamba2(), randomize)
    tokens = ref.random_tokens(VOCAB, 21)
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, 13:] = 0
    expected = pair.theirs(tokens, attention_mask=attention_mask).logits
    ref.assert_near(pair.ours(tokens)[1, :13], expected[1, :13])


@pytest.mark.slow
def test_training_follows_the_reference_step_by_step(host, randomize) -> None:
    pair = make_pair(host, "mamba", mamba2(), lambda model: randomize(model, scale=0.1))
    ref.assert_same_training(pair)


def test_training_packs_documents_that_do_not_see_one_another(host, randomize) -> None:
    model = build(host, configure(host, **OURS)).eval()
    randomize(model)
    lengths = (1, 9, 2, 7)
    tokens = ref.random_tokens(VOCAB, sum(lengths))
    packed = model(tokens, segment_ids=segments_of(*lengths))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(packed, model(tokens), atol=1e-2)


# -- the parts --------------------------------------------------------------------------------------


def scan_inputs(length: int, groups: int, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "x": draw(2, length, 4, 3),
        "dt": draw(2, length, 4).exp() * 0.2,
        "a": -draw(4).exp(),
        "b": draw(2, length, groups, 5),
        "c": draw(2, length, groups, 5),
    }


def written_out(x, dt, a, b, c, state=None, segment_ids=None):
    """s_t = exp(dt_t a) s_(t-1) + dt_t x_t b_t^T, y_t = s_t c_t, in fp64."""
    x, dt, a, b, c = (t.double() for t in (x, dt, a, b, c))
    batch, length, heads, size = x.shape
    repeats = heads // b.shape[2]
    b, c = b.repeat_interleave(repeats, 2), c.repeat_interleave(repeats, 2)
    s = torch.zeros(batch, heads, size, b.shape[-1]).double() if state is None else state.double()
    ys = []
    for t in range(length):
        if segment_ids is not None and t > 0:
            s = s * (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
        s = (dt[:, t] * a).exp()[..., None, None] * s
        s = s + dt[:, t, :, None, None] * x[:, t, ..., None] * b[:, t, :, None]
        ys.append((s * c[:, t, :, None]).sum(-1))
    return torch.stack(ys, 1).float(), s.float()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (7, 1), (8, 4), (13, 4), (13, 64)])
def test_the_chunked_scan_is_the_recurrence(length, chunk, groups) -> None:
    inputs = scan_inputs(length, groups)
    state = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(5))
    for start in (None, state):
        y, last = chunked_scan(**inputs, chunk_size=chunk, state=start)
        expected, expected_last = written_out(**inputs, state=start)
        torch.testing.assert_close(y, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(last, expected_last, atol=2e-5, rtol=1e-4)


def test_the_chunked_scan_survives_decay_beyond_the_range_of_fp32() -> None:
    """exp(-dt a) of positions far ahead overflows; neither it nor its gradient may show."""
    inputs = scan_inputs(16, 2)
    inputs["dt"] = (inputs["dt"] + 40.0).requires_grad_()
    y, _ = chunked_scan(**inputs, chunk_size=8)
    y.sum().backward()
    torch.testing.assert_close(y, written_out(**inputs)[0], atol=1e-3, rtol=1e-4)
    assert inputs["dt"].grad.isfinite().all()


@pytest.mark.parametrize("chunk", [64, 256])
def test_long_chunks_are_as_exact_as_the_recurrence_in_fp32(chunk: int) -> None:
    """Logarithms of decays reach -1000 in a chunk; the decay between two positions must not have the error of those."""
    inputs = scan_inputs(256, 2)
    inputs["dt"], inputs["a"] = inputs["dt"] * 2, inputs["a"] * 4
    expected = written_out(**inputs)[0]
    state, step_by_step = torch.zeros(2, 4, 3, 5), []
    for t in range(256):
        y, state = recurrent_step(state, *(value if n == "a" else value[:, t] for n, value in inputs.items()))
        step_by_step.append(y)
    error = (torch.stack(step_by_step, 1) - expected).abs().max()
    assert (chunked_scan(**inputs, chunk_size=chunk)[0] - expected).abs().max() < 4 * error


@pytest.mark.parametrize("lengths", [(13,), (4, 4, 5), (1, 1, 9, 2), (3, 10)])
def test_the_scan_starts_anew_in_each_document(lengths) -> None:
    inputs, segments = scan_inputs(13, 2), segments_of(*lengths)
    y, last = chunked_scan(**inputs, chunk_size=4, segment_ids=segments)
    expected, expected_last = written_out(**inputs, segment_ids=segments)
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, expected_last, atol=2e-5, rtol=1e-4)


def test_the_recurrent_step_is_a_step_of_the_recurrence() -> None:
    inputs = scan_inputs(1, 2)
    state = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(5))
    y, new = recurrent_step(state, *(value if name == "a" else value[:, 0] for name, value in inputs.items()))
    expected, expected_state = written_out(**inputs, state=state)
    torch.testing.assert_close(y, expected[:, 0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(new, expected_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_sees_its_own_document_only(taps, biased) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 9, 6, generator=generator), torch.randn(6, taps, generator=generator)
    bias = torch.randn(6, generator=generator) if biased else None
    segments = segments_of(2, 1, 6)
    expected = torch.zeros_like(x)
    for t in range(9):
        for back in range(min(taps, t + 1)):
            if segments[0, t] == segments[0, t - back]:
                expected[:, t] += weight[:, taps - 1 - back] * x[:, t - back]
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(causal_conv_of_segments(x, weight, bias, segments), expected)
    one = torch.zeros_like(segments)
    torch.testing.assert_close(causal_conv_of_segments(x, weight, bias, one), causal_conv(x, weight, bias))


def test_the_cache_does_not_grow_with_the_sequence(host) -> None:
    model = build(host, configure(host, **OURS)).eval()
    layout = cache_layout(model)
    assert layout.groups == ()
    assert layout.bytes_per_sequence == 2 * 4 * (8 * 8 * 6 + 3 * (64 + 2 * 12))


def test_initial_time_steps_and_rates_are_those_of_the_paper(host) -> None:
    keys = {**OURS, "mamba_num_heads": 512, "mamba_head_dim": 2, "mamba_dt_min": 0.002, "mamba_dt_max": 0.05}
    mixer = build(host, configure(host, **keys)).decoder.layers[0].mixer
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert steps.min() >= 0.002 * (1 - 1e-4)
    assert steps.max() <= 0.05 * (1 + 1e-4)
    # Evenly on a logarithmic scale: the median is the geometric mean.
    assert steps.median().item() == pytest.approx((0.002 * 0.05) ** 0.5, rel=0.2)
    rates = mixer.A_log.exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, rel=0.1)
    assert (mixer.D == 1).all()


def test_rates_and_time_steps_stay_in_fp32_beside_bf16_weights(host) -> None:
    from mt_core.parallel.context import ParallelContext

    ctx = ParallelContext(params_dtype=torch.bfloat16)
    tokens = ref.random_tokens(VOCAB, 21)
    expected = build(host, configure(host, **OURS)).eval()(tokens)
    errors = {}
    for fp32_residual in (False, True):
        model = build(host, configure(host, **OURS, fp32_residual_connection=fp32_residual), ctx).eval()
        fp32 = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
        assert fp32 == {f"decoder.layers.{i}.mixer.{name}" for i in (0, 1) for name in ("A_log", "D", "dt_bias")}
        logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        stream = model.embedding(tokens, None)
        assert stream.dtype == (torch.float32 if fp32_residual else torch.bfloat16)
        assert model.decoder.layers[0](stream, model.pattern(None, tokens.device)).dtype == stream.dtype
        errors[fp32_residual] = (logits.float() - expected).abs().mean() / expected.abs().mean()
    assert max(errors.values()) < 0.02


# -- shapes and maps ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    def published(layers: int, hidden: int) -> dict:
        return {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_heads": hidden // 32,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        }

    shapes = {
        "mamba2-130m": published(24, 768),
        "mamba2-370m": published(48, 1024),
        "mamba2-780m": published(48, 1536),
        "mamba2-1.3b": published(48, 2048),
        "mamba2-2.7b": published(64, 2560),
    }
    ref.assert_presets_match(host, "mamba", shapes, transformers.Mamba2Config, transformers.Mamba2ForCausalLM)
    assert ref.parameter_count(ref.build_preset(host, "mamba2-130m")) == 128_989_632


def test_the_first_spelling_of_the_embedding_is_read(host, randomize) -> None:
    from mt_models.hugging_face import load_reference

    pair = make_pair(host, "mamba", mamba2(), randomize)
    state = {
        name.replace("backbone.embeddings.", "backbone.embedding."): tensor
        for name, tensor in pair.theirs.state_dict().items()
    }
    model = build(host, configure(host, **HUGGING_FACE.read_config(pair.theirs.config.to_dict()))).eval()
    load_reference(model, state, HUGGING_FACE)
    tokens = ref.random_tokens(VOCAB, 9)
    assert torch.equal(model(tokens), pair.ours(tokens))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flux": 1}, "not known: flux=1"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; it can be 'silu' or 'swish'"),
        ({"intermediate_size": 48}, "intermediate_size=48 is not num_heads=8 times head_dim=8"),
        ({"expand": 4}, "expand=4 times hidden_size=32 is 128, but num_heads=8 times head_dim=8 is 64"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(change, words) -> None:
    external = {**mamba2().config.to_dict(), **change}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)


def test_an_expansion_that_is_no_whole_number_cannot_be_written(host) -> None:
    config = configure(host, **{**OURS, "mamba_num_heads": 6}).model
    with pytest.raises(ConfigError, match="model.mamba_num_heads=6 times .*=8 is no multiple of model.hidden_size=32"):
        HUGGING_FACE.write_config(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mamba_num_groups": 3}, "model.mamba_num_groups=3 does not divide the number of heads .*=8"),
        ({"mamba_head_dim": 24}, "model.mamba_head_dim=24 does not divide 2 x model.hidden_size=64; it can be 1, 2"),
        ({"mamba_dt_min": 0.5}, "model.mamba_dt_min=0.5 is above model.mamba_dt_max=0.1"),
        (
            {"mamba_dt_lower_limit": 0.5, "mamba_dt_upper_limit": 0.25},
            "model.mamba_dt_lower_limit=0.5 is above model.mamba_dt_upper_limit=0.25",
        ),
        ({"mamba_state_dim": 0}, "model.mamba_state_dim .*greater than 0"),
        ({"mamba_state": 4}, "mamba_state"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(host, **{**OURS, **keys})


def test_ranks_get_whole_groups(host, monkeypatch) -> None:
    from mt_models.mamba.config import check_mamba

    config = configure(host, **OURS)
    sharded = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"tensor_model_parallel_size": 4})}
    )
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=4 does not divide model.mamba_num_groups .*=2"):
        check_mamba(sharded)
