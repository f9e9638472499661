"""Passages that are the blocks of the inverse cloze task: those of an indexed data set of sentences, with titles."""

from __future__ import annotations

import numpy as np

from mt_core.config.schema import DataConfig
from mt_core.errors import DataError
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.ict import ICTDataConfig, ICTDataset, build_ict
from mt_retrieval.evidence.passages import Passage

SEED = 1234
"""Orders the index of blocks; ids are sorted here, so that it has no effect."""


class BlockEvidence:
    """The blocks of one epoch over all documents of a data set; the id is Megatron's number of the block.

    trained_on: the data section of the encoder, whose rules for blocks are taken over where it is of the inverse cloze
    task. Raises as `build_ict`.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer, seq_length: int, trained_on: DataConfig) -> None:
        self.name = prefix
        self._tokenizer = tokenizer
        rules = trained_on if isinstance(trained_on, ICTDataConfig) else ICTDataConfig(seq_length=seq_length)
        config = ICTDataConfig.model_validate(
            {
                "seq_length": seq_length,
                "data_path": [prefix],
                # All documents, whatever split the encoder was trained with.
                "split": "1,0,0",
                "use_one_sent_docs": rules.use_one_sent_docs,
                "titles_data_path": rules.titles_data_path,
            }
        )
        # num_samples=None: one epoch, in which each block occurs once.
        built = build_ict(config, tokenizer, SplitRequest("train", None, seq_length, SEED))
        assert isinstance(built, ICTDataset)
        self._blocks = built
        self._rules = [seq_length, rules.use_one_sent_docs]
        # Column 3 is the number of the block, column 2 its document.
        self._order = np.argsort(built.samples.index[:, 3], kind="stable")
        if not len(self._order):
            raise DataError(f"{prefix} has no blocks: each of its documents has fewer than two sentences")

    def __len__(self) -> int:
        return len(self._order)

    def fingerprint(self) -> str:
        return combined([self._blocks.fingerprint(), self._rules])

    def passage(self, row: int) -> Passage:
        title, text = self.tokens(row)
        block = self._blocks.samples.row(int(self._order[row]))[3]
        return Passage(block, self._tokenizer.decode(text), self._tokenizer.decode(title))

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        sample = int(self._order[row])
        document = self._blocks.samples.row(sample)[2]
        text = np.concatenate(self._blocks.samples.sentences(sample))
        return self._blocks.titles[document].tolist(), text.tolist()
