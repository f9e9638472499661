"""Result of an import: configuration, report, launch; and whether training accepts the configuration."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mt_core.config.checks import as_world
from mt_core.config.loading import LoadedConfig, load_config, load_config_anywhere
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.translation import Account, Translation

Status = Literal["translated", "default", "no effect", "refused"]
ALL = "all"
"""In place of arguments that may be left out: every one."""


@dataclass(frozen=True)
class Processes:
    """How many processes to start, as far as the source says. A number that is None is not known."""

    nproc: int | None = 1
    nnodes: int | None = 1
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None

    @property
    def world_size(self) -> int | None:
        return self.nproc * self.nnodes if self.nproc is not None and self.nnodes is not None else None


@dataclass(frozen=True)
class ImportResult:
    """source: what was read, as a sentence. sections: our configuration; None is null. complete: whether it has all
    that a run needs. written_out: keys that nothing given names: defaults that differ from ours, derived values."""

    source: str
    sections: Mapping[str, Mapping[str, Any]]
    accounts: Sequence[Account]
    written_out: Mapping[str, Any]
    processes: Processes
    notes: Sequence[str] = field(default=())
    complete: bool = True

    def of_status(self, status: Status) -> list[Account]:
        return [account for account in self.accounts if account.status == status]

    def refused_unless(self, allowed: Collection[str]) -> list[Account]:
        """What cannot be done and is not in `allowed`: names as typed, with or without dashes, or `all`."""
        names = {name.lstrip("-") for name in allowed}
        refused = self.of_status("refused")
        return (
            []
            if ALL in names
            else [account for account in refused if account.words.split()[0].lstrip("-") not in names]
        )


def result_of(translation: Translation, source: str, processes: Processes, notes: Sequence[str] = ()) -> ImportResult:
    """Result of an import of Megatron's arguments."""
    return ImportResult(
        f"{source}, as Megatron's {_VERSIONS[translation.version]} reads them",
        translation.sections,
        translation.accounts,
        translation.written_out,
        processes,
        [*notes, *_notes(translation)],
        complete=not translation.entry.fixed_sections,
    )


_VERSIONS = {"main": "main branch", "0.12": "core 0.12"}


def _notes(translation: Translation) -> list[str]:
    """What a user should know of the run beside its configuration."""
    notes, entry = [], translation.entry
    if entry.fixed_sections:
        notes.append(f"{', '.join(f'[{name}]' for name in entry.fixed_sections)}: {entry.fixed}")
    notes += _notes_on_start(translation.values, translation.sections.get("checkpoint", {}))
    if (translation.sections.get("model", {}).get("moe") or {}).get("moe_token_dispatcher_type") == "flex":
        notes.append("moe_token_dispatcher_type=flex needs DeepEP or HybridEP on the machines that train")
    if translation.values["profile"] and not translation.values["use_pytorch_profiler"]:
        notes.append(
            "--profile without --use-pytorch-profiler has nsys record steps; here torch's profiler does, and "
            "mt profile RUN/profile shows them"
        )
    if (rows := translation.padded_vocab_size) is not None:
        notes.append(f"the vocabulary is padded to {rows} rows, as Megatron's; their logits do not count in the loss")
    return notes


def _notes_on_start(values: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Where the run does not start as Megatron's does."""
    load = values["load"]
    if load is not None and load == values["save"] and values["no_save_optim"]:
        yield (
            f"--no-save-optim, and --load and --save both name {load}: its checkpoints have no state of the optimizer "
            f"to go on with. To start from their weights at step 0, set checkpoint.load={load} and another "
            "checkpoint.save; so that later runs can go on, set checkpoint.save_optimizer=true"
        )
        return
    if load is not None and load == values["save"] and checkpoint.get("load") is None:
        yield (
            f"--load and --save both name {load}: the run goes on from checkpoints of mt in it. To start from "
            f"Megatron's, set checkpoint.resume_from={load} and another checkpoint.save"
        )
    if load is not None and values["no_load_optim"] and not values["finetune"]:
        yield (
            f"--no-load-optim without --finetune: Megatron goes on at the iteration of {load}, after the samples that "
            f"it has consumed; checkpoint.load={load} takes its weights alone and starts at step 0, with the first "
            f"sample. To go on where it ended, set checkpoint.resume_from={load} instead, which takes the optimizer's "
            "state too"
        )


# -- checks of an imported configuration -------------------------------------------------------------

NAME = "imported.json"
GPU_DISPATCHER = "flex"
"""Sends tokens by DeepEP or HybridEP."""


def check_configuration(
    sections: Mapping[str, Mapping[str, Any]], world_size: int | None, host: PluginHost
) -> LoadedConfig:
    """Load it as training would, for so many processes; None: as many as its layout needs. Raises ConfigError.

    A dispatcher whose library is built for GPUs is checked as an all-to-all: it need not be installed here.
    """
    # From a file, so that the messages are those that training would give.
    with TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.write_text(json.dumps(_without_gpu_libraries(sections)), encoding="utf-8")
        if world_size is None:
            return load_config_anywhere(path, host=host)
        with as_world(world_size):
            return load_config(path, host=host)


def _without_gpu_libraries(sections: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    moe = sections.get("model", {}).get("moe") or {}
    if moe.get("moe_token_dispatcher_type") != GPU_DISPATCHER:
        return sections
    kept = {key: value for key, value in moe.items() if key != "moe_dispatcher_options"}
    model = {**sections["model"], "moe": {**kept, "moe_token_dispatcher_type": "alltoall"}}
    return {**sections, "model": model}


def check_result(result: ImportResult, host: PluginHost) -> None:
    """Raises ConfigError for a configuration that training would refuse. Of a part of one its sections are checked."""
    if result.complete:
        check_configuration(result.sections, result.processes.world_size, host)
