"""What mt-retrieval registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CallbackSpec, CommandSpec, DatasetSpec, Lazy, PassageRetrieverSpec
from mt_retrieval.dpr.sample import DPR_SAMPLE


@hookimpl
def mt_register_datasets() -> list[DatasetSpec]:
    return [
        DatasetSpec(
            name="dpr",
            doc="Questions with positive and negative passages, from files in the format of DPR",
            config_type=Lazy("mt_retrieval.dpr.config:DPRDataConfig"),
            build=Lazy("mt_retrieval.dpr.dataset:build_dpr"),
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
            build=Lazy("mt_retrieval.passage_retriever:build_index_retriever"),
        )
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="retrieve",
            doc="Embed, index and search passages; measure recall",
            app=Lazy("mt_retrieval.commands.app:app"),
        ),
        CommandSpec(
            name="retro",
            doc="Chunk database, index and neighbours of a Retro project",
            app=Lazy("mt_retrieval.commands.retro.app:app"),
        ),
    ]
