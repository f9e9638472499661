"""What mt-data registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.interfaces import CAUSAL_LM_SAMPLE
from mt_core.kinds import Lazy
from mt_core.specs import CommandSpec, DatasetSpec, TokenizerSpec
from mt_data.datasets.specs import IMAGE_DATASETS, RETRO_DATASETS, RETRO_SFT_DATASET, TASK_DATASETS


def _tokenizer(name: str, module: str, stem: str, doc: str) -> TokenizerSpec:
    return TokenizerSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_data.tokenizers.{module}:{stem}Config"),
        build=Lazy(f"mt_data.tokenizers.{module}:build_{module}"),
        materialize=Lazy("mt_data.tokenizers.base:materialize"),
    )


@hookimpl
def mt_register_tokenizers() -> list[TokenizerSpec]:
    return [
        _tokenizer("ByteLevelTokenizer", "byte_level", "ByteLevel", "UTF-8 bytes as ids; needs no file"),
        _tokenizer("GPT2BPETokenizer", "gpt2_bpe", "GPT2BPE", "Byte-level BPE from vocab.json and merges.txt"),
        _tokenizer(
            "BertWordPieceLowerCase", "bert_wordpiece", "BertWordPiece", "BERT's WordPiece from vocab.txt, lower-cased"
        ),
        _tokenizer("BertWordPieceCase", "bert_wordpiece", "BertWordPiece", "BERT's WordPiece from vocab.txt, cased"),
        _tokenizer("HuggingFaceTokenizer", "hugging_face", "HuggingFace", "A local directory with tokenizer.json"),
        _tokenizer("SentencePieceTokenizer", "sentence_piece", "SentencePiece", "A SentencePiece model"),
        _tokenizer(
            "GPTSentencePieceTokenizer", "sentence_piece", "SentencePiece", "A SentencePiece model as GPT uses it"
        ),
        _tokenizer("Llama2Tokenizer", "sentence_piece", "SentencePiece", "A SentencePiece model as Llama uses it"),
        _tokenizer("TikTokenizer", "tik_token", "TikToken", "A tiktoken vocabulary: Megatron's JSON or a rank file"),
        _tokenizer("NullTokenizer", "null", "Null", "Ids written as decimal numbers; needs no file"),
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
        DatasetSpec(
            name="gpt",
            doc="Windows over shuffled documents of token files or raw text, in Megatron's order",
            config_type=Lazy("mt_data.datasets.gpt:GPTDataConfig"),
            build=Lazy("mt_data.datasets.gpt:build_gpt"),
            sample=CAUSAL_LM_SAMPLE,
        ),
        DatasetSpec(
            name="fim",
            doc="As gpt, with documents rearranged for fill-in-the-middle",
            config_type=Lazy("mt_data.datasets.fim:FIMDataConfig"),
            build=Lazy("mt_data.datasets.fim:build_fim"),
            sample=CAUSAL_LM_SAMPLE,
        ),
        DatasetSpec(
            name="mock",
            doc="Synthetic documents that count upwards, as Megatron's mock data",
            config_type=Lazy("mt_data.datasets.mock:MockDataConfig"),
            build=Lazy("mt_data.datasets.mock:build_mock"),
            sample=CAUSAL_LM_SAMPLE,
        ),
        *TASK_DATASETS,
        *IMAGE_DATASETS,
        *RETRO_DATASETS,
        RETRO_SFT_DATASET,
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
