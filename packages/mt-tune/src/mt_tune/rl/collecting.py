"""Groups of completions to train on: of the next prompts, drawn by the policy and judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.errors import DataError
from mt_core.parallel.first_rank import on_first_rank, raise_on_all_ranks
from mt_core.train.batch_source import TrainingRun
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rewards.scoring import RewardFunctions
from mt_tune.rl.advantages import has_equal_rewards
from mt_tune.rl.config import RLConfig, prompt_data
from mt_tune.rl.drawer_choice import build_drawer
from mt_tune.rl.drawing import DrawOptions
from mt_tune.rl.episode_config import configured_episodes, require_messages
from mt_tune.rl.episodes import Episodes
from mt_tune.rl.judging import Judge, reward_metrics, rewards_of
from mt_tune.rl.pool import GroupPool
from mt_tune.rl.prompts import Key, Prompt, completion_ends, prompts_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.samples import PROMPT


class GroupCollector:
    """Draws and judges completions; process 0 asks for both, and all processes have the groups then."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        config = run.config
        self.keys = config.section(RLConfig)
        self.prompts: dict[Key, Prompt] = {}
        for dataset in (run.train_data, *run.valid_data.values()):
            self.prompts.update((prompt.key, prompt) for prompt in prompts_of(dataset))
        require_room(self.prompts.values(), self.keys, config.data.seq_length)
        ends = completion_ends(prompt_data(config), run.engine.tokenizer)
        self.options = DrawOptions(self.keys.temperature, self.keys.max_completion_length, ends, config.train.seed)
        require_messages(run)
        self.judge, episodes = self._build_judges(ends)
        self.drawer = build_drawer(run, self.keys, episodes)
        self.pool = GroupPool(self.keys.max_staleness, self.keys.updates)
        self.digests: dict[int, str] = {}
        """Digest of the weights of each version that drew tokens of the groups at hand, where they are a copy."""
        self.position = 0
        """Number of the next prompt in the order of the data set."""
        self.is_drawn = False
        """Whether the next round of drawing has been carried out before its groups are asked for."""

    def collect(self, needed: int) -> tuple[list[Group], list[Group]]:
        """The groups to train on, and all that were drawn for them."""
        kept: list[Group] = []
        drawn: list[Group] = []
        for _ in range(self.keys.max_generations if self.keys.dynamic_sampling else 1):
            new = self._round(needed - len(kept))
            drawn += new
            equal = has_equal_rewards(rewards_of(new))
            kept += [group for group, dead in zip(new, equal, strict=True) if not (self.keys.dynamic_sampling and dead)]
            if len(kept) == needed:
                break
        # Groups with equal rewards fill the batch up: their advantages are 0.
        kept += [group for group in drawn if not any(group is other for other in kept)][: needed - len(kept)]
        return kept, drawn

    def start_round(self, needed: int, ahead: int) -> None:
        """Draws with the weights of the moment for a generation that is trained on `ahead` steps later, in the
        background where rl.asynchronous is set."""
        self._use_new_weights()
        while len(self.pool.groups) < needed + self.keys.extra_groups:
            self.pool.groups.append(self._next_group())
        self.drawer.start(self.pool.groups, self.options, self.pool.enough(needed, self.run.state.iteration + ahead))
        self.is_drawn = True

    def _round(self, needed: int) -> list[Group]:
        """Complete and judged groups, on all processes."""
        if not self.is_drawn:
            self.start_round(needed, ahead=0)
        self.drawer.finish()
        self.is_drawn = False
        step = self.run.state.iteration
        groups = on_first_rank(lambda: self._judged(self.pool.chosen(needed, step), record=True), self.run.ctx.world)
        self.pool.remove(groups)
        return groups

    def _use_new_weights(self) -> None:
        self.drawer.use_new_weights()
        version, digest = self.drawer.version, self.drawer.digest
        if digest is not None and self.digests.get(version) != digest:
            used = {
                of_token for group in self.pool.groups for rollout in group.rollouts for of_token in rollout.versions
            }
            self.digests = {old: self.digests[old] for old in sorted(used & self.digests.keys())} | {version: digest}
            self.run.event("weights", step=version, hash=digest)

    def evaluate(self, groups: list[Group], options: DrawOptions) -> list[Group]:
        """The groups of held-out prompts, completed and judged, without metrics, which are those of training."""
        self.drawer.finish()
        self._use_new_weights()
        self.drawer.draw(groups, options)
        return on_first_rank(lambda: self._judged(groups, record=False), self.run.ctx.world)

    def state_dict(self) -> dict[str, Any]:
        self.drawer.finish()
        digests = [[version, digest] for version, digest in self.digests.items()]
        return {
            "position": self.position,
            "groups": self.pool.state_dict(),
            "is_drawn": self.is_drawn,
            "weights": digests,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.is_drawn = int(state["position"]), bool(state.get("is_drawn", False))
        self.pool.load_state_dict(state.get("groups", ()), self.prompts)
        self.digests = {int(version): digest for version, digest in state.get("weights", ())}

    def close(self) -> None:
        self.drawer.close()
        if self.judge is not None:
            self.judge.functions.close()

    def _next_group(self) -> Group:
        data: Any = self.run.train_data
        file, line = data[self.position % len(data)][PROMPT].tolist()
        group = Group(self.prompts[file, line], self.position, [Rollout() for _ in range(self.keys.group_size)])
        self.position += 1
        return group

    def _judged(self, groups: list[Group], *, record: bool) -> list[Group]:
        assert self.judge is not None
        table = self.judge.judge(groups, self.run.state.iteration, self.run.last_iteration)
        metrics: Mapping[str, float] = reward_metrics(groups, table) if record else {}
        for name, value in metrics.items():
            self.run.record(name, value)
        return groups

    def _build_judges(self, ends: frozenset[int]) -> tuple[Judge | None, Episodes | None]:
        """Reward functions and environments: on the first process alone, which calls them. Generators have environments
        themselves."""
        judge, episodes, error = None, None, None
        if self.run.ctx.world.rank == 0:
            try:
                if not self.keys.generator_processes:
                    episodes = configured_episodes(self.run.config, self.run.engine.tokenizer, self.run.host)
                functions = configured_rewards(self.run, has_environment=self.keys.has_environment)
                judge = Judge(functions, self.keys, self.run.engine.tokenizer, ends)
            except Exception as raised:
                error = raised
        raise_on_all_ranks(error, self.run.ctx.world)
        return judge, episodes


def configured_rewards(run: TrainingRun, *, has_environment: bool) -> RewardFunctions:
    """Environments may give all rewards."""
    keys = run.config.section(RewardsConfig)
    return RewardFunctions([]) if has_environment and not keys.functions else build_rewards(keys, run.host)


def require_room(prompts: Iterable[Prompt], keys: RLConfig, length: int) -> None:
    """Raises DataError for a prompt that does not fit with its completion into data.seq_length."""
    for prompt in prompts:
        if len(prompt.tokens) + keys.max_completion_length > length + 1:
            raise DataError(
                f"{prompt.where}: the prompt has {len(prompt.tokens)} tokens, with rl.max_completion_length="
                f"{keys.max_completion_length} more than data.seq_length={length} positions hold; raise the latter, or "
                "lower rl.max_completion_length"
            )
