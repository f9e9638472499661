"""What the data sets with images register: their specs, and the fields of their samples.

Read whenever plugins are listed, so that nothing heavy is imported here.
"""

from __future__ import annotations

from mt_core.specs import DatasetSpec, Lazy, SampleField


def image_grids(images: str) -> SampleField:
    doc = "rows and columns of views of each image; the rest is 0. Absent unless data.dynamic_resolution is set"
    return SampleField("image_grids", "int64", f"[{images}, 2]", doc)


IMAGE = SampleField("images", "float32", "[3, img_h, img_w]", "red, green and blue, (value / 255 - mean) / std")
IMAGE_CLASS_SAMPLE = (
    IMAGE,
    SampleField("labels", "int64", "[]", "number of the class"),
    SampleField("loss_mask", "float32", "[]", "1"),
)
IMAGE_TEXT_SAMPLE = (
    SampleField("tokens", "int64", "[sequence_length]", "input ids, the image token once for each feature; padded"),
    SampleField("labels", "int64", "[sequence_length]", "the id to predict at each position"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where a text or an answer is to be predicted"),
    SampleField("position_ids", "int64", "[sequence_length]", "positions"),
    IMAGE,
)
IMAGE_TEXTS_SAMPLE = (
    *IMAGE_TEXT_SAMPLE[:-1],
    image_grids("max_images"),
    SampleField(
        "images",
        "float32",
        "[max_images, 3, img_h, img_w]",
        "the views of the images, in the order of their tokens, which say how many there are; the rest is 0",
    ),
    SampleField(
        "segment_ids",
        "int32",
        "[sequence_length]",
        "number of the record within the sample; positions see only their own. Absent unless data.packing is set",
    ),
)


def _spec(name: str, module: str, stem: str, sample: tuple[SampleField, ...], doc: str) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_data.datasets.images.{module}:{stem}DataConfig"),
        build=Lazy(f"mt_data.datasets.images.{module}:build_{name}"),
        sample=sample,
    )


IMAGE_DATASETS = (
    _spec(
        "shapes", "shape_classes", "Shapes", IMAGE_CLASS_SAMPLE, "Synthetic images of a shape, whose kind is the class"
    ),
    _spec(
        "image_folder",
        "folder",
        "ImageFolder",
        IMAGE_CLASS_SAMPLE,
        "Image files in a folder for each class, or listed",
    ),
    _spec(
        "captioned_shapes",
        "captioned_shapes",
        "CaptionedShapes",
        (*IMAGE_TEXT_SAMPLE, image_grids("1")),
        "Synthetic images, and texts that describe them",
    ),
    _spec(
        "image_text",
        "image_text",
        "ImageText",
        IMAGE_TEXTS_SAMPLE,
        "Images with texts or conversations, from JSON lines or webdataset shards",
    ),
)
