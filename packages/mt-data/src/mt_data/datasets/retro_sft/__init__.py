"""Instruction tuning of RETRO: questions, their answers, and retrieved passages (Wang et al., 2023, InstructRetro).

`records` reads files, `prompts` puts passages and a question before an answer, `neighbors` makes passages the
neighbours of chunks, `encoding` keeps the tokens of a file, and `dataset` makes the samples. Evaluation uses the first
three, so that a model generates from the tokens that it was trained on.
"""
