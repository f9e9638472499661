"""From every readable format into every writable one, cut over ranks in one way before and in another after."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt import convert_cases
from tests.ckpt.conftest import State, assert_same_state, tensors_of
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint
from tests.ckpt.test_convert_gguf import MODELS as GGUF_MODELS
from tests.ckpt.test_convert_gguf import to_gguf
from tests.ckpt.test_convert_meta import write
from tests.covering import EXHAUSTIVE

from mt_ckpt.commands.convert import describe
from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.native import read as native
from mt_cli.model_check import check_model
from mt_core import specs
from mt_core.checkpoint_lookup import open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, CheckpointReader, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import PLAIN_MODULE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_waiting_for_the_disk")]

GPT2 = {**MODELS["gpt"], "ffn_hidden_size": 128, "activation": "gelu_tanh"}
LLAMA = MODELS["llama"]
FOUR_LAYERS = {name: {**model, "num_layers": 4} for name, model in convert_cases.MODELS.items()}
GRANITE = {**FOUR_LAYERS["granite_moe"], "moe": {"num_experts": 4, "moe_router_topk": 3}}
SPARSE = {name: FOUR_LAYERS[name] for name in ("deepseek_v32", "glm_5", "glm4_moe_lite")}
# Megatron's latent attention fixes what YaRN starts from.
SPARSE["deepseek_v32"] = {key: value for key, value in SPARSE["deepseek_v32"].items() if "rope" not in key}
SPARSE["deepseek_v32"].pop("original_max_position_embeddings")
HF_DENSE = ("phi3", "smollm3", "ministral3", "olmo", "exaone4", "seed_oss", "granite", "ernie4_5", "hunyuan")
"""Relatives of Llama with what Megatron does not have."""
CASES: dict[str, dict[str, Any]] = {
    "gpt": GPT2,
    "gpt_untied_odd": MODELS["gpt_untied_odd"],
    "gpt_multi_query": {**GPT2, "num_query_groups": 1},
    "gpt_no_bias": MODELS["gpt_no_bias"],
    "gpt_moe": MODELS["gpt_moe"],
    "llama": LLAMA,
    "llama_tied_biased": {**MODELS["llama_tied"], "attention_bias": True, "mlp_bias": True},
    "llama_yarn": MODELS["llama_yarn"],
    "mistral": MODELS["mistral"],
    "qwen2": MODELS["qwen2"],
    "qwen2_windows": MODELS["qwen2_windows"],
    "qwen3": MODELS["qwen3"],
    "gemma2": FOUR_LAYERS["gemma2"],
    "gemma3": FOUR_LAYERS["gemma3"],
    "gemma4": FOUR_LAYERS["gemma4"],
    "gemma4_experts": FOUR_LAYERS["gemma4_experts"],
    **{name: FOUR_LAYERS[name] for name in HF_DENSE},
    "phi3_unscaled": {**LLAMA, "family": "phi3"},
    "granite_neutral": {**LLAMA, "family": "granite"},
    "minimax_m2": FOUR_LAYERS["minimax_m2"],
    "minimax_m3": {
        **FOUR_LAYERS["minimax_m3"],
        "sparse_attention_freq": "([0]*1+[1]*3)",
        "moe": {**FOUR_LAYERS["minimax_m3"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "ernie4_5_moe": {
        **FOUR_LAYERS["ernie4_5_moe"],
        "moe": {**FOUR_LAYERS["ernie4_5_moe"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "lfm2_moe": {
        **FOUR_LAYERS["lfm2_moe"],
        "conv_layer_pattern": "[1]*3+[0]*1",
        "moe": {**FOUR_LAYERS["lfm2_moe"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "hunyuan_v1_moe": FOUR_LAYERS["hunyuan_v1_moe"],
    **{
        name: {**FOUR_LAYERS[name], "moe": {**FOUR_LAYERS[name]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"}}
        for name in ("dots1", "exaone_moe")
    },
    "solar_open": FOUR_LAYERS["solar_open"],
    "llama4": FOUR_LAYERS["llama4"],
    "lfm2": {**FOUR_LAYERS["lfm2"], "conv_layer_pattern": "[1]*3+[0]*1"},
    "qwen_next": FOUR_LAYERS["qwen_next"],
    "deepseek_v4": {**FOUR_LAYERS["deepseek_v4"], "compress_ratios": [0, 2, 3, 2]},
    "kimi_linear": {
        **FOUR_LAYERS["kimi_linear"],
        "moe": {**FOUR_LAYERS["kimi_linear"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "muse_glimmer": FOUR_LAYERS["muse_glimmer"],
    "muse_spark": {
        **FOUR_LAYERS["muse_spark"],
        "moe": {**FOUR_LAYERS["muse_spark"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "inkling": {
        **FOUR_LAYERS["inkling"],
        "moe": {**FOUR_LAYERS["inkling"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "hy_v3": {
        **FOUR_LAYERS["hy_v3"],
        "moe": {**FOUR_LAYERS["hy_v3"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "qwen4_exp": FOUR_LAYERS["qwen4_exp"],
    "kimi_k3": {
        **FOUR_LAYERS["kimi_k3"],
        "moe": {**FOUR_LAYERS["kimi_k3"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "glm5_next": {
        **FOUR_LAYERS["glm5_next"],
        "moe": {**FOUR_LAYERS["glm5_next"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "bailing_hybrid": {
        **FOUR_LAYERS["bailing_hybrid"],
        "expert_swiglu_limits": [0.0, 0.0, 3.0, 4.0],
        "shared_expert_swiglu_limits": None,
        "moe": {**FOUR_LAYERS["bailing_hybrid"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "qwen_next_experts": {**FOUR_LAYERS["qwen_next_experts"], "linear_attention_freq": "[1,0,1,0]"},
    "olmo_hybrid": FOUR_LAYERS["olmo_hybrid"],
    "moe": {**LLAMA, "family": "mixtral", "moe": {"num_experts": 4}},
    "moe_shared": {**MODELS["qwen2_moe"], "moe": {**MODELS["qwen2_moe"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"}},
    "qwen3_moe": {**LLAMA, "family": "qwen_moe", "moe": {"num_experts": 4, "moe_ffn_hidden_size": 12}},
    "olmoe": {**FOUR_LAYERS["olmoe"], "moe": {"num_experts": 4, "moe_router_topk": 3}},
    "granite_moe": {**GRANITE, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "granite_moe_neutral": GRANITE,
    "gpt_oss": MODELS["gpt_oss"],
    "deepseek_v3": {
        **MODELS["deepseek_v3"],
        "moe": {**MODELS["deepseek_v3"]["moe"], "moe_shared_expert_intermediate_size": 24},
    },
    "latent_dense": MODELS["latent_dense"],
    **{name: {**model, "moe": {**model["moe"], "moe_layer_freq": "([0]*1+[1]*3)"}} for name, model in SPARSE.items()},
    "mamba": MODELS["mamba"],
    "rwkv7": FOUR_LAYERS["rwkv7"],
    "hybrid": {
        **MODELS["hybrid"],
        "hybrid_layer_pattern": "M-*-M-*-",
        "mamba_num_heads": 8,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "swiglu",
    },
    "hybrid_experts": {
        key: value for key, value in convert_cases.MODELS["nemotron_3"].items() if not key.startswith("mtp_")
    },
    "nemotron_3": convert_cases.MODELS["nemotron_3"],
    "granite_hybrid": {**convert_cases.MODELS["granite_hybrid"], "hybrid_layer_pattern": "ME*EMEME"},
    "falcon_h1": FOUR_LAYERS["falcon_h1"],
    "jamba": {**FOUR_LAYERS["jamba"], "moe": {**FOUR_LAYERS["jamba"]["moe"], "moe_layer_freq": "[0,1,0,1]"}},
    "mistral4": {
        **FOUR_LAYERS["mistral4"],
        "moe": {**FOUR_LAYERS["mistral4"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "mistral_large4": {**FOUR_LAYERS["mistral_large4"], "kv_source_layers": None},
    "longcat_flash": FOUR_LAYERS["longcat_flash"],
    "bert": MODELS["bert"],
    "bert_no_heads": MODELS["bert_no_heads"],
    "modernbert": FOUR_LAYERS["modernbert"],
    "bert_classification": {**MODELS["bert"], "family": "bert_classification"},
    "modernbert_classification": {**FOUR_LAYERS["modernbert"], "family": "modernbert_classification"},
    "bert_multiple_choice": {**MODELS["bert"], "family": "bert_multiple_choice"},
    "gpt_classification": {**GPT2, "family": "gpt_classification"},
    "gpt_multiple_choice": {**GPT2, "family": "gpt_multiple_choice"},
    "llama_classification": {**LLAMA, "family": "llama_classification"},
    "llama_multiple_choice": {**LLAMA, "family": "llama_multiple_choice"},
    "t5": FOUR_LAYERS["t5"],
    "t5_learned_positions": MODELS["t5"],
    "bart": FOUR_LAYERS["bart"],
    "biencoder": {**MODELS["bert"], "family": "biencoder"},
    "retro": {**MODELS["gpt"], "family": "retro", "retro_cross_attention_layers": [2, 4]},
    "vision": convert_cases.MODELS["vision"],
    "llava": convert_cases.MODELS["llava"],
    "smolvlm": {
        **convert_cases.MODELS["llava"],
        "family": "smolvlm",
        "scale_factor": 2,
        "vision_model": {**convert_cases.TOWER, "vision_model_type": "siglip", "add_pooler": False},
    },
    "internvl": {
        **convert_cases.MODELS["llava"],
        "family": "internvl",
        "vision_model": {**convert_cases.TOWER, "vision_model_type": "internvit"},
    },
    "qwen_vl": convert_cases.QWEN_VL,
    "qwen3_vl": convert_cases.QWEN3_VL,
    "qwen3_vl_experts": convert_cases.QWEN3_VL_EXPERTS,
    "qwen3_omni": convert_cases.QWEN3_OMNI,
    "qwen_next_vl": convert_cases.QWEN_NEXT_VL,
    "mistral3": convert_cases.MISTRAL3,
    "kimi_k25": convert_cases.KIMI_K25,
    "gemma4_vl": convert_cases.GEMMA4_VL,
    "gemma4_vl_experts": convert_cases.GEMMA4_VL_EXPERTS,
    "lfm3": {**FOUR_LAYERS["lfm3"], "layer_pattern": "CWGC"},
    "afmoe": {
        **FOUR_LAYERS["afmoe"],
        "window_attn_skip_freq": 4,
        "moe": {**FOUR_LAYERS["afmoe"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "minimax_m3_vl": convert_cases.MINIMAX_M3_VL,
    "hy_v4": {
        **FOUR_LAYERS["hy_v4"],
        "moe": {**FOUR_LAYERS["hy_v4"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "step3p7": {
        **FOUR_LAYERS["step3p7"],
        "window_attn_skip_freq": "[0,1,1,0]",
        "expert_swiglu_limits": [0.0, 0.0, 0.1, 0.0],
        "shared_expert_swiglu_limits": [0.3, 0.0, 0.2, 0.0],
        "moe": {**FOUR_LAYERS["step3p7"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
    "mimo_v2_flash": {
        **FOUR_LAYERS["mimo_v2_flash"],
        "window_attn_skip_freq": "[0,1,1,0]",
        "mtp_num_layers": 1,
        "moe": {**FOUR_LAYERS["mimo_v2_flash"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"},
    },
}
GLM4_EXPERTS = {**convert_cases.SIGMOID_EXPERTS, "moe_layer_freq": "([0]*1+[1]*3)"}
CASES["glm4_moe"] = {**CASES["qwen3_moe"], "add_qkv_bias": True, "moe": GLM4_EXPERTS, "mtp_num_layers": 1}
# Those whose round trips are without the prediction elsewhere.
CASES |= {
    name: {**CASES[name], "mtp_num_layers": 1}
    for name in ("exaone_moe", "bailing_hybrid", "glm5_next", "longcat_flash", "qwen4_exp")
}
NO_MEGATRON = {
    *(
        "gemma2",
        "gemma3",
        "olmoe",
        "granite_moe",
        "modernbert",
        "t5",
        "biencoder",
        "retro",
        "vision",
        "llava",
        "smolvlm",
        "internvl",
    ),
    *(
        "qwen_vl",
        *HF_DENSE,
        "minimax_m2",
        "llama4",
        "lfm2",
        "lfm3",
        "afmoe",
        "mimo_v2_flash",
        "step3p7",
        "hy_v4",
        "qwen_next",
        "qwen_next_experts",
        "olmo_hybrid",
        "bart",
    ),
    *("kimi_linear", "deepseek_v4", "gemma4", "gemma4_experts", "qwen3_vl", "qwen3_vl_experts", "qwen_next_vl"),
    "qwen3_omni",
    *("gemma4_vl", "gemma4_vl_experts", "modernbert", "rwkv7", "minimax_m3_vl"),
    *("nemotron_3", "granite_hybrid", "falcon_h1", "mistral4", "jamba", "mistral3", "kimi_k25", "minimax_m3"),
    *("hy_v3", "muse_glimmer", "muse_spark", "inkling", "qwen4_exp", "bailing_hybrid", "glm5_next", "kimi_k3"),
    *("ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "dots1", "solar_open", "exaone_moe", "glm4_moe"),
    *("mistral_large4", "longcat_flash"),
    *(name for name in CASES if name.endswith(("_classification", "_multiple_choice"))),
}
WITHOUT_PREDICTION = ("deepseek_v3", "qwen_next_experts", "nemotron_3")
"""Models that GGUF holds without their multi-token prediction (test_gguf_save.py)."""
UNABLE = {
    "hf": {
        *("gpt_no_bias", "gpt_moe", "bert_no_heads", "biencoder", "retro"),
        *("gpt_multiple_choice", "llama_multiple_choice"),
    },
    "gguf": set(CASES)
    - {
        *("gpt", "gpt_untied_odd", "gpt_multi_query", "llama", "llama_tied_biased", "llama_yarn", "qwen2", "qwen3"),
        *("granite", "granite_neutral", "moe", "qwen3_moe", "granite_moe", "granite_moe_neutral", "gpt_oss", "mamba"),
        *("gemma4", "gemma4_experts", "phi3_unscaled", "ministral3", "seed_oss", "ernie4_5", "hunyuan", "minimax_m2"),
        *("lfm2", "glm4_moe_lite", "mistral4", "kimi_linear", "qwen_next", "jamba", "falcon_h1", "hybrid_experts"),
        *("granite_hybrid", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "dots1", "deepseek_v32", "glm_5", "kimi_k3"),
        *("exaone_moe", "glm4_moe", "afmoe", "mimo_v2_flash", "hy_v3", "step3p7", "t5", "minimax_m3"),
        *("bailing_hybrid", "qwen_vl", "qwen3_vl", "qwen3_vl_experts", *WITHOUT_PREDICTION),
    },
    "megatron": NO_MEGATRON,
    "megatron-dist": NO_MEGATRON,
    "megatron-legacy": NO_MEGATRON
    | {
        *("gpt_moe", "qwen3", "moe", "moe_shared", "qwen3_moe", "granite_moe_neutral", "gpt_oss", "deepseek_v3"),
        *SPARSE,
        *("latent_dense", "mamba", "hybrid", "hybrid_experts", "bert_no_heads", "t5_learned_positions"),
    },
    "transformers-megatron": set(CASES) - {"gpt"},
    "meta": set(CASES) - {"llama"},
    "trtllm": set(CASES)
    - {"gpt", "gpt_untied_odd", "gpt_multi_query", "gpt_no_bias", "llama", "llama_tied_biased", "mistral"},
}
"""Format -> models that it has no words for."""
ROUNDED: dict[str, dict[str, tuple[str, ...]]] = {
    "gguf": {
        **dict.fromkeys(
            ("mamba", "jamba", "kimi_linear", "hybrid_experts", "granite_hybrid", "bailing_hybrid"), ("A_log",)
        ),
        "minimax_m3": ("layernorm.weight",),
        "qwen_next": ("A_log", "layernorm.weight"),
        "step3p7": ("layernorm.weight",),
    }
}
"""Format -> models that it has words for, and ends of the names of parameters that it holds as a function of ours,
which rounds: GGUF has -exp(A_log), and norms plus one. `test_what_is_rounded` has them; all else is compared bit for
bit."""
MULTIPLIED = {"gguf": {"falcon_h1", "kimi_k3", "t5", "qwen_vl", "qwen3_vl", "qwen3_vl_experts", *WITHOUT_PREDICTION}}
"""Format -> models whose matrices contain factors of the configuration, or of other parameters, in it, or of which it
has the decoder alone, so that what is read is another model with the same outputs (test_gguf_save.py)."""
UNCUT = ("t5", "t5_learned_positions", "gemma4", "gemma4_vl")
"""Models that are not cut into pipeline stages."""
WHOLE = ("mt", "hf")
NOT_VIRTUAL = ("transformers-megatron", "trtllm")
Layout = tuple[int, int, int]
LAYOUTS: tuple[Layout, ...] = ((4, 1, 1), (2, 2, 1), (2, 2, 2))
"""Tensor, pipeline and virtual pipeline parallel sizes. Four ranks are more than the two groups of queries that most of
the models have."""
Cut = tuple[str, Layout]
"""A format, and over which ranks its files are cut, as far as it has files for ranks."""


def options(cut: Cut, model: str) -> ConvertOptions:
    name, (tp, pp, vpp) = cut
    if name == "gguf":  # one file, of whole tensors
        return ConvertOptions()
    if name in WHOLE:
        return ConvertOptions(max_shard_size=60_000)
    if name == "meta":  # which has no padding: the vocabulary here is divided by no number of ranks
        return ConvertOptions()
    if name == "megatron-dist":  # is read under any layout
        return ConvertOptions(target_tensor_parallel_size=tp)
    staged = model not in UNCUT
    return ConvertOptions(
        target_tensor_parallel_size=tp,
        target_pipeline_parallel_size=pp if staged else 1,
        target_virtual_pipeline_parallel_size=vpp if staged and name not in NOT_VIRTUAL else 1,
        target_expert_parallel_size=2 if name == "megatron" and "moe" in CASES[model] else 1,
    )


def formats(host: PluginHost) -> list[str]:
    """What can be both read and written."""
    readable = {spec.name for spec in host[CHECKPOINT_LOADERS]}
    return [spec.name for spec in host[CHECKPOINT_SAVERS] if spec.convert is not None and spec.name in readable]


def exact_formats(model: str, host: PluginHost) -> list[str]:
    """What holds every bit of the model."""
    inexact = (UNABLE, ROUNDED, MULTIPLIED)
    return [name for name in formats(host) if not any(model in kind.get(name, ()) for kind in inexact)]


def one_layout_a_pair(names: list[str], model: str) -> Iterable[tuple[Cut, Cut]]:
    """Each format into each, the layouts in turn."""
    for (i, first), (j, second) in product(enumerate(names), repeat=2):
        yield (first, LAYOUTS[(i + j) % 3]), (second, LAYOUTS[(i + j + 1) % 3])


def each_format_once(names: list[str], model: str) -> Iterable[tuple[Cut, Cut]]:
    """Each format read once and written once, each model's into another one; the layouts in turn."""
    number = list(CASES).index(model)
    for i, first in enumerate(names):
        second = names[(i + number) % len(names)]
        yield (first, LAYOUTS[(i + number) % 3]), (second, LAYOUTS[(i + number + 1) % 3])


