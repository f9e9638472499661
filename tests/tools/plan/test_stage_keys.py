"""Megatron's keys for the layers of the first and the last pipeline rank."""

from __future__ import annotations

import pytest

from mt_core.config.loading import load_config
from mt_core.config.parallel import ParallelConfig
from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.partition import stages_by_keys
from mt_core.parallel.pipeline.stage import Stage
from mt_core.plugins import load_plugins
from mt_core.train.pipelining import model_stages

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def stages(ranks: int, layers: int, each: int = 1, placement: str = "loop", **keys: object) -> list[Stage] | None:
    parallel = ParallelConfig.model_validate({"pipeline_model_parallel_size": ranks, **keys})
    return stages_by_keys(parallel, layers, each, placement)


def counts(found: list[Stage] | None) -> list[int]:
    assert found is not None
    return [len(stage.layers) for stage in found]


def test_without_the_keys_nothing_is_said() -> None:
    assert stages(4, 10) is None


def test_the_ends_have_what_the_keys_say() -> None:
    assert counts(stages(16, 61, **{FIRST: 4, LAST: 1})) == [4, *[4] * 14, 1]
    assert counts(stages(4, 18, 2, **{FIRST: 2, LAST: 4})) == [1, 3, 3, 2, 1, 3, 3, 2]


def test_embedding_and_loss_count_as_layers() -> None:
    assert counts(stages(4, 14, **{EMBEDDING: True, LOSS: True})) == [3, 4, 4, 3]
    assert counts(stages(4, 15, **{LOSS: True})) == [4, 4, 4, 3]


@pytest.mark.parametrize(
    ("keys", "placement", "words"),
    [
        (
            {FIRST: 2, "pipeline_model_parallel_layout": "Et|tL"},
            "loop",
            [FIRST, "pipeline_model_parallel_layout=Et|tL"],
        ),
        ({LOSS: True, "pipeline_schedule": "zbv_zero_bubble"}, "v", [LOSS, "pipeline_schedule=zbv_zero_bubble"]),
        ({FIRST: 3, LOSS: True}, "loop", ["cannot go with"]),
        ({FIRST: 3}, "loop", ["leaves 7 layers", "3 ranks", "3, 6, 9"]),
    ],
)
def test_what_cannot_be_had_is_refused(keys: dict[str, object], placement: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        stages(4, 10, 1, placement, **keys)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_configuration_that_sets_it_has_these_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = ["parallel.pipeline_model_parallel_size=2", "model.num_layers=5"]
    config = load_config(preset="gpt-tiny", overrides=[*two, f"parallel.{FIRST}=1"]).config
    assert counts(model_stages(config, load_plugins())) == [1, 4]
    with pytest.raises(ConfigError, match=rf"{FIRST}=7 .* leaves -2 layers"):
        load_config(preset="gpt-tiny", overrides=[*two, f"parallel.{FIRST}=7"])


def test_without_stages_the_keys_mean_nothing_and_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.{LAST} divides layers over pipeline stages"):
        load_config(preset="gpt-tiny", overrides=[f"parallel.{LAST}=1"])
