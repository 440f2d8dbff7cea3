"""A repair is the low-rank change of a down projection that best makes up for what routing leaves out.

It is a least-squares problem on the teacher's activations: the weighted activations ĥ should give the dense layer's
output. Its full-rank solution D is cut to rank r where that costs least, in the metric of ĥ's covariance C = LLᵀ: by the
singular value decomposition of D·L.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repair_down(
    hidden: Tensor, routed: Tensor, down: Tensor, rank: int, *, ridge: float = 0.03
) -> tuple[Tensor, Tensor]:
    """hidden [tokens, neurons] are the dense activations, routed [tokens, neurons] the weighted ones, and down
    [out, neurons] the projection. Returns A [rank, neurons] with rows of unit length and B [out, rank], so that
    down + B·A is the repaired projection."""
    missing = (hidden - routed) @ down.T
    covariance = routed.T @ routed
    covariance.diagonal().add_(ridge * covariance.diagonal().mean())
    factor = torch.linalg.cholesky(covariance)
    # D·L = (missingᵀ·routed)·C⁻¹·L = (missingᵀ·routed)·L⁻ᵀ
    whitened = torch.linalg.solve_triangular(factor.T, missing.T @ routed, upper=True, left=False)
    # The leading left singular vectors, by the smaller of the two Gram matrices.
    b = torch.linalg.eigh(whitened @ whitened.T).eigenvectors[:, -rank:]
    a = torch.linalg.solve_triangular(factor, b.T @ whitened, upper=False, left=False)
    length = a.norm(dim=1)
    return a / length[:, None], b * length
