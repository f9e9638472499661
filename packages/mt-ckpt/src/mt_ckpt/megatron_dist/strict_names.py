"""The keys that a strict load of Megatron-Core wants in a distributed checkpoint, compared with those of the index."""

from __future__ import annotations

from pathlib import Path

from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.megatron.strict_names import Shapes, reader_of, require_wanted
from mt_ckpt.megatron.target import plan
from mt_ckpt.megatron_dist.common import COMMON_KEY
from mt_ckpt.megatron_dist.dist_plan import dist_plan
from mt_ckpt.megatron_dist.index import METADATA_FILE, read_index
from mt_ckpt.megatron_dist.save import chosen_optimizer_format
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader, ConvertOptions, StrictNames


def require_strict_names(
    path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost
) -> StrictNames:
    """Of the `torch_dist` format, the optimizer's state included: --dist-ckpt-strictness raise_all passes.

    Raises CheckpointError as `mt_core.specs.RequireStrictNames` does.
    """
    made = plan(source, options, host, "torch_dist")
    planned = dist_plan(made, chosen_optimizer_format(made, options))
    common = {} if made.version.common_file else {COMMON_KEY: None}
    objects = dict.fromkeys(planned.objects)
    wanted: Shapes = {key: tensor.shape for key, tensor in planned.tensors.items()} | objects | common
    folder = find_iteration(path)
    index = read_index(folder)
    found: Shapes = {key: tensor.shape for key, tensor in index.tensors.items()} | dict.fromkeys(index.objects)
    require_wanted(folder / METADATA_FILE, found, wanted, made)
    return StrictNames(reader_of(made), len(wanted))
