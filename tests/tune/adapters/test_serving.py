"""Several adapters in one batch: each answer is that of the merged model alone."""

from __future__ import annotations

import pytest
import torch
from tests.infer.server import served
from tests.tune.adapters.models import adapted, base_of, loaded, reader_of, write_peft

from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator
from mt_tune.adapters.merge import MergedCheckpoint

KINDS = {
    "lora": {"type": "lora", "rank": 4, "alpha": 8.0},
    "queries": {"type": "lora", "rank": 2, "targets": ["q_proj", "embed_tokens"]},
    "dora": {"type": "dora", "rank": 3, "targets": ["v_proj", "down_proj"]},
    "ia3": {"type": "ia3", "targets": ["k_proj", "down_proj"]},
    "vera": {"type": "vera", "rank": 8},
}
GREEDY = SamplingParameters(temperature=0.0, max_tokens=8, logprobs=0)
PROMPTS = ["The quick brown", "a", "def f(x):"]


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host):
    return base_of(host, served.LLAMA)


@pytest.fixture(scope="module")
def folders(host, base, tmp_path_factory):
    """Name -> (the PEFT folder, the merged model)."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for name, adapter in KINDS.items():
        model, config = adapted(host, base, adapter)
        merged = loaded(host, MergedCheckpoint(reader_of(model, config), host))
        found[name] = (write_peft(root / name, model, config, host), merged)
    return found


def generator_of(host, model) -> TextGenerator:
    config = served.configuration(served.LLAMA)
    _, ctx = served.model_of(config, 0)
    return TextGenerator.of_model(model.eval(), served.ByteLevelTokenizer(), config, ctx)


def answers(generator: TextGenerator, asked) -> list[tuple[list[int], list[float]]]:
    """Of (prompt, adapter), all at once: tokens and their log-probabilities."""
    numbers = [generator.submit(prompt, GREEDY, None, adapter) for prompt, adapter in asked]
    found = {number: ([], []) for number in numbers}
    while not generator.is_idle:
        for event in generator.step():
            if event.token is not None:
                found[event.request][0].append(event.token)
                found[event.request][1].append(event.logprobs.token)
    return [found[number] for number in numbers]


def test_each_row_of_a_batch_has_its_adapter(host, base, folders) -> None:
    generator = generator_of(host, loaded(host, base))
    for name, (folder, _) in folders.items():
        generator.load_adapter(name, folder, host)
    names = [None, *KINDS]
    mixed = [(prompt, name) for prompt in PROMPTS for name in names]
    found = answers(generator, mixed)
    for number, name in enumerate(names):
        alone = generator_of(host, loaded(host, base) if name is None else folders[name][1])
        expected = answers(alone, [(prompt, None) for prompt in PROMPTS])
        for (tokens, logprobs), (ours, our_logprobs) in zip(expected, found[number :: len(names)], strict=True):
            assert ours == tokens, name
            torch.testing.assert_close(torch.tensor(our_logprobs), torch.tensor(logprobs), atol=1e-5, rtol=0)
    assert len({tuple(tokens) for tokens, _ in found[: len(names)]}) > 3  # they are different models


def test_a_prefix_is_not_shared_between_adapters(host, base, folders) -> None:
    """The same long prompt, one adapter after another, and a name that is loaded anew with another folder."""
    generator, prompt = generator_of(host, loaded(host, base)), "x" * 100
    generator.load_adapter("a", folders["lora"][0], host)
    first = answers(generator, [(prompt, None)])[0], answers(generator, [(prompt, "a")])[0]
    assert first[0] != first[1]
    generator.unload_adapter("a")
    with pytest.raises(ConfigError, match="no adapter a"):
        generator.submit(prompt, GREEDY, None, "a")
    generator.load_adapter("a", folders["ia3"][0], host)
    expected = answers(generator_of(host, folders["ia3"][1]), [(prompt, None)])[0]
    assert answers(generator, [(prompt, "a")])[0][0] == expected[0]


def test_an_adapter_in_use_is_not_unloaded(host, base, folders) -> None:
    generator = generator_of(host, loaded(host, base))
    generator.load_adapter("a", folders["lora"][0], host)
    number = generator.submit("a", GREEDY, None, "a")
    generator.step()
    with pytest.raises(ConfigError, match="requests with the adapter a run"):
        generator.unload_adapter("a")
    generator.cancel(number)
    generator.unload_adapter("a")


def test_what_cannot_be_beside_others_is_refused(host, base, tmp_path) -> None:
    for name, adapter in (
        ("head", {"type": "lora", "targets": ["lm_head"]}),
        ("rows", {"type": "trainable_tokens", "trainable_token_indices": [3]}),
    ):
        model, config = adapted(host, base, adapter)
        folder = write_peft(tmp_path / name, model, config, host)
        with pytest.raises(ConfigError, match="merge it"):
            generator_of(host, loaded(host, base)).load_adapter("a", folder, host)


def test_a_server_finds_adapters_by_the_model_of_a_request(host, base, folders) -> None:
    generator, body = generator_of(host, loaded(host, base)), {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}
    options = ServerOptions(adapter_folder=folders["lora"][0].parent)
    with served.live([ServedModel("base", 0, generator)], options) as server:
        assert server.call("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "lora"})[0] == 200
        assert server.call("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "../.."})[0] == 400
        assert [model["id"] for model in server.call("/v1/models")[1]["data"]] == ["base", "mine"]
        plain, mine = (server.call("/v1/completions", {**body, "model": name})[1] for name in ("base", "mine"))
        unnamed = server.call("/v1/completions", body)[1]
        assert server.call("/v1/embeddings", {"input": "a", "model": "mine"})[0] == 400
        assert server.call("/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 200
        assert server.call("/v1/completions", {**body, "model": "mine"})[0] == 404
    expected = answers(generator_of(host, folders["lora"][1]), [(PROMPTS[0], None)])[0][0]
    assert mine["model"] == "mine"
    assert mine["choices"][0]["text"] == generator.tokenizer.decode(expected)
    assert plain["choices"][0]["text"] == unnamed["choices"][0]["text"] != mine["choices"][0]["text"]


def test_adapters_are_loaded_by_requests_where_the_operator_allows_it(host, base) -> None:
    with served.live([ServedModel("base", 0, generator_of(host, loaded(host, base)))]) as server:
        status, answer = server.call("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "lora"})
    assert status == 403
    assert "--adapter-folder" in answer["error"]["message"]
