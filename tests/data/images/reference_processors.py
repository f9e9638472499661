"""Processors of `transformers` for images with texts, as far as they run without torchvision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from PIL.Image import Image

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def idefics3_processor(tokenizer: Any, side: int, longest_edge: int, features: int) -> Any:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    sizes = {"size": {"longest_edge": longest_edge}, "max_image_size": {"longest_edge": side}}
    return transformers.Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=features)


class InternVLProcessor:
    """The image processor of the published models, and the text that their processor puts in the place of an image.

    The processor itself cannot be made without one for videos, which needs torchvision.
    """

    def __init__(self, tokenizer: Any, side: int, features: int) -> None:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        colours = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
        self.images = GotOcr2ImageProcessorPil(size={"height": side, "width": side}, crop_to_patches=True, **colours)
        self.tokenizer = tokenizer
        self.state = SimpleNamespace(
            start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=features
        )

    def __call__(self, text: list[str], images: list[list[Image]], return_tensors: str) -> dict[str, Any]:
        from transformers import InternVLProcessor

        ((image,),), (one,) = images, text
        found = self.images([image], return_tensors=return_tensors)
        expanded = InternVLProcessor.replace_image_token(self.state, found, 0)
        ids = self.tokenizer([one.replace(self.state.image_token, expanded)], return_tensors=return_tensors)
        return {**ids, "pixel_values": found["pixel_values"]}
