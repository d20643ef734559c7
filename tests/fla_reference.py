"""Models of flash-linear-attention 0.6 as their published layers are structured, in plain PyTorch, any dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(config: dict, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [B, T, vocab_size] of a delta_net, linear_attn or (without its rotation) retnet model."""
    eps, attention = config["norm_eps"], config["attn"]["layers"] if config.get("attn") else []
    x = weights["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        w = {name.split(".", 3)[3]: value for name, value in weights.items() if name.startswith(f"model.layers.{i}.")}
        mixer = softmax_attention if i in attention else MIXERS[config["model_type"]]
        x = x + mixer(config, w, rms_norm(x, w["attn_norm.weight"], eps)) @ w["attn.o_proj.weight"].T
        h = rms_norm(x, w["mlp_norm.weight"], eps)
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embeddings.weight"])
    return rms_norm(x, weights["model.norm.weight"], eps) @ head.T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def delta_net(config: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    heads = config["num_heads"]
    q, k, v = (convolved(w, x, part).unflatten(-1, (heads, -1)) for part in "qkv")
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    beta = torch.sigmoid(x @ w["attn.b_proj.weight"].T) if config["use_beta"] else torch.ones_like(q[..., 0])
    if config["allow_neg_eigval"]:
        beta = 2 * beta
    memory = x.new_zeros(x.shape[0], heads, q.shape[-1], v.shape[-1])
    reads = []
    for t in range(x.shape[1]):
        residual = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], memory)
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * residual)
        reads.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory) * q.shape[-1] ** -0.5)
    out = rms_norm(torch.stack(reads, 1), w["attn.o_norm.weight"], config["norm_eps"]).flatten(-2)
    return out * F.silu(x @ w["attn.g_proj.weight"].T) if config["use_gate"] else out


def linear_attention(config: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    feature = {"identity": lambda y: y, "relu": F.relu, "elu": lambda y: F.elu(y) + 1}[config["feature_map"]]
    q, k, v = grouped(config, w, x)
    return rms_norm(weighted_sum(feature(q), feature(k), v, 0), w["attn.norm.weight"], config["norm_eps"]).flatten(-2)


def retention_without_rotation(config: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = grouped(config, w, x)
    log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(config["num_heads"], dtype=x.dtype))))
    out = weighted_sum(q, k, v, log_decay[:, None, None])
    out = rms_norm(out, w["attn.g_norm_swish_gate.weight"], config["norm_eps"]).flatten(-2)
    return out * F.silu(x @ w["attn.g_proj.weight"].T)


def softmax_attention(config: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    spec = config["attn"]
    size = config["hidden_size"] // spec["num_heads"]
    q, k, v = ((x @ w[f"attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2) for part in "qkv")
    angle = torch.arange(x.shape[1])[:, None] * spec["rope_theta"] ** (-torch.arange(0, size, 2) / size).to(x.dtype)
    q, k = (rotated(y, angle) for y in (q, k))
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


MIXERS = {"delta_net": delta_net, "linear_attn": linear_attention, "retnet": retention_without_rotation}


def convolved(w: dict[str, Tensor], x: Tensor, part: str) -> Tensor:
    y = x @ w[f"attn.{part}_proj.weight"].T
    kernel = w.get(f"attn.{part}_conv1d.weight")
    if kernel is None:
        return F.silu(y)
    padded = F.pad(y.transpose(1, 2), (kernel.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, kernel, groups=kernel.shape[0])).transpose(1, 2)


def grouped(config: dict, w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """Queries, keys and values [B, T, H, ·], key and value heads repeated for the query heads that share them."""
    heads = config["num_heads"]
    kv_heads = config["num_kv_heads"] or heads
    q, k, v = (
        (x @ w[f"attn.{part}_proj.weight"].T).unflatten(-1, (count, -1))
        for part, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
    )
    return [q, *(y.repeat_interleave(heads // kv_heads, 2) for y in (k, v))]


def weighted_sum(q: Tensor, k: Tensor, v: Tensor, log_decay) -> Tensor:
    """[B, T, H, V]: for each query the values so far, by its products with their keys over √K, faded with distance."""
    places = torch.arange(q.shape[1])
    distance = places[:, None] - places
    fading = torch.where(distance >= 0, torch.exp(log_decay * distance.to(q.dtype)), 0)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5 * fading
    return torch.einsum("bhts,bshv->bthv", scores, v)


def rotated(y: Tensor, angle: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
