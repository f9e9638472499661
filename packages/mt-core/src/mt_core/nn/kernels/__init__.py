"""Kernels that have more than one implementation: which there are, which serve, and which was chosen.

`catalogue` lists them, `choice` picks one for a request. `reference` is plain torch and says what each computes;
`triton_kernels` are ours for a GPU; `external` wraps Transformer Engine, Apex and Liger where they are installed.
"""
