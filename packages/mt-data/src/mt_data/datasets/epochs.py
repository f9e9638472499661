"""The order of samples of data sets with a fixed number of items an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def epoch_order(items: int, num_samples: int | None, seed: int) -> NDArray[np.int64]:
    """[epochs * items]: the item of each sample; each epoch has every item once, in an order of its own.

    As many whole epochs as give num_samples (None: one). One numpy.random.RandomState(seed) shuffles them
    one after the other, so that a longer order begins with the shorter one.
    """
    epochs = 1 if num_samples is None or items == 0 else max(1, -(-num_samples // items))
    order = np.tile(np.arange(items, dtype=np.int64), epochs)
    # RandomState takes seeds of 32 bits.
    random = np.random.RandomState(seed % 2**32)
    for epoch in range(epochs):
        random.shuffle(order[epoch * items : (epoch + 1) * items])
    return order
