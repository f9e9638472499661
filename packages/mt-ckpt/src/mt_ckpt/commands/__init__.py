"""The commands `mt ckpt` and `mt convert`."""
