"""Runs of distillation: the forms of a teacher, layouts and resumes agree; what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.covering import EXHAUSTIVE
from tests.tune.distill.runs import DISTILLED, SMALL, config, distilled

from mt_core.config import load_config
from mt_core.errors import CheckpointError, ConfigError, TrainingError
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_tune.commands.distill import preset_sections
from mt_tune.commands.options import TrainingOptions

TOP_K = "distillation.top_k=4"
EVALUATED = "train.eval_interval=1"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that predicts something else than the student's initial weights."""
    folder = tmp_path_factory.mktemp("teacher")
    Trainer(config("train.train_iters=6", "optimizer.lr=0.03", "train.seed=7"), run_dir=folder).train()
    return folder


def cached(folder: Path) -> str:
    return f"distillation.cache={json.dumps(str(folder))}"


def trained(teacher: Path | str, *overrides: str) -> dict[str, float]:
    trainer = Trainer(distilled(teacher, *overrides))
    trainer.train()
    return trainer.last_evaluation


# -- what is minimized -------------------------------------------------------------------------------


def test_the_loss_is_that_of_plain_torch_on_both_models_logits(teacher: Path) -> None:
    keys = ("distillation.alpha=0.6", "distillation.temperature=2.0", "optimizer.lr=0.0", "optimizer.min_lr=0.0")
    trainer = Trainer(distilled(teacher, *keys, EVALUATED, "train.train_iters=1"))
    trainer.train()
    big = Trainer(config("train.seed=7"), run_dir=None)
    big.engine.load_state(teacher)
    batch = next(trainer.engine.read_batches(trainer.valid_data["valid"], [(0, 4)]))
    total, count = 0.0, 0
    for arrays in batch.micro_batches:
        tokens, labels = torch.from_numpy(arrays["tokens"]), torch.from_numpy(arrays["labels"])
        with torch.no_grad():
            student, taught = (run.model.eval()(tokens=tokens).double() for run in (trainer, big))
        p, q = (F.log_softmax(x / 2.0, -1) for x in (taught, student))
        divergence = (p.exp() * (p - q)).sum(-1)
        ce = F.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        losses = 0.6 * 4.0 * divergence + 0.4 * ce
        mask = torch.from_numpy(arrays["loss_mask"])
        total, count = total + float((losses * mask).sum()), count + int(mask.sum())
    assert trainer.last_evaluation["valid_loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_student_comes_closer_to_the_teacher_and_to_the_text(teacher: Path) -> None:
    before = trained(teacher, "optimizer.lr=0.0", "optimizer.min_lr=0.0", "train.train_iters=1")
    after = trained(teacher, "optimizer.lr=0.03", "lr_schedule.lr_warmup_iters=0", "train.train_iters=8")
    assert after["valid_divergence"] < 0.5 * before["valid_divergence"]
    assert after["valid_cross_entropy"] < before["valid_cross_entropy"]


# -- the forms of a teacher --------------------------------------------------------------------------


def test_stored_answers_and_a_layout_of_its_own_train_the_same(teacher: Path, tmp_path: Path) -> None:
    own = "distillation.teacher_parallel.tensor_model_parallel_size=1"
    inside = trained(teacher, TOP_K)
    assert trained(teacher, TOP_K, own) == pytest.approx(inside, rel=1e-5)
    assert trained(teacher, own) == pytest.approx(trained(teacher), rel=1e-5)
    written = trained(teacher, TOP_K, cached(tmp_path / "cache"))
    files = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert written == pytest.approx(inside, rel=1e-5)
    # Without the teacher, from the files alone; other micro-batches find the same samples.
    config_of_cache = config(
        "train.loss=distillation", "train.batch_source=teacher", TOP_K, cached(tmp_path / "cache"),
        "train.micro_batch_size=4",
    )  # fmt: skip
    trainer = Trainer(config_of_cache)
    trainer.train()
    assert trainer.last_evaluation == pytest.approx(inside, rel=1e-4)
    # The teacher is not run again for what is there.
    trained(teacher, TOP_K, cached(tmp_path / "cache"))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == files


def test_logits_in_chunks_give_the_same_weights(teacher: Path) -> None:
    whole, parts = (
        Trainer(distilled(teacher, "distillation.divergence=jsd", "distillation.alpha=0.5", *keys))
        for keys in ((), ("distillation.chunk_positions=7",))
    )
    for trainer in (whole, parts):
        trainer.train()
    for (name, one), (_, other) in zip(whole.model.named_parameters(), parts.model.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_hidden_states_are_compared_by_the_formula(teacher: Path, kind: str) -> None:
    keys = ("distillation.hidden_layers=['1:2', '2:1']", f"distillation.hidden_loss={kind}", "distillation.alpha=0.5")
    still = ("optimizer.lr=0.0", "optimizer.min_lr=0.0", "train.train_iters=1", "distillation.hidden_weight=3.0")
    trainer = Trainer(distilled(teacher, *keys, *still))
    trainer.train()
    taught = Trainer(config("train.seed=7"))
    taught.engine.load_state(teacher)
    batch = next(trainer.engine.read_batches(trainer.valid_data["valid"], [(0, 4)]))
    outputs: dict[tuple[int, int], Any] = {}
    for which, run in enumerate((trainer, taught)):
        for number in (0, 1):
            layer = run.model.eval().decoder.layers[number]
            layer.register_forward_hook(lambda _m, _i, x, at=(which, number): outputs.__setitem__(at, x.detach()))
    losses = []
    for arrays in batch.micro_batches:
        for run in (trainer, taught):
            run.model(tokens=torch.from_numpy(arrays["tokens"]))
        for one, other in ((0, 1), (1, 0)):
            x, y = outputs[0, one].double(), outputs[1, other].double()
            losses.append((x - y).square().mean() if kind == "mse" else 1 - F.cosine_similarity(x, y, -1).mean())
    hidden = float(torch.stack(losses).mean())
    values = trainer.last_evaluation
    assert values["valid_hidden"] == pytest.approx(hidden, rel=1e-4)
    parts = 0.5 * values["valid_divergence"] + 0.5 * values["valid_cross_entropy"] + 3 * hidden
    assert values["valid_loss"] == pytest.approx(parts, rel=1e-4)


def test_a_resumed_run_is_one_that_was_not_interrupted(teacher: Path, tmp_path: Path) -> None:
    keys = (TOP_K, cached(tmp_path / "cache"), "train.train_iters=4")
    whole = Trainer(distilled(teacher, *keys), run_dir=tmp_path / "whole")
    whole.train()
    Trainer(distilled(teacher, *keys, "train.exit_iteration=2"), run_dir=tmp_path / "parts").train()
    resumed = Trainer(distilled(teacher, *keys), run_dir=tmp_path / "parts")
    assert resumed.state.iteration == 2
    resumed.train()
    for (name, one), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


# -- layouts -----------------------------------------------------------------------------------------

HIDDEN = ("distillation.hidden_layers=['1:2', '2:1']",)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "dp": (),
    "tp": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "pp": ("parallel.pipeline_model_parallel_size=2",),
    "cp": ("parallel.context_parallel_size=2",),
    "fsdp": ("parallel.use_torch_fsdp2=true",),
    "tp in chunks": ("parallel.tensor_model_parallel_size=2", "distillation.chunk_positions=7"),
    "dp with a teacher in tp": ("distillation.teacher_parallel.tensor_model_parallel_size=2",),
    "tp with a teacher in dp": (
        "parallel.tensor_model_parallel_size=2",
        "distillation.teacher_parallel.tensor_model_parallel_size=1",
    ),
    "tp, hidden": (*HIDDEN, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "cp, hidden": (*HIDDEN, "parallel.context_parallel_size=2"),
    "cp with a teacher in pp": (
        "parallel.context_parallel_size=2",
        "distillation.teacher_parallel.pipeline_model_parallel_size=2",
    ),
}
TOP_K_LAYOUTS = {f"top-k, {name}": (TOP_K, *LAYOUTS[name]) for name in ("tp", "cp", "pp", "dp with a teacher in tp")}
JSD = ("distillation.divergence=jsd", "distillation.alpha=0.7", "optimizer.lr=0.01")


def evaluated_in(
    rank: int, world: int, teacher: str, layouts: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Any]]:
    return {name: trained(teacher, *JSD, *keys) for name, keys in layouts.items()}


IN_OTHERS = ("dp", "tp", "cp")
"""Axes that are there with hidden layers, in chunks, or with a teacher in another layout."""


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in LAYOUTS | TOP_K_LAYOUTS if name not in IN_OTHERS], id="by default"),
        pytest.param(IN_OTHERS, id="further", marks=EXHAUSTIVE),
    ],
)
def test_two_ranks_compute_what_one_does(teacher: Path, names: Sequence[str]) -> None:
    """About 8 s: layouts of student and teacher after three steps."""
    alone = {key: trained(teacher, *JSD, *keys) for key, keys in {"": (), "top-k": (TOP_K,), "hidden": HIDDEN}.items()}
    layouts = {name: (LAYOUTS | TOP_K_LAYOUTS)[name] for name in names}
    for of_rank in run_ranks(2, evaluated_in, str(teacher), layouts):
        for name, values in of_rank.items():
            expected = next(alone[kind] for kind in ("top-k", "hidden", "") if kind in name)
            assert values == pytest.approx(expected, rel=2e-5), name


