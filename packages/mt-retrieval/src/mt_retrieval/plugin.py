"""What mt-retrieval registers. Read whenever plugins are listed, so that nothing heavy is imported here."""

from __future__ import annotations

from typing import Any

from mt_core.hookspecs import hookimpl
from mt_core.interfaces import SampleField
from mt_core.kinds import Kind, Lazy
from mt_core.specs import CallbackSpec, CommandSpec, DatasetSpec
from mt_retrieval.passage_retrievers import PASSAGE_RETRIEVERS, PassageRetrieverSpec

# -- fields of a sample ------------------------------------------------------------------------------

DPR_SAMPLE = (
    SampleField("query_tokens", "int64", "[sequence_length]", "CLS question SEP, padded"),
    SampleField("query_tokentype_ids", "int64", "[sequence_length]", "0"),
    SampleField("query_padding_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("context_tokens", "int64", "[passages, sequence_length]", "CLS title SEP text SEP, the positive first"),
    SampleField("context_tokentype_ids", "int64", "[passages, sequence_length]", "0"),
    SampleField("context_padding_mask", "int64", "[passages, sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("context_mask", "int64", "[passages]", "1 for passages, 0 where a question has fewer negatives"),
    SampleField("loss_mask", "float32", "[]", "1"),
)


@hookimpl
def mt_declare_kinds() -> list[Kind[Any]]:
    return [PASSAGE_RETRIEVERS]


@hookimpl
def mt_register_datasets() -> list[DatasetSpec]:
    return [
        DatasetSpec(
            name="dpr",
            doc="Questions with positive and negative passages, from files in the format of DPR",
            config_type=Lazy("mt_retrieval.dpr:DPRDataConfig"),
            build=Lazy("mt_retrieval.dpr:build_dpr"),
            sample=DPR_SAMPLE,
        )
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="refresh_negatives",
            doc="Mines hard negatives anew with each checkpoint (data.refresh)",
            build=Lazy("mt_retrieval.refresh:build_refresh"),
            always=True,
        )
    ]


@hookimpl
def mt_register_passage_retrievers() -> list[PassageRetrieverSpec]:
    return [
        PassageRetrieverSpec(
            name="index",
            doc="An index of mt retrieve index; options path, checkpoint, evidence, search_parameters",
            build=Lazy("mt_retrieval.retriever:build_index_retriever"),
        )
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="retrieve",
            doc="Embed, index and search passages; measure recall",
            app=Lazy("mt_retrieval.commands.retrieve:app"),
        ),
        CommandSpec(
            name="retro",
            doc="Chunk database, index and neighbours of a Retro project",
            app=Lazy("mt_retrieval.commands.retro:app"),
        ),
    ]
