"""Custom ops of tensors and scalars with one result, whose backward is an op too.

As in triton_attention.py, plain tensors, which nobody traces or transforms, go past the dispatcher, since it costs the
host more than the launch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import triton_device
from .triton_layout import NAMESPACE, is_plain


class Op:
    """`name(tensors, options) -> Tensor` and `name_backward(grad, tensors, options) -> Tensor[]`.

    Args:
        library: of this package's namespace, one for each op, in the module that makes it.
        name: that of the op.
        tensors, options: their schema.
        run: the result, from the tensors and the options.
        run_backward: gradients of those tensors that are given and of floating point, from tensors, the result's
            gradient and the options; both run with the tensors' device current.
        shape: that of the result, from the tensors and the options; its dtype is the first tensor's.
    """

    def __init__(
        self,
        library: torch.library.Library,
        name: str,
        tensors: str,
        options: str,
        run: Callable[..., Tensor],
        run_backward: Callable[..., list[Tensor]],
        shape: Callable[..., Sequence[int]],
    ):
        self.name, self.count = name, tensors.count("Tensor")
        self.run, self.run_backward, self.shape = run, run_backward, shape
        backward = f"{name}_backward"
        schema = f"{tensors}, {options}" if options else tensors
        library.define(f"{name}({schema}) -> Tensor")
        library.define(f"{backward}(Tensor grad, {schema}) -> Tensor[]")
        for device in ("CPU", "CUDA"):
            library.impl(name, self._forward, device)
            library.impl(backward, self._backward, device)
        library.impl(name, self._autograd, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", self._fake, lib=library)
        torch.library.register_fake(f"{NAMESPACE}::{backward}", self._fake_backward, lib=library)
        ops = getattr(torch.ops, NAMESPACE)
        self.op, self.backward_op = getattr(ops, name).default, getattr(ops, backward).default

    def __call__(self, *given) -> Tensor:
        """The result for tensors and options."""
        if torch.compiler.is_compiling() or not is_plain(given[0]):
            return self.op(*given)
        if self._with_gradients(given):
            return _Function.apply(self, True, *given)
        return self._forward(*given)

    def _with_gradients(self, given) -> bool:
        return torch.is_grad_enabled() and torch._C._any_requires_grad(*given)

    def _forward(self, *given) -> Tensor:
        with triton_device.current(given[0].device):
            return self.run(given[: self.count], *given[self.count :])

    def _backward(self, grad, *given) -> list[Tensor]:
        with triton_device.current(given[0].device):
            return self.run_backward(given[: self.count], grad, *given[self.count :])

    def _autograd(self, *given) -> Tensor:
        if self._with_gradients(given):
            return _Function.apply(self, False, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*given)

    def differentiable(self, given) -> list[int]:
        return [i for i, t in enumerate(given[: self.count]) if t is not None and t.is_floating_point()]

    def _fake(self, *given) -> Tensor:
        return given[0].new_empty(self.shape(given[: self.count], *given[self.count :]))

    def _fake_backward(self, grad, *given) -> list[Tensor]:
        return [given[i].new_empty(given[i].shape) for i in self.differentiable(given)]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, plain, *given):
        ctx.op, ctx.plain, ctx.options = op, plain, given[op.count :]
        ctx.save_for_backward(*given[: op.count])
        if plain:
            return op._forward(*given)
        with torch._C._AutoDispatchBelowAutograd():
            return op.op(*given)

    @staticmethod
    def backward(ctx, grad):
        op, given = ctx.op, (*ctx.saved_tensors, *ctx.options)
        if torch.is_grad_enabled():
            raise RuntimeError(f"{op.name} with impl='triton' has no second derivatives; use impl='torch'.")
        found = op._backward(grad, *given) if ctx.plain else op.backward_op(grad, *given)
        result = [None] * (2 + len(given))
        for i, gradient in zip(op.differentiable(given), found, strict=True):
            result[2 + i] = gradient
        return tuple(result)
