"""From keys, gains and ridges to step sizes and decays: what each token will do to the memory, before it is done."""

import torch
from torch import Tensor

from .rule import Rule


def energy(x: Tensor, count: Tensor, rule: Rule) -> Tensor:
    """The normalization statistic E of each step (paper, section 4).

    Args:
        x: [..., n + W - 1, K] write features, the W - 1 before the first step included, zero where there is no pair.
        count: [..., n] realised window sizes.

    Returns:
        [..., n]: the squared norm; for `falcon_3a` its mean over the window; for `falcon_3` the largest eigenvalue of
        the window's mean outer product, or the bound that `rule.smoothness` asks for.
    """
    if rule.smoothness in ("exact", "bound"):
        gram = _window_gram(x, rule.window)
        largest = _largest_eigenvalue if rule.smoothness == "exact" else _eigenvalue_bound
        return largest(gram) / count
    squared = x.square().sum(-1)
    if rule.window > 1:
        squared = squared.unfold(-1, rule.window, 1).sum(-1)
    return squared / count


def step_and_log_decay(
    energy: Tensor, gain: Tensor, ridge: Tensor | None, active: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Step size eta and log gamma of each step (paper, section 3.1).

    Args:
        energy: [...] statistic E.
        gain: [...] gain or step size; [..., V] for the per-channel rules.
        ridge: [...] ridge, or None where the rule has none.
        active: [...] bool, False where the step does nothing: padding, and a first token without a pair.

    Returns:
        eta and log gamma, both of gain's shape, 0 where not active.
    """
    if rule.per_channel:
        energy, active = energy[..., None], active[..., None]
        ridge = None if ridge is None else ridge[..., None]
    if rule.ridge == "scale_coupled":
        ridge = ridge * (energy.detach() if rule.detach_energy else energy)
    denominator = energy + rule.epsilon if ridge is None else energy + ridge + rule.epsilon
    possible = denominator > 0
    safe = torch.where(possible, denominator, 1)
    if rule.step_size == "gain":
        eta = gain / safe
    elif rule.residual:
        eta = torch.minimum(gain, 2 / safe)
    else:
        eta, possible = gain, torch.ones_like(possible)
    eta = torch.where(active & possible, eta, 0)
    if ridge is None:
        return eta, torch.zeros_like(eta)
    alpha = (eta * torch.where(active, ridge, 0)).clamp(max=1 - rule.decay_floor)
    return eta, torch.log1p(-alpha)


def _window_gram(x: Tensor, window: int) -> Tensor:
    """[..., n, W, W] inner products within each window, from W products per feature."""
    n = x.shape[-2] - window + 1
    lagged = [(x[..., : x.shape[-2] - lag, :] * x[..., lag:, :]).sum(-1) for lag in range(window)]
    rows = []
    for a in range(window):
        rows.append(torch.stack([lagged[abs(a - b)][..., min(a, b) : min(a, b) + n] for b in range(window)], -1))
    return torch.stack(rows, -2)


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """Largest eigenvalue [...] of positive semidefinite matrices [..., W, W].

    Squaring a matrix doubles the gaps between the logarithms of its eigenvalues, so that the matrix, kept at trace 1,
    tends to a projector onto the top eigenspace, whatever its dimension. A column of it is a top eigenvector; taken as
    constant it gives the eigenvalue and, where that repeats, a valid subgradient.
    """
    with torch.no_grad():
        power = _unit_trace(gram)[0]
        for _ in range(52 if gram.dtype == torch.float64 else 24):
            power = _unit_trace(power @ power)[0]
        column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*power.shape[:-1], 1)
        vector = power.gather(-1, column)
        vector = vector / vector.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
    return (vector * (gram @ vector)).sum((-2, -1))


def _eigenvalue_bound(gram: Tensor) -> Tensor:
    """(tr G^16)^(1/16), at least the largest eigenvalue and at most W^(1/16) times it."""
    power, trace = _unit_trace(gram)
    for _ in range(4):
        power = power @ power
    total = power.diagonal(dim1=-2, dim2=-1).sum(-1)
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1) ** (1 / 16), 0) * trace[..., 0, 0]


def _unit_trace(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix over its trace, and the trace [..., 1, 1]; a zero matrix stays zero."""
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return matrix / torch.where(trace > 0, trace, 1), trace
