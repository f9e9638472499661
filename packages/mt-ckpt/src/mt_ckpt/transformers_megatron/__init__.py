"""GPT-2 in the layout of the reshaping tool that transformers brings for Accelerate's Megatron-LM plugin.

The tool is transformers/models/megatron_gpt2/checkpoint_reshaping_and_interoperability.py: `release/mp_rank_TT[_PPP]/
model_optim_rng.pt`, a pickle of nested dictionaries under Megatron's names from before Megatron-Core.
"""
