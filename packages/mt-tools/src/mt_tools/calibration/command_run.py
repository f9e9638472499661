"""What `mt calibrate` does on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.config.sources import parse_override
from mt_core.launch.environment import read_environment
from mt_core.parallel.context import is_writer, wait_for_all
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_tools.calibration.options import CalibrationOptions
from mt_tools.calibration.run import CalibrationResult, calibrate_model
from mt_tools.calibration.samples import Samples, rank_batches, samples_of_split, samples_of_text
from mt_tools.calibration.store import calibration_store
from mt_tools.calibration.writing import write_calibrated

Settings = dict[str, dict[str, Any]]
DATA, TYPE, SEQ_LENGTH = "data", "dataset_type", "seq_length"

LENGTH = 2048
"""Tokens of a sample of a text by default."""


@dataclass(frozen=True)
class Data:
    """What a model is calibrated and measured with. text, eval_text: None for the splits of section [data]. seq_length:
    of samples of texts; None: LENGTH, or the model's longest."""

    text: Path | None
    eval_text: Path | None
    samples: int
    eval_samples: int
    seq_length: int | None
    micro_batch_size: int

    def length(self, trained: TrainedModel) -> int:
        """Tokens of a sample of a text."""
        longest = getattr(trained.config.model, "max_sequence_length", None)
        return self.seq_length or min(LENGTH, longest or LENGTH)

    def calibration(self, trained: TrainedModel, host: PluginHost) -> Samples:
        if self.text is None:
            return samples_of_split(trained.config, trained.tokenizer, host, "train", self.samples)
        return samples_of_text(self.text, trained.tokenizer, self.length(trained), self.samples)

    def evaluation(self, trained: TrainedModel, host: PluginHost) -> Samples:
        if self.eval_text is None:
            return samples_of_split(trained.config, trained.tokenizer, host, "valid", self.eval_samples)
        return samples_of_text(self.eval_text, trained.tokenizer, self.length(trained), self.eval_samples)


def calibrate_checkpoint(
    path: Path,
    out: Path,
    options: CalibrationOptions,
    data: Data,
    overrides: list[str],
    device: str,
    host: PluginHost,
) -> CalibrationResult | None:
    """Calibrate a checkpoint and write the result; on rank 0 what it cost. Collective over the world."""
    settings = _settings(overrides)
    own_data = settings.pop(DATA, {})
    trained = load_trained_model(path, host, device=device, settings=settings)
    trained = replace(trained, config=with_data(trained.config, own_data, host))
    batches = rank_batches(data.calibration(trained, host), data.micro_batch_size, trained.ctx)
    eval_batches = rank_batches(data.evaluation(trained, host), data.micro_batch_size, trained.ctx)
    stored = open_checkpoint(trained.checkpoint, host).dtypes()
    with calibration_store(out) as store:
        result = calibrate_model(trained, options, batches, eval_batches, stored, store)
        wait_for_all()
        if is_writer():
            data_settings = {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(data).items()
            }
            data_settings["seq_length"] = data.length(trained)
            report = {"source": str(trained.checkpoint), "options": asdict(options), "data": data_settings}
            write_calibrated(trained.checkpoint, out, options.scheme, store, {**report, **result.as_values()}, host)
    return result if is_writer() else None


def with_data(config: Config, keys: Mapping[str, Any], host: PluginHost) -> Config:
    """The configuration with these keys of [data]. Another data set has none of the keys of the one before."""
    stored = config.to_dict()
    same = keys.get(TYPE, stored[DATA].get(TYPE)) == stored[DATA].get(TYPE)
    kept = stored[DATA] if same else {SEQ_LENGTH: stored[DATA][SEQ_LENGTH]}
    return config_from_dict({**stored, DATA: {**kept, **keys}}, host)


def _settings(overrides: list[str]) -> Settings:
    settings: Settings = {}
    for override in overrides:
        path, value = parse_override(override)
        section: dict[str, Any] = settings
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value
    # All ranks are replicas where no layout is set.
    return {"parallel": {}, **settings} if read_environment().world_size > 1 else settings
