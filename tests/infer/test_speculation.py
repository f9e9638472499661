"""Speculative decoding gives the tokens and the distribution of decoding without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from tests.dist.in_turn import InTurn
from tests.infer.engines import OPTIONS, configuration, engine_of, new_model, prompts, run, tokens_of
from tests.infer.references import engine_like, reference, row_of, trained

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import whole
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.lockstep import LockstepEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import Sampled, probabilities
from mt_infer.speculation import drafter
from mt_infer.speculation.building import DraftModel
from mt_infer.speculation.drafter import continuation
from mt_infer.text import TextGenerator

SAMPLING = [
    SamplingParameters(temperature=0.0, max_tokens=20, logprobs=1),
    SamplingParameters(temperature=0.7, seed=7, max_tokens=17, top_k=10, n=2),
    SamplingParameters(
        temperature=0.4, seed=8, max_tokens=20, repetition_penalty=1.3, min_tokens=4, stop_token_ids=(9, 8)
    ),
    SamplingParameters(temperature=0.0, max_tokens=1),
    SamplingParameters(num_beams=2, max_tokens=6),
]
LENGTHS = (5, 21, 3, 9, 4)


def drafting_engine(name: str, draft: str, **options: Any) -> InferenceEngine:
    """With the draft model `draft`."""
    options = {"speculative_method": "draft_model", "cache_memory_gb": 0.05, "cache_block_size": 4, **options}
    own, small = trained(name), DraftModel(trained(draft).model)
    return InferenceEngine(own.model, None, own.ctx, InferenceConfig(**options), longest=64, draft_model=small)


def generated(engine: Any) -> list[list[list[int]]]:
    found = run(engine, prompts(*LENGTHS), SAMPLING)
    return [[tokens_of([one for one in events if one.index == index]) for index in range(2)] for events in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bamba", "mistral"])
def test_tokens_with_ngrams(name: str) -> None:
    engine = engine_like(name, speculative_method="ngram", speculative_ngram=2)
    assert generated(engine) == generated(engine_like(name))
    assert engine.speculation.drafted > engine.speculation.accepted
    assert engine.manager.used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft"), [("llama", "gpt2"), ("bamba", "llama"), ("gpt2", "bamba")])
def test_tokens_with_a_draft_model(name: str, draft: str) -> None:
    engine = drafting_engine(name, draft, max_requests=4, max_tokens_per_step=16)
    assert generated(engine) == generated(engine_like(name))
    assert engine.speculation.drafted > engine.speculation.accepted


def test_accepted_drafts_count_for_penalties() -> None:
    """Each drafted position is sampled with the penalties of the drafts before it."""
    asked = SamplingParameters(seed=5, temperature=0.5, max_tokens=30, repetition_penalty=2.0, presence_penalty=1.0)
    drafting = drafting_engine("llama", "llama")
    alone, drafted = (tokens_of(run(one, prompts(5), asked)[0]) for one in (engine_like("llama"), drafting))
    assert drafted == alone
    assert drafting.speculation.acceptance_rate == 1.0


@pytest.mark.slow
def test_steps_that_leave_sequences_out() -> None:
    """Fewer positions in a step than sequences run: drafts wait with those that are left out."""
    small = {"max_requests": 8, "max_tokens_per_step": 5}
    expected = generated(engine_like("llama"))
    for engine in (
        drafting_engine("llama", "bamba", **small),
        engine_like("llama", speculative_method="ngram", **small),
    ):
        assert generated(engine) == expected


@pytest.mark.slow
def test_log_probabilities_are_the_same_to_the_last_bit() -> None:
    """With numerics.batch_invariant, a chunk of drafts gives what its positions give one at a time."""
    asked, texts = SamplingParameters(seed=4, max_tokens=20, logprobs=3), prompts(9, 4)
    alone = engine_of(configuration("llama", inference={"batch_invariant": True}))
    options = alone.options.model_copy(update={"speculative_method": "draft_model"})
    draft = DraftModel(alone.model)
    drafting = InferenceEngine(
        alone.model, None, alone.ctx, options, longest=64, draft_model=draft, batch_invariant=True
    )
    found = [[[event.logprobs for event in events] for events in run(one, texts, asked)] for one in (alone, drafting)]
    assert found[0] == found[1]
    assert drafting.speculation.acceptance_rate == 1.0


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_draft_model_that_is_the_model_is_always_right(name: str) -> None:
    """Also of sampled tokens, since both draw by the same numbers; and several tokens come of each pass."""
    engine = drafting_engine(name, name, speculative_tokens=3, prefix_caching=False)
    for text in prompts(5, 9):
        engine.add(text, SamplingParameters(temperature=1.0, seed=5, max_tokens=17))
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
    assert engine.speculation.acceptance_rate == 1.0
    assert steps == 1 + 16 // 4


PREDICTED = [("deepseek", 1), ("deepseek", 2), ("nemotron_3", 2), ("mimo_v2_flash", 2)]
PREDICTED += [("qwen4_exp", 1), ("deepseek_v4", 1), ("deepseek_v4", 2)]
"""Families and depths. Depths of the last three read residual streams."""


def predicting(depths: int, family: str = "deepseek", **inference: Any) -> InferenceEngine:
    keys = {**MODELS[family], "mtp_num_layers": depths}
    return engine_of(configuration(keys, inference=inference))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "depths"), PREDICTED)
def test_tokens_with_multi_token_prediction(family: str, depths: int) -> None:
    engine = predicting(depths, family, speculative_method="mtp")
    assert generated(engine) == generated(predicting(depths, family))
    assert engine.speculation.drafted > 0


@torch.no_grad()
def predicted(engine: InferenceEngine, tokens: Sequence[int]) -> list[int]:
    """What each depth predicts behind the tokens, over the whole text at once, without a cache."""
    model: Any = engine.model
    ids = torch.tensor([list(tokens)])
    places = torch.arange(len(tokens))[None]
    pattern, angles = model.pattern(None, ids.device), model.angles(places, None)
    # What `unprojected` reads: residual streams where the model has several.
    stage = whole(model.config.num_layers)
    state = model.through_layers(model.embedding(ids, places), ids, pattern, angles, None, stage)[:, :-1]
    places = places[:, :-1]
    pattern, angles = model.pattern(None, ids.device), model.angles(places, None)
    drafts: list[int] = []
    for depth in model.mtp.layers.numbers():
        ahead = torch.tensor([[*tokens, *drafts][depth + 1 :]])
        state = model.mtp.layers[depth](state, model.embedding(ahead, places), pattern, angles)
        drafts.append(int(model.logits_ahead(depth, state)[0, -1].argmax()))
    return drafts


@pytest.mark.parametrize(("family", "depths"), PREDICTED)
def test_drafts_are_those_of_the_layers_over_the_whole_text(family: str, depths: int) -> None:
    engine = predicting(depths, family, speculative_method="mtp")
    engine.model.eval()
    for text in prompts(5, 21):
        engine.add(text, SamplingParameters(temperature=0.0, max_tokens=8))
    compared = 0
    while not engine.is_idle:
        engine.step()
        for sequence in engine.scheduler.running:
            if sequence.drafts:
                expected = predicted(engine, sequence.tokens)[: len(sequence.drafts)]
                assert list(sequence.drafts) == expected
                compared += 1
    assert compared > 8


def always(drafts: Sequence[int], sampled: Sequence[Sampled]) -> list[Sampled]:
    """A wrong rule of acceptance: any draft will do."""
    return [*(Sampled(draft, None) for draft in drafts), sampled[-1]]


def chi_square(name: str, draft: str, requests: int = 1000) -> float:
    """Of the third token, drafted as the second of three, against the probabilities that transformers gives."""
    sampling = [SamplingParameters(seed=seed, top_k=5, forced_tokens=(7, 9), max_tokens=4) for seed in range(requests)]
    engine = drafting_engine(name, draft, max_requests=256, max_tokens_per_step=2048, speculative_tokens=3)
    text = prompts(3)[0]
    counts = torch.zeros(101)
    for events in run(engine, [text] * requests, sampling):
        counts[tokens_of(events)[2]] += 1
    with torch.no_grad():
        logits = reference(name)(torch.tensor([[*text, 7, 9]])).logits[:, -1].float()
    expected = requests * probabilities(logits, [row_of(SamplingParameters(top_k=5), text)])[0]
    assert engine.speculation.drafted > requests
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-3)).sum())


QUANTILE = 33.4
"""A chi-square variable with 4 degrees of freedom exceeds it with probability 1e-6."""


@pytest.mark.slow
def test_distribution_is_the_models() -> None:
    assert chi_square("llama", "gpt2") < QUANTILE


@pytest.mark.slow
def test_a_wrong_rule_of_acceptance_changes_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "accepted", always)
    assert chi_square("llama", "gpt2") > QUANTILE


@pytest.mark.parametrize(
    ("tokens", "longest", "followed"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 3, [4, 1, 2]),  # the latest place of (1, 2)
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 3, [3, 6, 1, 2, 4, 5, 1, 2]),  # that of the longer (5, 1, 2)
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 2, [4, 5, 1, 2]),
        ([1, 2, 3], 3, []),
        ([4], 3, []),
        ([4, 4], 3, [4]),
    ],
)
def test_what_followed_an_ngram(tokens: list[int], longest: int, followed: list[int]) -> None:
    assert continuation(tokens, longest) == followed


def test_a_stop_text_within_a_draft_ends_one_sequence() -> None:
    """The step that brings the stop text is also the first sequence's last."""
    config = configuration({**MODELS["llama"], "vocab_size": 261}, inference={"speculative_method": "ngram"})
    generator = TextGenerator(LockstepEngine(engine_of(config)), ByteLevelTokenizer(), config)
    asked = SamplingParameters(max_tokens=3, n=2, logit_bias={ord("a"): 1e6}, stop=("aa",))
    found = generator.generate(["aaaa"], asked)[0]
    assert [(one.text, one.finish) for one in found] == [("", "stop")] * 2


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_prompt_with_images_is_continued_as_without_drafts(method: str) -> None:
    """Its image token lies behind the vocabulary of both models."""
    model = {**MODELS["llava"], "image_token_index": 5000}
    config = configuration(model)
    size = config.model.vision_model.img_h
    images = {"images": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))}
    prompt = [9, *[5000] * config.model.image_seq_length, 8]
    asked = SamplingParameters(temperature=0.0, max_tokens=6, logit_bias={9: 1e6})
    own = new_model(config)
    draft = DraftModel(new_model(configuration("llama"))) if method == "draft_model" else None
    options = config.section(InferenceConfig).model_copy(update={"speculative_method": method})
    engine = InferenceEngine(own, None, ParallelContext(), options, longest=64, draft_model=draft)
    assert tokens_of(run(engine, [prompt], asked, [images])[0]) == [9] * 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: engine_like("llama", speculative_method="mtp"), "layers of multi-token prediction"),
        (lambda: engine_like("llama", speculative_method="draft_model"), "needs inference.speculative_model"),
        (lambda: drafting_engine("llama", "t5"), "reads tokens only"),
    ],
)
def test_methods_that_cannot_be_used(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def layout_engine(model: dict[str, Any], method: str, parallel: dict[str, Any]) -> InferenceEngine:
    options = {"speculative_method": method, "speculative_ngram": 1}
    if method != "draft_model":
        return engine_of(configuration(model, parallel=parallel, inference=options), collective=True)
    draft = model if "moe" in model else "gpt2"
    own, small = (engine_of(configuration(keys, parallel=parallel), collective=True) for keys in (model, draft))
    options = InferenceConfig(**{**OPTIONS, **options})
    drafting = DraftModel(small.model, small.runner.decoder)
    placed = own.runner.decoder
    return InferenceEngine(own.model, None, own.ctx, options, longest=64, placed=placed, draft_model=drafting)


def on_rank(rank: int, world: int, layout: str) -> Any:
    engine = LockstepEngine(layout_engine(*LAYOUTS[layout]))
    if rank:
        return engine.follow()
    found = generated(engine)
    engine.close()
    assert engine.engine.speculation.drafted > 0
    return found


TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
PREDICTING = {**MODELS["deepseek"], "mtp_num_layers": 1}
LAYOUTS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llama-ngram-tp": (MODELS["llama"], "ngram", TP),
    "hybrid-ngram-pp": (MODELS["hybrid"], "ngram", PP),
    "hybrid-draft-tp": (MODELS["hybrid"], "draft_model", TP),
    "llama-draft-pp": (MODELS["llama"], "draft_model", PP),
    "deepseek-mtp-tp": (PREDICTING, "mtp", TP),
    "deepseek-mtp-pp": (PREDICTING, "mtp", PP),
    "deepseek-mtp-ep": (PREDICTING, "mtp", EP),
    "qwen_moe-draft-ep": (MODELS["qwen_moe"], "draft_model", EP),
}
RUNS = InTurn(on_rank, [(2, layout) for layout in LAYOUTS])


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_in_layouts(layout: str) -> None:
    model = LAYOUTS[layout][0]
    assert RUNS.result(2, layout) == generated(engine_of(configuration(model)))
