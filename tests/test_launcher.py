"""Launches take Triton's own way once, and then reach the compiled kernel with the same arguments."""

import pytest
import torch

pytest.importorskip("triton")

from falcon_kernels import launcher
from falcon_kernels.launcher import Launcher


class Compiled:
    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, calls):
        self.calls = calls

    def run(self, *arguments):
        self.calls.append(("compiled", *arguments))


class Kernel:
    arg_names = ("a", "b", "SIZE", "FLAG")

    def __init__(self, interpreted=False):
        self.calls, self.interpreted = [], interpreted

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.calls.append(("triton", grid, arguments, constants))
            return None if self.interpreted else Compiled(self.calls)

        return run

    def warmup(self, *arguments, grid, **constants):
        self.calls.append(("compile", grid, arguments, constants))


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(launcher, "KNOWN", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)


def test_the_second_launch_with_the_same_flags_reuses_the_first():
    kernel, tensor = Kernel(), torch.zeros(2)
    launch = Launcher(kernel, (5, 2), {"SIZE": 8, "num_warps": 4}, ("FLAG",), aligned=True)
    for flag in (True, False, True):
        launch(tensor, None, flags=(flag,))
    constants = {"SIZE": 8, "num_warps": 4}
    assert kernel.calls == [
        ("triton", (5, 2, 1), (tensor, None), constants | {"FLAG": True}),
        ("triton", (5, 2, 1), (tensor, None), constants | {"FLAG": False}),
        ("compiled", 5, 2, 1, 103, 11, (4, 1, 0), None, None, None, tensor.data_ptr(), None, 8, True),
    ]


def test_an_argument_that_comes_or_goes_is_another_kernel():
    kernel, tensor = Kernel(), torch.zeros(2)
    launch = Launcher(kernel, (5,), {"SIZE": 8, "FLAG": False}, aligned=True)
    for given in (tensor, None, tensor, None):
        launch(tensor, given)
    assert [call[0] for call in kernel.calls] == ["triton", "triton", "compiled", "compiled"]
    address = tensor.data_ptr()
    assert [call[-4:-2] for call in kernel.calls[2:]] == [(address, address), (address, None)]


@pytest.mark.parametrize("why", ["not aligned", "interpreted", "unknown version"])
def test_else_every_launch_is_tritons(why, monkeypatch):
    monkeypatch.setattr(launcher, "KNOWN", why != "unknown version")
    kernel = Kernel(interpreted=why == "interpreted")
    launch = Launcher(kernel, (5,), {"SIZE": 8, "FLAG": False}, aligned=why != "not aligned")
    for _ in range(2):
        launch(1, 2)
    assert [call[0] for call in kernel.calls] == ["triton"] * 2


def test_profilers_see_every_launch(monkeypatch):
    kernel = Kernel()
    launch = Launcher(kernel, (5,), {"SIZE": 8, "FLAG": False}, aligned=True)
    launch(1, 2)
    monkeypatch.setattr(launcher.triton.knobs.runtime, "launch_exit_hook", lambda metadata: None)
    launch(1, 2)
    assert [call[0] for call in kernel.calls] == ["triton"] * 2


@pytest.mark.skipif(not hasattr(launcher.triton, "AsyncCompileMode"), reason="this Triton compiles one after another")
def test_nothing_is_launched_while_kernels_are_compiled():
    kernel, tensor = Kernel(), torch.zeros(2)
    launch = Launcher(kernel, (5,), {"SIZE": 8}, ("FLAG",), aligned=True)
    for _ in range(2):
        with launcher.compiling():
            launch(tensor, None, flags=(True,))
        launch(tensor, None, flags=(True,))
    given = (5, 1, 1), (tensor, None), {"SIZE": 8, "FLAG": True}
    assert kernel.calls[:3] == [("compile", *given), ("triton", *given), ("compile", *given)]
    assert [call[0] for call in kernel.calls[3:]] == ["compiled"]
