"""Time of the chunked PyTorch form beside that of its own matrix products and of the loop over tokens.

    python benchmarks/torch_form.py

Forward and backward of one layer, float32, on the CPU. The products are recorded while the form runs, then run alone on
tensors of the same shapes.
"""

import sys
from pathlib import Path

import torch
from falcon_kernels import RULES, Rule, falcon_attention
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from report import median_seconds, report

B, T, H, K, V = 1, 4096, 8, 64, 64


class Products(TorchDispatchMode):
    """Records the operands of every matrix product."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.shapes.append(tuple((tuple(a.shape), a.stride()) for a in args))
        return function(*args, **(kwargs or {}))


def inputs(rule: Rule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (torch.nn.functional.rms_norm(torch.randn(B, T, H, K), (K,)) for _ in range(2))
    gain = 2 * torch.sigmoid(torch.randn(B, T, H, *([V] if rule.per_channel else [])))
    ridge = torch.sigmoid(torch.randn(B, T, H) - 3)
    return [t.requires_grad_() for t in (q, k, torch.randn(B, T, H, V), gain, ridge)]


def random_strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return torch.randn(extent).as_strided(shape, stride)


def main() -> None:
    rows = []
    for name in RULES:
        rule = Rule(name)
        arguments = inputs(rule)
        cotangent = torch.randn(B, T, H, V)

        def train(impl: str, rule=rule, arguments=arguments, cotangent=cotangent) -> None:
            output = falcon_attention(*arguments, rule=rule, impl=impl).output
            torch.autograd.grad(output, arguments, cotangent)

        with Products() as products:
            train("torch")
        operands = [[random_strided(*operand) for operand in pair] for pair in products.shapes]
        flops = sum(2 * a[0][0] * a[0][1] * a[0][2] * b[0][2] for a, b in products.shapes if len(a[0]) == 3)

        def multiply(operands=operands) -> None:
            for a, b in operands:
                a @ b

        ours, alone = median_seconds(lambda t=train: t("torch")), median_seconds(multiply)
        loop = median_seconds(lambda t=train: t("reference"), repeats=1)
        rows.append(
            {
                "rule": name,
                "torch form, ms": ours * 1e3,
                "its products, ms": alone * 1e3,
                "GFLOP": flops / 1e9,
                "ratio": ours / alone,
                "loop, ms": loop * 1e3,
                "loop over torch form": loop / ours,
            }
        )
    title = f"forward + backward, B={B} T={T} H={H} K=V={K}, float32"
    report("torch_form", title, rows, shape={"B": B, "T": T, "H": H, "K": K, "V": V})


if __name__ == "__main__":
    main()