def write_on_ranks(rank: int, world: int, teacher: str, cache: str, keys: tuple[str, ...]) -> int:
    trainer = Trainer(distilled(teacher, TOP_K, cached(Path(cache)), *keys))
    return len(trainer.source.teaching.cache)  # type: ignore[attr-defined]


@pytest.mark.dist
@pytest.mark.slow
def test_answers_written_by_two_ranks_are_read_by_one(teacher: Path, tmp_path: Path) -> None:
    """About 3 s."""
    inside = trained(teacher, TOP_K)
    for name in ("cp", "dp"):
        folder = tmp_path / name
        sizes = run_ranks(2, write_on_ranks, str(teacher), str(folder), LAYOUTS[name])
        assert sizes[0] == sizes[1] == 16
        assert trained(teacher, TOP_K, cached(folder)) == pytest.approx(inside, rel=1e-5)


# -- what cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.batch_source=dataset",), "compares with a teacher"),
        (("train.loss=cross_entropy",), "set one of them"),
        (("distillation.teacher=null",), "names no model to learn from"),
        ((cached(Path("x")),), "say with distillation.top_k how many"),
        (("distillation.tail=renormalize",), "no effect without distillation.top_k"),
        ((TOP_K, "distillation.tail=drop", "distillation.divergence=jsd"), "use bin or renormalize"),
        (("distillation.beta=1.0", "distillation.divergence=jsd"), "forward_kl and reverse_kl"),
        (("distillation.hidden_layers=['2-2']",), 'STUDENT:TEACHER, such as "2:4"'),
        (("train.cuda_graphs=step",), "without the teacher's forward pass"),
    ],
)
def test_settings_that_contradict_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        distilled("random", *overrides)


