"""Adapters: few trained parameters beside a frozen model (LoRA and its relatives), their formats, merging them."""
