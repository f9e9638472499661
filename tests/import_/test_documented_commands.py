"""The commands of Megatron-LM's README on small data: BERT, T5 and ICT from texts to a training, tasks, conversion."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mt_cli.app import build_group
from mt_cli.main import run
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_import.other_programs import answer_words

SIZES = (
    "--hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 0.0001 --train-iters 2 --lr-decay-iters 2 --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 "
    "--lr-warmup-fraction .01 --clip-grad 1.0 --vocab-file bert-vocab.txt --split 949,50,1 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1"
)
BERT = f"{SIZES} --num-layers 2 --seq-length 64"
T5 = (
    f"{SIZES} --encoder-num-layers 2 --decoder-num-layers 2 --kv-channels 16 --ffn-hidden-size 64 "
    "--encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 100"
)
ICT = f"{BERT} --titles-data-path my-ict_title_sentence --ict-head-size 16 --use-one-sent-docs"
SENTENCES = "The quick brown fox jumps over the lazy dog. It runs far away from here. And it sleeps well."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": SENTENCES, "title": "The fox"})] * 100
    Path("my-corpus.json").write_text("\n".join(lines) + "\n")
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    Path("bert-vocab.txt").write_text("\n".join(pieces) + "\n")
    return tmp_path


def preprocess(prefix: str, tokenizer_type: str, *options: str) -> None:
    words = f"--input my-corpus.json --output-prefix {prefix} --vocab-file bert-vocab.txt --tokenizer-type "
    arguments = [*words.split(), tokenizer_type, "--split-sentences"]
    assert run(["data", "preprocess", *arguments, *options]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "words", "tokenizer_type"),
    [
        ("bert", BERT, "BertWordPieceLowerCase"),
        ("t5", f"{T5} --tokenizer-type BertWordPieceCase", "BertWordPieceCase"),
        ("ict", ICT, "BertWordPieceLowerCase"),
    ],
)
def test_what_is_preprocessed_and_imported_trains(folder: Path, entry: str, words: str, tokenizer_type: str) -> None:
    keys = ("--json-keys", "text", "title") if entry == "ict" else ()
    preprocess(f"my-{entry}", tokenizer_type, *keys)
    arguments = [*words.split(), "--data-path", f"my-{entry}_text_sentence"]
    assert run(["import", "-o", "run.json", "--entry", entry, "--megatron-args", *arguments]) == 0
    assert run(["train", "run.json", "--run-dir", "run"]) == 0
    losses = [json.loads(line).get("loss") for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 2


def test_another_tokenizer_is_named_with_its_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess("my-bert", "BertWordPieceLowerCase")
    arguments = [*BERT.split(), "--data-path", "my-bert_text_sentence", "--tokenizer-type", "BertWordPieceCase"]
    assert run(["import", "-o", "run.json", "--entry", "bert", "--megatron-args", *arguments]) == 0
    assert run(["train", "run.json", "--run-dir", "run"]) != 0
    printed = capsys.readouterr().err
    assert 'tokenizer.tokenizer_type="BertWordPieceLowerCase", tokenizer.vocab_file="bert-vocab.txt"' in printed


CONVERSION = "--load-dir {source} --save-dir {target} --target-tensor-parallel-size 2"
TASKS = {
    "--task WIKITEXT103 --valid-data F --load C --overlapping-eval 16 --seq-length 64 --num-layers 2": (
        "mt eval wikitext103 C F --overlapping-eval 16 --seq-length 64"
    ),
    "--task LAMBADA --valid-data F --load C --strict-lambada --micro-batch-size 8": (
        "mt eval lambada C F --strict --set inference.max_requests=8"
    ),
    "--task LAMBADA --valid-data F --load C": "mt eval lambada C F --loose",
    "--task MNLI --epochs 0 --load C --valid-data dev-a.tsv b.tsv": (
        "mt eval classification C --task mnli --data dev_a=dev-a.tsv --data b=b.tsv"
    ),
    "--task RETRIEVER-EVAL --load C --embedding-path E.npy --evidence-data-path W --qa-data-test Q --faiss-match regex "
    "--retriever-report-topk-accuracies 1 20": (
        "mt retrieve evaluate E.npy Q --checkpoint C --evidence W --match regex --top-k 1 --top-k 20"
    ),
}


@pytest.mark.parametrize("typed", TASKS)
def test_a_task_is_answered_by_a_command_that_mt_has(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "--megatron-args", *typed.split()]) == 0
    command, *note = capsys.readouterr().out.splitlines()
    assert command == TASKS[typed]
    assert note == (["# no option of this command answers --num-layers"] if "num-layers" in typed else [])
    words, host = command.split()[1:], load_plugins()
    group = build_group(host).commands[words[0]].load()
    context = group.make_context(words[0], words[1:], resilient_parsing=False, obj=host)
    name, sub, rest = group.resolve_command(context, words[1:])
    sub.make_context(name, rest, parent=context)  # raises for an option that the command does not have


@pytest.mark.parametrize("task", ["RACE", "MNLI", "QQP"])
def test_finetuning_is_answered_with_settings_that_load(task: str) -> None:
    words = (
        f"--task {task} --train-data a/train.tsv b.tsv --valid-data dev-1.tsv x/dev-1.tsv --epochs 3 --lr 5e-5 "
        "--seed 7 --pretrained-checkpoint C --micro-batch-size 4 --lr-warmup-fraction 0.06 --fp16 "
        "--tokenizer-type BertWordPieceLowerCase --vocab-file v.txt --save runs/x --num-layers 24 --log-interval 10"
    )
    answer = answer_words(words.split())
    assert answer.left_out == ["--num-layers", "--log-interval"]
    typed = shlex.split(answer.text(), comments=True)
    assert typed[:6] == ["mt", "train", "--preset", f"{task.lower()}-bert-345m", "--run-dir", "runs/x"]
    config = load_config(preset=typed[3], overrides=typed[7::2]).config
    assert (config.train.train_epochs, config.train.seed, config.optimizer.lr) == (3, 7, 5e-5)
    assert [entry.prefix for entry in config.data.train_data_path] == ["a/train.tsv", "b.tsv"]
    sets = config.data.valid_data_paths.values()
    assert [[entry.prefix for entry in files] for files in sets] == [["dev-1.tsv"], ["x/dev-1.tsv"]]
    assert config.precision.dtype == "fp16"


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["--loader mcore --saver mcore", "--loader core", "--saver megatron", ""])
def test_the_checkpoint_converter_is_answered_by_one_that_runs(
    formats: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "train.train_iters=1 model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=64"
    chosen = [word for setting in settings.split() for word in ("--set", setting)]
    assert run(["train", "--preset", "gpt-tiny", "--run-dir", "run", *chosen]) == 0
    arguments = f"--model-type GPT {formats} {CONVERSION.format(source='run', target='out')}".split()
    capsys.readouterr()
    assert run(["import", "--megatron-args", *arguments]) == 0
    assert run(shlex.split(capsys.readouterr().out, comments=True)[1:]) == 0
    assert len([*Path("out").glob("iter_*/mp_rank_0*")]) == 2


def test_a_script_of_a_task_keeps_its_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "race.sh"
    script.write_text("python tasks/main.py --task RACE --train-data $DATA/train --load $CKPT --epochs 1\n")
    assert run(["import", str(script)]) == 0
    printed = capsys.readouterr().out
    assert '"data.train_data_path=[\\"$DATA/train\\"]"' in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task RACER", 'did you mean "RACE"'),
        ("--task LAMBADA --load C", "needs --valid-data"),
        ("--model-type GPT --load-dir a", "needs --save-dir"),
        ("--model-type GPT --loader x --load-dir a --save-dir b", "--loader x: it can be core"),
    ],
)
def test_what_cannot_be_answered_is_said(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        answer_words(words.split())
