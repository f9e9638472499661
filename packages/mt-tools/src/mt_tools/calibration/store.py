"""A folder beside the result in which ranks put what they have computed until the result is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import SafetensorsFile, TensorInfo, write_safetensors
from mt_ckpt.quantized.calibrated import CalibratedWeight
from mt_ckpt.quantized.grids import Scales
from mt_core.parallel.context import is_writer, wait_for_all

CODES, SCALE, ZEROS, NUMBERS = "codes", "scale", "zeros", "numbers"


@contextmanager
def calibration_store(result: Path) -> Iterator[CalibrationStore]:
    """Beside the folder `result`, on a file system that all ranks share; removed at the end. Collective."""
    folder = result.parent / f".{result.name}.calibration"
    if is_writer():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    wait_for_all()
    try:
        yield CalibrationStore(folder)
        # Not after an error, with which the other ranks have not come here.
        wait_for_all()
    finally:
        if is_writer():
            shutil.rmtree(folder, ignore_errors=True)


class CalibrationStore:
    """Calibrated weights (CalibratedWeights), weights that were changed otherwise, and other tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- codes and scales -----------------------------------------------------------------------------

    def put(self, name: str, weight: CalibratedWeight, part: int = 0) -> None:
        """part: of experts, in their order over the ranks that have them."""
        zeros = {} if weight.scales.zeros is None else {ZEROS: weight.scales.zeros}
        numbers = torch.tensor([weight.scales.whole, weight.largest], dtype=torch.float64)
        self.put_tensors(
            f"codes.{name}.{part}", {CODES: weight.codes, SCALE: weight.scales.scale, **zeros, NUMBERS: numbers}
        )

    def read(self, name: str) -> CalibratedWeight:
        """All experts of a weight together."""
        parts = [self.tensors(file) for file in self._parts(f"codes.{name}")]
        joined = {key: _joined([part[key] for part in parts]) for key in parts[0] if key != NUMBERS}
        whole, largest = parts[0][NUMBERS].tolist()
        return CalibratedWeight(joined[CODES], Scales(joined[SCALE], joined.get(ZEROS), whole), largest)

    # -- weights in high precision ----------------------------------------------------------------------

    def change(self, name: str, value: Tensor, part: int = 0) -> None:
        """A canonical parameter that the result has in place of the model's."""
        self.put_tensors(f"changed.{name}.{part}", {"value": value})

    def changed(self, name: str) -> Tensor | None:
        parts = [self.tensors(file)["value"] for file in self._parts(f"changed.{name}")]
        return _joined(parts) if parts else None

    # -- files ------------------------------------------------------------------------------------------

    def put_tensors(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
        # Larger elements first, which keeps all of them aligned.
        order = sorted(infos, key=lambda name: -infos[name].dtype.itemsize)
        write_safetensors(
            self.folder / f"{file}.safetensors", {name: infos[name] for name in order}, [stored[name] for name in order]
        )

    def tensors(self, file: str) -> dict[str, Tensor]:
        opened = SafetensorsFile(self.folder / f"{file}.safetensors")
        return {name: opened.read(name).clone() for name in opened.tensors}

    def _parts(self, name: str) -> list[str]:
        parts = [file.name.removesuffix(".safetensors") for file in self.folder.glob(f"{name}.*.safetensors")]
        return sorted(parts, key=lambda file: int(file.rpartition(".")[2]))


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    # As bytes: few operations take float8.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
