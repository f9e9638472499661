"""The nearest orthogonal matrix by Newton-Schulz iteration, and the scale of Muon's update.

With the singular value decomposition X = U S V^T, a step X <- a X + (b X X^T + c (X X^T)^2) X keeps U and V and maps
each singular value s to a s + b s^3 + c s^5. A few steps bring those above about 0.01 near to 1 (to within 0.3 of it),
which is what Muon needs of U V^T (Jordan et al., Muon, 2024; Bernstein and Newhouse, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mt_core.optim.configs import MuonCoefficients, MuonScale

COEFFICIENTS: Mapping[MuonCoefficients, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""(a, b, c) of each step, repeated cyclically for more steps: Jordan's, and You's (2025)."""
SMALLEST_NORM = 1e-7
"""Lower bound of the norm that is divided by, so that a zero matrix stays zero."""


def orthogonalize(matrix: Tensor, steps: int, coefficients: MuonCoefficients) -> Tensor:
    """Approximately U V^T of each matrix [..., rows, columns], in its dtype."""
    # Transposed if tall: the Gram matrix is then of the smaller dimension.
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    # The Frobenius norm bounds the largest singular value, so all are in [0, 1], where the polynomial moves them to 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    sets = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        # [..., n, n] with n = min(rows, columns)
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_factor(rows: int, columns: int, mode: MuonScale) -> float:
    """Factor on an orthogonal [rows, columns] that makes the size of updates independent of the shape.

    spectral: sqrt(max(rows, columns)), whose elements have a root mean square of 1, so that with an extra factor of
    0.2 learning rates are those of AdamW (Liu et al., Muon is scalable for LLM training, 2025).
    unit_rms_norm: sqrt(rows / columns). shape_scaling: the same, at least 1.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    ratio = rows / columns
    return max(1.0, ratio) ** 0.5 if mode == "shape_scaling" else ratio**0.5
