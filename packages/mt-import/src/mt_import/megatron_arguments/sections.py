"""Sections beside [model], from Megatron's arguments after its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families import model_section as checkpoint_model_section
from mt_core.config.layer_pattern import pattern_of
from mt_core.config.schema import TimeoutsConfig
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments import multimodal
from mt_import.megatron_arguments.derived import sums_in_fp32
from mt_import.megatron_arguments.entry_scripts import EntryScript
from mt_import.megatron_arguments.refusals import COMMUNICATORS, OPTIMIZERS
from mt_import.megatron_arguments.table import Version, arguments, by_dest
from mt_models.bert.megatron import bert_section
from mt_models.gpt.megatron import gpt_section

Values = Mapping[str, Any]
Keys = dict[str, Any]
"""Dotted key -> value; None is null."""
BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
SIZES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "expert_shard": "num_experts",
    "expert_replicate": "num_experts",
}
"""Axis -> what is above 1 where it has messages."""
SCHEDULE_KEYS = (
    *("optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.start_weight_decay"),
    *("optimizer.end_weight_decay", "optimizer.weight_decay_incr_style", "lr_schedule.lr_decay_style"),
    *("lr_schedule.lr_decay_iters", "lr_schedule.lr_decay_samples", "lr_schedule.lr_warmup_iters"),
    *("lr_schedule.lr_warmup_samples", "lr_schedule.lr_warmup_fraction", "train.train_iters", "train.train_samples"),
)
"""What Megatron's scheduler compares with the checkpoint, unless it is to be overridden."""
PROFILE_KEYS = ("profile.first_step", "profile.last_step", "profile.ranks")
WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
COUNTED_VOCABULARY = ("NullTokenizer", "TikTokenizer")
"""Tokenizers whose vocabulary size is an argument."""


def run_keys(values: Values, entry: EntryScript, version: Version) -> Keys:
    """Dotted key -> value, those that do not count included."""
    keys = copied_keys(values)
    rules = (_parallel, _communicators, _timeouts, _optimizer, _schedule, _precision, _recompute, _checkpoint)
    for rule in (*rules, _train, _trackers, _profile):
        keys |= rule(values)
    if entry.name == "ict" and values["bert_load"] is not None and "checkpoint.resume_from" not in keys:
        keys.setdefault("checkpoint.load", values["bert_load"])
    # Later rules win over values that are copied.
    return {**keys, **_data(values, entry), **_tokenizer(values, version)}


def copied_keys(values: Values) -> Keys:
    """Arguments that are keys of the same meaning."""
    return {
        argument.keys[0]: values[argument.dest]
        for argument in arguments()
        if argument.outcome == "copy" and values.get(argument.dest) is not None
    }


def _parallel(values: Values) -> Keys:
    keys: Keys = _sharding(values)
    if (stages := values["virtual_pipeline_model_parallel_size"] or 1) > 1:
        keys["parallel.virtual_pipeline_model_parallel_size"] = stages
        keys["parallel.pipeline_schedule"] = "interleaved_1f1b"
    if values["context_parallel_size"] > 1:
        keys["parallel.cp_comm_type"] = values["cp_comm_type"][0]
    # null follows tensor parallelism, also when that is changed later. Without experts there is nothing to divide.
    if not values["num_experts"] or values["tensor_model_parallel_size"] == values["expert_tensor_parallel_size"]:
        keys["parallel.expert_tensor_parallel_size"] = None
    return keys


def _sharding(values: Values) -> Keys:
    """Megatron's FSDP shards what torch's does."""
    if values["use_torch_fsdp2"]:
        return {"parallel.use_torch_fsdp2": True}
    if not (values["use_megatron_fsdp"] or values["use_custom_fsdp"]):
        return {"parallel.use_distributed_optimizer": values["use_distributed_optimizer"]}
    strategy = values["data_parallel_sharding_strategy"]
    if strategy == "optim":
        return {"parallel.use_distributed_optimizer": True}
    if strategy == "no_shard":
        return {}
    return {
        "parallel.use_torch_fsdp2": True,
        "parallel.fsdp_reshard_after_forward": strategy == "optim_grads_params",
    }