def every_layout(names: list[str], model: str) -> Iterable[tuple[Cut, Cut]]:
    """Each format under each layout into each other one under each."""
    cuts = {(name, repr(options((name, layout), model))): (name, layout) for name in names for layout in LAYOUTS}
    return product(cuts.values(), repeat=2)


class Sources:
    """The model with random weights, written by the savers without a conversion, once under each layout."""

    def __init__(self, model: str, host: PluginHost, folder: Path) -> None:
        self.model, self.host, self.folder = model, host, folder
        self.random = RandomCheckpoint(CASES[model], host)
        self._written: dict[Cut, Path] = {}

    def path(self, cut: Cut) -> Path:
        if cut not in self._written:
            path = self.folder / f"source-{len(self._written)}"
            write = self.host[CHECKPOINT_SAVERS].get(cut[0]).convert.load()
            write(path, self.random, options(cut, self.model), self.host)
            self._written[cut] = path
        return self._written[cut]


def opened(path: Path, name: str, host: PluginHost) -> CheckpointReader:
    return open_with(host[CHECKPOINT_LOADERS].get(name), path, host)


def model_of(reader: CheckpointReader) -> State:
    return {name: tensor for name, tensor in tensors_of(reader).items() if name.startswith("model.")}


def test_every_family_is_here(host) -> None:
    given_by_programs = {PLAIN_MODULE}
    assert {model["family"] for model in CASES.values()} == {
        spec.name for spec in host[specs.MODELS]
    } - given_by_programs


