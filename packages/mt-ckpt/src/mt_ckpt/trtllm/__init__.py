"""TensorRT-LLM's checkpoints: what `trtllm-build` reads."""
