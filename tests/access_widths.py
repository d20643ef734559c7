"""Prints the widths in bits of the accesses to global memory of elementwise kernels, as launched with bfloat16.

Compiled for compute capability 9.0, which needs no GPU: python tests/access_widths.py
"""

import re

import torch
import triton
from falcon_kernels import triton_convolution, triton_mlp, triton_norm
from falcon_kernels.launcher import Launcher
from triton.backends.compiler import GPUTarget


class Hopper:
    """A device to compile for, as Triton asks for one."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(launcher: Launcher, *arguments) -> None:
    ptx = launcher.kernel.warmup(*arguments, grid=launcher.grid, **launcher.constants).asm["ptx"]
    plain = re.findall(r"(?:ld|st)\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)", ptx)
    widths = {int(count or 1) * int(bits) for count, bits in plain}
    widths |= {8 * int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.[^,]*, [^,]*, (\w+)", ptx)}
    print(launcher.kernel.__module__.rpartition("_")[2], launcher.kernel.__name__, *sorted(widths))


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    Launcher.__call__ = compile_only
    for rows in (512, 511):
        x = torch.zeros(rows, 8, dtype=torch.bfloat16)
        triton_mlp._run((x, x, x[:8]))
        triton_mlp._run_backward((x, x, x[:8]), x)
    x, heads, weight = x.new_zeros(2, 512, 128), x.new_zeros(2, 512, 2, 64), torch.zeros(128, 4)
    triton_convolution._run((x, weight, None), 64, 1, 1e-6)
    triton_convolution._run_backward((x, weight, None), heads, 64, 1, 1e-6)
    triton_norm._run((heads, weight[:64, 0], heads), 1e-6)
    triton_norm._run_backward((heads, weight[:64, 0], heads), heads, 1e-6)
    wide = x.float().requires_grad_()
    total, normed = triton_norm.add_norm(wide, x, weight[:, 0], 1e-6, x.dtype)
    torch.autograd.grad([total, normed], wide, [total, normed])


if __name__ == "__main__":
    main()
