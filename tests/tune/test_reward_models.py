"""Reward models: gradients against plain torch, layouts, Hugging Face's classes, adapters, steps, records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.covering import EXHAUSTIVE
from tests.infer.server.served import live
from tests.tune.preference_runs import PAIRS, config, write_pairs

from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_data.preprocess.readers import Record
from mt_infer.server.served_model import load_models
from mt_tune.reward_models.process_dataset import ProcessReader
from mt_tune.reward_models.scorer import RewardScorer
from mt_tune.rewards.base import RewardError, RewardSample
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig

KEYS = (
    "data.dataset_type=reward",
    "train.loss=reward",
    "train.batch_source=dataset",
    "score_head.type=sequence",
    "lr_schedule.lr_warmup_iters=0",
)
LLAMA = (
    "model.family=llama",
    "model.ffn_hidden_size=32",
    "model.num_query_groups=2",
    "model.untie_embeddings_and_output_weights=true",
)


class Lines(Callback):
    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.valid: list[Mapping[str, Any]] = []

    def on_log(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.steps.append(dict(metrics))

    def on_evaluation(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.valid.append(dict(metrics))

    def values(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.steps]


def run(data: Path, directory: Path | None, *overrides: str) -> tuple[Lines, Trainer]:
    lines = Lines()
    trainer = Trainer(config(data, *KEYS, *overrides), run_dir=directory, callbacks=[lines])
    trainer.train()
    return lines, trainer


def with_margins(folder: Path) -> Path:
    path = folder / "margins.jsonl"
    records = [{**pair, "margin": number % 3 / 2} for number, pair in enumerate(PAIRS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# -- pairs ---------------------------------------------------------------------------------------------


def reward(model: Any, text: str) -> torch.Tensor:
    """By itself in a row of its own. The byte tokenizer of the preset; its end of a document is 256."""
    return model(tokens=torch.tensor([[*text.encode(), 256]]))[0, -1, 0].float()


@pytest.mark.slow
def test_gradients_are_those_of_plain_torch(tmp_path: Path) -> None:
    """About 2 s: all 12 pairs packed in one step: loss and every gradient, with margins and centring."""
    data = with_margins(tmp_path)
    trainer = Trainer(config(data, *KEYS, "score_head.center_rewards_coefficient=0.1"), run_dir=tmp_path / "run")
    losses = []
    for number, pair in enumerate(PAIRS[:12]):
        chosen, rejected = (reward(trainer.model, pair["prompt"] + pair[side]) for side in ("chosen", "rejected"))
        centred = 0.1 * (chosen + rejected) ** 2
        losses.append(-F.logsigmoid(chosen - rejected - number % 3 / 2) + centred)
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}  # type: ignore[union-attr]
    trainer.model.zero_grad()
    engine, whole = trainer.engine, trainer.train_data
    packs = {tuple(whole.members(index)): index for index in range(len(whole))}  # type: ignore[attr-defined]
    rows = [whole[index] for index in packs.values()]
    tensors = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        found.update({name: parameter.grad.clone() for name, parameter in engine.weights.named_parameters()})  # type: ignore[union-attr]

    engine.step.on_gradients = keep
    outcome = engine.train_step(engine.rank_batch(tensors))
    assert outcome.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    # Pairs are what the loss is divided by, and all tokens of both texts what the speed counts.
    texts = [pair["prompt"] + pair[side] for pair in PAIRS[:12] for side in ("chosen", "rejected")]
    assert outcome.tokens == sum(len(text.encode()) + 1 for text in texts)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_preference_is_learnt_and_scored(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    lines, trainer = run(data, tmp_path / "run", "train.train_iters=12")
    assert lines.values("accuracy")[-1] > 0.9
    assert lines.values("margin")[-1] > 0.5
    assert lines.values("min_reward")[-1] < lines.values("mean_reward")[-1] < lines.values("max_reward")[-1]
    assert lines.valid[-1]["valid_accuracy"] > 0.5
    scorer = RewardScorer.load(tmp_path / "run", device="cpu")
    answers = [(pair["prompt"], pair[side]) for pair in PAIRS[:2] for side in ("chosen", "rejected")]
    rewards = scorer.rewards(answers)
    trainer.model.eval()
    expected = [float(reward(trainer.model, prompt + answer).detach()) for prompt, answer in answers]
    assert rewards == pytest.approx(expected, abs=1e-5)
    assert rewards[0] > rewards[1]
    # The same as a reward of other completions, whose tokens are scored in one batch, and by a server.
    rows = [RewardSample(prompt, answer, [], [], {}) for prompt, answer in answers]
    keys = RewardsConfig(
        functions=["judge=reward_model", "exact_match"],
        options={"judge": {"path": str(tmp_path / "run"), "device": "cpu"}, "exact_match": {"column": "answer"}},
        workers=0,
    )
    with build_rewards(keys, load_plugins()) as functions:
        rows = [replace(row, row={"answer": ""}) for row in rows]
        assert functions.score(rows, 1).values["judge"] == pytest.approx(rewards, abs=1e-5)
        too_long = RewardSample(PAIRS[0]["prompt"], "x" * 999, [], [], {"answer": ""})
        with pytest.raises(RewardError, match=r'reward "judge", sample 4 .*the prompt has 1\d\d\d tokens'):
            functions.score([*rows, too_long], 1)
    scored_by_server(tmp_path / "run", answers, rewards)


def scored_by_server(folder: Path, answers: list[tuple[str, str]], rewards: list[float]) -> None:
    with live(load_models([folder], device="cpu", settings={})) as server:
        prompts, texts = map(list, zip(*answers, strict=True))
        _, answer = server.call("/score", {"text_1": prompts, "text_2": texts})
        assert [one["score"] for one in answer["data"]] == pytest.approx(rewards, abs=1e-5)
        _, ranked = server.call("/rerank", {"query": prompts[0], "documents": texts[:2]})
        assert [one["index"] for one in ranked["results"]] == [0, 1]
        status, refused = server.call("/v1/completions", {"prompt": "x"})
        assert status == 400
        assert "scores answers and generates no text; /score takes it" in json.dumps(refused)


def test_an_adapter_is_trained_beside_the_head(tmp_path: Path, mt: Callable[..., Any]) -> None:
    """The base is frozen, the head is not; merged, the model scores the same; a PEFT folder would lose the head."""
    data = write_pairs(tmp_path)
    lora = (*LLAMA, "adapter.type=lora", "adapter.rank=4", "train.train_iters=4")
    _, trainer = run(data, tmp_path / "run", *lora)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert "score_head.weight" in trained
    assert all(".adapter." in name for name in trained - {"score_head.weight"})
    refused = mt(
        "convert", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "peft"), "--saver", "peft"
    )
    assert refused.code != 0
    assert "has a trained score head" in refused.err
    merged = mt("ckpt", "merge-adapter", str(tmp_path / "run"), str(tmp_path / "merged"))
    assert merged.code == 0, merged.err
    answers = [(pair["prompt"], pair["chosen"]) for pair in PAIRS[:3]]
    first, second = (RewardScorer.load(tmp_path / name, device="cpu").rewards(answers) for name in ("run", "merged"))
    assert second == pytest.approx(first, abs=1e-5)


# -- Hugging Face --------------------------------------------------------------------------------------

FAMILIES = {
    "gpt": (
        "model.position_embedding_type=learned_absolute",
        "model.activation=gelu_tanh",
        "model.normalization=LayerNorm",
        "model.add_bias_linear=true",
    ),
    "llama": LLAMA,
    "qwen": (*LLAMA, "model.family=qwen"),
    "mistral": (*LLAMA[:-1], "model.family=mistral"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_transformers_computes_the_same_scores(tmp_path: Path, mt: Callable[..., Any], family: str, kind: str) -> None:
    """About 3 s each: written, read by transformers, and read back."""
    keys = KEYS if kind == "sequence" else STEPS
    data = write_pairs(tmp_path) if kind == "sequence" else write_steps(tmp_path)
    loaded = config(data, *keys, *FAMILIES[family], "train.train_iters=2")
    Trainer(loaded, run_dir=tmp_path / "run").train()
    written = mt("convert", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "hf"), "--saver", "hf")
    assert written.code == 0, written.err
    auto = (
        transformers.AutoModelForSequenceClassification
        if kind == "sequence"
        else transformers.AutoModelForTokenClassification
    )
    model, report = auto.from_pretrained(tmp_path / "hf", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == (1 if kind == "sequence" else 2)
    ours = RewardScorer.load(tmp_path / "run", device="cpu")
    texts = [[*f"{a}+{a}={b}".encode(), 256] for a, b in ((1, 2), (2, 5), (33, 66))]
    for text in texts:
        with torch.no_grad():
            theirs = model.eval()(input_ids=torch.tensor([text])).logits
        expected = theirs[0] if kind == "sequence" else theirs[0, -1]
        assert ours.scores([text])[0] == pytest.approx(expected.tolist(), abs=1e-5)
    if family != "gpt" and kind == "sequence":
        again = RewardScorer.load(tmp_path / "hf", device="cpu")
        assert again.scores(texts) == ours.scores(texts)


def test_a_causal_model_is_the_start(tmp_path: Path, mt: Callable[..., Any]) -> None:
    """Of Hugging Face: its layers are taken, its LM head is left out by name, the head begins with initial values."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(
        vocab_size=261, max_position_embeddings=64, bos_token_id=None, eos_token_id=256, **shape
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "base")
    data = write_pairs(tmp_path)
    arguments = (
        "--steps",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "tokenizer.tokenizer_type=ByteLevelTokenizer",
    )
    trained = mt("tune", "reward", str(tmp_path / "base"), str(data), *arguments)
    assert trained.code == 0, trained.err
    assert RewardScorer.load(tmp_path / "run", device="cpu").rewards([("1+1=", "2")])


