"""Files that the checkpoints of a run hold: those of its tokenizer, the ones beside them in the checkpoint that it
starts from (generation_config.json, preprocessor_config.json), and what the data set adds (a chat template)."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.config.schema import Config
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader, Tokenizer
from mt_core.train.build import restore_tokenizer


def kept_files(
    config: Config, tokenizer: Tokenizer, source: CheckpointReader | None, host: PluginHost
) -> Mapping[str, bytes]:
    """By name. source: the checkpoint that the run starts from or resumes, or None."""
    beside = {} if source is None else files_beside_tokenizer(config, tokenizer, source, host)
    files = {**beside, **tokenizer.files()}
    spec = host.datasets.get(config.data.dataset_type, key="data.dataset_type")
    return files if spec.checkpoint_files is None else spec.checkpoint_files.load()(config.data, tokenizer, files)


def files_beside_tokenizer(
    config: Config, tokenizer: Tokenizer, source: CheckpointReader, host: PluginHost
) -> dict[str, bytes]:
    """The files of `source` that are not the tokenizer's; {} if the run has another tokenizer than `source`, since
    their token ids would be another vocabulary's."""
    own, stored = tokenizer.files(), source.files()
    section = source.metadata.get("config", {}).get("tokenizer") or {}
    same_type = section.get("tokenizer_type") == config.tokenizer.tokenizer_type
    if any(stored.get(name) != data for name, data in own.items()) or not (own or same_type):
        return {}
    beside = {name: data for name, data in stored.items() if name not in own}
    # A tokenizer that is built from a folder reads some files only if they are there: those change what it is.
    if beside and restore_tokenizer(config, {**beside, **own}, host).fingerprint() != tokenizer.fingerprint():
        return {}
    return beside
