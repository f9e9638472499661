"""GGUF, the single-file format of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
