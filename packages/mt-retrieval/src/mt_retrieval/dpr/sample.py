"""The fields of a sample. Read whenever plugins are listed, so that nothing heavy is imported here."""

from mt_core.specs import SampleField

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
