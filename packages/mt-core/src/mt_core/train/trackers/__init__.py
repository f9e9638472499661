"""Trackers of metrics, named by logging.trackers: TensorBoard, Weights & Biases, MLflow, trackio, Comet."""
