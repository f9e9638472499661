"""An exception for one request, wherever it comes from as its tokens are chosen, ends that request and no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from tests.dist.in_turn import InTurn
from tests.infer.engines import configuration, engine_of, new_model, prompts, run, tokens_of
from tests.infer.server.served import generator, language_model, live

from mt_core.errors import ConfigError
from mt_infer import beams, chunk_results
from mt_infer import engine as engine_module
from mt_infer.chunk_results import results_from_logits
from mt_infer.engine import InferenceEngine
from mt_infer.requests import DRAFT_FAILED, INPUTS_FAILED, SAMPLING_FAILED, TEXT_FAILED, FinishReason, TokenEvent
from mt_infer.sampling import sampler
from mt_infer.sampling.beam_search import BeamSearch
from mt_infer.sampling.constraints import Constraints, Matcher
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.speculation import drafter
from mt_infer.speculation.building import DraftModel
from mt_infer.speculation.drafter import NgramDrafter

BROKEN = 77
"""The seed of the request that fails."""


def fails(_: object) -> None:
    raise IndexError("a defect")


def failing(real: Callable[..., Any], rows_of: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """`real`, which raises where one of its sequences is of the broken request."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if any(one.request.sampling.seed == BROKEN for one in rows_of(*args)):
            fails(args)
        return real(*args, **kwargs)

    return function


PLACES = {
    "score_prompts": (chunk_results, "_prompt_logprobs", lambda chunk, *_: [chunk.sequence]),
    "adjust": (sampler, "adjust", lambda _, rows: [row.sequence for row in rows]),
    "choose": (sampler, "probabilities", lambda _, rows: [row.sequence for row in rows]),
    "follow": (chunk_results, "_continuation", lambda sequence, _: [sequence]),
}
BEAM_PLACES = {
    "candidates": (chunk_results, "beam_candidates", lambda _, sequences: sequences),
    "likeliest": (beams, "_likeliest", lambda _, sequence: [sequence]),
}


def engine(**inference: Any) -> InferenceEngine:
    return engine_of(configuration("llama", inference=inference))


def ends(events: Sequence[TokenEvent]) -> list[tuple[int, str | None, str | None]]:
    return [(one.index, one.finish, one.error) for one in events if one.finish is not None]


def assert_it_fails_alone(own: InferenceEngine, **broken: Any) -> None:
    """In the first places of a batch, in the middle, and last."""
    plain = {"temperature": 1.0, "max_tokens": 5, "repetition_penalty": 1.1, "prompt_logprobs": 0}
    others = [SamplingParameters(seed=seed, **plain) for seed in (1, 2)]
    bad = SamplingParameters(seed=BROKEN, **{**plain, **broken})
    texts = prompts(5, 9)
    alone = [tokens_of(events) for events in run(own, texts, others)]
    for place in range(3):
        asked = [*others[:place], bad, *others[place:]]
        found = run(own, [*texts[:place], prompts(7)[0], *texts[place:]], asked)
        ended = found.pop(place)
        assert ends(ended) == [(index, FinishReason.ERROR, SAMPLING_FAILED) for index in range(bad.n)]
        assert [tokens_of(events) for events in found] == alone
    assert own.manager.used_blocks == 0
    assert own.is_idle


