"""Configurations of Megatron-Bridge and NeMo 1.x: YAML whose keys are Megatron's attributes, partly by other names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.command_line import ParsedArgument
from mt_import.megatron_arguments.entry_scripts import entry_script
from mt_import.megatron_arguments.table import Argument, arguments, by_dest
from mt_import.megatron_arguments.translation import Account, translate
from mt_import.readers.megatron import MegatronOptions
from mt_import.readers.nemo import CHANGES, DATA, GIVEN_LATER, MISSING, NemoValues, in_megatrons_words, note_on_missing
from mt_import.readers.nemo_gemma2 import SCALAR, gemma2_section
from mt_import.result import ImportResult, Processes, result_of
from mt_models.gpt.config import GPTConfig

TARGET = "_target_"
BRIDGE_SECTIONS = ("model", "dataset", "optimizer", "scheduler", "train", "checkpoint", "logger", "tokenizer", "ddp")
SUFFIX = "_config"
"""Ending of the names of sections in older files."""
NAMES: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "sequence_length": "seq_length",
    "encoder_seq_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "blend": "data_path",
    "data_prefix": "data_path",
    "splits_string": "split",
    "index_mapping_dir": "data_cache_path",
    "mock": "mock_data",
    "random_seed": "seed",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rotary_percentage": "rotary_percent",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "persist_layer_norm": "no_persist_layer_norm",
    "max_steps": "train_iters",
    "val_check_interval": "eval_interval",
    "limit_val_batches": "eval_iters",
    "gradient_clip_val": "clip_grad",
    "warmup_steps": "lr_warmup_iters",
    "native_amp_init_scale": "initial_loss_scale",
    "native_amp_growth_interval": "loss_scale_window",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "bias": "add_bias_linear",
    "masked_lm_prob": "mask_prob",
    "ngroups_mamba": "mamba_num_groups",
    "qkv_bias": "add_qkv_bias",
    "max_sequence_length": "seq_length",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_sync": "overlap_param_gather",
}
"""Key there -> Megatron's attribute, where it is another name."""
IGNORED = (
    *(
        TARGET,
        "_call_",
        "_partial_",
        "_args_",
        "name",
        "target",
        "precision",
        "mixed_precision",
        "devices",
        "num_nodes",
        "accelerator",
    ),
    *("share_embeddings_and_output_weights", "gated_linear_unit", "activation_func", "activation", "betas", "type"),
    *("model_type", "params_dtype", "pipeline_dtype", "autocast_dtype", "perform_initialization", "megatron_amp_O2"),
    *("scale_factor", "rope_scaling", "low_freq_factor", "high_freq_factor", "old_context_len"),
    *(
        "library",
        "vocab_size",
        "should_pad_vocab",
        "is_vocab_size_set",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "sched",
    ),
)
"""Keys that are read together with others, or that say nothing of a run."""
ACTIVATIONS: Mapping[str, str | None] = {
    "": None,
    "gelu": None,
    "gated silu": "swiglu",
    "swiglu": "swiglu",
    "squared_relu": "squared_relu",
    "squared-relu": "squared_relu",
    "openai-gelu": "openai_gelu",
    "gated quick_gelu": "quick_geglu",
    "megatron.bridge.models.mamba.nemotron_h_provider.NemotronHModelProvider.<lambda>": "squared_relu",
}
"""Activation function, `gated` before the name where the feed-forward is -> Megatron's option; None: its default."""
ROPE_SCALING: Mapping[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
"""Constants of Llama 3.1's scaling in Megatron."""
UNREAD: Mapping[str, str] = {
    "attention_chunk_size": "attention within chunks of the sequence",
    "nope_layer_interval": "layers without positions",
}
"""Keys of Bridge's model that are no options of Megatron-LM and change what it computes -> what they request."""
LAYERS = (
    "megatron.core.",
    "megatron.bridge.models.gpt_provider.default_layer_spec",
    "megatron.bridge.models.mamba.mamba_provider.get_default_mamba_stack_spec",
)
"""Beginning of the names of Megatron-Core's own layers, as values of a dump."""
BRIDGE_PATHS = (*BRIDGE_SECTIONS, "rng", "dist", "comm_overlap", "mixed_precision")
NEMO_PATHS = ("model", "model.data", "model.optim", "model.optim.sched", "model.tokenizer", "trainer")
"""Where their files have attributes of Megatron."""
FIRST: Mapping[str, str] = {"seq_length": "model.seq_length", "seed": "rng.seed"}
"""Attribute -> the path that counts where several differ, as in some recipes, which Bridge trains after a change."""
_OF_RUN = "how ranks communicate and where memory is, not what is computed"
_OF_FILES = "of Bridge's checkpoints; [checkpoint] says what mt writes and reads"
_OF_MASKS = "how masks and batches are handed to the model; the same positions count"
_OF_NEMO = "how NeMo runs Megatron's model"
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("checkpoint.*", "logger.*", "profiling.*", "model.nsys_profile.*", "*.dist_ckpt_*"), _OF_FILES),
    **dict.fromkeys(("ddp.average_in_collective", "ddp.preserve_fp32_weights", "optimizer.store_param_*"), _OF_RUN),
    **dict.fromkeys(("dist.*", "comm_overlap.*", "ddp.check_for_nan_in_grad"), _OF_RUN),
    **dict.fromkeys(("model.batch_p2p_*", "model.cpu_offloading_*", "model.deallocate_pipeline_outputs"), _OF_RUN),
    **dict.fromkeys(("model.scatter_embedding_sequence_parallel", "model.parallel_output"), _OF_RUN),
    **dict.fromkeys(("dataset.add_extra_token_to_sequence", "dataset.create_attention_mask"), _OF_MASKS),
    **dict.fromkeys(("dataset.drop_last_partial_validation_sequence", "dataset.pin_memory"), _OF_MASKS),
    **dict.fromkeys(("*.get_attention_mask_from_fusion", "model.data.validation_drop_last"), _OF_MASKS),
    **dict.fromkeys(("model.data.pad_to_max_length", "model.data.ceil_to_power_2"), _OF_MASKS),
    "dataset.split_matrix": "repeats split",
    "model.*init_method.std": "follows from init_method_std",
    **dict.fromkeys(("model.mcore_gpt", "model.transformer_engine", "model.p*_process"), _OF_NEMO),
    **dict.fromkeys(("model.optim.bucket_cap_mb", "model.optim.contiguous_*_buffer"), _OF_RUN),
    **dict.fromkeys(("model.grad_*", "model.gradient_as_bucket_view", "model.reduce_amax"), _OF_NEMO),
    **dict.fromkeys(("model.apex_transformer_log_level", "model.bias_dropout_add_fusion"), _OF_NEMO),
    **dict.fromkeys(("model.data.skip_warmup", "model.data.shuffle_documents"), _OF_NEMO),
    **dict.fromkeys(("trainer.*", "model.tokenizer.use_fast", "nemo_version", "run.*", "restore_*"), _OF_NEMO),
    **dict.fromkeys((key for key, (same, _) in CHANGES.items() if same != (False,)), "what Megatron does"),
}
"""Pattern of keys that are no options of Megatron-LM -> why they change nothing that is trained."""
DTYPES: Mapping[str, str] = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "sentencepiece": ("SentencePieceTokenizer", "model"),
    "huggingface": ("HuggingFaceTokenizer", "type"),
}
"""NeMo's tokenizer library -> tokenizer_type, and the key of its files."""
TOKENIZER_FILE = "model.tokenizer.model"
"""Read with the library."""
OWN_SECTIONS = (
    "exp_manager",
    "ft",
    "inprocess_restart",
    "nvrx_straggler",
    "straggler",
    "profiling",
    "rerun_state_machine",
)
"""Sections about records and restarts."""
_REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{multiply:([^,]+),(.+)\}")


