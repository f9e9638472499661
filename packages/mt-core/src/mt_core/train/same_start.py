"""What all ranks of a run have to be started with alike: configuration, tokenizer, data, versions and code."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import Config
from mt_core.interfaces import Dataset, Tokenizer
from mt_core.launch.agreement import any_rank_differs, require_agreement
from mt_core.paths import is_remote
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.resume import CONTENT, TOKENIZER
from mt_core.versions import installed_versions

NODE_KEYS = frozenset(
    {
        "data.data_cache_path",
        "data.index_engine",
        "data.mmap_bin_files",
        "data.num_workers",
        "data.prefetch_batches",
        "data.tokenize_workers",
        "data.verify_checksums",
        "logging.device_peak_tflops",
        "logging.progress",
        "train.device",
        "train.num_threads",
    }
)
"""Keys that may differ between the nodes of a run: scratch folders, and how a node reads its data and computes; with
those that sections of other distributions name (`keys_of_node`). Paths of a tokenizer's files may differ too, since
their content is compared. The type of the device is compared when ranks meet (`mt_core.launch.process_group`)."""
LIBRARIES = ("numpy", "tokenizers", "sentencepiece", "tiktoken", "triton", "transformer_engine", "flash_attn")
VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that choose a collective's algorithm, which all ranks have to share, or an arithmetic."""
MARK, SECONDS_UNTIL_SEEN = ".mt-seen-by-all-ranks", 90.0
"""A file in the folder of checkpoints, and how long a network file system may take to show it: NFS keeps for up to 60 s
that a file is not there."""
SAMPLES = 8
"""Samples of a data set that are compared. Fingerprints of files without checksums do not read the tokens."""


def require_same_program(config: Config, tokenizer: Tokenizer, host: PluginHost) -> None:
    """Raise ConfigError on every rank, with the first key and node, where ranks were started differently.

    Before the groups of the layout are made: ranks with different layouts would wait for one another.
    """
    timeout = config.timeouts.load
    require_agreement("configuration", compared_keys(config), timeout=timeout)
    require_agreement("tokenizer and versions", {**_tokenizer(tokenizer), **_versions(host)}, timeout=timeout)
    roots = _package_folders(host)
    # Ranks that import from the same folders of one file system run the same code, which then need not be read: hashing
    # its 1,600 files takes each of them 0.2 s.
    place = json.dumps([*file_system(), _script(), sorted(map(str, roots.values())), sys.path])
    if any_rank_differs("place of the code", place, timeout=timeout):
        require_agreement("code (SHA-256)", code_digests(roots), timeout=timeout)


def require_same_checkpoint(
    path: Path | None, reader: CheckpointReader | None, config: Config, run_dir: Path | None = None
) -> None:
    """The same for the checkpoint that a run starts from, and the run directory, into which all ranks write."""
    metadata = json.dumps(reader.metadata, sort_keys=True, default=str) if reader is not None else ""
    values = {
        "run directory": str(run_dir),
        "checkpoint": path.name if path is not None else "none",
        "checkpoint.metadata (SHA-256)": _digest(metadata.encode()),
    }
    require_agreement("checkpoint", values, timeout=config.timeouts.load)


def require_same_samples(identity: Mapping[str, str], datasets: Mapping[str, Dataset], config: Config) -> None:
    """The same for data. identity: the `data_identity` of the training data. datasets: by name, those that the
    configuration describes, of which samples are compared; samples of a caller's own may be drawn at random."""
    values: dict[str, Any] = {CONTENT: identity.get(CONTENT, "unknown")}
    for name, dataset in datasets.items():
        values |= _content(name, dataset)
    require_agreement("data", values, timeout=config.timeouts.data)


def require_shared_folder(folder: Path, config: Config) -> None:
    """Raise ConfigError on every rank, where one does not see what rank 0 writes into the folder of checkpoints: the
    first save would wait for that rank's report. Collective; the folder exists on rank 0.

    The same relative path is another folder in another working directory, and so is a disk of each machine.
    """
    place = json.dumps([*file_system(), str(folder.absolute())])
    if is_remote(folder) or not any_rank_differs("place of the checkpoints", place, timeout=config.timeouts.load):
        return
    mark, is_first = folder / MARK, torch.distributed.get_rank() == 0
    if is_first:
        mark.touch()
    try:
        seen = "seen" if _appears(mark) else f"not seen in {folder.absolute()}"
        require_agreement("checkpoints", {f"what rank 0 writes into {folder}": seen}, timeout=config.timeouts.load)
    finally:
        if is_first:
            mark.unlink(missing_ok=True)