# -- layouts -------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp": (),
    "tp": ("parallel.tensor_model_parallel_size=2",),
    "sp": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "pp": ("parallel.pipeline_model_parallel_size=2",),
    "cp": ("parallel.context_parallel_size=2",),
    "zero": ("parallel.use_distributed_optimizer=true",),
    "fsdp": ("parallel.use_torch_fsdp2=true",),
}
COMPARED = ("loss", "margin", "mean_reward", "max_reward", "grad_norm")


def compared(lines: Lines, names: tuple[str, ...]) -> list[list[float]]:
    return [*(lines.values(name) for name in names), [line["valid_loss"] for line in lines.valid]]


def train_in(
    rank: int, world: int, data: str, steps: str, folder: str, layouts: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    found = {}
    for name, overrides in layouts.items():
        pairs, _ = run(Path(data), Path(folder) / name, *overrides)
        stepped, _ = run_steps(Path(steps), Path(folder) / f"{name}-steps", *overrides)
        found[name] = (compared(pairs, COMPARED), compared(stepped, ("loss", "accuracy", "grad_norm")))
    return found


IN_OTHERS = ("tp", "zero")
"""Sequence parallelism has tensor parallelism; whose optimizer a gradient goes into is no matter of the head."""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in LAYOUTS if name not in IN_OTHERS], id="by default"),
        pytest.param(IN_OTHERS, id="further", marks=EXHAUSTIVE),
    ],
)
def test_two_ranks_compute_what_one_does(tmp_path: Path, names: Sequence[str]) -> None:
    """About 5 s: losses, rewards, gradients' norms and validation of both kinds of head in every layout."""
    data, steps = write_pairs(tmp_path), write_steps(tmp_path)
    pairs, _ = run(data, tmp_path / "alone")
    stepped, _ = run_steps(steps, tmp_path / "alone-steps")
    expected = (compared(pairs, COMPARED), compared(stepped, ("loss", "accuracy", "grad_norm")))
    for of_rank in run_ranks(
        2, train_in, str(data), str(steps), str(tmp_path), {name: LAYOUTS[name] for name in names}
    ):
        for name, found in of_rank.items():
            for ours, wanted in zip(found, expected, strict=True):
                for values, others in zip(ours, wanted, strict=True):
                    assert values == pytest.approx(others, rel=1e-4, abs=1e-5), name


