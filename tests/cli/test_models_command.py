"""`mt models`: counts compared with formulas and with what the papers say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.models.published_configs import SMOLLM2_135M

from mt_cli import main
from mt_cli.presets import part_of
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, load_plugins
from mt_core.specs import MODELS, TOKENIZERS, ModelSpec


def gpt2_parameters(layers: int, hidden: int, positions: int, vocab: int) -> int:
    """Biases everywhere, tied output: 12 h^2 + 13 h a layer, two final norm vectors, two embeddings."""
    return layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + (vocab + positions) * hidden


def tiny_parameters(layers: int, hidden: int, ffn: int, vocab: int) -> int:
    """No biases, RMSNorm, gated feed-forward, rotary positions, tied output."""
    return layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + hidden + vocab * hidden


def test_counts_are_exact(mt) -> None:
    found = json.loads(mt("models", "gpt", "--json").out)
    sizes = {preset["name"]: preset["size"]["total"] for preset in found["presets"]}
    assert sizes["gpt2-124m"] == gpt2_parameters(12, 768, 1024, 50257) == 124_439_808
    assert sizes["gpt2-1.5b"] == gpt2_parameters(48, 1600, 1024, 50257) == 1_557_611_200
    assert sizes["gpt3-175b"] == gpt2_parameters(96, 12288, 2048, 50257)
    tiny = next(preset for preset in found["presets"] if preset["name"] == "gpt-tiny")
    assert tiny["size"]["total"] == tiny_parameters(4, 128, 320, tiny["size"]["vocab_size"])
    assert sum(tiny["size"]["parts"].values()) == tiny["size"]["total"]


def test_a_preset_without_vocabulary_takes_the_tokenizers(mt) -> None:
    (tiny,) = json.loads(mt("models", "gpt-tiny", "--json").out)["presets"]
    assert "vocab_size" not in tiny["values"]["model"]
    host = load_plugins()
    spec = host[TOKENIZERS].get("ByteLevelTokenizer")
    tokenizer = spec.build.load()(spec.config_type.load()())
    assert tiny["size"]["vocab_size"] == tokenizer.vocab_size


@pytest.mark.long
@pytest.mark.slow
def test_the_table(mt) -> None:
    lines = mt("models").lines
    assert ["gpt2-124m", "124,439,808", "12", "768", "12", "1024"] in lines
    presets = {name for spec in load_plugins()[MODELS] for name in spec.presets.load()}
    assert presets <= {line[0] for line in lines if line}


def test_one_preset(mt) -> None:
    outcome = mt("models", "gpt2-124m")
    assert ["embedding.word_embeddings", "38,597,376", "31.0%"] in outcome.lines
    assert ["model.num_layers", "12"] in outcome.lines
    assert outcome.lines[-1] == ["mt", "train", "--preset", "gpt2-124m", "--set", "train.train_iters=1000"]


def test_an_unknown_name(mt) -> None:
    outcome = mt("models", "gpt2-124")
    assert outcome.code == 2
    assert outcome.err == ('error: gpt2-124 is no installed model family and no preset (did you mean "gpt2-124m"?)\n')


def test_without_torch_nothing_is_counted(mt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_cli.presets.find_spec", lambda name: None)
    outcome = mt("models", "gpt")
    assert ["gpt2-124m", "-", "12", "768", "12", "1024"] in outcome.lines
    assert 'Not counted: torch is missing (pip install "mt-core[train]")' in outcome.out


def family(name: str, presets: str) -> type:
    spec = ModelSpec(name=name, doc="of a test", config_type=Lazy("a:b"), build=Lazy("a:b"), presets=Lazy(presets))
    return type("Module", (), {"mt_register_models": staticmethod(hookimpl(lambda: [spec]))})


PRESETS = {"small": {"model": {"num_layers": 3}}}


def test_what_is_wrong_with_one_family_hides_no_other(mt, monkeypatch: pytest.MonkeyPatch) -> None:
    host = load_plugins()
    broken = {"gone": "a_module_that_is_not_there:PRESETS", "a": f"{__name__}:PRESETS", "b": f"{__name__}:PRESETS"}
    for name, presets in broken.items():
        host.add(family(name, presets), Plugin(name, "m", f"dist-{name}", "1.0"))
    host.add(family("c", f"{__name__}:OTHERS"), Plugin("c", "m", "dist-c", "1.0"))
    few = {"gpt", "c", *broken}  # all are counted in test_the_table
    host[MODELS].registrations = [one for one in host[MODELS].registrations if one.spec.name in few]
    monkeypatch.setattr(main, "load_plugins", lambda **_: host)
    outcome = mt("models")
    assert outcome.code == 0
    assert ["gpt2-124m", "124,439,808", "12", "768", "12", "1024"] in outcome.lines
    assert ["huge", "-", "-", "-", "-", "-"] in outcome.lines
    assert "Not counted: huge: ModuleNotFoundError: No module named 'a'" in outcome.out
    assert 'plugin "gone" (dist-gone 1.0) cannot give its presets: ModuleNotFoundError' in outcome.out
    assert 'preset small is brought by plugin "a" (dist-a 1.0) and plugin "b" (dist-b 1.0)' in outcome.out


OTHERS: dict[str, dict[str, dict[str, int]]] = {"huge": {"model": {}}}


def test_parts_gather_layers() -> None:
    assert part_of("decoder.layers.31.mlp.linear_fc1.weight") == "decoder.layers.*.mlp"
    assert part_of("embedding.word_embeddings.weight") == "embedding.word_embeddings"
    assert part_of("output_layer.weight") == "output_layer"


# -- the printed hint -----------------------------------------------------------------------------------


def hint(mt, name: str) -> tuple[list[str], list[str]]:
    """The words of the command that `mt models NAME` prints, and what it says is lacking."""
    lines = mt("models", name).out.splitlines()
    (command,) = [line for line in lines if line.startswith("mt train ")]
    return command.split()[1:], [line for line in lines if "but first: " in line]


def test_the_hint_of_the_smallest_preset_is_whole(mt) -> None:
    assert hint(mt, "gpt-tiny") == (["train", "--preset", "gpt-tiny"], [])


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3.2-1b", "mamba2-130m", "olmoe-1b-7b"])
def test_a_printed_command_trains(mt, name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for the size of the model and the length of the run."""
    command, lacks = hint(mt, name)
    assert lacks == []
    assert "train.train_iters=1000" in command
    small = ["model.num_layers=1", "model.hidden_size=64", "model.vocab_size=512", "data.seq_length=32"]
    small += [] if "mamba" in name else ["model.num_attention_heads=2"]
    small += ["model.num_query_groups=2", "model.kv_channels=32"] if "llama" in name else []
    small += ["model.mamba_head_dim=32"] if "mamba" in name else []
    small += (
        ["model.num_query_groups=2", "model.moe.num_experts=2", "model.moe.moe_router_topk=1"]
        if "olmoe" in name
        else []
    )
    short = ["train.train_iters=1", "train.eval_iters=1", "train.sample_prompt=null", "train.micro_batch_size=1"]
    quick = ["data.corpus_bytes=1000000", "logging.progress=none", "checkpoint.save_interval=null", *short]
    settings = [part for text in (*small, *quick) for part in ("--set", text)]
    assert mt(*command, *settings, "--run-dir", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert-base-uncased", "data.dataset_type=builtin gives no tokentype_ids and padding_mask"),
        ("t5-small", "data.dataset_type=builtin gives no encoder_tokens and decoder_tokens"),
        ("retro-172m", "data."),
        ("ict-base", "data."),
        ("clip-vit-base-patch32", "data.dataset_type=builtin gives no images"),
    ],
)
def test_a_hint_that_is_not_whole_names_the_keys(mt, name: str, key: str) -> None:
    _, lacks = hint(mt, name)
    assert lacks
    assert key in lacks[0]


