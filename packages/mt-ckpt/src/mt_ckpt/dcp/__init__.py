"""Folders of torch.distributed.checkpoint (DCP) that trainers other than Megatron write: torchtitan, OLMo-core."""
