"""Trackers of metrics: MLflow, Comet, TensorBoard, trackio, Weights & Biases."""