IN_EVERY_PAIR = ("gpt", "llama")
"""Models of which the default suite converts each format into each: those that all formats can hold."""


def draws() -> Iterator[object]:
    for model in CASES:
        default = one_layout_a_pair if model in IN_EVERY_PAIR else each_format_once
        # What differs between models of these few formats are the names in Hugging Face's files, which tests of the
        # families compare as well.
        usual = pytest.mark.long if model in NO_MEGATRON & UNABLE["gguf"] else ()
        for drawn in (each_format_once, one_layout_a_pair, every_layout):
            yield pytest.param(model, drawn, marks=usual if drawn is default else EXHAUSTIVE)


@pytest.mark.parametrize(("model", "drawn"), list(draws()))
def test_every_pair_of_formats_and_layouts(model: str, drawn: Callable, host, tmp_path: Path) -> None:
    sources = Sources(model, host, tmp_path)
    able = exact_formats(model, host)
    for number, (first, second) in enumerate(drawn(able, model)):
        path, asked = tmp_path / f"converted-{number}", options(second, model)
        convert(sources.path(first), path, loader=first[0], saver=second[0], options=asked, host=host)
        assert_same_state(model_of(opened(path, second[0], host)), sources.random.tensors)


def test_parts_of_a_published_model_that_are_not_read_are_named(host, tmp_path: Path) -> None:
    folder = tmp_path / "in one file"
    convert(Sources("minimax_m3", host, tmp_path).path(("mt", LAYOUTS[0])), folder, loader="mt", saver="hf", host=host)
    (folder / CHECKSUMS).unlink()
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2, 3), "mtp.norm.weight": torch.zeros(3)}, file)
    assert opened(folder, "hf", host).left_out == {"mtp.*": 2}
    report = convert(folder, tmp_path / "mt", loader="hf", saver="mt", host=host)
    assert "mtp.*" in report.left_out
    assert any(line.startswith("left out") and "mtp.*" in line for line in describe(report, "mt", dry_run=False))