def _communicators(values: Values) -> Keys:
    """Megatron ignores options of groups of one rank."""
    axes = dict.fromkeys(COMMUNICATORS[group] for group in values["high_priority_stream_groups"] or ())
    several = [axis for axis in axes if axis not in SIZES or (values.get(SIZES[axis]) or 1) > 1]
    return {"parallel.nccl_communicators": {axis: {"is_high_priority_stream": True} for axis in several}}


def _timeouts(values: Values) -> Keys:
    """Megatron's limit is that of one operation. A phase in which ranks compute as well is never given less than its
    default."""
    minutes = values["distributed_timeout_minutes"]
    if minutes == by_dest()["distributed_timeout_minutes"].default_of("main"):
        return {}
    fields, seconds = TimeoutsConfig.model_fields, 60.0 * minutes
    waiting = ("init", "step")
    return {f"timeouts.{name}": seconds if name in waiting else max(seconds, fields[name].default) for name in fields}


def _optimizer(values: Values) -> Keys:
    keys: Keys = {"optimizer.optimizer": OPTIMIZERS[values["optimizer"]]}
    if not values["use_precision_aware_optimizer"]:
        return keys
    keys["optimizer.exp_avg_dtype"] = values["exp_avg_dtype"]
    if values["bf16"] and not _sharding(values).get("parallel.use_torch_fsdp2"):
        keys["optimizer.main_weights"] = "remainders"  # Megatron's store_param_remainders, which is no argument
    return keys


def _schedule(values: Values) -> Keys:
    counts = ("lr_warmup_iters", "lr_warmup_samples")
    return {f"lr_schedule.{dest}": values[dest] for dest in counts if values[dest]}


def _precision(values: Values) -> Keys:
    dtype = "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"
    keys: Keys = {"precision.dtype": dtype, "precision.fp8_format": values["fp8"] or "none"}
    if values["fp4"]:
        keys |= {"precision.fp8_format": "e2m1", "precision.fp8_recipe": "nvfp4"}
    if float(values["loss_scale_window"]).is_integer():  # Megatron's parser makes a float of it
        keys["precision.loss_scale_window"] = int(values["loss_scale_window"])
    return keys


def _recompute(values: Values) -> Keys:
    keys: Keys = {"recompute.recompute_granularity": values["recompute_granularity"] or "none"}
    if values["recompute_modules"] is not None:
        keys["recompute.recompute_modules"] = values["recompute_modules"]
    if values["fine_grained_activation_offloading"]:
        keys["recompute.offload_modules"] = values["offload_modules"] or []
        keys["recompute.min_offloaded_tensor_size"] = values["min_offloaded_tensor_size"]
    return keys


def _checkpoint(values: Values) -> Keys:
    # Without --save Megatron saves nothing, whatever the interval.
    keys: Keys = {"checkpoint.save_interval": values["save_interval"] if values["save"] is not None else None}
    if values["no_save_optim"]:
        keys["checkpoint.save_optimizer"] = False
    if values["save_retain_interval"] is not None:  # Megatron keeps the newest, and those that it divides
        keys |= {"checkpoint.keep_last": 1, "checkpoint.keep_every": values["save_retain_interval"]}
    return keys | _start(values)


def _start(values: Values) -> Keys:
    """Where weights come from. A run that loads what it saves goes on by itself."""
    keys: Keys = {}
    load = _loaded_folder(values)
    if load is not None and (values["finetune"] or values["no_load_optim"]):
        keys["checkpoint.load"] = load
    # Another folder: the run starts from its state and saves elsewhere.
    elif load is not None and load != values["save"]:
        keys["checkpoint.resume_from"] = load
    elif load is not None and values["exit_on_missing_checkpoint"]:
        keys["checkpoint.resume"] = "required"
    if values["override_opt_param_scheduler"] and "checkpoint.load" not in keys:
        keys["checkpoint.accept_changes"] = list(SCHEDULE_KEYS)
    if values["pretrained_checkpoint"] is not None:
        keys.setdefault("checkpoint.load", values["pretrained_checkpoint"])
    return keys


def _loaded_folder(values: Values) -> str | None:
    """--load, or the folder in it of the iteration that --override-ckpt-iteration names."""
    load, iteration = values["load"], values["override_ckpt_iteration"]
    return load if load is None or iteration is None else f"{load}/iter_{iteration:07d}"