def is_bridge(values: Mapping[str, Any]) -> bool:
    names = {str(name).removesuffix(SUFFIX) for name in values}
    # Two sections at least: many other files have a key `model`.
    return "model" in names and ("trainer" in names or len(names & set(BRIDGE_SECTIONS)) >= 2)


def import_bridge(values: Mapping[str, Any], source: str, host: PluginHost, options: MegatronOptions) -> ImportResult:
    """A Bridge dump or override file, or a NeMo 1.x configuration. Raises ConfigError."""
    flat = dict(_flat(values, values))
    nemo = in_megatrons_words(flat) if "trainer" in values else None
    flat = flat if nemo is None else nemo.flat
    parsed_arguments, unknown = given_of(flat, NEMO_PATHS if nemo is not None else BRIDGE_PATHS)
    parsed_arguments |= _joint(flat)
    _apply_weight_decay(parsed_arguments)
    hybrid = "hybrid" if "hybrid_override_pattern" in parsed_arguments else "gpt"
    entry = entry_script(options.entry or (hybrid if nemo is None else nemo.entry))
    translation = translate(parsed_arguments, entry, host, source=source, version=options.version or "main")
    processes = _processes(flat, options)
    result = result_of(translation, f"{source} with {len(parsed_arguments)} values", processes)
    result = replace(result, accounts=[*result.accounts, *unknown])
    return result if nemo is None else _of_nemo(result, nemo)


