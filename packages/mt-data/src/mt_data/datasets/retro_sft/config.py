"""Configuration of instruction tuning with passages."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from mt_data.datasets.retro.config import NeighborKeys
from mt_data.datasets.sft.config import ChatTemplateKeys


class RetroSFTDataConfig(NeighborKeys, ChatTemplateKeys):
    """Questions with answers and passages in JSON lines, or in JSON arrays as Megatron's `NAME_QA_train.json`."""

    dataset_type: str = "retro_sft"
    ft_neighbours: NonNegativeInt = 1
    """Passages in the prompt, before the question."""
    encode_passages: bool = True
    """Passages are neighbours of every chunk too, which the encoder reads; false: no chunk has neighbours."""
    reuse_top: bool = True
    """The neighbours are the first passages; false: those behind the ft_neighbours passages of the prompt."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """Where a question and its answer do not fit into seq_length without any passage in the prompt, the answer is cut
    at its end (and the record left out when nothing of it remains), or it is an error."""
    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""

    @property
    def neighbor_passages(self) -> slice:
        """Which passages of a record are neighbours."""
        first = 0 if self.reuse_top else self.ft_neighbours
        return slice(first, first + self.retro_num_neighbors if self.encode_passages else first)
