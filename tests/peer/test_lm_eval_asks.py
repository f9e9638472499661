"""lm-evaluation-harness asks `mt serve` through its model local-completions: its numbers are those of our engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.infer.server.served import CONTEXT, LLAMA, configuration, live, model_of
from tests.peer.environment import environment_with

from mt_data.tokenizers.hugging_face import HuggingFaceConfig, build_hugging_face
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

PACKAGES = ("lm_eval[api]>=0.4.9,<0.5", "transformers")
PAIRS = [["The quick", " brown fox"], ["a", "b"], ["", "start"], ["x" * 230, " long" * 12], ["Köln", " ist groß"]]
CONTEXTS = ["Once upon a time", "def f(x):", "word " * 40]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as ids 0 to 255, and an end of documents, as transformers reads them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eod>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def generators(tokenizer_folder: Path) -> list[TextGenerator]:
    """One to serve, and one with the same weights to compare with."""
    tokenizer = build_hugging_face(HuggingFaceConfig(tokenizer_model=str(tokenizer_folder)))
    config = configuration(LLAMA)
    found = []
    for _ in range(2):
        model, ctx = model_of(config, 1)
        found.append(TextGenerator.of_model(model, tokenizer, config, ctx))
    return found


def test_scores_and_texts_are_the_engines(generators, tokenizer_folder: Path, tmp_path: Path) -> None:
    served, ours = generators
    pairs, contexts = tmp_path / "pairs.json", tmp_path / "contexts.json"
    pairs.write_text(json.dumps(PAIRS))
    contexts.write_text(json.dumps(CONTEXTS))
    python = environment_with(PACKAGES, sys.version.partition(" ")[0], sys.executable)
    script = Path(__file__).parent / "lm_eval_process" / "ask.py"
    with live([ServedModel("tiny", 0, served)]) as server:
        done = subprocess.run(
            [str(python), str(script), server.url, "tiny", str(tokenizer_folder), str(pairs), str(contexts)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"},
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for (context, continuation), (score, is_greedy) in zip(PAIRS, found["scored"], strict=True):
        end = ours.tokenizer.special.eod
        prompt = list(ours.tokenizer.encode(context)) or [end]
        expected = continuation_scores(ours, prompt, list(ours.tokenizer.encode(continuation)))
        assert score == pytest.approx(sum(expected), abs=1e-3)
        assert not is_greedy
    greedy = SamplingParameters(temperature=0.0, max_tokens=12, stop=("e",))
    assert found["generated"] == [one[0].text for one in ours.generate(CONTEXTS, greedy)]
    for text, score in zip(CONTEXTS[:2], found["rolling"], strict=False):
        ids = list(ours.tokenizer.encode(text))
        assert score == pytest.approx(sum(continuation_scores(ours, [end], ids)), abs=1e-3)


def continuation_scores(ours: TextGenerator, prompt: list[int], continuation: list[int]) -> list[float]:
    """lm_eval cuts the beginning of what is too long; one position is for the token that it asks for."""
    (scores,) = ours.score([[*prompt, *continuation][-(CONTEXT - 1) :]])
    return scores[-len(continuation) :]