def _of_nemo(result: ImportResult, nemo: NemoValues) -> ImportResult:
    result = _with_keys_of_gpt(replace(result, accounts=[*result.accounts, *nemo.accounts]), nemo)
    if not nemo.missing:
        return result
    if DATA in nemo.missing:  # without data Megatron's arguments mean mock data
        data = {**result.sections["data"], "dataset_type": entry_script(nemo.entry).dataset_type}
        result = replace(result, sections={**result.sections, "data": data})
    return replace(result, notes=[note_on_missing(nemo.missing), *result.notes], complete=False)


def _with_keys_of_gpt(result: ImportResult, nemo: NemoValues) -> ImportResult:
    model, accounts = result.sections["model"], list(result.accounts)
    for setting in nemo.of_gpt.values():
        if model["family"] == "gpt":
            model = {**model, **setting.keys}
            keys = {f"model.{key}": value for key, value in setting.keys.items()}
            accounts = [account for account in accounts if not account.keys.keys() & keys.keys()]
            accounts.append(Account(setting.path, "translated", keys, ""))
        else:
            accounts.append(Account(setting.path, "refused", {}, f"model.family={model['family']} has no such key"))
    if nemo.of_gemma2 is not None:
        fields = GPTConfig.model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        model = {"max_position_embeddings": nemo.positions, **model}
        model = gemma2_section(model, nemo.of_gemma2, defaults)
        keys = {f"model.{key}": value for key, value in nemo.of_gemma2.items()}
        accounts.append(Account(SCALAR, "translated", {"model.family": "gemma", **keys}, ""))
    return replace(result, sections={**result.sections, "model": model}, accounts=accounts)


