"""What mt-tune registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mt_ckpt.variant_specs import HuggingFaceVariantSpec
from mt_core.checkpoint_specs import CheckpointLoaderSpec, CheckpointSaverSpec
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy
from mt_core.specs import (
    BatchSourceSpec,
    CallbackSpec,
    CommandSpec,
    DatasetSpec,
    LossSpec,
    ModelTransformSpec,
    SectionSpec,
)
from mt_tune.environments.environment_specs import ENVIRONMENTS, EnvironmentSpec
from mt_tune.preferences.samples import PAIR_SAMPLE, UNPAIRED_SAMPLE
from mt_tune.reward_models.samples import PROCESS_SAMPLE, REWARD_SAMPLE
from mt_tune.rewards.reward_specs import REWARDS, RewardSpec
from mt_tune.rl.samples import PROMPT_SAMPLE

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [REWARDS, ENVIRONMENTS]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="tune",
            doc="Go on training a model: instructions, adapters, preferences, rewards",
            app=Lazy("mt_tune.commands.app:app"),
        ),
        CommandSpec(
            name="rollouts",
            doc="Completions that a run drew and was trained on, with their rewards",
            app=Lazy("mt_tune.commands.rollouts:rollouts"),
        ),
        CommandSpec(
            name="ckpt merge-adapter",
            doc="Merge an adapter into its base",
            app=Lazy("mt_tune.adapters.command:merge_adapter"),
        ),
    ]


@hookimpl
def mt_register_checkpoint_savers() -> list[CheckpointSaverSpec]:
    return [
        CheckpointSaverSpec(
            name="peft",
            doc="The adapter of a run as a PEFT folder, for PeftModel.from_pretrained; the base is left out",
            convert=Lazy("mt_tune.adapters.peft_folder:convert_checkpoint"),
        )
    ]


@hookimpl
def mt_register_checkpoint_loaders() -> list[CheckpointLoaderSpec]:
    return [
        CheckpointLoaderSpec(
            name="peft-on-base",
            doc="An adapter of PEFT or of Megatron-Bridge with the base that it names",
            detect=Lazy("mt_tune.adapters.on_base:detect"),
            open=Lazy("mt_tune.adapters.on_base:open_checkpoint_on_base"),
        )
    ]


@hookimpl
def mt_register_sections() -> list[SectionSpec]:
    return [
        SectionSpec(
            name="adapter",
            doc="Parameters that are trained beside a frozen model: LoRA and its relatives",
            config_type=Lazy("mt_tune.adapters.config:AdapterConfig"),
            affects_training=True,
        ),
        SectionSpec(
            name="quantize",
            doc="Training with quantized weights: rounding in the forward pass",
            config_type=Lazy("mt_tune.quantized_training.config:QuantizeConfig"),
            affects_training=True,
            shrink=Lazy("mt_tune.quantized_training.config:shrink_quantize"),
        ),
        SectionSpec(
            name="tune",
            doc="Changes of training that fine-tuning uses: noise on embeddings, learning rates by layer",
            config_type=Lazy("mt_tune.sft.config:TuneConfig"),
            affects_training=True,
        ),
        SectionSpec(
            name="preference",
            doc="Training by preferences: DPO and its relatives",
            config_type=Lazy("mt_tune.preferences.config:PreferenceConfig"),
            affects_training=True,
        ),
        SectionSpec(
            name="score_head",
            doc="Scores in place of the LM head: reward models",
            config_type=Lazy("mt_tune.reward_models.config:ScoreHeadConfig"),
            affects_training=True,
        ),
        SectionSpec(
            name="rewards",
            doc="Reward functions of generated texts, and the processes that they run in",
            config_type=Lazy("mt_tune.rewards.config:RewardsConfig"),
            affects_training=True,
            shrink=Lazy("mt_tune.rewards.config:shrink_rewards"),
        ),
        SectionSpec(
            name="rl",
            doc="Reinforcement learning: completions that are drawn, advantages, the loss of a policy",
            config_type=Lazy("mt_tune.rl.config:RLConfig"),
            affects_training=True,
            shrink=Lazy("mt_tune.rl.small_run:shrink_rl"),
        ),
        SectionSpec(
            name="distillation",
            doc="Training on the distributions of a teacher",
            config_type=Lazy("mt_tune.distill.config:DistillationConfig"),
            affects_training=True,
            shrink=Lazy("mt_tune.distill.config:shrink_distillation"),
        ),
    ]


@hookimpl
def mt_register_environments() -> list[EnvironmentSpec]:
    return [
        EnvironmentSpec(
            name="reasoning_gym",
            doc="Questions of a task of reasoning-gym, by the column item; options dataset, size, seed and the task's",
            build=Lazy("mt_tune.environments.reasoning_gym:build_reasoning_gym"),
        ),
        EnvironmentSpec(
            name="verifiers",
            doc="Tasks of a taskset of verifiers, by the column item; options taskset and the keys of verifiers' [env]",
            build=Lazy("mt_tune.environments.verifiers:build_verifiers"),
        ),
    ]


@hookimpl
def mt_register_rewards() -> list[RewardSpec]:
    return [
        RewardSpec(
            name="accuracy",
            doc="The answer has the value of the right one, by math-verify; options column, after, numbers",
            build=Lazy("mt_tune.rewards.math_rewards:build_accuracy"),
            aliases=("accuracy_reward",),
        ),
        RewardSpec(
            name="cosine_accuracy",
            doc="Accuracy by length: short right answers and long wrong ones have more; option max_length",
            build=Lazy("mt_tune.rewards.math_rewards:build_cosine"),
            aliases=("cosine_scaled_reward",),
        ),
        RewardSpec(
            name="exact_match",
            doc="The answer, found by a pattern, is the text of the right one; options column, pattern",
            build=Lazy("mt_tune.rewards.text_rewards:build_exact_match"),
        ),
        RewardSpec(
            name="regex",
            doc="A regular expression matches the completion; options pattern, full, reward, penalty",
            build=Lazy("mt_tune.rewards.text_rewards:build_regex"),
        ),
        RewardSpec(
            name="think_format",
            doc="The completion begins with one <think>...</think>",
            build=Lazy("mt_tune.rewards.text_rewards:build_think_format"),
            aliases=("think_format_reward",),
        ),
        RewardSpec(
            name="overlong",
            doc="DAPO's soft penalty of long completions; options max_length, cache",
            build=Lazy("mt_tune.rewards.text_rewards:build_overlong"),
            one_at_a_time=False,
            aliases=("soft_overlong_punishment_reward",),
        ),
        RewardSpec(
            name="repetition",
            doc="A penalty of repeated n-grams; options ngram_size, max_penalty",
            build=Lazy("mt_tune.rewards.text_rewards:build_repetition"),
            one_at_a_time=False,
            aliases=("repetition_penalty_reward",),
        ),
        RewardSpec(
            name="code",
            doc="The completion's program passes the tests of its row, in a sandbox; options column, partial, limits",
            build=Lazy("mt_tune.rewards.code_rewards:build_code"),
            # The sandbox has processes with deadlines of its own.
            one_at_a_time=False,
            in_process=True,
        ),
        RewardSpec(
            name="reward_model",
            doc="The score of a reward model: a run of mt tune reward, or a folder of Hugging Face; option path",
            build=Lazy("mt_tune.rewards.model_rewards:build_model_reward"),
            one_at_a_time=False,
            in_process=True,
        ),
        RewardSpec(
            name="http",
            doc="A server gives the rewards: POST {prompts, completions, ...} -> {rewards}; option url",
            build=Lazy("mt_tune.rewards.http_rewards:build_http"),
            one_at_a_time=False,
        ),
        RewardSpec(
            name="reasoning_gym",
            doc="The score of a row's task of reasoning-gym; option tagged",
            build=Lazy("mt_tune.rewards.gym_rewards:build_reasoning_gym"),
        ),
    ]


@hookimpl
def mt_register_model_transforms() -> list[ModelTransformSpec]:
    return [
        ModelTransformSpec(
            # By its name behind "adapter", which freezes the model: the head is trained beside adapters.
            name="score_head",
            doc="Scores in place of the LM head, of [score_head]",
            applies=Lazy("mt_tune.reward_models.config:has_score_head"),
            transform=Lazy("mt_tune.reward_models.model:add_score_head"),
        ),
        ModelTransformSpec(
            name="adapter",
            doc="Freezes the model and adds the adapters of [adapter] to its layers",
            applies=Lazy("mt_tune.adapters.config:has_adapter"),
            transform=Lazy("mt_tune.adapters.transform:add_adapters"),
        ),
        ModelTransformSpec(
            # By its name behind "adapter", which decides what is frozen.
            name="adapter_base",
            doc="Holds the frozen matrices of a model with adapters as adapter.base says: nf4, int8, fp8, int4",
            applies=Lazy("mt_tune.adapters.config:has_quantized_base"),
            transform=Lazy("mt_tune.adapters.quantized_base:quantize_base"),
            adapt=Lazy("mt_tune.adapters.quantized_reading:quantized_checkpoint"),
            replaces_parameters=True,
        ),
        ModelTransformSpec(
            name="embedding_noise",
            doc="Adds the noise of tune.neftune_noise_alpha to token embeddings while training",
            applies=Lazy("mt_tune.sft.config:has_noise"),
            transform=Lazy("mt_tune.sft.neftune:add_noise"),
        ),
        ModelTransformSpec(
            name="quantized_weights",
            doc="Rounds the weights of linear layers and experts as quantize.scheme says",
            applies=Lazy("mt_tune.quantized_training.config:is_fake_quantized"),
            transform=Lazy("mt_tune.quantized_training.transform:round_weights"),
        ),
        ModelTransformSpec(
            name="routing_replay",
            doc="Routers that note their experts and take those of generation (rl.routing_replay)",
            applies=Lazy("mt_tune.rl.routing_replay:has_replay"),
            transform=Lazy("mt_tune.rl.routing_replay:add_replay"),
        ),
        ModelTransformSpec(
            name="learning_rates",
            doc="Learning rates by layer and by name: tune.layer_lr_decay, tune.lr_multipliers",
            applies=Lazy("mt_tune.sft.config:has_rates"),
            transform=Lazy("mt_tune.sft.learning_rates:set_rates"),
        ),
    ]


@hookimpl
def mt_register_losses() -> list[LossSpec]:
    return [
        LossSpec(
            name="dft",
            doc="Dynamic fine-tuning: cross entropy times the probability of the token, which has no gradient",
            build=Lazy("mt_tune.sft.dft:build_dft"),
        ),
        LossSpec(
            name="preference",
            doc="The losses of preference.loss: DPO and its relatives, ORPO, SimPO, CPO",
            build=Lazy("mt_tune.preferences.objective:build_preference_loss"),
        ),
        LossSpec(
            name="unpaired_preference",
            doc="The loss of preference.unpaired_loss: KTO and BCO, of answers that are desirable or not",
            build=Lazy("mt_tune.preferences.unpaired_objective:build_unpaired_loss"),
        ),
        LossSpec(
            name="policy",
            doc="Losses of a policy by the advantages of what it drew ([rl]): PPO, GRPO, DAPO, GSPO, CISPO",
            build=Lazy("mt_tune.rl.objective:build_policy_loss"),
        ),
        LossSpec(
            name="value",
            doc="The squared distance of a value model to returns; mt tune grpo --algorithm ppo trains one",
            build=Lazy("mt_tune.rl.value_model:build_value_loss"),
        ),
        LossSpec(
            name="distillation",
            doc="A divergence from the distributions of a teacher ([distillation]), and cross entropy",
            build=Lazy("mt_tune.distill.objective:build_distillation_loss"),
        ),
        LossSpec(
            name="reward",
            doc="Bradley-Terry over the rewards of a chosen and a rejected text",
            build=Lazy("mt_tune.reward_models.losses:build_reward_loss"),
        ),
        LossSpec(
            name="process_reward",
            doc="Cross entropy of wrong and right at the end of each step of an answer",
            build=Lazy("mt_tune.reward_models.losses:build_process_reward_loss"),
        ),
    ]


@hookimpl
def mt_register_datasets() -> list[DatasetSpec]:
    return [
        DatasetSpec(
            name="prompts",
            doc="Prompts that the model completes, with columns for rewards",
            config_type=Lazy("mt_tune.rl.config:PromptDataConfig"),
            build=Lazy("mt_tune.rl.prompts:build_prompts"),
            checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
            sample=PROMPT_SAMPLE,
        ),
        DatasetSpec(
            name="preference",
            doc="Pairs of a chosen and a rejected answer, packed, each answer a segment",
            config_type=Lazy("mt_tune.preferences.config:PreferenceDataConfig"),
            build=Lazy("mt_tune.preferences.dataset:build_preferences"),
            checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
            sample=PAIR_SAMPLE,
        ),
        DatasetSpec(
            name="unpaired_preference",
            doc="Answers with a label, desirable or not, packed, each a segment",
            config_type=Lazy("mt_tune.preferences.config:UnpairedDataConfig"),
            build=Lazy("mt_tune.preferences.unpaired_dataset:build_unpaired"),
            checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
            sample=UNPAIRED_SAMPLE,
        ),
        DatasetSpec(
            name="reward",
            doc="Pairs of whole texts for a reward model, packed",
            config_type=Lazy("mt_tune.reward_models.config:RewardDataConfig"),
            build=Lazy("mt_tune.reward_models.pair_dataset:build_reward_pairs"),
            checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
            sample=REWARD_SAMPLE,
        ),
        DatasetSpec(
            name="process_reward",
            doc="Answers in steps with a label each, packed",
            config_type=Lazy("mt_tune.reward_models.config:ProcessRewardDataConfig"),
            build=Lazy("mt_tune.reward_models.process_dataset:build_process_rewards"),
            sample=PROCESS_SAMPLE,
        ),
    ]


@hookimpl
def mt_register_batch_sources() -> list[BatchSourceSpec]:
    return [
        BatchSourceSpec(
            name="reference",
            doc="The data set's batches with log-probabilities of a reference (preference.reference)",
            build=Lazy("mt_tune.preferences.reference:ReferenceSource"),
        ),
        BatchSourceSpec(
            name="unpaired_reference",
            doc="The same of single answers, with what their implicit rewards are compared with",
            build=Lazy("mt_tune.preferences.unpaired_reference:UnpairedReferenceSource"),
        ),
        BatchSourceSpec(
            name="rollouts",
            doc="Completions that the trained model draws, with rewards and advantages ([rl], [rewards])",
            build=Lazy("mt_tune.rl.source:RolloutSource"),
        ),
        BatchSourceSpec(
            name="teacher",
            doc="The data set's batches with the distributions of a teacher (distillation.teacher)",
            build=Lazy("mt_tune.distill.source:TeacherSource"),
        ),
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="adapter_start",
            doc="Sets what adapters take from the weights that a run starts from, or reads them (adapter.load)",
            build=Lazy("mt_tune.adapters.callback:build_adapter_start"),
            always=True,
            all_ranks=True,
        ),
        CallbackSpec(
            name="position_check",
            doc="Compares rotary positions with those of checkpoint.load, where keys of [model] change them",
            build=Lazy("mt_tune.positions.callback:build_position_check"),
            always=True,
            all_ranks=True,
        ),
    ]


@hookimpl
def mt_register_hugging_face_variants() -> list[HuggingFaceVariantSpec]:
    return [
        HuggingFaceVariantSpec(
            name="scores",
            doc="Models with [score_head]: ForSequenceClassification and ForTokenClassification",
            write=Lazy("mt_tune.reward_models.hugging_face:written_family"),
            read=Lazy("mt_tune.reward_models.hugging_face:read_family"),
        )
    ]


@hookimpl(optionalhook=True)
def mt_register_adapter_sets() -> list[Any]:
    # mt-infer asks for it, which this distribution can do without.
    from mt_infer.adapters import AdapterSetSpec

    return [
        AdapterSetSpec(
            name="peft",
            doc="PEFT folders on a served model: LoRA, DoRA, VeRA and IA3 of linear layers and of token embeddings",
            build=Lazy("mt_tune.adapters.serving:PeftAdapterSet"),
        )
    ]


@hookimpl(optionalhook=True)
def mt_register_pair_scorers() -> list[Any]:
    # As above.
    from mt_infer.pair_scorers import PairScorerSpec

    return [
        PairScorerSpec(
            name="reward_model",
            doc="Reward models: the score of an answer to a prompt",
            build=Lazy("mt_tune.reward_models.scorer:build_pair_scorer"),
        )
    ]


@hookimpl
def mt_check_config(config: Config) -> None:
    from mt_tune.adapters.config import check_adapter
    from mt_tune.distill.config import check_distillation
    from mt_tune.preferences.config import check_preference
    from mt_tune.quantized_training.config import check_quantize
    from mt_tune.reward_models.config import check_score_head
    from mt_tune.rl.config import POLICY, RLConfig
    from mt_tune.rl.config_rules import check_rl
    from mt_tune.sft.config import check_tune

    check_adapter(config)
    check_quantize(config)
    check_tune(config)
    check_preference(config)
    check_rl(config)
    if config.train.loss == POLICY:
        # Needs mt-infer, as such a run does.
        from mt_tune.rl.routing_checks import check_routing_replay

        check_routing_replay(config, config.section(RLConfig))
    check_distillation(config)
    check_score_head(config)
