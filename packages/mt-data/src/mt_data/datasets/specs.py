"""What the data sets register: their specs, and the fields of their samples.

Read whenever plugins are listed, so that nothing heavy is imported here.
"""

from __future__ import annotations

from mt_core.interfaces import CAUSAL_LM_SAMPLE, SampleField
from mt_core.kinds import Lazy
from mt_core.specs import DatasetSpec
from mt_data.datasets.glue_tasks import GLUE

BERT_SAMPLE = (
    SampleField("tokens", "int64", "[sequence_length]", "CLS A SEP B SEP, padded; some replaced"),
    SampleField("tokentype_ids", "int64", "[sequence_length]", "0 for CLS A SEP and padding, 1 for B SEP"),
    SampleField("labels", "int64", "[sequence_length]", "the true id where a token is masked, else -1"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where a token is masked, else 0"),
    SampleField("padding_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("is_random", "int64", "[]", "1 when A and B stand in exchanged order, else 0"),
    SampleField("truncated", "int64", "[]", "1 when tokens were cut away to fit, else 0"),
)

T5_SAMPLE = (
    SampleField("encoder_tokens", "int64", "[sequence_length]", "text with a sentinel for each span, padded"),
    SampleField("decoder_tokens", "int64", "[decoder_seq_length]", "BOS, then each sentinel and its span"),
    SampleField("labels", "int64", "[decoder_seq_length]", "decoder_tokens a step later, EOS, then -1"),
    SampleField("loss_mask", "float32", "[decoder_seq_length]", "1 where there is a label, else 0"),
    SampleField("encoder_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("decoder_mask", "int64", "[decoder_seq_length]", "1 for tokens, 0 for padding"),
    SampleField("truncated", "int64", "[]", "1 when tokens were cut away to fit, else 0"),
)

ICT_SAMPLE = (
    SampleField("query_tokens", "int64", "[sequence_length]", "CLS sentence SEP, padded"),
    SampleField("query_tokentype_ids", "int64", "[sequence_length]", "0"),
    SampleField("query_padding_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("context_tokens", "int64", "[sequence_length]", "CLS title SEP block SEP, padded"),
    SampleField("context_tokentype_ids", "int64", "[sequence_length]", "0"),
    SampleField("context_padding_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("block_data", "int64", "[4]", "first sentence, one past the last, document, number of the block"),
    SampleField("loss_mask", "float32", "[]", "1"),
)

LABELLED_TEXT = (
    SampleField("tokens", "int64", "[sequence_length]", "CLS A SEP B SEP, or CLS A SEP, padded"),
    SampleField("tokentype_ids", "int64", "[sequence_length]", "1 for B and the SEP after it, else 0"),
    SampleField("padding_mask", "int64", "[sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("truncated", "int64", "[]", "1 when tokens were cut away to fit, else 0"),
    SampleField("loss_mask", "float32", "[]", "1 when there is a label, else 0"),
    SampleField("uid", "int64", "[]", "number of the line, from the file"),
)
TEXT_CLASSIFICATION_SAMPLE = (
    *LABELLED_TEXT,
    SampleField("labels", "int64", "[]", "number of the class (of a regression: float32); -1 without a label"),
)
TEXT_REGRESSION_SAMPLE = (
    *LABELLED_TEXT,
    SampleField("labels", "float32", "[]", "the number to predict; -1 without a label"),
)

MULTIPLE_CHOICE_SAMPLE = (
    SampleField("tokens", "int64", "[4, sequence_length]", "for each option CLS question SEP article SEP"),
    SampleField("tokentype_ids", "int64", "[4, sequence_length]", "1 for the article and its SEP, else 0"),
    SampleField("padding_mask", "int64", "[4, sequence_length]", "1 for tokens, 0 for padding"),
    SampleField("truncated", "int64", "[]", "1 when tokens of an option's sequence were cut away to fit, else 0"),
    SampleField("labels", "int64", "[]", "number of the right option"),
    SampleField("loss_mask", "float32", "[]", "1"),
    SampleField("uid", "int64", "[]", "number of the question within its folder"),
)


def _spec(name: str, module: str, stem: str, build: str, sample: tuple[SampleField, ...], doc: str) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_data.datasets.{module}:{stem}DataConfig"),
        build=Lazy(f"mt_data.datasets.{module}:{build}"),
        sample=sample,
    )


TASK_DATASETS = (
    _spec("bert", "bert", "Bert", "build_bert", BERT_SAMPLE, "Sentence pairs with masked words, in Megatron's order"),
    _spec("t5", "t5", "T5", "build_t5", T5_SAMPLE, "Spans replaced by sentinels, in Megatron's order"),
    _spec("ict", "ict", "ICT", "build_ict", ICT_SAMPLE, "A sentence, and the titled block of text it comes from"),
    DatasetSpec(
        name="sft",
        doc="Conversations with chat templates, packed, loss on the answers",
        config_type=Lazy("mt_data.datasets.sft.config:SFTDataConfig"),
        build=Lazy("mt_data.datasets.sft.dataset:build_sft"),
        checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
        sample=CAUSAL_LM_SAMPLE,
    ),
    DatasetSpec(
        name="instructions",
        doc="Synthetic instructions about words, which a small model learns to follow in minutes",
        config_type=Lazy("mt_data.datasets.sft.instructions:InstructionsDataConfig"),
        build=Lazy("mt_data.datasets.sft.instructions:build_instructions"),
        checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
        sample=CAUSAL_LM_SAMPLE,
    ),
    _spec(
        "race",
        "multiple_choice",
        "MultipleChoice",
        "build_multiple_choice",
        MULTIPLE_CHOICE_SAMPLE,
        "Multiple choice from the folders of RACE",
    ),
    _spec(
        "text_classification",
        "text_classification",
        "TextClassification",
        "build_text_classification",
        TEXT_CLASSIFICATION_SAMPLE,
        "One or two texts with a class or a number, from tab-separated files or JSON lines with columns of any name",
    ),
    *(
        _spec(
            name,
            "text_classification",
            "Glue",
            "build_text_classification",
            TEXT_CLASSIFICATION_SAMPLE if task.labels else TEXT_REGRESSION_SAMPLE,
            task.doc,
        )
        for name, task in GLUE.items()
    ),
)


# -- images ------------------------------------------------------------------------------------------


def image_grids(images: str) -> SampleField:
    doc = (
        "rows and columns of views of each image; the rest is 0. Absent unless data.dynamic_resolution is set. With "
        "data.frames_per_view above 1 a third number of a view of a video: with data.video_rule=qwen2_vl microseconds, "
        "with kimi_k25 its frames, with minimax_m3 its place among those that see one another"
    )
    return SampleField("image_grids", "int64", f"[{images}, 2 or 3]", doc)


IMAGE = SampleField("images", "float32", "[3, img_h, img_w]", "red, green and blue, (value / 255 - mean) / std")
IMAGE_CLASS_SAMPLE = (
    IMAGE,
    SampleField("labels", "int64", "[]", "number of the class"),
    SampleField("loss_mask", "float32", "[]", "1"),
)
IMAGE_TEXT_SAMPLE = (
    SampleField("tokens", "int64", "[sequence_length]", "input ids, the image token once for each feature; padded"),
    SampleField("labels", "int64", "[sequence_length]", "the id to predict at each position"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where a text or an answer is to be predicted"),
    SampleField("position_ids", "int64", "[sequence_length]", "positions"),
    IMAGE,
)
SOUND_FIELDS = (
    SampleField(
        "audio",
        "float32",
        "[max_audio_samples]",
        "sounds at 16 kHz, end to end; the rest is 0. Absent unless data.audio_token_index is set",
    ),
    SampleField("audio_lengths", "int64", "[max_sounds]", "samples of each sound; the rest is 0. Absent like audio"),
)
IMAGE_TEXTS_SAMPLE = (
    *IMAGE_TEXT_SAMPLE[:-1],
    *SOUND_FIELDS,
    image_grids("max_images"),
    SampleField(
        "images",
        "float32",
        "[max_images, 3, img_h, img_w]",
        "the views of the images, in the order of their tokens, which say how many there are; the rest is 0",
    ),
    SampleField(
        "segment_ids",
        "int32",
        "[sequence_length]",
        "number of the record within the sample; positions see only their own. Absent unless data.packing is set",
    ),
)


def _image_spec(name: str, module: str, stem: str, sample: tuple[SampleField, ...], doc: str) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        doc=doc,
        config_type=Lazy(f"mt_data.datasets.images.{module}:{stem}DataConfig"),
        build=Lazy(f"mt_data.datasets.images.{module}:build_{name}"),
        sample=sample,
    )


IMAGE_DATASETS = (
    _image_spec(
        "shapes", "shapes", "Shapes", IMAGE_CLASS_SAMPLE, "Synthetic images of a shape, whose kind is the class"
    ),
    _image_spec(
        "image_folder",
        "folder",
        "ImageFolder",
        IMAGE_CLASS_SAMPLE,
        "Image files in a folder for each class, or listed",
    ),
    _image_spec(
        "captioned_shapes",
        "shapes",
        "CaptionedShapes",
        (*IMAGE_TEXT_SAMPLE, *SOUND_FIELDS, image_grids("1")),
        "Synthetic images, and texts that describe them",
    ),
    _image_spec(
        "image_text",
        "image_text",
        "ImageText",
        IMAGE_TEXTS_SAMPLE,
        "Images with texts or conversations, from JSON lines or webdataset shards",
    ),
)


# -- neighbours --------------------------------------------------------------------------------------

NEIGHBORS = "[sequence_length / retro_chunk_length, retro_num_neighbors, retrieved length]"
RETRO_SAMPLE = (
    *(field for field in CAUSAL_LM_SAMPLE if field.name != "segment_ids"),
    SampleField("neighbor_tokens", "int64", NEIGHBORS, "ids of each chunk's neighbours, padded at the end"),
    SampleField("neighbor_mask", "int64", NEIGHBORS, "1 for tokens, 0 for padding"),
)

RETRO_DATASETS = (
    DatasetSpec(
        name="builtin_retro",
        doc="The text that every Python carries, with similar chunks of other documents",
        config_type=Lazy("mt_data.datasets.retro.config:BuiltinRetroDataConfig"),
        build=Lazy("mt_data.datasets.retro.builtin:build_builtin_retro"),
        sample=RETRO_SAMPLE,
    ),
    DatasetSpec(
        name="retro",
        doc="Token files with a chunk database and the neighbours of each chunk",
        config_type=Lazy("mt_data.datasets.retro.config:RetroDataConfig"),
        build=Lazy("mt_data.datasets.retro.files:build_retro_files"),
        sample=RETRO_SAMPLE,
    ),
)


# -- instruction tuning with passages ----------------------------------------------------------------

RETRO_SFT_DATASET = DatasetSpec(
    name="retro_sft",
    doc="Questions with answers and retrieved passages, for instruction tuning of RETRO",
    config_type=Lazy("mt_data.datasets.retro_sft.dataset:RetroSFTDataConfig"),
    build=Lazy("mt_data.datasets.retro_sft.dataset:build_retro_sft"),
    sample=RETRO_SAMPLE,
    checkpoint_files=Lazy("mt_data.datasets.sft.config:checkpoint_files"),
)
