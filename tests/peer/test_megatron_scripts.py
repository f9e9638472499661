"""Launch scripts and functional tests that Megatron-LM's developers wrote: they import, and what imports trains.

They are not in this repository. A package that carries Megatron-LM's sources (core 0.15) brings them;
MT_MEGATRON_SCRIPTS names folders with other versions, separated by colons, each laid out as Megatron-LM's repository.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.peer.environment import installed_alone

from mt_core.config.loading import LoadedConfig
from mt_core.config.parallel import ParallelConfig
from mt_core.errors import MtError
from mt_core.plugins import PluginHost
from mt_data.indexed.writer import IndexedDatasetWriter
from mt_import.megatron_arguments.derived import spread
from mt_import.readers.megatron import MegatronOptions
from mt_import.result import ImportResult, check_configuration
from mt_import.sources import import_file
from mt_tools.verify.run_record import record_run
from mt_tools.verify.small_config import shrink

PACKAGE = "flag-scale==0.8.0"
SOURCES = Path("flag_scale", "third_party", "Megatron-LM")
TESTS = "tests/functional_tests/test_cases"
GOAL = 0.9


@dataclass(frozen=True)
class Script:
    """arguments, define: what the script's own comments ask its user for. why: it cannot be imported; the words of the
    message."""

    path: str
    arguments: tuple[str, ...] = ()
    define: Mapping[str, str] | None = None
    entry: str | None = None
    program: str | None = None
    why: str = ""


INTERNVIT = "InternViT with 6 billion parameters"
MULTIMODAL = {"WORKSPACE": "w", "LOAD_NAME": "l", "BATCH": "0", "DATETIME": "now", "MODEL_NAME": "m"}
POST_TRAINING = {"ETP": "1", "CP": "1", "MLM_MODEL_CKPT": "c", "MLM_DATA_ARGS": "--train-samples 64 --mock-data"}
SC21 = {"MEGATRON_CODE_DIR": "m", "MEGATRON_DATA": "d", "BPE_VOCAB_FILE": "v", "BPE_MERGE_FILE": "f"}
CONFS = (
    *("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V2-Lite", "meta-llama/Llama-3.1-8B-Instruct"),
    *("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    *("meta-llama/Llama-3.2-1B-Instruct", "moonshotai/Kimi-K2-Instruct", "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base"),
    *("nvidia/Nemotron-H-4B-Instruct", "nvidia/Nemotron-H-8B-Base-8K", "nvidia/Nemotron-Mini-4B-Instruct"),
    *("qwen/Qwen2.5-0.5B-Instruct", "qwen/Qwen2.5-7B-Instruct", "qwen/Qwen3-0.6B", "qwen/Qwen3-235B-A22B"),
    *("qwen/Qwen3-30B-A3B", "qwen/Qwen3-8B"),
)
FIGURES = (*(f"figure_{number}" for number in range(11, 19)), "table_1")
"""Which set arguments and submit a job that reads them."""
MIMO = {"DRY_RUN": "false", "DEBUG_MODE": "false"}
PROVIDED = ("mock_train", "vlm_train", "avlm_train", "video_vlm_train")
NANO = "llama_3p1_nemotron_nano_vl_8b_v1"
WITHOUT_TRAINING = (
    *("inference/**/*", "**/*text_gen*", "academic_paper_scripts/msdp/*", "**/preprocess*", "**/*generate-*"),
    *("multimodal/combine_*", "academic_paper_scripts/sc21/S*", "academic_paper_scripts/sc21/CONFIG.sh"),
    *(f"post_training/modelopt/{name}*" for name in ("conf/arguments", "convert", "export", "generat", "mmlu")),
    *(f"post_training/modelopt/{name}*" for name in ("offline_feature_extract", "prune", "quantize", "validate")),
)
"""Scripts that generate, convert or prepare, and parts that others read."""
FINETUNED = ("qwen/Qwen3-8B", "meta-llama/Llama-4-Scout-17B-16E-Instruct")
SCRIPTS = (
    Script("bert/train_bert_340m_distributed.sh", ("c", "t", "v", "d"), {"NUM_NODES": "16"}),
    Script("t5/train_t5_220m_distributed.sh", ("c", "t", "v", "d")),
    Script("mamba/train.sh", ("d", "t")),
    Script("mixtral/train_mixtral_8x7b_distributed.sh", ("c", "t", "d")),
    Script("llama/train_llama3_8b_h100_fp8.sh"),
    *(Script(f"post_training/modelopt/conf/{conf}.sh") for conf in CONFS),
    *(Script("post_training/modelopt/finetune.sh", (conf,), POST_TRAINING, "gpt") for conf in FINETUNED),
    Script(
        "gpt3/train_gpt3_175b_distributed.sh",
        ("c", "t", "v", "m", "d"),
        {"NUM_NODES": "16"},
        why="--train-iters counts iterations and --rampup-batch-size samples",  # Megatron refuses it, too
    ),
    Script("retro/train_retro_2b_distributed.sh", ("c", "t"), why="--max-position-embeddings"),  # in a project folder
    *(Script(f"academic_paper_scripts/sc21/run_{name}.sh", (), SC21) for name in FIGURES),
    Script(
        "academic_paper_scripts/detxoify_lm/finetune_gpt_distributed-1.3b.sh",
        ("d", "s", "1e-5", "16", "100", "c"),
        {"DATA_BLEND": "0"},
        why="--data-path2 is no option of Megatron's",  # of a program beside it
    ),
    Script("post_training/modelopt/eagle3.sh", ("qwen/Qwen3-8B",), POST_TRAINING, "gpt", "finetune.py"),
    *(
        Script(f"mimo/scripts/run_{name}.sh", ("d", "c"), MIMO, why="Python functions of the script")
        for name in PROVIDED
    ),
    Script("multimodal/pretrain_mistral_clip.sh", (), {**MULTIMODAL, "DATA_TRAIN": "shards.tar"}),
    Script("multimodal/sft_mistral_clip.sh", (), {**MULTIMODAL, "DATA_TRAIN": "shards.tar", "LOAD_ITER": "1"}),
    *(
        Script(f"multimodal/nvlm/{name}.sh", (), MULTIMODAL, program="145" if "72b" in name else "142", why=INTERNVIT)
        for name in ("pretrain_qwen20_72b_internvit_6b", "pretrain_yi_34b_internvit_6b")
    ),
    *(
        Script(f"multimodal/nvlm/{name}.sh", (), {**MULTIMODAL, "BATCH": "0"}, why=why)
        for name, why in (
            ("sft_34b_internvit", INTERNVIT),
            ("sft_qwen2p5_7b_internvit_6b_video", INTERNVIT),
            ("sft_qwen20_72b_internvit_6b", "does not divide the 8 processes"),  # pipeline stages of four nodes on one
        )
    ),
    *(Script(f"multimodal/{NANO}/{name}_{NANO}.sh", (), MULTIMODAL, why="RADIO") for name in ("pretraining", "sft")),
)
"""Scripts of examples/ that start a training of Megatron's, or set the arguments of one."""
REFUSED: Mapping[str, str] = {
    "gpt3_mr_mcore_te_tp2_pp2_mla": "swiglu=False is not read of a model with multi-latent attention",
    "mimo_vlm": "is no option of Megatron's",
    "mxfp8": "--fp8-recipe mxfp8",
    "modelopt_distill": "distillation from a teacher",
    "fsdp2_resume_torch_dist": "parallel.use_torch_fsdp2 trains in fp32 or bf16",
}
"""Part of the name of a functional test -> words of the reason why it cannot be imported."""


