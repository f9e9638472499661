"""Image files with classes: a folder for each class, or a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.config import BlendEntry
from mt_data.datasets.images.config import ImageDataConfig, Resize
from mt_data.datasets.images.pixels import SUFFIXES, ImageFile, as_input, fit, read_image
from mt_data.datasets.images.records import text_of
from mt_data.datasets.images.sample import labelled
from mt_data.datasets.opening import BuiltSplit, split_sources
from mt_data.datasets.splits import SPLITS, epoch_order
from mt_data.datasets.text_files import TextDataConfig, TextSource, build_from_text
from mt_data.preprocess.readers import iter_records


class ImageFolderDataConfig(TextDataConfig, ImageDataConfig):
    """Image files with classes. Each prefix is a folder that has a folder for each class, or a file of JSON lines
    {"image": path, "label": name}, whose paths begin at the file's folder."""

    dataset_type: str = "image_folder"
    num_classes: PositiveInt
    """Classes that there are in all named folders and files together; numbers are given in the order of names."""
    resize: Resize = "crop"
    """crop takes the middle of an image in the requested proportions; squash takes all of it and changes them."""


@dataclass(frozen=True)
class LabelledImage:
    """An image and the name of its class."""

    path: Path
    label: str
    where: str


class ImageFolderDataset:
    """Sample k is file `order[k]`."""

    def __init__(
        self, files: list[LabelledImage], order: NDArray[np.int64], classes: list[str], config: ImageFolderDataConfig
    ) -> None:
        self.files, self.order, self.config = files, order, config
        self.numbers = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.order)

    def file(self, index: int) -> LabelledImage:
        """The file of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of images, of which there are {len(self)}")
        return self.files[int(self.order[index])]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        file = self.file(index)
        image = fit(read_image(ImageFile(file.path)), self.config.img_h, self.config.img_w, self.config.resize)
        return labelled(as_input(image, self.config), self.numbers[file.label])

    def describe(self, index: int) -> str:
        return self.file(index).where


def build_image_folder(config: ImageFolderDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of IMAGE_CLASS_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError for a folder without images, unusable lines, and another number of classes than named.
    """
    classes = class_names(config)
    return build_from_text(config, request, partial(_make, config, classes, request))


def _make(
    config: ImageFolderDataConfig,
    classes: list[str],
    request: SplitRequest,
    source: TextSource,
    num_samples: int | None,
) -> ImageFolderDataset:
    # A split of one folder has to have all classes: files are taken in an order without any.
    files = shuffled(find_images(Path(source.name)))
    within = source.elements(len(files), "images")
    chosen = files[within.start : within.stop]
    return ImageFolderDataset(chosen, epoch_order(len(chosen), num_samples, request.seed), classes, config)


def shuffled(files: list[LabelledImage]) -> list[LabelledImage]:
    """In an order that depends on their number alone."""
    return [files[place] for place in np.random.RandomState(0).permutation(len(files))]


def class_names(config: ImageFolderDataConfig) -> list[str]:
    """The classes of all splits together, in the order of their names; DataError when they are not num_classes."""
    # Over all splits: a class that one split lacks must not move the numbers of the others.
    labels = {file.label for entry in _entries(config) for file in find_images(Path(entry.prefix))}
    if len(labels) != config.num_classes:
        shown = ", ".join(sorted(labels)[:10])
        raise DataError(
            f"data.num_classes={config.num_classes}, and the images have {len(labels)} classes ({shown}"
            f"{', ...' if len(labels) > 10 else ''}); set it, and model.num_classes, to {len(labels)}"
        )
    return sorted(labels)


def _entries(config: ImageFolderDataConfig) -> Iterable[BlendEntry]:
    for blend in (config.valid_data_paths or {}).values():
        yield from blend
    for split in SPLITS:
        # The sets of valid_data_paths were taken above; split_sources does not cover them.
        sources = split_sources(config, split) if split != "valid" or config.valid_data_paths is None else None
        yield from sources.entries if sources is not None else ()


def find_images(path: Path) -> list[LabelledImage]:
    """The images of a folder of folders, or of a file of JSON lines."""
    images = _listed(path) if path.is_file() else _in_folders(path)
    if not images:
        raise DataError(
            f"{path} has no images; it must be a folder that has a folder of images for each class "
            f"({', '.join(sorted(SUFFIXES))}), or a file of JSON lines with image and label"
        )
    return images


def _in_folders(path: Path) -> list[LabelledImage]:
    files = (file for file in sorted(path.glob("*/*")) if file.suffix.lower() in SUFFIXES)
    return [LabelledImage(file, file.parent.name, str(file)) for file in files]


def _listed(path: Path) -> list[LabelledImage]:
    return [
        LabelledImage(path.parent / text_of(record.value, "image", where), text_of(record.value, "label", where), where)
        for record in iter_records(path)
        for where in (f"{record.file}, line {record.line}",)
    ]
