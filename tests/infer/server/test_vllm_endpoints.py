"""Endpoints that vLLM has beside OpenAI's, and embeddings of language models."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.infer.server.served import (
    CONTEXT,
    VOCABULARY,
    Live,
    chat_format,
    configuration,
    live,
    model_of,
    openai_client,
)

from mt_core.config import load_config
from mt_core.errors import ConfigError
from mt_core.nn.model import Model
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.embedding import TextEmbedder
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel

TEXTS = ["a text", "a longer text than that", "x"]


def test_tokens_of_a_text_and_back(served: Live) -> None:
    status, found = served.call("/tokenize", {"model": "alpha", "prompt": "hé"})
    assert (status, found["tokens"], found["count"]) == (200, list("hé".encode()), 3)
    assert (found["max_model_len"], found["token_strs"]) == (CONTEXT, None)
    asked = {"model": "alpha", "prompt": "hi", "return_token_strs": True}
    assert served.call("/tokenize", asked)[1]["token_strs"] == ["h", "i"]
    assert served.call("/detokenize", {"model": "alpha", "tokens": found["tokens"]}) == (200, {"prompt": "hé"})
    messages = [{"role": "user", "content": "hi"}]
    for begins in (True, False):
        asked = {"model": "alpha", "messages": messages, "add_generation_prompt": begins}
        text = chat_format().text(messages, None, {"add_generation_prompt": begins})
        assert bytes(served.call("/tokenize", asked)[1]["tokens"]).decode() == text
    framed = served.call("/tokenize", {"model": "bert", "prompt": "hi"})[1]["tokens"]
    bare = served.call("/tokenize", {"model": "bert", "prompt": "hi", "add_special_tokens": False})[1]["tokens"]
    assert (framed, bare) == ([259, *b"hi", 260], list(b"hi"))
    for path, body, words in (
        ("/tokenize", {"model": "alpha"}, "prompt or messages"),
        ("/tokenize", {"model": "alpha", "prompt": "x", "messages": messages}, "one of them"),
        ("/detokenize", {"model": "alpha", "tokens": [261]}, "ids go from 0 to 260"),
    ):
        status, answer = served.call(path, body)
        assert (status, words in answer["error"]["message"]) == (400, True)


def test_version_and_ping(served: Live) -> None:
    assert served.call("/version") == (200, {"version": version("mt-infer")})
    assert served.call("/ping")[0] == served.call("/ping", {}, method="POST")[0] == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("BEARER  secret ", 200),
        ("secret", 401),
        ("Basic secret", 401),
        ("Bearer", 401),
        ("Bearersecret", 401),
        ("", 401),
    ],
)
def test_the_scheme_of_a_key_has_any_case_and_is_needed(header: str, status: int) -> None:
    with live([], ServerOptions(api_key="secret")) as guarded:
        assert guarded.call("/version", headers={"Authorization": header})[0] == status
        assert guarded.call("/ping")[0] == 200


def last_states(served: Live, texts: list[str]) -> torch.Tensor:
    """The last hidden state of transformers' model with the served weights, at each text's last token, of length 1."""
    from transformers import LlamaConfig, LlamaModel

    ours = served.service.models.find("alpha").generator.model
    config = ours.config
    theirs = LlamaModel(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=ours.decoder.layers["0"].mlp.linear_fc2.weight.shape[1],
            vocab_size=VOCABULARY,
            rms_norm_eps=config.norm_epsilon,
        )
    ).eval()
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    theirs.embed_tokens.weight.data = ours.embedding.word_embeddings.weight.data[:VOCABULARY]
    theirs.norm.weight.data = ours.decoder.final_layernorm.weight.data
    for number, layer in enumerate(theirs.layers):
        own = ours.decoder.layers[str(number)]
        # [heads, (query, key, value), width, H]
        parts = own.self_attention.linear_qkv.weight.data.unflatten(0, (heads, 3, width)).unbind(1)
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            getattr(layer.self_attn, name).weight.data = part.flatten(0, 1)
        layer.self_attn.o_proj.weight.data = own.self_attention.linear_proj.weight.data
        layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data = own.mlp.linear_fc1.weight.data.chunk(2)
        layer.mlp.down_proj.weight.data = own.mlp.linear_fc2.weight.data
        layer.input_layernorm.weight.data = own.input_layernorm.weight.data
        layer.post_attention_layernorm.weight.data = own.pre_mlp_layernorm.weight.data
    with torch.inference_mode():
        states = [theirs(torch.tensor([list(text.encode())])).last_hidden_state[0, -1] for text in texts]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1)


@pytest.mark.slow
def test_embeddings_of_a_language_model_are_its_last_states(served: Live) -> None:
    found = openai_client(served).embeddings.create(model="alpha", input=TEXTS)
    assert torch.tensor([one.embedding for one in found.data]).allclose(last_states(served, TEXTS), atol=1e-5)
    assert found.usage.prompt_tokens == sum(map(len, TEXTS))


def embedded(served: Live, model: str, texts: list[str], side: str = "document") -> torch.Tensor:
    body = {"model": model, "input": texts, "input_type": side}
    return torch.tensor([one["embedding"] for one in served.call("/v1/embeddings", body)[1]["data"]])


@pytest.mark.parametrize("model", ["alpha", "bert"])
def test_scores_are_cosines_and_rank(served: Live, model: str) -> None:
    documents = torch.nn.functional.normalize(embedded(served, model, TEXTS), dim=-1)
    query = torch.nn.functional.normalize(embedded(served, model, ["a query"]), dim=-1)
    expected = (documents @ query[0]).tolist()
    for path in ("/score", "/v1/score"):
        status, found = served.call(path, {"model": model, "text_1": "a query", "text_2": TEXTS})
        assert (status, [one["index"] for one in found["data"]]) == (200, [0, 1, 2])
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
    pairs = served.call("/score", {"model": model, "text_1": TEXTS, "text_2": TEXTS})[1]["data"]
    assert [one["score"] for one in pairs] == pytest.approx([1.0] * 3, abs=1e-5)
    order = sorted(range(3), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        asked = {"model": model, "query": "a query", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
        status, found = served.call(path, asked)
        assert [one["index"] for one in found["results"]] == order
        assert [one["document"]["text"] for one in found["results"]] == [TEXTS[index] for index in order]
        assert found["results"][0]["relevance_score"] == pytest.approx(max(expected), abs=1e-5)
    best = served.call("/rerank", {**asked, "top_n": 1, "return_documents": False})[1]["results"]
    assert [sorted(one) for one in best] == [["index", "relevance_score"]]
    assert best[0]["index"] == order[0]
    status, answer = served.call("/score", {"model": model, "text_1": TEXTS[:2], "text_2": TEXTS})
    assert (status, "as many" in answer["error"]["message"]) == (400, True)


def test_a_biencoder_scores_a_query_with_documents() -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    keys = {"family": "biencoder", **sizes, "vocab_size": VOCABULARY, "biencoder_projection_dim": 8}
    model, ctx = model_of(configuration(keys), 1)
    embedder = TextEmbedder(model, ByteLevelTokenizer(), ctx.device, VOCABULARY)
    with live([ServedModel("two", 0, embedder=embedder)]) as two:
        query, documents = embedded(two, "two", ["ab"], "query"), embedded(two, "two", TEXTS)
        expected = torch.nn.functional.cosine_similarity(query, documents).tolist()
        found = two.call("/score", {"text_1": "ab", "text_2": TEXTS})[1]["data"]
        assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)


def test_a_language_model_is_refused_where_an_encoder_is_meant() -> None:
    """Its texts would be framed as those of an encoder."""

    class Language(Model):
        continues_text = True

    trained: Any = SimpleNamespace(model=Language(), config=load_config(preset="gpt-tiny").config)
    with pytest.raises(
        ConfigError, match=r"model.family=gpt is a language model and no encoder; mt serve embeds texts"
    ):
        TextEmbedder.of_trained(trained)