VARIABLES = {"REPEAT": "1"}
"""What the program that runs the tests sets."""


@cache
def folders() -> list[Path]:
    given = os.environ.get("MT_MEGATRON_SCRIPTS", "")
    return [installed_alone(PACKAGE) / SOURCES, *(Path(folder) for folder in given.split(":") if folder)]


def functional_tests(folder: Path) -> list[Path]:
    """Configurations of tests that start pretraining, NeMo's left out."""
    found = sorted((folder / TESTS).glob("**/model_config.yaml"))
    return [path for path in found if _trains(path.read_text()) and "gpt-nemo" not in path.parts]


def _trains(text: str) -> bool:
    return "MODE: inference" not in text and "\nMODEL_ARGS:" in f"\n{text}" and "--lr:" in text


def imported(path: Path, host: PluginHost, script: Script | None = None) -> tuple[ImportResult | None, str]:
    """What comes out, or why nothing does."""
    script = script or Script("")
    options = MegatronOptions(entry=script.entry, program=script.program)
    try:
        define = {**VARIABLES, **(script.define or {})}
        result = import_file(path, host, arguments=script.arguments, define=define, options=options)
        if refused := [f"{one.words}: {one.reason}" for one in result.of_status("refused")]:
            return None, "; ".join(refused)
        if result.complete:
            check_configuration(result.sections, result.processes.world_size, host)
    except MtError as error:
        return None, str(error)
    return result, ""