@pytest.mark.parametrize("inference", [{}, {"speculative_method": "ngram", "speculative_ngram": 1}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_request_ends_alone(place: str, inference: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, rows_of = PLACES[place]
    monkeypatch.setattr(module, name, failing(getattr(module, name), rows_of))
    assert_it_fails_alone(engine(**inference), n=2)


@pytest.mark.parametrize("place", BEAM_PLACES)
def test_a_failing_search_ends_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, rows_of = BEAM_PLACES[place]
    monkeypatch.setattr(module, name, failing(getattr(module, name), rows_of))
    assert_it_fails_alone(engine(), num_beams=2, n=2)


def test_a_search_that_fails_over_all_its_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamSearch, "advance", lambda self, *_: fails(self))
    assert_it_fails_alone(engine(), num_beams=2, n=2)


def test_an_error_that_other_ranks_may_not_have_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would go on with the sequence, and wait for this rank."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(chunk_results, "verify", no_memory)
    own = engine()
    assert ends(run(own, prompts(5), SamplingParameters(seed=1))[0]) == [(0, FinishReason.ERROR, SAMPLING_FAILED)]
    monkeypatch.setattr(
        engine_module, "results_from_logits", lambda *args, **_: results_from_logits(*args, alone=False)
    )
    with pytest.raises(torch.OutOfMemoryError):
        run(own, prompts(5), SamplingParameters(seed=1))


def test_a_text_that_cannot_be_decoded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = generator()
    decode = own.tokenizer.decode
    refused = SamplingParameters(seed=3, max_tokens=9, forced_tokens=(1, 250))
    monkeypatch.setattr(own.tokenizer, "decode", lambda ids: fails(ids) if 250 in ids else decode(ids))
    others = SamplingParameters(seed=4, max_tokens=9, banned_token_ids=(250,))
    ((bad,), (good,)) = own.generate(["a", "b"], [refused, others])
    assert (bad.error, bad.finish) == (TEXT_FAILED, FinishReason.ERROR)
    assert (good.error, len(good.tokens)) == (None, 9)
    assert own.engine.engine.manager.used_blocks == 0


def test_a_server_goes_on_after_a_request_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "_mask", lambda *_: fails(None))
    with live([language_model("m", 1)]) as served:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        status, answer = served.call("/v1/chat/completions", {**asked, "response_format": {"type": "json_object"}})
        assert (status, answer["error"]["message"]) == (500, SAMPLING_FAILED)
        assert served.call("/health")[0] == 200
        assert served.call("/v1/chat/completions", asked)[0] == 200


def test_a_failing_matcher_of_beams_ends_their_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the beams' memory changes hands."""

    class Broken(Matcher):
        def __init__(self) -> None:
            super().__init__("regex", None, 64)  # type: ignore[arg-type]

        error = None
        is_complete = False
        allowed = lambda self, drafted, size: torch.ones(size, dtype=torch.bool)  # noqa: E731
        copy = lambda self: self  # noqa: E731
        advance = fails

    real = Constraints.matcher
    monkeypatch.setattr(
        Constraints, "matcher", lambda self, own: Broken() if own.seed == BROKEN else real(self, own), raising=True
    )
    assert_it_fails_alone(engine(), num_beams=2, n=2)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_a_failing_draft_ends_its_request_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens up to there are reported."""
    own = drafting_engine(method)
    module, name, rows_of = {
        "ngram": (NgramDrafter, "_draft", lambda _, sequence: [sequence]),
        "draft_model": (drafter, "choose", lambda _, rows: [row.sequence for row in rows]),
        "mtp": (drafter, "choose", lambda _, rows: [row.sequence for row in rows]),
    }[method]
    plain = SamplingParameters(temperature=0.0, seed=1, max_tokens=6)
    alone = tokens_of(run(own, prompts(5), plain)[0])
    monkeypatch.setattr(module, name, failing(getattr(module, name), rows_of))
    bad = SamplingParameters(temperature=0.0, seed=BROKEN, max_tokens=6)
    good, broken = run(own, [*prompts(5), prompts(9)[0]], [plain, bad])
    assert tokens_of(good) == alone
    assert ends(broken) == [(0, FinishReason.ERROR, DRAFT_FAILED)]
    assert len(tokens_of(broken)) >= 1
    assert own.manager.used_blocks == 0
    assert own.is_idle


def drafting_engine(method: str) -> InferenceEngine:
    inference = {"speculative_method": method, "speculative_tokens": 2, "speculative_ngram": 1}
    if method == "draft_model":
        small = DraftModel(new_model(configuration("llama")))
        return engine_of(configuration("llama", inference=inference), draft_model=small)
    keys = {**MODELS["deepseek"], "mtp_num_layers": 1} if method == "mtp" else "llama"
    return engine_of(configuration(keys, inference=inference))


@pytest.mark.parametrize("error", [ConfigError("the images are no images"), IndexError("a defect")], ids=repr)
def test_inputs_that_cannot_be_encoded_end_their_request_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine_of(configuration("t5"))
    condition = own.runner.condition

    def condition_or_fail(inputs: Mapping[str, torch.Tensor]) -> Any:
        if any(7 in tensor.tolist()[0] for tensor in inputs.values()):
            raise error
        return condition(inputs)

    def asked(token: int) -> dict[str, torch.Tensor]:
        return {own.model.conditioned_by[0]: torch.tensor([[token] * 5])}

    sampling = SamplingParameters(seed=1, n=2, max_tokens=3)
    alone = [tokens_of(events) for events in run(own, [[1]], sampling, [asked(5)])]
    monkeypatch.setattr(own.runner, "condition", condition_or_fail)
    good, bad, last = run(own, [[1]] * 3, sampling, [asked(5), asked(7), asked(5)])
    message = str(error) if isinstance(error, ConfigError) else INPUTS_FAILED
    assert ends(bad) == [(index, FinishReason.ERROR, message) for index in range(2)]
    assert [tokens_of(good), tokens_of(last)] == alone * 2
    assert own.manager.used_blocks == 0
    assert own.is_idle


# -- on several ranks: an error that one of them has ---------------------------------------------------

DIVIDED = {**MODELS["t5"], "decoder_num_layers": 1}
"""Two stages of two layers: the encoder's last one is in the second."""
PP, TP = {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
BAD, GOOD = 7, 5
RANKS: dict[str, tuple[dict[str, Any], str, int, type[Exception]]] = {
    f"{where}, rank {rank}, {error.__name__}": (layout, where, rank, error)
    for layout, where, rank, error in (
        (PP, "encode_stage", 0, IndexError),
        (PP, "encode_stage", 1, MemoryError),
        (PP, "conditioned", 1, MemoryError),
        (PP, "to", 0, MemoryError),
        (PP, "to", 1, MemoryError),
        (TP, "to", 1, MemoryError),
    )
}
"""Name -> layout, where a rank fails, the rank, what it raises. `to`: as the inputs are taken to the device."""


class BadTensor(torch.Tensor):
    """One that cannot be taken to a device on one rank."""

    raises: type[Exception] | None = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.raises is not None:
            raise self.raises
        return self.as_subclass(torch.Tensor)


def failing_on_one_rank(rank: int, world: int, name: str) -> list[Any] | None:
    layout, where, broken, error = RANKS[name]
    own = engine_of(configuration(DIVIDED, parallel=layout), collective=True)
    asked = [{"encoder_tokens": torch.tensor([[token, 5, 4, 3]])} for token in (GOOD, BAD, GOOD)]
    if where == "to":
        asked[1]["encoder_tokens"] = asked[1]["encoder_tokens"].as_subclass(BadTensor)
        asked[1]["encoder_tokens"].raises = error if rank == broken else None
    elif rank == broken:
        real = getattr(own.model, where)

        def fail(*args: Any) -> Any:
            if int(args[-1]["encoder_tokens"][0, 0]) == BAD:
                raise error
            return real(*args)

        setattr(own.model, where, fail)
    sampling = SamplingParameters(temperature=0.0, seed=1, max_tokens=3)
    found = [run(own, [[1]], sampling, [one]) for one in asked]
    assert own.is_idle
    assert own.manager.used_blocks == 0
    return [(tokens_of(events), ends(events)) for ((events),) in found]


FAILING = InTurn(failing_on_one_rank, [(2, name) for name in RANKS])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_an_error_of_one_rank_ends_the_request_alone(name: str) -> None:
    """An encoder over pipeline stages, whose ranks wait for one another, and memory that one rank lacks."""
    alone = run(engine_of(configuration(DIVIDED)), [[1]], SamplingParameters(temperature=0.0, seed=1, max_tokens=3), [
        {"encoder_tokens": torch.tensor([[GOOD, 5, 4, 3]])}
    ])  # fmt: skip
    for good, bad, again in FAILING.of_ranks(2, name):
        assert good == again == (tokens_of(alone[0]), ends(alone[0]))
        assert bad == ([], [(0, FinishReason.ERROR, INPUTS_FAILED)])
