"""Launches that do not ask Triton anew, argument by argument, which compilation of a kernel fits.

A compilation follows from constants, dtypes, which arguments are None, the integers, and whether pointers are multiples
of 16 bytes. Who makes a `Launcher` promises that only the pointers change between its calls, and that they stay
multiples of 16 bytes if `aligned`; else every launch goes Triton's own way.
"""

from typing import Any

import triton

# In these versions a compiled kernel takes all arguments of the kernel, constants included.
KNOWN = (3, 6) <= tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 7)


class Launcher:
    """One kernel on one grid. `flags` are constants that differ between launches, `constants` all others and options.

    Constants follow the other arguments in the kernel's signature.
    """

    def __init__(self, kernel, grid: tuple[int, ...], constants: dict[str, Any], flags: tuple[str, ...] = (),
                 aligned: bool = False):  # fmt: skip
        self.kernel, self.grid, self.constants, self.flags = kernel, grid, constants, flags
        self.aligned = aligned and KNOWN
        self.ready: dict[tuple, tuple] = {}  # by flags: the launch of a compiled kernel, and its constants in order

    def __call__(self, *arguments, flags: tuple = ()) -> None:
        if flags in self.ready:
            launch, constants = self.ready[flags]
            launch(*arguments, *constants)
            return
        constants = self.constants | dict(zip(self.flags, flags, strict=True))
        compiled = self.kernel[self.grid](*arguments, **constants)
        if self.aligned and compiled is not None:  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(arguments) :]
            grid = (*self.grid, 1, 1)[:3]
            self.ready[flags] = compiled[grid], tuple(constants[name] for name in names)