def train_small(result: ImportResult, host: PluginHost, seen: set[str], folder: Path) -> None:
    """Two steps of the same model and options on one process; each small configuration once. folder: for a vocabulary
    in place of the tokenizer's files."""
    sections: dict[str, Any] = {name: dict(keys) for name, keys in result.sections.items()}
    if "vocab_file" in (tokenizer := sections["tokenizer"]):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "##ing"]
        tokenizer["vocab_file"] = str(folder / "vocab.txt")
        (folder / "vocab.txt").write_text("\n".join(words))
        sections["data"] |= {"data_path": [_sentences(folder / "sentences", len(words))], "split": "80,10,10"}
    sections["data"].pop("data_cache_path", None)  # a variable of the script's user
    loaded = check_configuration(sections, None, host)
    alone = loaded.config.model_copy(update={"parallel": ParallelConfig()})
    small = shrink(alone, host, steps=2)
    if (text := repr(small.to_dict())) in seen:
        return
    seen.add(text)
    record = record_run(LoadedConfig(small, {}, None), 2, host=host)
    assert record is not None


def _sentences(prefix: Path, vocab_size: int) -> str:
    """Documents of sentences, as BERT and T5 read them."""
    numbers = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(400):
            lengths = numbers.integers(4, 9, size=6)
            writer.add_document(numbers.integers(5, vocab_size, size=lengths.sum()), lengths)
        writer.finish()
    return str(prefix)


def test_functional_tests_import_and_train(host: PluginHost, tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    total, seen = 0, set[str]()
    for path in (path for folder in folders() for path in functional_tests(folder)):
        total += 1
        result, why = imported(path, host)
        if result is None:
            failed[path.parent.name] = why
        else:
            train_small(result, host, seen, tmp_path)
    assert total > 150
    assert len(seen) > 30
    unnamed = {name: why for name, why in failed.items() if not any(k in name and w in why for k, w in REFUSED.items())}
    assert unnamed == {}
    assert 1 - len(failed) / total >= GOAL, failed


def test_every_script_that_starts_a_training_is_in_the_list() -> None:
    """Three quarters of them are imported."""
    examples = folders()[0] / "examples"
    present = {str(path.relative_to(examples)) for path in examples.glob("**/*.sh")}
    others = {str(path.relative_to(examples)) for pattern in WITHOUT_TRAINING for path in examples.glob(pattern)}
    listed = {script.path for script in SCRIPTS}
    assert len(present) > 80
    assert present - others - listed == set()
    refused = {script.path for script in SCRIPTS if script.why}
    assert 1 - len(refused) / len(listed) > 0.7


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.path.rpartition("/")[2])
def test_a_script_imports_and_trains(script: Script, host: PluginHost, tmp_path: Path) -> None:
    result, why = imported(folders()[0] / "examples" / script.path, host, script)
    assert (result is None, script.why in why) == (bool(script.why), True), why
    if result is not None and result.complete:
        train_small(result, host, set(), tmp_path)


def _spread_there(path: Path) -> Callable[[int, float, float], list[str]]:
    """The function of the peer's that spreads layers, which prints nothing and imports nothing of its package."""
    functions = ("Symbols", "_allocate_auto")
    given: dict[str, Any] = {"log_single_rank": lambda *words, **options: None}
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in functions]
    exec(compile(tree, str(path), "exec"), given)
    return given["_allocate_auto"]


def _shares() -> Iterator[tuple[int, float, float]]:
    for layers in range(4, 80):
        yield from ((layers, a, f) for a in (0.0, 0.08, 0.125, 0.3, 0.5) for f in (0.0, 0.1, 0.25, 0.4) if a + f < 1)


def test_layers_of_a_hybrid_by_shares_stand_where_the_peer_puts_them() -> None:
    theirs = _spread_there(folders()[0] / "megatron/core/ssm/mamba_hybrid_layer_allocation.py")
    for layers, attention, feed_forward in _shares():
        first = spread(["M"] * layers, "*", round(layers * attention), extra_section=True)
        ours = spread(first, "-", round(layers * feed_forward), extra_section=False)
        assert ours == theirs(layers, attention, feed_forward), (layers, attention, feed_forward)