# -- steps of answers ----------------------------------------------------------------------------------

STEPS = (
    "data.dataset_type=process_reward",
    "train.loss=process_reward",
    "train.batch_source=dataset",
    "score_head.type=token",
    "lr_schedule.lr_warmup_iters=0",
)
ANSWERS = [
    {
        "prompt": f"{a}+{b}+1?",
        "completions": [f"{a}+{b}={a + b}", f"then {a + b + 1 if b % 2 else 'no'}"],
        "labels": [True, b % 2 == 1],
    }
    for a in range(4)
    for b in range(4)
]


def write_steps(folder: Path) -> Path:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in ANSWERS))
    return path


def run_steps(data: Path, directory: Path | None, *overrides: str) -> tuple[Lines, Trainer]:
    lines = Lines()
    trainer = Trainer(config(data, *STEPS, *overrides), run_dir=directory, callbacks=[lines])
    trainer.train()
    return lines, trainer


def test_steps_are_judged_as_transformers_judges_tokens(tmp_path: Path) -> None:
    """The loss is the mean over the ends of steps, each answer by itself; what is learnt shows."""
    lines, _ = run_steps(write_steps(tmp_path), tmp_path / "run", "train.train_iters=20")
    trainer = Trainer(config(write_steps(tmp_path), *STEPS))
    judged = []
    for index in sorted({tuple(trainer.train_data.members(i)): i for i in range(len(trainer.train_data))}.values()):  # type: ignore[attr-defined]
        sample = trainer.train_data[index]
        for segment, member in enumerate(trainer.train_data.members(index)):  # type: ignore[attr-defined]
            answer: Any = ANSWERS[member]
            here = sample["segment_ids"] == segment
            text = answer["prompt"] + "".join(step + "\n" for step in answer["completions"])
            # The tokenizer's beginning of a text stands before the prompt.
            assert bytes(sample["tokens"][here].tolist()[1:]).decode() == text
            ends = np.flatnonzero(sample["loss_mask"][here]) - 1
            assert [text[: end + 1] for end in ends] == [
                answer["prompt"] + "".join(step + "\n" for step in answer["completions"][:count]) for count in (1, 2)
            ]
            assert sample["labels"][here][ends + 1].tolist() == [int(label) for label in answer["labels"]]
            judged.append(member)
    assert sorted(judged) == list(range(12))
    assert lines.values("accuracy")[-1] > 0.9
    assert lines.values("loss")[-1] < 0.5