def _flat(values: Mapping[str, Any], root: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path -> value; maps that name a Python object are left out."""
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        if path == "" and str(key).removesuffix(SUFFIX) in OWN_SECTIONS:
            continue
        if isinstance(value, Mapping):
            # _call_: false names the object itself, such as an activation function.
            if value.get("_call_") is not False:
                yield from _flat(value, root, here)
            elif isinstance(value.get(TARGET), str):
                yield here, value[TARGET]
        elif value == MISSING and here.startswith(GIVEN_LATER):
            yield here, value
        else:
            yield here, _resolved(value, here, root)


def _resolved(value: Any, here: str, root: Mapping[str, Any], trail: tuple[str, ...] = ()) -> Any:
    """References of OmegaConf: ${a.b}, ${.sibling}, ${multiply:a,b}. trail: the keys that were looked up for it. Raises
    ConfigError for ???, for what is absent, and for references that lead to themselves."""
    if value == MISSING:
        raise ConfigError(f"{here} is ???, a value that has to be given")
    if not isinstance(value, str):
        return value
    if match := _PRODUCT.fullmatch(value):
        factors = [_factor(text.strip(), here, root, trail) for text in match.groups()]
        return factors[0] * factors[1]
    if match := _REFERENCE.fullmatch(value):
        # A leading dot is a sibling of the key.
        base = here.split(".")[:-1] if match[1] else []
        return _looked_up([*base, *match[2].split(".")], here, root, trail)
    return value


def _factor(text: str, here: str, root: Mapping[str, Any], trail: tuple[str, ...]) -> int:
    value = _resolved(text, here, root, trail)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{here} multiplies {text}, which is {value!r} and no whole number") from None


def _looked_up(path: list[str], here: str, root: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    place: Any = root
    for name in path:
        if not isinstance(place, Mapping) or name not in place:
            raise ConfigError(f"{here} refers to {'.'.join(path)}, which is not there")
        place = place[name]
    key = ".".join(path)
    if key in trail:
        raise ConfigError(f"{key} refers to itself: {' -> '.join([*trail, key])}; give one of them a value")
    # A reference may lead to another one.
    return _resolved(place, key, root, (*trail, key))


def given_of(flat: Mapping[str, Any], places: Sequence[str]) -> tuple[dict[str, ParsedArgument], list[Account]]:
    """Attributes by their paths, and an account of each value that is no argument of Megatron's. places: the sections
    that hold attributes. Raises ConfigError for two paths that give one attribute other values."""
    parsed_arguments: dict[str, ParsedArgument] = {}
    unknown = []
    for path, value in flat.items():
        # Both divide Megatron's attributes over their sections. Elsewhere a name means another thing.
        section, _, name = path.rpartition(".")
        if name in IGNORED or path == TOKENIZER_FILE or value is None:
            continue
        argument = by_dest().get(NAMES.get(name, name)) if section.removesuffix(SUFFIX) in places else None
        if argument is None:
            # Switches that are off need no account.
            if value not in (False, "", []):
                unknown.append(account_of_unknown(path, value))
            continue
        value = _value(argument, name, value)
        # Filled in from the other by Megatron-Core.
        if name == "embedding_init_method_std" and value == flat.get("model.init_method_std"):
            continue
        # A dump has every attribute; those with Megatron's default count as not given.
        if value != argument.default:
            parsed = ParsedArgument(argument, path, value)
            before = parsed_arguments.get(argument.dest, parsed)
            parsed_arguments[argument.dest] = chosen = _counting(before, parsed)
            unknown += [
                Account(f"{other.spelled} {other.value}", "no effect", {}, f"{chosen.spelled}={chosen.value} counts")
                for other in (before, parsed)
                if other.value != chosen.value
            ]
    return parsed_arguments, unknown


def _counting(before: ParsedArgument, now: ParsedArgument) -> ParsedArgument:
    """The value that counts where two paths have one attribute. Raises ConfigError where it is not known which."""
    if before.value == now.value:
        return now
    for parsed in (before, now):
        if parsed.spelled == FIRST.get(parsed.argument.dest):
            return parsed
    raise ConfigError(
        f"{before.spelled}={before.value} and {now.spelled}={now.value} are one setting; make them equal, or leave one "
        "out"
    )


def account_of_unknown(path: str, value: Any) -> Account:
    """The account of a key that is no option of Megatron-LM's: refused, unless it is known to change nothing."""
    section, _, name = path.rpartition(".")
    words = f"{path} {value}"
    if section == "model" and name in UNREAD:
        return Account(words, "refused", {}, UNREAD[name])
    if str(value).startswith(LAYERS):
        return Account(words, "no effect", {}, "the layers of Megatron-Core, which every family here has")
    if (reason := next((why for key, why in WITHOUT_EFFECT.items() if fnmatchcase(path, key)), None)) is not None:
        return Account(words, "no effect", {}, reason)
    near = did_you_mean(name, by_dest())
    return Account(words, "refused", {}, f"unknown: neither Megatron-LM has it nor is it known to change nothing{near}")


def _value(argument: Argument, name: str, value: Any) -> Any:
    if name == "persist_layer_norm":
        return not value
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    if name == "blend" and isinstance(value, list) and value and isinstance(value[0], list):
        prefixes, weights = value[0], value[1] if len(value) > 1 and value[1] else None
        # [prefixes, weights] -> "weight prefix weight prefix", as --data-path has it.
        return prefixes if weights is None else [str(x) for pair in zip(weights, prefixes, strict=True) for x in pair]
    if argument.count and not isinstance(value, list):
        return [value]
    if argument.kind == "float" and isinstance(value, int | str):
        return float(value)
    return [str(x) for x in value] if argument.dest == "data_path" and isinstance(value, list) else value


def _joint(flat: Mapping[str, Any]) -> dict[str, ParsedArgument]:
    """What several keys say together, or one by another polarity."""
    last = {path.rpartition(".")[2]: value for path, value in flat.items()}
    values: dict[str, Any] = {}
    if last.get("share_embeddings_and_output_weights") is False:
        values["untie_embeddings_and_output_weights"] = True
    values |= _activation(str(last.get("activation_func") or last.get("activation") or ""), last)
    values |= _rope_scaling(flat)
    # Bridge's mixed_precision wins over the switches of its model.
    precision = str(last.get("mixed_precision") or last.get("precision") or last.get("params_dtype") or "")
    if last.get("bf16") or "bf" in precision:
        values["bf16"] = True
    elif last.get("fp16") or precision in ("16", "16-mixed", "torch.float16", "fp16_mixed"):
        values["fp16"] = True
    if last.get("max_position_embeddings") is None and last.get("seq_length") is not None:
        # Bridge's models have a table of positions for the length of a sample.
        values["max_position_embeddings"] = last["seq_length"]
    if flat.get("tokenizer.vocab_size") is not None:
        values["vocab_size"] = flat["tokenizer.vocab_size"]
    # Megatron's parser has a flag beside the number.
    if last.get("num_query_groups"):
        values["group_query_attention"] = True
    if isinstance(betas := last.get("betas"), list):
        values |= {"adam_beta1": float(betas[0]), "adam_beta2": float(betas[1])}
    values |= _nemo_tokenizer(flat)
    rows = {argument.dest: argument for argument in arguments()}
    return {dest: ParsedArgument(rows[dest], rows[dest].spelled, value) for dest, value in values.items()}


def _activation(name: str, last: Mapping[str, Any]) -> dict[str, bool]:
    """The option of an activation function, by its name or that of its object. Raises ConfigError for another one."""
    kind = name if name.endswith("<lambda>") else name.rpartition(".")[2].removeprefix("fast-")
    kind = f"gated {kind}" if last.get("gated_linear_unit") else kind
    if kind not in ACTIVATIONS:
        raise ConfigError(
            f"the activation {name} ({kind}) is not read; it can be {', '.join(filter(None, ACTIVATIONS))}"
        )
    return {option: True for option in [ACTIVATIONS[kind]] if option is not None}


def _rope_scaling(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1's scaling, of which Megatron has the factor as an option. Raises ConfigError for other frequencies."""
    factor = flat.get("model.scale_factor")
    if factor is None or flat.get("model.rope_scaling") is False:
        return {}
    for name, value in ROPE_SCALING.items():
        if flat.get(f"model.{name}", value) != value:
            raise ConfigError(
                f"model.{name}={flat[f'model.{name}']} is not read; with model.scale_factor it is {value}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


def _apply_weight_decay(parsed_arguments: dict[str, ParsedArgument]) -> None:
    """Bridge's scheduler sets the weight decay from its own start and end, whatever the optimizer's says."""
    start, end = parsed_arguments.get("start_weight_decay"), parsed_arguments.get("end_weight_decay")
    style = parsed_arguments.get("weight_decay_incr_style")
    if end is not None and (style is None or style.value == "constant"):
        if start is not None and start.value != end.value:
            raise ConfigError(
                f"{start.spelled}={start.value} and {end.spelled}={end.value} with weight_decay_incr_style=constant; "
                "make them equal, or choose linear or cosine"
            )
        parsed_arguments["weight_decay"] = ParsedArgument(by_dest()["weight_decay"], end.spelled, end.value)
        parsed_arguments.pop("start_weight_decay", None)
        del parsed_arguments["end_weight_decay"]


def _nemo_tokenizer(flat: Mapping[str, Any]) -> dict[str, Any]:
    """model.tokenizer of NeMo 1.x names a library, and then what it takes."""
    library = str(flat.get("model.tokenizer.library"))
    if library == "megatron":
        return {"tokenizer_type": flat.get("model.tokenizer.type")}
    if library in LIBRARIES:
        kind, key = LIBRARIES[library]
        return {"tokenizer_type": kind, "tokenizer_model": flat.get(f"model.tokenizer.{key}")}
    return {}


def _processes(flat: Mapping[str, Any], options: MegatronOptions) -> Processes:
    devices, nodes = flat.get("trainer.devices"), flat.get("trainer.num_nodes", 1)
    if options.world_size is not None or not isinstance(devices, int):
        return Processes(options.world_size)
    return Processes(devices, nodes)
