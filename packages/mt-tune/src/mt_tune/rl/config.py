"""The section [rl], and the data of prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from mt_core.errors import ConfigError
from mt_data.datasets.sft.config import ChatTemplateKeys

POLICY, PROMPTS, ROLLOUTS = "policy", "prompts", "rollouts"
"""Names of the loss, of the data set, and of the source of batches."""
VALUE, GAE = "value", "gae"
"""Names of the loss of a value model, and of the advantages that need one."""
DROPOUTS = ("hidden_dropout", "attention_dropout")
REFERENCE_NEEDED = "rl.beta={beta} holds the policy to a reference, the weights of checkpoint.load, which is not set"


class RLConfig(Section):
    """Reinforcement learning (train.batch_source="rollouts", train.loss="policy")."""

    group_size: PositiveInt = 8
    """Completions of a prompt, whose rewards are compared (G)."""
    max_completion_length: PositiveInt = 256
    """Tokens of a completion."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, where completions are drawn and in the loss."""
    eval_temperature: NonNegativeFloat = 0.0
    """That of completions of held-out prompts; 0 takes the likeliest tokens."""
    eval_on_start: bool = True
    """Evaluate before the first step, so that what the run has learned shows. Without held-out prompts there is nothing
    to evaluate on."""
    loss: Literal["clip", "gspo", "cispo", "sapo", "reinforce"] = "clip"
    """Loss of a token: the clipped ratio (PPO, GRPO, DAPO), the same with the ratio of the whole completion (GSPO), the
    clipped ratio as a weight (CISPO), soft gates (SAPO), or the log-probability times the advantage.
    train.loss_normalization says over what its mean is taken."""
    epsilon: NonNegativeFloat = Field(0.2)
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: NonNegativeFloat | None = None
    """The ratio is clipped above 1 + epsilon_high; of cispo, above epsilon_high. Default: epsilon, of cispo 5."""
    delta: PositiveFloat | None = None
    """Largest ratio of tokens with negative advantages (dual clip); above 1 + epsilon_high."""
    advantage: Literal[
        "grpo", "dr_grpo", "grpo_batch", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gae"
    ] = "grpo"
    """What a completion's reward is compared with: the mean of its group, divided by the deviation of the group (grpo),
    by nothing (dr_grpo) or by that of the batch (grpo_batch); the mean of the others (rloo); the mean over the batch's
    tokens (reinforce_plus_plus, after subtraction of the group's mean with _baseline); the mean weighted by length
    (opo); or, token by token, the values of a value model (gae, PPO)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """With gae: factor of the reward of each later token."""
    lam: float = Field(0.95, ge=0, le=1)
    """With gae: factor of each later difference from the value model; 1 takes the return, 0 looks one token ahead."""
    value_model: str | None = None
    """With gae: a run, a checkpoint or a Hugging Face folder that the value model starts from, such as a reward model.
    Default: checkpoint.load, with a new head."""
    value_lr: PositiveFloat | None = None
    """With gae: learning rate of the value model. Default: optimizer.lr; other rates are scaled with it."""
    value_clip: PositiveFloat | None = 0.2
    """With gae: how far a value moves from the one before the updates without the larger loss of the two; null: no
    bound."""
    beta: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference, the weights of checkpoint.load."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: in the loss, by kl_estimator, or as log-ratio (k1) subtracted from rewards."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """In the loss: half the squared log-ratio, or r - log r - 1 times the importance ratio; both have the gradient of
    the divergence."""
    steps_per_generation: PositiveInt = 1
    """Optimizer steps that the completions of one generation are divided into."""
    num_iterations: PositiveInt = 1
    """Times that a generation's completions are trained on."""
    sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """Weight of a token for the difference between generation and training, exp(log p trained - log p drawn): by token,
    by the product over the completion, or by its geometric mean; limited to sampling_correction_max, or 0 outside of
    the bounds (mask)."""
    sampling_correction_max: PositiveFloat = 2.0
    """The largest weight; of the masks, weights above it are 0."""
    sampling_correction_min: NonNegativeFloat = 0.0
    """The smallest weight of the masks: those below it are 0, too."""
    mask_truncated: bool = False
    """Leave out completions that reached max_completion_length."""
    overlong_buffer: NonNegativeInt = 0
    """Last tokens of max_completion_length in which the reward falls linearly, by overlong_penalty at its end."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What the longest completion loses."""
    dynamic_sampling: bool = False
    """Draw completions of further prompts in place of groups whose rewards are all equal (DAPO)."""
    max_generations: PositiveInt = 8
    """With dynamic_sampling: times that prompts are drawn for one batch, at most."""
    patience: NonNegativeInt = 8
    """Generations in a row from which nothing can be learned (all groups with equal rewards, or all completions cut at
    their longest) before the run stops and says why; 0: never."""
    generation_parallel: dict[str, Any] | None = None
    """Keys of [parallel] of the layout that generates, with a copy of the weights. Default: the run's own layout and
    memory; under FSDP2 and context parallelism each process by itself."""
    generator_processes: NonNegativeInt = 0
    """Processes that draw completions, beside those that train, in the layout generation_parallel (default: each has
    the whole model); on GPUs with a device each. 0: the processes that train draw."""
    max_staleness: NonNegativeInt = 0
    """Optimizer steps by which the weights that drew a token may be older than those of the first step that trains on
    it; 0: completions are drawn with the weights of the moment."""
    asynchronous: bool = False
    """With max_staleness of at least the steps of a generation, the next one is drawn while this one is trained on: by
    generator_processes, or in a thread with a copy of the weights, which needs a run of one process."""
    extra_groups: NonNegativeInt = 0
    """Groups in progress beside those that a generation needs. A generation ends when enough groups are complete; the
    others go on in the next one, with its weights, within max_staleness."""
    routing_replay: bool = False
    """In mixtures of experts tokens go through the experts that they went through where they were drawn."""
    environments: list[str] = Field(default_factory=list)
    """The other side of conversations: names of registered environments (`mt plugins --kind environments`), and classes
    of rewards.modules as `module:Class`, as TRL's environment_factory takes them. Of several a row's column
    `environment` chooses one, by its label (`LABEL=NAME`; default: its name)."""
    tools: list[str] = Field(default_factory=list)
    """Functions of rewards.modules that the model may call, as `module:function`, beside those of environments."""
    environment_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Label of an environment -> its options; of a class its keyword arguments."""
    environment_weight: float = 1.0
    """Factor of the reward that environments give themselves, beside those of [rewards]."""
    max_turns: PositiveInt | None = None
    """Turns of the model in a conversation, at most; tokens are bounded by max_completion_length, which counts those of
    environments too."""
    environment_processes: NonNegativeInt = 64
    """Processes in which environments act, one conversation each; completions beyond wait for one that is free. 0: in
    the process of training, where nothing ends them. rewards.memory_mb limits their memory."""
    environment_deadline_seconds: PositiveFloat = 60.0
    """Time of an environment for one turn, after which its process is ended; rewards.on_failure says what becomes of
    the completion."""
    keep_dropped_turns: bool = False
    """Take a chat template that writes earlier turns in another way than the last one; what the model is trained on are
    the tokens that it drew."""
    write_rollouts: bool = True
    """Keep prompts, completions and rewards in rollouts.jsonl of the run directory (mt rollouts)."""

    @property
    def has_environment(self) -> bool:
        return bool(self.environments or self.tools)

    @property
    def high(self) -> float:
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss == "cispo" else self.epsilon

    @property
    def updates(self) -> int:
        """Optimizer steps on the completions of one generation."""
        return self.steps_per_generation * self.num_iterations

    @property
    def draws_ahead(self) -> bool:
        """Whether completions of the next generation are drawn while this one is trained on."""
        return self.asynchronous and self.max_staleness > 0


class PromptDataConfig(ChatTemplateKeys):
    """Prompts in JSON lines, JSON arrays or Parquet: `prompt` (a text or messages) or `messages`; other columns are
    handed to rewards."""

    dataset_type: str = PROMPTS
    prompt_format: Literal["text", "user_message"] | None = None
    """A prompt that is a text is completed as it is, or becomes the message of a user. Needed where a chat template is
    there."""
    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""


def prompt_data(config: Any) -> PromptDataConfig:
    """The section [data] of a configuration. Raises ConfigError for another data set than prompts."""
    if not isinstance(config.data, PromptDataConfig):
        raise ConfigError(
            f'completions are drawn for prompts; set data.dataset_type (now {config.data.dataset_type}) to "{PROMPTS}"'
        )
    return config.data