def test_a_teacher_that_does_not_fit_is_refused(teacher: Path) -> None:
    with pytest.raises(ConfigError, match="larger than the vocabulary of 261 ids"):
        Trainer(distilled(teacher, "distillation.top_k=9999"))
    with pytest.raises(CheckpointError, match="/nowhere: no such directory"):
        Trainer(distilled("/nowhere"))
    others = ("data.dataset_type=mock", "tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=300")
    small = [text for text in SMALL if not text.startswith("data.corpus_bytes")]
    keys = [*small, *DISTILLED, f"distillation.teacher={json.dumps(str(teacher))}", *others]
    with pytest.raises(ConfigError, match=r"has another tokenizer \(261 ids, .* than the student \(300 ids"):
        Trainer(load_config(preset="gpt-tiny", overrides=keys))


def test_a_cache_of_something_else_is_refused(teacher: Path, tmp_path: Path) -> None:
    cache = cached(tmp_path / "cache")
    Trainer(distilled(teacher, TOP_K, cache))
    for overrides, words in (
        (("distillation.teacher=random",), "that of another teacher"),
        (("distillation.temperature=2.0",), "computed at distillation.temperature=1.0"),
        (("distillation.top_k=5",), "holds 4 tokens of each position"),
    ):
        with pytest.raises(ConfigError, match=words):
            Trainer(distilled(teacher, TOP_K, cache, *overrides))
    alone = config("train.loss=distillation", "train.batch_source=teacher", TOP_K, cache, "train.seed=4")
    with pytest.raises(TrainingError, match="it was written for other data"):
        Trainer(alone).train()
    with pytest.raises(CheckpointError, match="no cache of a teacher"):
        Trainer(config("train.loss=distillation", "train.batch_source=teacher", TOP_K, cached(tmp_path)))


def test_a_smaller_batch_than_that_of_the_preset_is_computed_in_parts_of_its_own() -> None:
    train = preset_sections(TrainingOptions(batch_size=6), ranks=1)["train"]
    assert train == {"global_batch_size": 6, "micro_batch_size": 2}