def dropped_keys(values: Values) -> dict[str, str]:
    """Keys of arguments that other arguments leave without effect, each with the reason."""
    load, dropped = values["load"], dict[str, str]()
    if load is not None and load == values["save"] and (values["finetune"] or values["no_load_optim"]):
        dropped["checkpoint.save"] = (
            f"{load} has the checkpoints that --load names; those of this run go to checkpoints/ in its run directory, "
            "or to the folder that checkpoint.save names"
        )
    if option := sums_in_fp32(values):
        dropped["precision.grad_reduce_in_bf16"] = (
            f"{option} sums gradients in fp32; here they are also sent in fp32, twice the bytes of bf16: no key sends "
            "bf16 and sums in fp32"
        )
    if not values["profile"]:
        dropped |= dict.fromkeys(PROFILE_KEYS, "counts only with --profile")
    if values["language_model_type"]:
        dropped["data.eod_mask_loss"] = "a record is a document; its end counts where data.eod_after_answer puts one"
    if values["fp8"]:
        dropped["parallel.tp_comm_overlap"] = "products in FP8 are not overlapped, which changes no result"
    return dropped


def _train(values: Values) -> Keys:
    scope = "step" if values["cuda_graph_impl"] == "full_iteration" else "blocks"
    graphs = values["enable_cuda_graph"] or values["external_cuda_graph"] or values["cuda_graph_impl"] != "none"
    return {
        "train.eval_interval": values["eval_interval"],
        "train.cuda_graphs": scope if graphs else "none",
        "train.sample_prompt": "",  # Megatron generates no text at the end
    }


def _trackers(values: Values) -> Keys:
    """Megatron writes to TensorBoard when it has a folder, and to Weights & Biases when it has a project."""
    keys = {"tensorboard.dir": values["tensorboard_dir"], "wandb.project": values["wandb_project"]}
    named = {key: value for key, value in keys.items() if value}
    return {**named, "logging.trackers": [key.partition(".")[0] for key in named]}


def _profile(values: Values) -> Keys:
    """Megatron counts steps from 0; with torch.profiler, whose step() it calls before a step begins, from 1."""
    if not values["profile"]:
        return {}
    first = max(values["profile_step_start"] + (not values["use_pytorch_profiler"]), 1)
    last = max(first + values["profile_step_end"] - values["profile_step_start"] - 1, first)
    ranks = values["profile_ranks"] or None
    keys = ("train.callbacks", "profile.first_step", "profile.last_step", "profile.ranks")
    return dict(zip(keys, (["profile"], first, last, ranks), strict=True))


def _data(values: Values, entry: EntryScript) -> Keys:
    if entry.name == "vlm":
        return multimodal.data_keys(values)
    keys: Keys = {"data.dataset_type": _dataset(values, entry)}
    for dest in BLENDS:
        if values.get(dest) is not None:
            keys[f"data.{dest}"] = blend(values[dest])
    if entry.name == "retro":
        keys |= {f"data.{dest}": values[dest] for dest in ("retro_num_neighbors", "retro_num_retrieved_chunks")}
    if entry.name == "bert":
        keys["data.bert_binary_head"] = values["bert_binary_head"]
    return keys


def _dataset(values: Values, entry: EntryScript) -> str:
    sources = (*BLENDS, "data_args_path", "per_split_data_args_path")
    if entry.dataset_type != "gpt":
        return entry.dataset_type
    if values["mock_data"] or not any(values[dest] for dest in sources):  # Megatron makes data up, too
        return "mock"
    return "sft" if values["sft"] else "fim" if values["fim_data"] else "gpt"


