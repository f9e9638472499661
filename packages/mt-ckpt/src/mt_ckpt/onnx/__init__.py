"""ONNX: encoders as graphs, by the exporter of torch."""
