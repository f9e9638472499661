"""From files of text to Megatron's indexed datasets (`mt data preprocess`), and the readers beneath it.

`run.preprocess(options.PreprocessOptions(...))` is the command as a function.
"""
