"""What mt-ckpt registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mt_ckpt.variant_specs import VARIANTS
from mt_core.checkpoint_specs import CheckpointLoaderSpec, CheckpointSaverSpec
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy
from mt_core.specs import CallbackSpec, CommandSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [VARIANTS]


@hookimpl
def mt_register_checkpoint_loaders() -> list[CheckpointLoaderSpec]:
    return [
        CheckpointLoaderSpec(
            name="mt",
            doc="mt's own format: safetensors shards, JSON and checksums in one directory",
            detect=Lazy("mt_ckpt.native.manifest:detect"),
            open=Lazy("mt_ckpt.native.read:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="hf",
            aliases=("llama_mistral", "mixtral_hf"),
            doc="Hugging Face: safetensors or .bin files with config.json, whole or in shards",
            detect=Lazy("mt_ckpt.hugging_face.reader:detect"),
            open=Lazy("mt_ckpt.hugging_face.reader:open_checkpoint"),
            open_module=Lazy("mt_ckpt.hugging_face.reader:read_module"),
            check_config=Lazy("mt_ckpt.quantized.methods:scheme_of"),
        ),
        CheckpointLoaderSpec(
            name="meta",
            aliases=("llama_mistral",),
            doc="consolidated weights with params.json: Llama from Meta, Mistral's own layout",
            detect=Lazy("mt_ckpt.meta.reader:detect"),
            open=Lazy("mt_ckpt.meta.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="gguf",
            doc="GGUF files of llama.cpp, of all its types; quantized weights are dequantized",
            detect=Lazy("mt_ckpt.gguf.reader:detect"),
            open=Lazy("mt_ckpt.gguf.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="dcp",
            doc="torch.distributed.checkpoint with the names of torchtitan, OLMo-core or Hugging Face; needs a config",
            detect=Lazy("mt_ckpt.dcp.reader:detect"),
            open=Lazy("mt_ckpt.dcp.reader:open_checkpoint"),
            open_described=Lazy("mt_ckpt.dcp.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="transformers-megatron",
            doc="GPT-2 from the reshaping tool for Accelerate's Megatron-LM plugin",
            detect=Lazy("mt_ckpt.transformers_megatron.reader:detect"),
            open=Lazy("mt_ckpt.transformers_megatron.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="megatron",
            aliases=("core", "mcore", "torch"),
            doc="Megatron-Core, torch format: a file for each tensor, pipeline and expert rank",
            detect=Lazy("mt_ckpt.megatron.folder:detect"),
            open=Lazy("mt_ckpt.megatron.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="megatron-dist",
            aliases=("torch_dist",),
            doc="Megatron-Core, torch_dist format: a distributed checkpoint, optimizer included",
            detect=Lazy("mt_ckpt.megatron_dist.index:detect"),
            open=Lazy("mt_ckpt.megatron_dist.reader:open_checkpoint"),
        ),
        CheckpointLoaderSpec(
            name="megatron-legacy",
            aliases=("legacy",),
            doc="Megatron-LM before Megatron-Core: GPT and BERT, checkpoint versions 0 to 3",
            detect=Lazy("mt_ckpt.megatron.folder:detect_legacy"),
            open=Lazy("mt_ckpt.megatron_legacy.reader:open_checkpoint"),
        ),
    ]


@hookimpl
def mt_register_checkpoint_savers() -> list[CheckpointSaverSpec]:
    return [
        CheckpointSaverSpec(
            name="mt",
            doc="mt's own format, staged, synced and renamed into place",
            save=Lazy("mt_ckpt.native.save:save_checkpoint"),
            save_sharded=Lazy("mt_ckpt.native.save:ShardedSave"),
            convert=Lazy("mt_ckpt.native.convert:convert_checkpoint"),
            plan=Lazy("mt_ckpt.native.convert:plan_files"),
            converts_to_addresses=True,
        ),
        CheckpointSaverSpec(
            name="hf",
            aliases=("llama_mistral", "mixtral_hf"),
            doc="Hugging Face: safetensors in shards, config.json and tokenizer files, for from_pretrained",
            convert=Lazy("mt_ckpt.hugging_face.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.hugging_face.tokenizer:takes_file"),
            plan=Lazy("mt_ckpt.hugging_face.save:plan_files"),
            converts_to_addresses=True,
        ),
        CheckpointSaverSpec(
            name="gguf",
            doc="One GGUF file for llama.cpp, quantized by --quantize, with tokenizer and chat template",
            convert=Lazy("mt_ckpt.gguf.save:convert_checkpoint"),
        ),
        CheckpointSaverSpec(
            name="meta",
            aliases=("llama_mistral",),
            doc="Llama as Meta publishes it: params.json and a consolidated.NN.pth for each model-parallel rank",
            convert=Lazy("mt_ckpt.meta.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.meta.save:takes_file"),
        ),
        CheckpointSaverSpec(
            name="trtllm",
            doc="TensorRT-LLM: config.json and a safetensors file for each rank, of GPT and Llama models",
            convert=Lazy("mt_ckpt.trtllm.save:convert_checkpoint"),
        ),
        CheckpointSaverSpec(
            name="onnx",
            doc="ONNX: the encoders of BERT and biencoders as graphs, for onnxruntime and others",
            convert=Lazy("mt_ckpt.onnx.save:convert_checkpoint"),
        ),
        CheckpointSaverSpec(
            name="transformers-megatron",
            doc="GPT-2 for Accelerate's Megatron-LM plugin, as the reshaping tool writes it",
            convert=Lazy("mt_ckpt.transformers_megatron.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.megatron.save:takes_file"),
        ),
        CheckpointSaverSpec(
            name="megatron",
            aliases=("core", "mcore", "torch"),
            doc="Megatron-Core, torch format, for any tensor, pipeline and expert parallel sizes",
            convert=Lazy("mt_ckpt.megatron.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.megatron.save:takes_file"),
            plan=Lazy("mt_ckpt.megatron.save:plan_files"),
            require_strict_names=Lazy("mt_ckpt.megatron.save:require_strict_names"),
        ),
        CheckpointSaverSpec(
            name="megatron-dist",
            aliases=("torch_dist",),
            doc="Megatron-Core, torch_dist format, with an optimizer for any layout or in flat buckets",
            convert=Lazy("mt_ckpt.megatron_dist.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.megatron.save:takes_file"),
            plan=Lazy("mt_ckpt.megatron_dist.save:plan_files"),
            require_strict_names=Lazy("mt_ckpt.megatron_dist.save:require_strict_names"),
        ),
        CheckpointSaverSpec(
            name="megatron-legacy",
            aliases=("legacy",),
            doc="Megatron-LM's names from before Megatron-Core",
            convert=Lazy("mt_ckpt.megatron_legacy.save:convert_checkpoint"),
            takes_file=Lazy("mt_ckpt.megatron.save:takes_file"),
            plan=Lazy("mt_ckpt.megatron_legacy.save:plan_files"),
        ),
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="hf_export",
            doc="Hugging Face folders beside checkpoints, every checkpoint.save_hf_interval steps",
            build=Lazy("mt_ckpt.convert.export:build_export"),
            always=True,
        )
    ]


@hookimpl
def mt_check_config(config: Config, host: PluginHost) -> None:
    if config.checkpoint.save_hf_interval is not None:
        from mt_ckpt.hugging_face.variants import family_of_config

        family_of_config(config, host)


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="ckpt", doc="Inspect, verify, compare and thin out checkpoints", app=Lazy("mt_ckpt.commands.ckpt:app")
        ),
        CommandSpec(
            name="imatrix",
            doc="Collect an importance matrix for quantization to GGUF",
            app=Lazy("mt_ckpt.commands.imatrix:imatrix"),
        ),
        CommandSpec(
            name="convert", doc="Convert a checkpoint to another format", app=Lazy("mt_ckpt.commands.convert:convert")
        ),
    ]
