"""The masked-parallel form: the whole sequence as one masked attention. For reading and for tests; quadratic in T W."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rule import Rule
from .schedule import energy, step_and_log_decay
from .state import FalconState


def attention(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor, ridge: Tensor | None, state: FalconState, rule: Rule
) -> tuple[Tensor, Tensor]:
    """All six rules in one formula (paper, sections 4 and D.1), without masks or packing.

    Unrolled, S_t = Diag(exp(u_t)) S_0 + sum over s <= t and pairs j in the window of s of exp(u_t - u_s) x_j z_{s,j}',
    where an inner-product rule has z_{s,j} = w_s v_j and a regression rule solves for it:

        z_{s,j} = w_s (v_j - exp(u_{s-1}) S_0' x_j - sum over r < s, i of exp(u_{s-1} - u_r) (x_j . x_i) z_{r,i}).

    Arguments as in `falcon_attention`. Returns the output [B, T, H, V] and the final memory [B, H, K, V].
    """
    batch, length = q.shape[:2]
    pair = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    x = k
    if rule.shifted:
        x = torch.cat([state.previous_key[:, None], k[:, :-1]], 1)
        pair = torch.cat([state.previous_valid[:, None], pair[:, 1:]], 1)
    active = pair[:, None]
    if rule.window > 1:
        x, v, pair = (torch.cat(two, 1) for two in ((state.tail_x, x), (state.tail_v, v), (state.tail_valid, pair)))
    x, v = (torch.where(pair[..., None, None], t, 0).transpose(1, 2) for t in (x, v))
    q, gain = q.transpose(1, 2), gain.transpose(1, 2)
    ridge = None if ridge is None else ridge.transpose(1, 2)
    count = pair.to(v.dtype)[:, None].unfold(-1, rule.window, 1).sum(-1).clamp_min(1)

    eta, log_decay = step_and_log_decay(energy(x, count, rule), gain, ridge, active, rule)
    if not rule.per_channel:
        eta, log_decay = eta[..., None], log_decay[..., None]
    weight = (eta / count[..., None]).transpose(-1, -2)  # [B, H, V or 1, T]
    u = log_decay.transpose(-1, -2).cumsum(-1)

    member = (torch.arange(length)[:, None] + torch.arange(rule.window)).flatten()  # pair of each unknown (s, j)
    step = torch.arange(length).repeat_interleave(rule.window)  # its step s
    u_before = pad(u[..., :-1], (1, 0))
    read_u = u_before if rule.timing == "read_before_write" else u
    reaches = (step[None, :] < torch.arange(length)[:, None]) | (
        (step[None, :] == torch.arange(length)[:, None]) & (rule.timing == "read_after_write")
    )

    def decay(to: Tensor, allowed: Tensor) -> Tensor:
        return (to[..., :, None] - u[..., None, step]).masked_fill(~allowed, -torch.inf).exp()

    def run(values: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        right = values[..., member, :]
        if rule.residual:
            right = right - u_before.exp().transpose(-1, -2)[..., step, :] * (x @ memory)[..., member, :]
        z = (weight[..., step].transpose(-1, -2) * right).transpose(-1, -2)[..., None]  # [B, H, V, T W, 1]
        if rule.residual:
            gram = (x @ x.transpose(-1, -2))[..., member[:, None], member]
            earlier = decay(u_before[..., step], step[None, :] < step[:, None])
            system = weight[..., step, None] * earlier * gram[:, :, None]
            z = torch.linalg.solve_triangular(
                system.expand(*z.shape[:-2], *system.shape[-2:]), z, upper=False, unitriangular=True
            )
        scores = (q @ x.transpose(-1, -2))[:, :, None][..., member] * decay(read_u, reaches)
        read = (scores @ z)[..., 0].transpose(-1, -2) + read_u.exp().transpose(-1, -2) * (q @ memory)
        to_end = (u[..., -1:] - u[..., step])[..., None].exp() * z  # [B, H, V, T W, 1]
        written = torch.einsum("bhjk,bhvj->bhkv", x[..., member, :], to_end[..., 0])
        return read, u[..., -1].exp()[:, :, None] * memory + written

    output, memory = run(v, state.memory)
    if rule.normalized_read:
        ones = torch.ones_like(v) if rule.per_channel else torch.ones_like(v[..., :1])
        total, _ = run(ones, state.normalizer if rule.per_channel else state.normalizer[..., None])
        output = output / (total + rule.read_epsilon)
    return output.transpose(1, 2), memory