def test_a_check_counts_the_layers_of_prediction_that_tensors_have(host, tmp_path: Path) -> None:
    folder = Sources("exaone_moe", host, tmp_path).path(("hf", LAYOUTS[0]))
    (folder / CHECKSUMS).unlink()
    config = json.loads((folder / "config.json").read_text())
    counted = {key: value for key, value in config.items() if key not in ("num_nextn_predict_layers", "mtp_num_layers")}
    (folder / "config.json").write_text(json.dumps(counted))
    report = convert(folder, tmp_path / "mt", loader="hf", saver="mt", host=host)
    assert check_model(folder, host).parameters == report.num_parameters


def predicting_folder(host, tmp_path: Path, model: str = "glm4_moe") -> tuple[Path, Path, str]:
    """A folder of Hugging Face, its file, and the prefix of its first layer of prediction."""
    folder = tmp_path / model
    # In one file.
    convert(Sources(model, host, tmp_path).path(("mt", LAYOUTS[0])), folder, loader="mt", saver="hf", host=host)
    (folder / CHECKSUMS).unlink()
    (file,) = folder.glob("*.safetensors")
    return folder, file, f"model.layers.{CASES[model]['num_layers']}."


def test_a_count_of_layers_that_files_have_not_is_named(host, tmp_path: Path) -> None:
    folder, file, predicted = predicting_folder(host, tmp_path)
    save_file({name: x for name, x in load_file(file).items() if not name.startswith(predicted)}, file)
    report = convert(folder, tmp_path / "mt", loader="hf", saver="mt", dry_run=True, host=host)
    (line,) = report.notes
    assert line.startswith("config.json: num_nextn_predict_layers=1, and the files have tensors of 0 such layers")
    assert line in describe(report, "mt", dry_run=True)


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_is_left_out_is_named_where_it_differs(host, tmp_path: Path, differs: bool) -> None:
    folder, file, predicted = predicting_folder(host, tmp_path)
    tensors = load_file(file)
    tensors[f"{predicted}shared_head.head.weight"] = tensors["lm_head.weight"] + (1.0 if differs else 0.0)
    tensors[f"{predicted}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    report = convert(folder, tmp_path / "mt", loader="hf", saver="mt", dry_run=True, host=host)
    words = "left out, though it differs from lm_head.weight, which is used in its place: "
    assert report.notes == ((f"{words}{predicted}shared_head.head.weight",) if differs else ())


def test_the_refusal_of_a_repeated_head_that_differs_says_what_the_model_has(host, tmp_path: Path) -> None:
    """Breaks where it names tied embeddings, which a head within a layer of prediction has nothing to do with."""
    folder, file, predicted = predicting_folder(host, tmp_path, "deepseek_v3")
    tensors, repeated = load_file(file), f"{predicted}shared_head.head.weight"
    save_file({**tensors, repeated: tensors["lm_head.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="repeats lm_head.weight, which the model has once") as refusal:
        convert(folder, tmp_path / "mt", loader="hf", saver="mt", host=host)
    assert repeated in str(refusal.value)
    assert "tie_word_embeddings" not in str(refusal.value)
    save_file(tensors, file)
    convert(folder, tmp_path / "mt", loader="hf", saver="mt", host=host)


def test_a_table_of_integers_goes_from_hugging_face_to_hugging_face(host, tmp_path: Path) -> None:
    """DeepSeek-V4's experts of each token: int64 there, fp32 in the model."""
    sources = Sources("deepseek_v4", host, tmp_path)
    asked = options(("hf", LAYOUTS[0]), "deepseek_v4")
    convert(sources.path(("hf", LAYOUTS[0])), tmp_path / "copy", loader="hf", saver="hf", options=asked, host=host)
    assert_same_state(model_of(opened(tmp_path / "copy", "hf", host)), sources.random.tensors)


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, models in ROUNDED.items() for model in models])
def test_what_is_rounded(name: str, model: str, host, tmp_path: Path) -> None:
    """Only the parameters of that function, each by what the roundings of exp and of its inverse are together."""
    sources = Sources(model, host, tmp_path)
    read = model_of(opened(sources.path((name, LAYOUTS[0])), name, host))
    rounded = {parameter for parameter in read if parameter.endswith(ROUNDED[name][model])}
    assert rounded
    for parameter in rounded:
        found, given = read.pop(parameter), sources.random.tensors[parameter]
        torch.testing.assert_close(found, given, rtol=2**-23, atol=2**-23)
    exact = {parameter: value for parameter, value in sources.random.tensors.items() if parameter not in rounded}
    assert_same_state(read, exact)


@pytest.mark.parametrize("model", [name for name in CASES if name not in UNABLE["trtllm"]])
def test_every_format_into_what_is_only_written(model: str, host, tmp_path: Path) -> None:
    """The same bytes whatever the source; test_convert_trtllm.py says that they are the right ones."""
    sources = Sources(model, host, tmp_path)
    able = exact_formats(model, host)
    asked = ConvertOptions(target_tensor_parallel_size=4, target_pipeline_parallel_size=2)
    host[CHECKPOINT_SAVERS].get("trtllm").convert.load()(tmp_path / "expected", sources.random, asked, host)
    for name, layout in zip(able, cycle(LAYOUTS), strict=False):
        path = tmp_path / f"from-{name}"
        convert(sources.path((name, layout)), path, loader=name, saver="trtllm", options=asked, host=host)
        for rank in range(8):
            file = f"rank{rank}.safetensors"
            assert_same_state(load_file(path / file), load_file(tmp_path / "expected" / file))


@pytest.mark.parametrize("model", CASES)
def test_formats_without_words_for_a_model_refuse_it(model: str, host, tmp_path: Path) -> None:
    sources = Sources(model, host, tmp_path)
    for name in [*formats(host), "trtllm"]:
        if model in UNABLE.get(name, ()):
            kinds = (ConfigError, CheckpointError) if name == "megatron-legacy" else ConfigError
            with pytest.raises(kinds):
                sources.path((name, LAYOUTS[0]))
            assert not list(tmp_path.iterdir())


GIVEN = {
    "meta-llama": LLAMA,
    "meta-mistral": {**LLAMA, "family": "mistral"},
    **{f"gguf-{name}": model for name, (model, _) in GGUF_MODELS.items()},
}


@pytest.mark.parametrize("given", GIVEN)
def test_from_files_of_other_programs(given: str, make_model, host, tmp_path: Path) -> None:
    """Files as other programs write them, in formats that savers here may have, too."""
    first, _, kind = given.partition("-")
    keys = {**GIVEN[given], "num_layers": 4, "norm_epsilon": 1e-5}
    original = tensors_of(native.open_checkpoint(make_model(**keys)))
    if first == "gguf":
        convert(tmp_path / "source", tmp_path / "plain", saver="hf", host=host)
        to_gguf(tmp_path / "plain", tmp_path / "given" / "m.gguf", GGUF_MODELS[kind][1], keys)
    elif kind == "mistral":
        write_mistral(tmp_path / "given", original)
    else:
        write_meta(tmp_path / "given", original)
    unable = {"megatron-legacy"} if kind == "qwen3" else set()
    unable |= set() if kind.startswith("llama") else {"meta"}
    for second in set(formats(host)) - {"transformers-megatron"} - unable:
        path, asked = tmp_path / second, options((second, LAYOUTS[2]), "llama")
        convert(tmp_path / "given", path, loader=first, saver=second, options=asked, host=host)
        assert_same_state(model_of(opened(path, second, host)), original)


SHAPE = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 101, "norm_eps": 1e-5, "rope_theta": 10000.0}


def write_meta(folder: Path, tensors: State) -> None:
    """A Llama in the files of two ranks."""
    params = {**SHAPE, "n_layers": num_layers(tensors), "multiple_of": 16}
    write(folder, metas_state(tensors), params, ranks=2, embedding_dim=1)


def write_mistral(folder: Path, tensors: State) -> None:
    """Mistral's own file, which has Meta's names and order of channels."""
    folder.mkdir()
    save_file(metas_state(tensors), folder / "consolidated.safetensors")
    params = {**SHAPE, "n_layers": num_layers(tensors), "head_dim": 8, "hidden_dim": 48}
    (folder / "params.json").write_text(json.dumps(params))


def num_layers(tensors: State) -> int:
    return sum(name.endswith("linear_qkv.weight") for name in tensors)


def metas_state(tensors: State) -> State:
    """The same Llama under Meta's names, queries and keys in Meta's order of channels."""
    state = {
        "tok_embeddings.weight": tensors["model.embedding.word_embeddings.weight"],
        "norm.weight": tensors["model.decoder.final_layernorm.weight"],
        "output.weight": tensors["model.output_layer.weight"],
    }
    for i in range(num_layers(tensors)):
        ours, theirs = f"model.decoder.layers.{i}.", f"layers.{i}."
        q, k, v = tensors[f"{ours}self_attention.linear_qkv.weight"].unflatten(0, (2, 4, 8)).split([2, 1, 1], dim=1)
        gate, up = tensors[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        state |= {
            f"{theirs}attention.wq.weight": metas_order(q.reshape(32, 32)),
            f"{theirs}attention.wk.weight": metas_order(k.reshape(16, 32)),
            f"{theirs}attention.wv.weight": v.reshape(16, 32),
            f"{theirs}attention.wo.weight": tensors[f"{ours}self_attention.linear_proj.weight"],
            f"{theirs}feed_forward.w1.weight": gate,
            f"{theirs}feed_forward.w3.weight": up,
            f"{theirs}feed_forward.w2.weight": tensors[f"{ours}mlp.linear_fc2.weight"],
            f"{theirs}attention_norm.weight": tensors[f"{ours}input_layernorm.weight"],
            f"{theirs}ffn_norm.weight": tensors[f"{ours}pre_mlp_layernorm.weight"],
        }
    return {name: tensor.contiguous() for name, tensor in state.items()}


def metas_order(rows: torch.Tensor) -> torch.Tensor:
    """Channel i of the first half of a head of 8, and of the second, beside one another."""
    return rows.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