# -- mt models check ------------------------------------------------------------------------------------


def saved_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMOLLM2_135M, **changes}))
    return folder


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {**HEADS, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 12, "vocab_size": 11}


def small_tensors() -> dict[str, torch.Tensor]:
    """Those of a tied Llama of these sizes."""
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    shapes |= {f"{layer}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (8 if name in "qo" else 4, 8) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (8, 12)}
    return {name: torch.zeros(size) for name, size in shapes.items()}


def test_a_published_config_is_taken(mt, tmp_path: Path) -> None:
    found = json.loads(mt("models", "check", saved_config(tmp_path) / "config.json", "--json").out)
    assert found["taken"]
    assert (found["family"], found["parameters"], found["tensors"]) == ("llama", 134_515_008, None)


def test_each_field_that_is_refused_is_named_with_its_reason(mt, tmp_path: Path) -> None:
    folder = saved_config(tmp_path, attention_sink_size=4, hidden_act="relu", rope_interleaved=True)
    outcome = mt("models", "check", folder, "--json")
    problems = json.loads(outcome.out)["problems"]
    assert outcome.code == 1
    assert [problem["names"] for problem in problems] == [["attention_sink_size"], ["hidden_act"], ["rope_interleaved"]]
    assert "hidden_act='relu' is not supported" in problems[1]["why"]
    assert "not taken" in mt("models", "check", folder).out


def test_a_type_of_no_family_and_a_folder_without_a_config(mt, tmp_path: Path) -> None:
    outcome = mt("models", "check", saved_config(tmp_path, model_type="reformer"), "--json")
    (problem,) = json.loads(outcome.out)["problems"]
    assert problem["names"] == ["model_type"]
    assert "known are " in problem["why"]
    assert mt("models", "check", tmp_path / "nothing").code == 2
    assert mt("models", "gpt", tmp_path).code == 2


def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(mt, tmp_path: Path) -> None:
    folder, tensors = saved_config(tmp_path, **SMALL), small_tensors()
    save_file(tensors, folder / "model.safetensors")
    assert "tensors, all used" in mt("models", "check", folder).out
    quantized = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "quantized.json").write_text(json.dumps(quantized))
    assert "quantized by fp8" in mt("models", "check", tmp_path / "quantized.json").out
    save_file({**tensors, "model.norm.weight": torch.zeros(7)}, folder / "model.safetensors")
    (problem,) = json.loads(mt("models", "check", folder, "--json").out)["problems"]
    assert problem["names"] == ["decoder.final_layernorm.weight"]
    del tensors["model.norm.weight"]
    save_file({**tensors, "model.extra": torch.zeros(1)}, folder / "model.safetensors")
    (problem,) = json.loads(mt("models", "check", folder, "--json").out)["problems"]
    assert problem["names"] == ["model.norm.weight", "model.extra"]


