"""The section [adapter] of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section, used_when
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.config.schema import Config

AdapterType = Literal["none", "lora", "dora", "vera", "ia3", "trainable_tokens"]
LOW_RANK = ("lora", "dora")
ON_LAYERS = ("lora", "dora", "vera", "ia3")
ON = (*ON_LAYERS, "trainable_tokens")
QUANTIZED = ("nf4", "int8", "fp8", "int4", "fp4")
ALL_LINEAR = "all-linear"


class AdapterConfig(Section):
    """Parameters that are trained beside a frozen model."""

    type: AdapterType = "none"
    """lora, dora, vera and ia3 change linear layers, trainable_tokens rows of the embedding; none: the model itself is
    trained."""
    load: str | None = None
    """A folder of PEFT, or of an adapter of Megatron-Bridge, whose values training starts from. Where `type` is not
    set, the folder says the other keys."""
    rank: PositiveInt = used_when(16, type=("lora", "dora", "vera"))
    """Rank of the update of a matrix. VeRA, which trains two vectors a matrix, usually has 256."""
    alpha: PositiveFloat = used_when(32.0, type=LOW_RANK)
    """The update is multiplied by alpha / rank."""
    rslora: bool = used_when(False, type=LOW_RANK)
    """Multiply the update by alpha / sqrt(rank)."""
    dropout: Probability = used_when(0.0, type=("lora", "vera"))
    """Dropout of the input of the update; not of experts and routers."""
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = used_when("kaiming", type="lora")
    """Initial values of A, with B zero: uniform in 1 / sqrt(inputs), or normal with the deviation 1 / rank. pissa takes
    singular vectors of the weight and olora its QR decomposition, and the base is reduced by the update."""
    targets: list[str] = used_when([ALL_LINEAR], type=ON_LAYERS)
    """Layers that are adapted: ends of their Hugging Face or canonical names, with * for any characters, or all-linear:
    all but routers, embeddings and the output layer."""
    excluded: list[str] = used_when([], type=ON_LAYERS)
    """Layers among the targets that are not adapted."""
    rank_pattern: dict[str, PositiveInt] = used_when({}, type=LOW_RANK)
    """Regular expression of the end of a layer's name -> its rank; the first that fits counts."""
    alpha_pattern: dict[str, PositiveFloat] = used_when({}, type=LOW_RANK)
    """Regular expression of the end of a layer's name -> its alpha; the first that fits counts."""
    lr_ratio: PositiveFloat = used_when(1.0, type=LOW_RANK)
    """Factor of the learning rate of B; LoRA+ takes 16."""
    experts: Literal["fused", "per_expert", "shared_outer"] = used_when("fused", type=ON_LAYERS)
    """Adapters of experts. fused: gate and up of an expert share one (PEFT's target_parameters); per_expert: they have
    one each (files of a tensor for each expert); shared_outer: the same, and all experts of a layer share what meets
    the hidden size: A of gate and up, B of down."""
    feedforward_targets: list[str] = used_when(["down_proj", "fc2", "linear_fc2"], type="ia3")
    """Targets whose inputs are scaled, where the outputs of others are."""
    projection_prng_key: NonNegativeInt = used_when(0, type="vera")
    """Seed of the frozen matrices that all layers share."""
    d_initial: PositiveFloat = used_when(0.1, type="vera")
    """Initial value of the vectors of rank size."""
    base: Literal["none", "nf4", "int8", "fp8", "int4", "fp4"] = used_when("none", type=ON)
    """How the frozen matrices of linear layers and experts are held in memory; none: in precision.dtype."""
    base_block_size: PositiveInt | None = used_when(None, base=QUANTIZED)
    """Numbers of a row that share a scale. None: 64 of nf4, 128 of fp8 and int4, 32 of fp4, and of
    int8 the whole row."""
    base_double_quant: bool = used_when(True, base="nf4")
    """Quantize the scales of nf4 too, as bitsandbytes does with bnb_4bit_use_double_quant."""
    base_excluded: list[str] = used_when([], base=QUANTIZED)
    """Layers that stay in precision.dtype, named as targets are."""
    base_requantize: bool = used_when(False, base=QUANTIZED)
    """Quantize weights anew that checkpoint.load has in another quantized format, which rounds them twice."""
    trainable_token_indices: list[NonNegativeInt] = used_when([], type=ON)
    """Ids whose rows of the embedding are trained."""
    modules_to_save: list[str] = used_when([], type=ON)
    """Modules that are trained whole beside the adapter, named as targets are."""

    @model_validator(mode="before")
    @classmethod
    def _described_by_its_folder(cls, values: Any) -> Any:
        """Keys that the folder of `load` says, where no type is set; a stored configuration has all keys."""
        if not isinstance(values, dict) or values.get("load") is None or "type" in values:
            return values
        from pathlib import Path

        from mt_tune.adapters.peft_reading import described_section

        return {**described_section(Path(values["load"])), **values}

    @property
    def is_on(self) -> bool:
        return self.type != "none"


def has_quantized_base(config: Config) -> bool:
    return config.section(AdapterConfig).base != "none"


def has_adapter(config: Config) -> bool:
    return config.section(AdapterConfig).is_on


def check_adapter(config: Config) -> None:
    """Raises ConfigError for keys of [adapter] that contradict each other or another section."""
    adapter = config.section(AdapterConfig)
    if not adapter.is_on:
        return
    if adapter.type == "trainable_tokens" and not adapter.trainable_token_indices:
        raise ConfigError("adapter.type=trainable_tokens trains the rows of adapter.trainable_token_indices; name ids")
    if len(set(adapter.trainable_token_indices)) < len(adapter.trainable_token_indices):
        raise ConfigError("adapter.trainable_token_indices names an id twice")
    if adapter.experts == "shared_outer" and (adapter.type != "lora" or adapter.init in ("pissa", "olora")):
        kind = f"adapter.type={adapter.type}" if adapter.type != "lora" else f"adapter.init={adapter.init}"
        raise ConfigError(
            f"adapter.experts=shared_outer with {kind}: experts share a matrix of plain LoRA alone; set "
            "adapter.experts=per_expert"
        )
    if adapter.base != "none":
        _check_base(adapter, config)
    if config.precision.fp8_format != "none":
        raise ConfigError(
            f"precision.fp8_format={config.precision.fp8_format} quantizes the products of the frozen layers too, "
            "which adapters are not proved with; set it to none"
        )


def _check_base(adapter: AdapterConfig, config: Config) -> None:
    if config.train.compile != "none":
        raise ConfigError(
            f"train.compile={config.train.compile}: products with the weights of adapter.base={adapter.base} are not "
            "compiled; set train.compile=none"
        )
    if config.checkpoint.load_parts:
        raise ConfigError(
            f"checkpoint.load_parts with adapter.base={adapter.base}: quantized parts cannot be told from others; "
            "convert them into one folder, and name it in checkpoint.load"
        )
    size = adapter.base_block_size
    if size is not None and (size % 2 or size < 16):
        raise ConfigError(f"adapter.base_block_size={size}: it can be an even number from 16 on")
