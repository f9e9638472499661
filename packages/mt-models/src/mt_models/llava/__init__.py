"""LLaVA: an image tower, a projection, and any decoder, which reads images as it reads words."""
