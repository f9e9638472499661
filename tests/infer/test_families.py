"""Every family that generates: the engine's tokens and log-probabilities against the uncached forward pass, and
against `transformers`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import save_file
from tests.ckpt.convert_cases import GROUPED, MODELS
from tests.ckpt.family_cases import class_named
from tests.covering import EXHAUSTIVE
from tests.infer.engines import (
    configuration,
    engine_of,
    logprobs_of,
    new_model,
    prompts,
    randomize,
    run,
    tokens_of,
)
from torch import Tensor, nn

from mt_ckpt.hugging_face.tokenizer import special_ids
from mt_core import specs
from mt_core.config.schema import Config
from mt_core.plugins import PluginHost, load_plugins
from mt_infer.requests import TokenEvent
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.hugging_face import HuggingFaceFamily, to_reference

GPT_OSS = {"family": "gpt_oss", **GROUPED, "sliding_window": 5, "moe": {"num_experts": 4, "moe_router_topk": 2}}
ENCODERS = ("bert", "modernbert", "vision")
FAMILIES = {**{name: keys for name, keys in MODELS.items() if name not in ENCODERS}, "gpt_oss": GPT_OSS}
CONDITIONED = ("t5", "bart", "llava")
DECODERS = [name for name in FAMILIES if name not in CONDITIONED]
TINY = {"cache_block_size": 2, "max_requests": 3, "max_tokens_per_step": 7}
"""A block is full after two positions, prompts take several passes, and half of the requests wait."""
GREEDY = SamplingParameters(temperature=0.0, max_tokens=6, logprobs=3)
SCORED = SamplingParameters(temperature=0.0, max_tokens=6, logprobs=1, prompt_logprobs=0)
IMAGE, FEATURES = 100, 4


@cache
def host() -> PluginHost:
    return load_plugins()


def shared_prefixes() -> list[list[int]]:
    """Six prompts; the last three begin as the first does, or are it."""
    first, *others = prompts(19, 3, 8)
    return [first, *others, first[:13] + others[0], first, first[:6]]


def forward_logprobs(model: nn.Module, tokens: Sequence[int], **inputs: Tensor) -> Tensor:
    """[S, V] of the uncached forward pass."""
    with torch.no_grad():
        name = "decoder_tokens" if "encoder_tokens" in inputs else "tokens"
        return model(**{name: torch.tensor([tokens])}, **inputs)[0].float().log_softmax(-1)


def assert_equals_forward(
    model: nn.Module, prompt: Sequence[int], events: Sequence[TokenEvent], **inputs: Tensor
) -> None:
    generated = tokens_of(events)
    logs = forward_logprobs(model, [*prompt, *generated], **inputs)
    following = logs[len(prompt) - 1 : -1]
    assert generated == following.argmax(-1).tolist()
    assert logprobs_of(events) == pytest.approx(following.max(-1).values.tolist(), abs=1e-5)
    for row, event in zip(following, events, strict=False):
        assert event.logprobs is not None
        top = row.topk(len(event.logprobs.top))
        assert [token for token, _ in event.logprobs.top] == top.indices.tolist()
    if events[0].prompt_logprobs is not None:
        first, *found = events[0].prompt_logprobs
        assert first is None
        expected = logs[:-1].gather(1, torch.tensor([prompt[1:] + generated]).T).squeeze(1)[: len(prompt) - 1]
        assert [one.token for one in found if one is not None] == pytest.approx(expected.tolist(), abs=1e-5)


CACHED_AS_OTHERS = {
    *("gpt2_gelu", "gpt_bigcode", "llama_tied_biased", "llama_multi_head", "qwen2", "qwen3", "smollm3", "olmo"),
    *("seed_oss", "granite", "ernie4_5", "hunyuan", "qwen_moe", "olmoe", "minimax_m2", "granite_moe", "exaone4"),
    *("glm4_moe_lite", "qwen_next_experts", "lfm3", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe"),
    "afmoe",
    *("hy_v3", "longcat_flash", "kimi_k3", "muse_spark"),
    *("dots1", "solar_open", "exaone_moe"),
}
"""Families with the cache and the positions of others; the tokens of all are compared with transformers' below."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXHAUSTIVE if name in CACHED_AS_OTHERS else ()) for name in DECODERS]
)
def test_tokens_and_logprobs_are_those_of_the_full_forward(name: str) -> None:
    engine = engine_of(configuration(FAMILIES[name], inference=TINY), randomized=True)
    engine.model.eval()
    for sampling, texts in ((GREEDY, shared_prefixes()), (SCORED, shared_prefixes()[:3])):
        for text, events in zip(texts, run(engine, texts, sampling), strict=True):
            assert_equals_forward(engine.model, text, events)
    # Once more: everything but the ends of the prompts is in the cache.
    hits = [text for text in shared_prefixes() if len(text) > 2]
    for text, events in zip(hits, run(engine, hits, GREEDY), strict=True):
        assert_equals_forward(engine.model, text, events)
    assert engine.manager.used_blocks == 0
    assert engine.manager.states is None or engine.manager.states.free == TINY["max_requests"]


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek", "hybrid"])
def test_a_prompt_is_scored_from_a_token_on_behind_what_is_in_the_cache(name: str) -> None:
    engine = engine_of(configuration(FAMILIES[name], inference=TINY), longest=19)
    (text,) = prompts(19)
    logs = forward_logprobs(engine.model, text)
    for start in (0, 13, 13, 18, 19):
        for max_tokens in (0, 1):
            scoring = SamplingParameters(
                temperature=0.0, max_tokens=max_tokens, prompt_logprobs=0, prompt_logprobs_start=start
            )
            ((event,),) = run(engine, [text], scoring)
            assert event.prompt_logprobs is not None
            assert len(event.prompt_logprobs) == len(text)
            for place, found in enumerate(event.prompt_logprobs):
                assert (found is None) == (place < max(1, start))
                if found is not None:
                    assert found.token == pytest.approx(float(logs[place - 1, text[place]]), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek", "hybrid"])
def test_a_prefix_that_is_in_the_cache_is_not_computed_again(name: str) -> None:
    engine = engine_of(configuration(FAMILIES[name], inference=TINY))
    (text,) = prompts(19)
    computed = []
    for _ in range(2):
        engine.add(text, SamplingParameters(temperature=0.0, max_tokens=1))
        passes = 0
        while not engine.is_idle:
            engine.step()
            passes += 1
        computed.append(passes)
    # 19 positions in passes of 7, recurrent states cut at the last full block; then one position.
    assert computed[0] >= 3
    assert computed[1] == 1


BY_LENGTH = {
    "longrope": FAMILIES["phi3"],
    "dynamic": {
        **FAMILIES["llama"],
        "rope_scaling_type": "dynamic",
        "rope_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("scaling", BY_LENGTH)
def test_sequences_with_other_rotary_frequencies_share_no_prefix(scaling: str) -> None:
    """Beginnings of one text, which may grow to 25, 12, 23 and 11 positions: 16 are the original ones."""
    engine = engine_of(configuration(BY_LENGTH[scaling], inference=TINY), randomized=True)
    engine.model.eval()
    (text,) = prompts(19)
    for length in (19, 6, 17, 5):
        (events,) = run(engine, [text[:length]], GREEDY)
        assert_equals_forward(engine.model, text[:length], events)


def conditioned(name: str) -> tuple[list[list[int]], list[dict[str, Tensor]]]:
    """Prompts, and what each is conditioned by."""
    generator = torch.Generator().manual_seed(4)
    if name in ("t5", "bart"):
        texts = [torch.randint(1, 101, (1, length), generator=generator) for length in (9, 3, 17)]
        return [[0], [0, 7, 3], [0]], [{"encoder_tokens": text} for text in texts]
    image = [IMAGE] * FEATURES
    images = torch.randn(2, 3, 8, 8, generator=generator)
    texts = [[5, *image, 9, 8], [*image, 7, *image], [5, *image, 9, 8], [3, 4]]
    return texts, [{"images": images[:1]}, {"images": images}, {"images": images[1:]}, {}]


@pytest.mark.parametrize("name", CONDITIONED)
def test_conditioned_families_equal_the_full_forward(name: str) -> None:
    """The third prompt of LLaVA has the first one's tokens and another image: they share nothing."""
    engine = engine_of(configuration(FAMILIES[name], inference=TINY), randomized=True)
    engine.model.eval()
    texts, inputs = conditioned(name)
    for _ in range(2):
        found = run(engine, texts, SCORED, inputs)
        found += run(engine, texts, GREEDY, inputs)
        for text, own, events in zip(texts * 2, inputs * 2, found, strict=True):
            assert_equals_forward(engine.model, text, events, **own)
    assert engine.manager.used_blocks == 0


# -- the reference -----------------------------------------------------------------------------------

ODD = {"hidden_size": 36, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 44, "vocab_size": 103}
REFERENCES: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in ODD.items() if key in keys} for name, keys in FAMILIES.items()
} | {
    # Their head size does not depend on the hidden size, or it has to be even.
    "bloom": {"hidden_size": 40, "vocab_size": 103},
    "gpt_neox": {"hidden_size": 48, "vocab_size": 103},
    "gpt_bigcode": {"hidden_size": 36, "num_attention_heads": 6, "vocab_size": 103},
    "gpt_oss": {"vocab_size": 103},
    "deepseek": {"hidden_size": 36, "vocab_size": 103},
    "mamba": {"hidden_size": 40, "vocab_size": 103},
    **{
        name: {"hidden_size": 40, "vocab_size": 103, "num_attention_heads": 5, "num_query_groups": 5}
        for name in ("hybrid", "nemotron_3", "granite_hybrid", "falcon_h1")
    },
    "gemma4_experts": {**ODD, "num_global_query_groups": 3},
    "inkling": {**ODD, "window_query_groups": 3},
    # Layers with a window have twice the key-value heads.
    "mimo_v2_flash": {**ODD, "num_query_groups": 3},
    "step3p7": {**ODD, "num_window_attention_heads": 10},
    "t5": {"hidden_size": 36, "num_attention_heads": 6, "vocab_size": 103},
    "llava": {},
    # Four of the six channels of a head are rotated. Texts of 9 and 14 positions and of 22 and 25 stay on one side of
    # the boundary from their prompts on: transformers changes the factors where one crosses it.
    "phi3": {
        **ODD,
        "original_max_position_embeddings": 15,
        "rope_short_factor": [1.0, 1.5],
        "rope_long_factor": [2.0, 4.0],
    },
}


NO_TOWER = ("model.vision_", "model.audio_tower.", "model.multi_modal_projector.")
"""Tensors of a tower, which a decoder has none of although transformers knows it beside one alone."""


def reference_of(config: Config, model: nn.Module, folder: Path) -> nn.Module:
    """The model of `transformers` from files with our weights, in the names that we write."""
    pytest.importorskip("transformers")
    family: HuggingFaceFamily = host()[specs.MODELS].get(config.model.family).name_maps["hf"].load()
    # The ids of special tokens that files without a tokenizer have. Defaults may lie outside of a small vocabulary.
    external = {**special_ids({}), **family.write_config(config.model)}
    (folder / "config.json").write_text(json.dumps(external))
    save_file(to_reference(model, family), folder / "model.safetensors", metadata={"format": "pt"})
    kind = class_named(external["architectures"][0])
    reference, loading = kind.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["unexpected_keys"]
    assert not {name for name in loading["missing_keys"] if not name.startswith(NO_TOWER)}
    return reference.eval()


def expected_of(reference: nn.Module, name: str, prompt: Sequence[int], inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """Greedy tokens of `generate`, and the log-probabilities of its scores."""
    given = {"input_ids": torch.tensor([prompt])}
    if name in ("t5", "bart"):
        given = {"input_ids": inputs["encoder_tokens"], "decoder_input_ids": torch.tensor([prompt])}
    if "images" in inputs:
        given["pixel_values"] = inputs["images"]
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    done = reference.generate(
        **given, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logs = torch.cat(done.logits).float().log_softmax(-1)
    tokens = done.sequences[0, -len(logs) :]
    return tokens.tolist(), logs.gather(1, tokens[:, None]).squeeze(1).tolist()


WITHOUT_CLASS = ("rwkv7", "kimi_k3")
"""Families of which transformers has no class."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_CLASS])
def test_tokens_and_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = configuration({**FAMILIES[name], **REFERENCES[name]}, inference=TINY)
    model = new_model(config)
    randomize(model)
    reference = reference_of(config, model, tmp_path)
    texts, inputs = conditioned(name) if name in CONDITIONED else (shared_prefixes()[:4], [{}] * 4)
    engine = engine_of(config, model=model)
    for text, own, events in zip(texts, inputs, run(engine, texts, GREEDY, inputs), strict=True):
        tokens, logprobs = expected_of(reference, name, text, own)
        assert tokens_of(events) == tokens
        assert logprobs_of(events) == pytest.approx(logprobs, abs=1e-4)
