"""The built-in corpus with neighbours found by MinHash."""

from __future__ import annotations

from dataclasses import replace

from mt_core.specs import Split, SplitRequest, Tokenizer
from mt_data.datasets.builtin import NAME, build_builtin
from mt_data.datasets.retro.config import BuiltinRetroDataConfig
from mt_data.datasets.retro.database import StreamDatabase
from mt_data.datasets.retro.dataset import Retrieval, RetroDataset, items_of, retro_dataset
from mt_data.datasets.retro.nearest import chunks_of, nearest_chunks
from mt_data.datasets.retro.stream import TokenStream
from mt_data.datasets.samples import SampleRules


def build_builtin_retro(config: BuiltinRetroDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> RetroDataset:
    """Samples of RETRO_SAMPLE over the documents of `request.split`; the database is the training split.

    Raises DataError when this Python carries no text, or too little for one sample.
    """

    def stream_of(split: Split) -> TokenStream:
        # Only the tokens of the split are used; its GPT samples, in another order than RETRO's, are not read.
        documents = build_builtin(config, tokenizer, replace(request, split=split, num_samples=None))
        return TokenStream(documents.source, f"{NAME} ({split})")

    database = stream_of("train")
    training = request.split == "train"
    text = database if training else stream_of(request.split)
    chunk = config.retro_chunk_length
    numbers = nearest_chunks(
        chunks_of(text, chunk, chunk),
        chunks_of(database, chunk, config.retrieved_length),
        config.retro_num_neighbors,
        same_text=training,
    )
    rules = SampleRules.of(config, tokenizer)
    retrieval = Retrieval(numbers, StreamDatabase(database, chunk), chunk, config.retrieved_length, rules.vocab_size)
    items = range(items_of(text, request.sequence_length))
    return retro_dataset(text, items, config, request, rules, retrieval)
