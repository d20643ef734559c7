"""Launches that do not ask Triton anew, argument by argument, which compilation of a kernel fits.

A compilation follows from constants, dtypes, which arguments are None, the integers, and whether pointers are multiples
of 16 bytes. Who makes a `Launcher` promises that between calls only the pointers change, and which of them are None,
and that they stay multiples of 16 bytes if `aligned`; else every launch goes Triton's own way.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

# In these versions a compiled kernel is run with grid, stream, handle, metadata, hooks, and all arguments, constants
# included; a pointer may be an integer.
KNOWN = (3, 6) <= tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 7)

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for this device, and can be side by side."""
    return KNOWN and device.type == "cuda"


@contextmanager
def compiling() -> Iterator[None]:
    """Within, nothing is launched: what launches need is compiled side by side, and has been when this ends. What does
    not compile says so when it is launched."""
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        before = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(before)


def _observed() -> bool:
    """Whether a profiler hooks into Triton's launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def dtypes_of(tensors: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in tensors])


def are_aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the pointers are all multiples of 16 bytes."""
    return all([t is None or t.data_ptr() % 16 == 0 for t in tensors])


class Launcher:
    """One kernel on one grid. `flags` are constants that differ between launches, `constants` all others and options.

    Constants follow the other arguments in the kernel's signature, each a tensor, an integer or None. Tensors lie on
    the current device.
    """

    def __init__(self, kernel, grid: tuple[int, ...], constants: dict[str, Any], flags: tuple[str, ...] = (),
                 aligned: bool = False):  # fmt: skip
        self.kernel, self.constants, self.flags = kernel, constants, flags
        self.grid = (*grid, 1, 1)[:3]
        self.aligned = aligned and KNOWN
        self.ready: dict[tuple, tuple] = {}  # by flags and absences: a kernel, which arguments are tensors, constants

    def __call__(self, *arguments, flags: tuple = ()) -> None:
        kind = flags, tuple([argument is None for argument in arguments])
        if _compiling.get():
            self.kernel.warmup(*arguments, grid=self.grid, **self._constants(flags))
            return
        if kind in self.ready and not _observed():
            compiled, tensors, constants = self.ready[kind]
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            pointers = list(arguments)
            for i in tensors:
                pointers[i] = pointers[i].data_ptr()
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *constants
            )
            return
        constants = self._constants(flags)
        compiled = self.kernel[self.grid](*arguments, **constants)
        if self.aligned and compiled is not None:  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(arguments) :]
            tensors = tuple(i for i, t in enumerate(arguments) if isinstance(t, Tensor))
            self.ready[kind] = compiled, tensors, tuple(constants[name] for name in names)

    def _constants(self, flags: tuple) -> dict[str, Any]:
        return self.constants | dict(zip(self.flags, flags, strict=True))
