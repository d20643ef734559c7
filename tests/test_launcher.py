"""Launches take Triton's own way once, and then reach the compiled kernel with the same arguments."""

import pytest

pytest.importorskip("triton")

from falcon_kernels import launcher
from falcon_kernels.launcher import Launcher


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("compiled", grid, arguments))


class Kernel:
    arg_names = ("a", "b", "SIZE", "FLAG")

    def __init__(self, interpreted=False):
        self.calls, self.interpreted = [], interpreted

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.calls.append(("triton", grid, arguments, constants))
            return None if self.interpreted else Compiled(self.calls)

        return run


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(launcher, "KNOWN", True)


def test_the_second_launch_with_the_same_flags_reuses_the_first():
    kernel = Kernel()
    launch = Launcher(kernel, (5, 2), {"SIZE": 8, "num_warps": 4}, ("FLAG",), aligned=True)
    for flag in (True, False, True):
        launch(1, 2, flags=(flag,))
    constants = {"SIZE": 8, "num_warps": 4}
    assert kernel.calls == [
        ("triton", (5, 2), (1, 2), constants | {"FLAG": True}),
        ("triton", (5, 2), (1, 2), constants | {"FLAG": False}),
        ("compiled", (5, 2, 1), (1, 2, 8, True)),
    ]


@pytest.mark.parametrize("why", ["not aligned", "interpreted", "unknown version"])
def test_else_every_launch_is_tritons(why, monkeypatch):
    monkeypatch.setattr(launcher, "KNOWN", why != "unknown version")
    kernel = Kernel(interpreted=why == "interpreted")
    launch = Launcher(kernel, (5,), {"SIZE": 8, "FLAG": False}, aligned=why != "not aligned")
    for _ in range(2):
        launch(1, 2)
    assert [call[0] for call in kernel.calls] == ["triton"] * 2