def test_the_loss_of_steps_is_that_of_token_classification(tmp_path: Path, mt: Callable[..., Any]) -> None:
    data = write_steps(tmp_path)
    _, trainer = run_steps(data, tmp_path / "run", *LLAMA, "data.packing=false", "train.global_batch_size=12")
    assert (
        mt("convert", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "hf"), "--saver", "hf").code
        == 0
    )
    model = transformers.LlamaForTokenClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    rows = [trainer.train_data[index] for index in range(12)]
    labels = torch.tensor(np.stack([np.where(row["loss_mask"] > 0, row["labels"], -100) for row in rows]))
    tokens = torch.tensor(np.stack([row["tokens"] for row in rows]))
    with torch.no_grad():
        expected = float(model(input_ids=tokens, labels=labels).loss)
    batch = trainer.engine.rank_batch({name: torch.tensor(np.stack([row[name] for row in rows])) for name in rows[0]})
    assert trainer.engine.train_step(batch).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a", "completions": ["b"]}, 'has no key "labels"'),
        ({"prompt": "", "completions": ["b"], "labels": [True]}, '"prompt" must be a text'),
        ({"prompt": "a", "completions": [], "labels": []}, '"completions" must be a list with an entry'),
        ({"prompt": "a", "completions": ["b", ""], "labels": [True, True]}, "texts that are not empty"),
        ({"prompt": "a", "completions": ["b"], "labels": [1]}, '"labels" has 1; its entries must be true or false'),
        ({"prompt": "a", "completions": ["b"], "labels": [True, False]}, "they are as many"),
    ],
)
def test_a_record_that_is_no_answer_in_steps_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        ProcessReader().example(Record(fields, "steps.jsonl", 3))
    assert str(refused.value).startswith("steps.jsonl, line 3")


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("score_head.type=none",), 'takes score_head.type="sequence"'),
        (("score_head.num_labels=2",), "score_head.num_labels=1"),
        (("data.dataset_type=preference",), "takes the data of data.dataset_type"),
        (("train.loss=cross_entropy",), "takes the place of the LM head"),
        (
            ("train.loss=process_reward", "score_head.type=token", "score_head.center_rewards_coefficient=0.1"),
            "data of",
        ),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(write_pairs(tmp_path), *KEYS, *overrides)


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    small = ("num_layers=2", "hidden_size=16", "num_attention_heads=4", "max_position_embeddings=64")
    keys = ("model.family=bert", *(f"model.{key}" for key in small), "model.add_lm_head=true")
    with pytest.raises(ConfigError, match=r"needs a causal decoder"):
        Trainer(config(write_pairs(tmp_path), *KEYS, *keys))
