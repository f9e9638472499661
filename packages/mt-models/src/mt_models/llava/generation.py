"""Generation from prompts with images, on top of mt_core.inference.generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mt_models.llava.model import LlavaModel


class WithImages:
    """A decoder whose prompt has images: `generate_ids(WithImages(model, images), prompt, ...)`.

    images: [N, C, img_h, img_w], in the order of their tokens in the prompt. With a cache, only the prompt's forward
    pass has images; without a cache every step repeats the prompt, and its images with it.
    """

    def __init__(self, model: LlavaModel, images: Tensor) -> None:
        self.model, self.images = model, images

    def __call__(self, tokens: Tensor, *, cache: Any = None) -> Tensor:
        has_images = bool((tokens == self.model.config.image_token_index).any())
        return self.model(tokens, self.images if has_images else None, cache=cache)

    def new_cache(self, capacity: int) -> Any:
        return self.model.new_cache(capacity)

    @property
    def max_sequence_length(self) -> int | None:
        return self.model.max_sequence_length

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self, mode: bool = True) -> Any:
        return self.model.train(mode)

    def eval(self) -> Any:
        return self.model.eval()