@pytest.mark.parametrize(("architecture", "outputs"), [("Sequence", 1), ("Token", 3)])
def test_a_head_of_scores_is_taken_and_counted_in_place_of_the_lm_head(mt, tmp_path, architecture, outputs) -> None:
    """Breaks where the folder is checked against the model of its [model] section alone, which has an LM head."""
    names = {str(number): f"LABEL_{number}" for number in range(outputs)}
    labels = {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    architectures = [f"LlamaFor{architecture}Classification"]
    folder = saved_config(tmp_path, **SMALL, **labels, architectures=architectures, tie_word_embeddings=False)
    tensors = {**small_tensors(), "score.weight": torch.zeros(outputs, 8)}
    if architecture == "Token":
        tensors["score.bias"] = torch.zeros(outputs)
    save_file(tensors, folder / "model.safetensors")
    checked = json.loads(mt("models", "check", folder, "--json").out)
    assert checked["problems"] == []
    assert checked["parameters"] == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("size", [10**12, 10**30])
def test_sizes_that_no_tensor_has_are_said(mt, tmp_path, size: int) -> None:
    published = {"model_type": "llama", "hidden_size": 8 * size, "num_attention_heads": 4, "num_hidden_layers": 1}
    published |= {"head_dim": 8, "intermediate_size": size, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(published))
    outcome = mt("models", "check", tmp_path / "config.json", "--json")
    assert outcome.code == 1
    assert "its sizes make no tensors" in json.loads(outcome.out)["problems"][0]["why"]


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config", "quant_method='hqq' .* can be awq, "),
        ({"compression_config": {"quant_method": "none"}}, "compression_config", "'none' is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": 16}},
            "quantization_config",
            "weight_block_size=16 is not a number of rows and one of columns",
        ),
        ({"model_type": ["qwen3_vl"]}, "model_type", r"model_type=\"?\['qwen3_vl'\]\"? is "),
        ({"architectures": 5}, "architectures", "architectures=5 is not supported; it can be a list of names"),
        ({"architectures": [None]}, "architectures", r"architectures=\[None\] is not supported"),
        ({"text_config": [1]}, "text_config", r"text_config=\[1\] is not supported; it can be a JSON object"),
        (
            {"vision_config": "small"},
            "vision_config",
            "vision_config='small' is not supported; it can be a JSON object",
        ),
        ({"vision_config": None}, "vision_config", "vision_config=null stands for the defaults .*can be a JSON object"),
    ],
)
def test_parts_and_ways_of_storing_that_are_not_read_are_named(mt, tmp_path, changes, field, sentence) -> None:
    """`mt convert` says the same of a folder."""
    text = {"model_type": "qwen3_vl_text", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 24, "out_hidden_size": 32}
    vision["deepstack_visual_indexes"] = []
    published = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert mt("models", "check", tmp_path / "config.json").code == 0
    (tmp_path / "config.json").write_text(json.dumps({**published, **changes}))
    outcome = mt("models", "check", tmp_path / "config.json", "--json")
    (problem,) = json.loads(outcome.out)["problems"]
    assert outcome.code == 1
    assert re.search(sentence, problem["why"])
    assert field in problem["names"]
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    outcome = mt("convert", "--load-dir", tmp_path, "--save-dir", tmp_path / "out", "--saver", "mt")
    assert outcome.code == 2
    assert re.search(sentence, outcome.err)
