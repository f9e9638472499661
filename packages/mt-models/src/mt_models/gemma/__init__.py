"""Gemma 2 and 3 (text): GeGLU, norms around every block, local and global layers in turn, soft caps."""
