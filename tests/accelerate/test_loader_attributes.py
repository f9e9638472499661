"""What programs read and set of prepared loaders: `batch_sampler.even_batches`, data sets, epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accelerate.programs import build, samples
from torch.utils.data import DataLoader

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_core.errors import ConfigError
from mt_core.testing import run_ranks


def rows_of_rank(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    """Ten samples in batches of four, on this rank."""
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(10), batch_size=4))  # type: ignore[arg-type]
    filled = [batch.tolist() for batch in loader]
    loader.batch_sampler.even_batches = False
    uneven = [batch.tolist() for batch in loader]
    with accelerator.join_uneven_inputs([], even_batches=True):
        joined = [batch.tolist() for batch in loader]
    skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)]
    return {"filled": filled, "uneven": uneven, "joined": joined, "skipped": skipped}


@pytest.mark.dist
@pytest.mark.slow
def test_a_program_decides_for_one_loader_whether_its_batches_are_even() -> None:
    first, second = run_ranks(2, rows_of_rank)
    assert first["uneven"] == [[0, 1, 2, 3], [8, 9]]
    assert second["uneven"] == [[4, 5, 6, 7]]
    assert (first["skipped"], second["skipped"]) == ([[8, 9]], [])
    # Filled up from the beginning of the data, as Accelerate does.
    assert first["filled"] == first["joined"] == [[0, 1, 2, 3], [8, 9, 0, 1]]
    assert second["filled"] == second["joined"] == [[4, 5, 6, 7], [2, 3, 4, 5]]


@pytest.fixture
def prepared() -> tuple[Accelerator, Any, Any]:
    """An Accelerator with the plugin, its model, and a loader of five samples in batches of four."""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(), cpu=True)
    model = build("gpt2")
    loader: Any = DataLoader(samples("gpt2", 5), batch_size=4)  # type: ignore[arg-type]
    engine, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    return accelerator, engine, loader


def test_an_uneven_last_batch_has_the_loss_of_its_samples_alone(prepared: tuple[Accelerator, Any, Any]) -> None:
    _, engine, loader = prepared
    loader.batch_sampler.even_batches = False
    engine.eval()
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [4, 1]
    with torch.no_grad():
        alone = build("gpt2").eval()(**batches[1]).loss.item()
    assert engine(**batches[1]).loss.item() == pytest.approx(alone, rel=1e-5)


def test_batches_are_even_in_join_uneven_inputs(prepared: tuple[Accelerator, Any, Any]) -> None:
    accelerator, engine, loader = prepared
    with accelerator.join_uneven_inputs([engine], even_batches=False):
        assert [len(batch["input_ids"]) for batch in loader] == [4, 1]
    assert [len(batch["input_ids"]) for batch in loader] == [4, 4]


def test_a_loader_can_be_prepared_after_the_model(prepared: tuple[Accelerator, Any, Any]) -> None:
    accelerator, engine, loader = prepared
    later: Any = accelerator.prepare(DataLoader(samples("gpt2", 6), batch_size=4))  # type: ignore[arg-type]
    engine.eval()
    gathered = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in later]
    assert [len(rows) for rows in gathered] == [4, 2]
    assert accelerator.prepare(loader) is loader
    with pytest.raises(ConfigError, match="prepares one model"):
        accelerator.prepare(build("gpt2"))


class Followed(torch.utils.data.SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_loader_of_the_plugin_has_the_attributes_of_a_dataloader(prepared: tuple[Accelerator, Any, Any]) -> None:
    accelerator, _, loader = prepared
    assert (len(loader.dataset), loader.num_workers, loader.total_dataset_length) == (5, 0, 5)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.even_batches) == (4, True)
    rows = samples("gpt2", 5)
    sampler = Followed(rows)
    later: Any = accelerator.prepare_data_loader(DataLoader(rows, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    later.set_epoch(3)
    assert (later.get_sampler(), sampler.epoch) == (sampler, 3)
