"""The experts of a rank, and implementations of their grouped GEMM."""
