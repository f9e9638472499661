"""What mt-data registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CAUSAL_LM_SAMPLE, CommandSpec, DatasetSpec, Lazy, TokenizerSpec


def _tokenizer(name: str, module: str, stem: str, doc: str) -> TokenizerSpec:
    return TokenizerSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_data.tokenizers.{module}:{stem}Config"),
        build=Lazy(f"mt_data.tokenizers.{module}:build_{module}"),
    )


@hookimpl
def mt_register_tokenizers() -> list[TokenizerSpec]:
    return [
        _tokenizer("ByteLevelTokenizer", "byte_level", "ByteLevel", "UTF-8 bytes as ids; needs no file"),
    ]


@hookimpl
def mt_register_datasets() -> list[DatasetSpec]:
    return [
        DatasetSpec(
            name="builtin",
            doc="The text that every Python carries: its standard library and documentation",
            config_type=Lazy("mt_data.datasets.builtin:BuiltinDataConfig"),
            build=Lazy("mt_data.datasets.builtin:build_builtin"),
            sample=CAUSAL_LM_SAMPLE,
        ),
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="data",
            doc="Prepare, inspect, verify and filter data",
            app=Lazy("mt_data.commands.app:app"),
        )
    ]
