"""Launches that do not ask Triton anew, argument by argument, which compilation of a kernel fits.

A compilation follows from constants, dtypes, which arguments are None, the integers, and whether pointers are multiples
of 16 bytes. Who makes a `Launcher` promises that between calls only the pointers change, and which of them are None,
and that they stay multiples of 16 bytes if `aligned`; else every launch goes Triton's own way.
"""

from typing import Any

import torch
import triton

# In these versions a compiled kernel is run with grid, stream, handle, metadata, hooks, and all arguments, constants
# included; a pointer may be an integer.
KNOWN = (3, 6) <= tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 7)


def _observed() -> bool:
    """Whether a profiler hooks into Triton's launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


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
        constants = self.constants | dict(zip(self.flags, flags, strict=True))
        compiled = self.kernel[self.grid](*arguments, **constants)
        if self.aligned and compiled is not None:  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(arguments) :]
            tensors = tuple(i for i, t in enumerate(arguments) if isinstance(t, torch.Tensor))
            self.ready[kind] = compiled, tensors, tuple(constants[name] for name in names)
