"""Calibration: scales and codes of quantized weights, chosen by what a model computes of a data set."""