def _appears(file: Path) -> bool:
    end = time.monotonic() + SECONDS_UNTIL_SEEN
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def compared_keys(config: Config) -> dict[str, Any]:
    """Values by dotted key, without those that may differ between nodes."""
    left_out = NODE_KEYS | {f"tokenizer.{key}" for key in getattr(config.tokenizer, "file_keys", {})}
    left_out |= {f"{name}.{key}" for name, section in config.brought.items() for key in section.keys_of_node}
    flat = dict(_flattened(config.to_dict(), ""))
    return {key: value for key, value in flat.items() if key not in left_out}


def _flattened(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    fingerprint = getattr(tokenizer, "fingerprint", None)
    return {TOKENIZER: fingerprint() if fingerprint is not None else "unknown"}


def _versions(host: PluginHost) -> dict[str, Any]:
    plugins = {plugin.distribution: plugin.version for plugin in host.plugins if plugin.loaded}
    versions = {"python": platform.python_version(), "torch": torch.__version__, **plugins}
    named = {f"version of {name}": version for name, version in {**versions, **installed_versions(LIBRARIES)}.items()}
    variables = {f"variable {name}": os.environ.get(name, "(not set)") for name in VARIABLES}
    return {"plugins": sorted(plugins), **named, **variables}


def _content(name: str, dataset: Dataset) -> dict[str, Any]:
    """The number of samples, and a hash of some, from the first on."""
    length = len(dataset)
    samples = hashlib.sha256()
    for place in sorted({length * part // SAMPLES for part in range(SAMPLES)} if length else ()):
        for field, value in dataset[place].items():
            samples.update(f"{field} {value.dtype} {value.shape}".encode())
            samples.update(value.tobytes())
    return {f"number of samples ({name})": length, f"samples ({name}), SHA-256 of {SAMPLES}": samples.hexdigest()}


# -- code -----------------------------------------------------------------------------------------

BOOT_ID, MOUNTS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/mnt")


def file_system() -> list[str]:
    """Equal for two processes only if they see the same files: containers and machines made from one image may have
    equal host names and paths. Where the kernel does not say it, no two processes have the same."""
    try:
        # The boot tells machines apart, the mount namespace containers of one machine, the root what chroot changes.
        root = Path("/").stat()
        kernel = [BOOT_ID.read_text(encoding="ascii").strip(), str(MOUNTS.readlink()), f"{root.st_dev}:{root.st_ino}"]
    except OSError:
        kernel = [uuid4().hex]
    return [socket.gethostname(), *kernel]


def _package_folders(host: PluginHost) -> dict[str, Path]:
    """The folders of the packages that plugins are modules of, by the packages' names."""
    roots = {plugin.module.partition(":")[0].partition(".")[0] for plugin in host.plugins if plugin.loaded}
    paths = {root: getattr(sys.modules.get(root), "__path__", None) for root in sorted(roots | {"mt_core"})}
    return {root: Path(path[0]) for root, path in paths.items() if path}


def code_digests(packages: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each Python file of these packages, and of the modules that the user's program has imported."""
    files = {f"{name}/{file.relative_to(root)}": file for name, root in packages.items() for file in root.rglob("*.py")}
    users = {
        name: file for name, file in _users_modules() if not any(file.is_relative_to(r) for r in packages.values())
    }
    return {name: _digest(file.read_bytes()) for name, file in sorted({**files, **users}.items())}


def _users_modules() -> Iterator[tuple[str, Path]]:
    """Imported modules that neither belong to Python nor are installed: the script, and what lies beside it."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name, module in list(sys.modules.items()):
        file = _file(module)
        if file is not None and not any(file.is_relative_to(folder) for folder in installed):
            yield f"{name} ({file.name})", file


def _file(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name) if isinstance(name, str) and name.endswith(".py") and Path(name).is_file() else None


def _script() -> str:
    return str(_file(sys.modules.get("__main__")))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
