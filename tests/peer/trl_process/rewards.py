"""Run in the environment with TRL: its reward functions called as its trainer does, and by ours in worker processes.

    rewards.py OUT

writes {name: {"theirs": [...], "unchanged": [...], "registered": [...] or null}}.
"""

import json
import sys
from types import SimpleNamespace

from trl import rewards as trl_rewards

from mt_core.plugins import load_plugins
from mt_tune.rewards.base import RewardSample
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig

TEXTS = [
    (r"<think>\boxed{2}</think> it is \boxed{\frac{2}{6}}", r"\frac{1}{3}"),
    (r"\boxed{0.5}", r"$\frac{1}{2}$"),
    (r"<think>a<think>b</think> \boxed{4}", "5"),
    (r"so $x = 7$, \boxed{7 \text{ cm}}", "7"),
    (r"<think>never closed \boxed{3}", "3"),
    ("1/3", r"\frac{1}{3}"),
    (r"\boxed{3}", "no number at all"),
    ("<think>\nlines\n</think>\n\\boxed{12,000}", "12000"),
]
IDS = [[1, 2, 3, 4], [5] * 40, [], [7, 8, 7, 8, 7, 8], list(range(90)), [1] * 100, [2, 2], [*range(120), 1, 2, 3]]
DIRECT = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_cosine_scaled_reward": {"max_len": 100},
    "get_repetition_penalty_reward": {"ngram_size": 2, "max_penalty": -0.5},
    "get_soft_overlong_punishment": {"max_completion_len": 100, "soft_punish_cache": 20},
}
REGISTERED = {
    "accuracy_reward": ("accuracy", {}),
    "reasoning_accuracy_reward": ("accuracy", {"after": "</think>"}),
    "think_format_reward": ("think_format", {}),
    "get_cosine_scaled_reward": ("cosine_accuracy", {"max_length": 100}),
    "get_repetition_penalty_reward": ("repetition", {"ngram_size": 2, "max_penalty": -0.5}),
    "get_soft_overlong_punishment": ("overlong", {"max_length": 100, "cache": 20}),
}


def samples():
    return [
        RewardSample(
            [{"role": "user", "content": "?"}], [{"role": "assistant", "content": text}], [1], ids, {"solution": right}
        )
        for (text, right), ids in zip(TEXTS, IDS, strict=True)
    ]


def theirs(name):
    """As GRPOTrainer._calculate_rewards calls them."""
    function = getattr(trl_rewards, name)
    function = function(**DIRECT[name]) if DIRECT[name] else function
    ours = samples()
    logged = {}
    return function(
        prompts=[sample.prompt for sample in ours],
        completions=[sample.completion for sample in ours],
        completion_ids=[sample.completion_ids for sample in ours],
        solution=[sample.row["solution"] for sample in ours],
        trainer_state=SimpleNamespace(global_step=3),
        log_extra=logged.__setitem__,
        log_metric=logged.__setitem__,
    )


def main():
    host = load_plugins()
    keys = RewardsConfig(
        functions=[f"trl.rewards.{name}" for name in DIRECT],
        modules=["trl.rewards"],
        options={name: options for name, options in DIRECT.items() if options},
        workers=1,
        deadline_seconds=120,
    )
    with build_rewards(keys, host) as functions:
        unchanged = functions.score(samples(), 3)
    keys = RewardsConfig(
        functions=[f"{name}={ours}" for name, (ours, _) in REGISTERED.items()],
        options={name: options for name, (_, options) in REGISTERED.items() if options},
        workers=1,
        deadline_seconds=120,
    )
    with build_rewards(keys, host) as functions:
        registered = functions.score(samples(), 3)
    found = {
        name: {"theirs": theirs(name), "unchanged": unchanged.values[name], "registered": registered.values[name]}
        for name in DIRECT
    }
    with open(sys.argv[1], "w") as file:
        json.dump({"rewards": found, "columns": dict(unchanged.columns)}, file)


if __name__ == "__main__":
    main()