def blend(words: Sequence[str]) -> list[Any]:
    """--data-path: prefixes, or weights and prefixes in turns."""
    # "0.3 a 0.7 b"; a list of prefixes alone has weights by their sizes.
    weights, prefixes = words[::2], words[1::2]
    if len(weights) != len(prefixes) or not all(map(_is_number, weights)):
        return list(words)
    return [{"prefix": prefix, "weight": float(weight)} for weight, prefix in zip(weights, prefixes, strict=True)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tokenizer(values: Values, version: Version) -> Keys:
    keys: Keys = {}
    if values["tokenizer_type"] == multimodal.TOKENIZER:
        keys["tokenizer.tokenizer_type"] = "HuggingFaceTokenizer"
    size, kind, pad = values["vocab_size"], values["tokenizer_type"], values["null_tokenizer_pad_id"]
    if size is not None and kind in COUNTED_VOCABULARY:
        # Until 0.12 Megatron's NullTokenizer added its end of document to the size that it was given.
        keys["tokenizer.vocab_size"] = size + (kind == "NullTokenizer" and version == "0.12")
    if kind in WORD_PIECES:
        # Megatron's scripts for BERT, T5 and ICT never encode a text: tokens of their files are taken as they are.
        keys["tokenizer.tokenizer_hf_no_include_special_tokens"] = True
    if pad >= 0:  # Megatron's -1 is no id
        keys["tokenizer.null_tokenizer_pad_id"] = pad
    return keys


# [model], from Megatron's arguments after its validation, as its checkpoints are read.

MOE_TRAINING = ("moe_shared_expert_overlap", "moe_router_force_load_balancing")
"""Options of MoE models that concern training alone."""
DISPATCHERS: Mapping[str, str] = {"alltoall_seq": "alltoall"}
"""Megatron's name for a dispatcher -> ours, where it is another."""
SAME_MODEL: Mapping[str, Any] = {"apply_layernorm_1p": False}
"""Arguments that change what a checkpoint holds, and no number that is computed."""
RETRO: Mapping[str, str] = {
    "retro_num_neighbors": "retro_num_neighbors",
    "retro_num_retrieved_chunks": "retro_num_retrieved_chunks",
    "retro_encoder_layers": "retro_encoder_num_layers",
    "retro_encoder_hidden_dropout": "retro_encoder_hidden_dropout",
    "retro_encoder_attention_dropout": "retro_encoder_attention_dropout",
}
BIENCODER = ("biencoder_projection_dim", "biencoder_shared_query_context_model", "retriever_score_scaling")


def model_section(values: Mapping[str, Any], entry: EntryScript, source: str, host: PluginHost) -> dict[str, Any]:
    """The keys of [model] but vocab_size, which the tokenizer says. source: what messages call the arguments.

    Raises ConfigError, naming the argument, for a model that no installed family is.
    """
    # The reader of Megatron's checkpoints maps the same arguments: one table for both.
    section = _section(Arguments({**values, **SAME_MODEL}, Path(source)), entry, host)
    section.pop("vocab_size", None)
    if "moe" in section:
        section["moe"] = section["moe"] | _moe_training(values)
        if isinstance(layers := values["moe_layer_freq"], list) and "moe_layer_freq" in section["moe"]:
            # Back to the short form, which a reader of the file can check.
            section["moe"]["moe_layer_freq"] = pattern_of(list(map(bool, layers)))
    return section


def _section(args: Arguments, entry: EntryScript, host: PluginHost) -> dict[str, Any]:
    if entry.name == "vlm":
        return multimodal.section(args.values, lambda values: _decoder(values, args.origin, host))
    if entry.name == "retro":
        return {
            **gpt_section(args, entry.parameters),
            "family": "retro",
            **{key: args.values[dest] for dest, key in RETRO.items()},
        }
    if entry.name == "ict":
        biencoder_keys = {dest: args.values[dest] for dest in BIENCODER}
        section = {**bert_section(args, entry.parameters), "family": "biencoder", **biencoder_keys}
        return {key: value for key, value in section.items() if not key.startswith(("add_", "bert_"))}
    return checkpoint_model_section(args, _parameters(args, entry), 1, host)


def _decoder(values: Mapping[str, Any], origin: Path, host: PluginHost) -> dict[str, Any]:
    return checkpoint_model_section(Arguments(values, origin), (), 1, host)


def _parameters(args: Arguments, entry: EntryScript) -> tuple[str, ...]:
    """Names that tell the parts of the model; of BERT's binary head and its pooler --bert-no-binary-head does."""
    if entry.name == "bert" and args.values["bert_binary_head"]:
        return (*entry.parameters, "binary_head.weight", "pooler.dense.weight")
    return entry.parameters


def _moe_training(values: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {dest: True for dest in MOE_TRAINING if values[dest]}
    kind = "flex" if values["moe_enable_deepep"] else values["moe_token_dispatcher_type"]
    keys["moe_token_dispatcher_type"] = DISPATCHERS.get(kind, kind)
    if kind == "flex":
        keys["moe_dispatcher_options"] = {"moe_flex_dispatcher_backend": values["moe_flex_dispatcher_backend"]}
    return keys
