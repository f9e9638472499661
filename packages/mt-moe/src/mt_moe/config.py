"""`model.moe`: the MoE options, under Megatron's argument names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from mt_core.config.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, Section, used_when
from mt_core.config.messages import validation_message
from mt_core.errors import ConfigError

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
PositiveFloat = Annotated[float, Field(gt=0)]

DEFAULT_COEFFICIENT = 1e-2
"""Default coefficient of a load-balancing loss."""


class MoeConfig(Section):
    """A mixture of experts in place of the dense feed-forward of some layers."""

    num_experts: Annotated[int, Field(gt=0, lt=2**15)]
    """Experts of a layer, over all ranks."""
    moe_layer_freq: PositiveInt | str | list[NonNegativeInt] = 1
    """Which layers have experts: n means every n-th, starting with layer 0; a list such as [0, 1, 1], or a pattern such
    as "([0]*1+[1]*23)", has a 1 for each layer with experts and a 0 for each dense one."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Inner width of an expert. Default: that of the dense feed-forward."""
    moe_grouped_gemm: Literal["auto", "loop", "grouped", "triton"] = "auto"
    """How the experts' matrices are multiplied: one product after another (loop), torch's grouped_mm (grouped) or a
    Triton kernel (triton), which alone permutes rows itself. `auto` takes triton on GPUs of compute capability 8.0 and
    later, and loop on a CPU; without Triton grouped where it is one kernel (bf16 on Hopper and Blackwell)."""
    moe_num_zero_experts: NonNegativeInt = 0
    """So many further experts return the token as it is, times its weight, which costs nothing (LongCat-Flash). The
    router scores them behind the others."""
    moe_latent_size: PositiveInt | None = None
    """Experts work on tokens projected to this width, and their sum is projected back."""

    moe_router_topk: PositiveInt = 2
    """Experts of a token."""
    moe_router_score_function: ScoreFunction = "softmax"
    """Turns logits into scores."""
    moe_router_pre_softmax: bool = used_when(False, moe_router_score_function="softmax")
    """Softmax over all experts and then top-k; else top-k and then softmax over the chosen ones."""
    moe_router_num_groups: PositiveInt | None = None
    """Experts stand in this many groups, and a token chooses groups first."""
    moe_router_group_topk: PositiveInt | None = None
    """Groups of a token."""
    moe_router_group_score_topk: PositiveInt | None = None
    """A group's score is the sum of its so many highest scores. Default: moe_router_topk / moe_router_group_topk,
    rounded down; DeepSeek-V2 has 1."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Weights of the chosen experts are multiplied by this."""
    moe_router_weight_epsilon: PositiveFloat = used_when(1e-20, moe_router_score_function=("sigmoid", "sqrtsoftplus"))
    """Added to the sum of the chosen scores, by which each is divided; 1e-6 in LFM2."""
    moe_router_expert_scale: bool = False
    """Weights of the chosen experts are multiplied by a trained number of each expert (Gemma 4)."""
    moe_apply_probs_on_input: bool = False
    """The weight of a token's expert multiplies what the expert reads, in place of its output (Llama 4); for
    moe_router_topk = 1."""
    moe_router_enable_expert_bias: bool = False
    """A bias on the scores, for the choice only, evens out the load without a loss (Wang et al., 2024). With softmax it
    is added to the probabilities over all experts (ERNIE 4.5)."""
    moe_router_bias_update_rate: NonNegativeFloat = used_when(1e-3, moe_router_enable_expert_bias=True)
    """What a step adds to the bias of an expert below the mean load, and takes from one above it."""
    moe_router_bias: bool | None = None
    """A trained bias on the logits. Default: as the model's other linear layers."""
    moe_router_hash_layers: NonNegativeInt = 0
    """In so many first layers a token's experts are read from a table by its id, which is not trained; scores give
    their weights alone (DeepSeek-V4)."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the logits and of all that follows from them."""
    moe_router_weight_in_fp32: bool = False
    """The router's matrix is kept in fp32 whatever precision.dtype is (ERNIE 4.5)."""
    moe_input_jitter_eps: PositiveFloat | None = None
    """In training the router's input is multiplied by noise in [1 - eps, 1 + eps], the same in every
    layout."""
    moe_router_force_load_balancing: bool = False
    """For benchmarks: experts are dealt out in turn, whatever their scores."""
    moe_router_random_seed: NonNegativeInt | None = None
    """For benchmarks: experts are drawn at random with this seed, the same in every step, whatever their scores."""

    moe_router_load_balancing_type: list[Balancing] = Field(default=["aux_loss"], min_length=1)
    """Losses that even out the load, over a micro-batch (aux_loss), each sequence (seq_aux_loss) or all data-parallel
    ranks and the step's micro-batches so far (global_aux_loss); or sinkhorn, or none, alone."""
    moe_aux_loss_coeff: list[NonNegativeFloat] | None = None
    """A coefficient for each balance loss. Default: 0.01 each."""
    moe_aux_loss_score_function: ScoreFunction | None = None
    """Scores of experts in these losses. Default: moe_router_score_function. Classes of transformers take softmax for
    routers with sigmoid, too."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Coefficient of the mean squared log-sum-exp of the logits (Zoph et al., ST-MoE, 2022)."""

    moe_token_dispatcher_type: str = "alltoall"
    """Name of the dispatcher, which carries tokens to the ranks of their experts."""
    moe_dispatcher_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that dispatcher."""
    moe_permute_fusion: bool | None = None
    """Triton's products permute rows while they load and store them (moe_grouped_gemm=triton, the default on a GPU);
    with other products kernels permute tokens in one pass. Default: on a GPU with Triton."""
    moe_expert_capacity_factor: PositiveFloat | None = None
    """An expert takes at most this many times the mean number of a rank's tokens; the rest are dropped.
    Default: nothing is dropped."""
    moe_pad_expert_input_to_capacity: bool = False
    """Every expert gets exactly its capacity, filled up with zeros."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens stay: those with the highest weights, or the first ones."""

    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Total inner width of the experts that see every token."""
    moe_shared_expert_gate: bool = False
    """Their output is multiplied by the sigmoid of a trained projection of the token."""
    moe_shared_expert_overlap: bool | None = None
    """They work while tokens are on their way to the other experts. Default: where experts are on several ranks and the
    dispatcher can do it (alltoall, allgather)."""

    @property
    def loss_types(self) -> list[str]:
        """The balancing types that are losses."""
        return [name for name in self.moe_router_load_balancing_type if name.endswith("loss")]

    @property
    def balance_coefficients(self) -> dict[str, float]:
        """Balance loss -> its coefficient. The lengths agree once checked."""
        configured = self.moe_aux_loss_coeff
        coefficients = configured if configured is not None else [DEFAULT_COEFFICIENT] * len(self.loss_types)
        return dict(zip(self.loss_types, coefficients, strict=True))

    @property
    def balance_score_function(self) -> ScoreFunction:
        """Scores of experts in balance losses."""
        return self.moe_aux_loss_score_function or self.moe_router_score_function

    @property
    def num_scored(self) -> int:
        """Experts that the router chooses among: those with matrices, and those that return the token."""
        return self.num_experts + self.moe_num_zero_experts

    @property
    def uses_sinkhorn(self) -> bool:
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def group_score_topk(self) -> int:
        """How many of a group's scores make its own. Of grouped routers only."""
        assert self.moe_router_group_topk is not None
        return self.moe_router_group_score_topk or self.moe_router_topk // self.moe_router_group_topk


def read_moe_config(values: Mapping[str, Any]) -> MoeConfig:
    """Parse `model.moe` into its typed form. Raises ConfigError for unknown keys and wrong values."""
    try:
        return MoeConfig.model_validate(dict(values))
    except ValidationError as error:
        origins = dict.fromkeys(values, "[model.moe]")
        raise ConfigError(validation_message("model.moe", MoeConfig, error, origins)) from None
