"""What a conversion is: a list of the tensors it makes, each with what it is made from. dict → dict follows from it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ConversionError(ValueError):
    """Why a checkpoint is not converted: one sentence for each tensor or option that is wrong."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Piece:
    """One tensor of the result.

    Args:
        target: its name.
        sources: the tensors that it is made from; none where it is made new.
        make: from those tensors to the new one.
        how: what `make` does, in a few words.
    """

    target: str
    sources: tuple[str, ...]
    make: Callable[..., Tensor]
    how: str


def copied(target: str, source: str) -> Piece:
    return Piece(target, (source,), lambda tensor: tensor, "as it is")


def filled(target: str, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Piece:
    return Piece(target, (), lambda: torch.full(shape, value, dtype=dtype), f"{value:g} everywhere")


@dataclass(frozen=True)
class Account:
    """Where every tensor went.

    Args:
        taken: for each tensor of the source that is used, the names it goes to, and how.
        made: for each tensor of the result that has no source, how it is made.
        left: for each tensor of the source that is not used, why.
        lost: what the result does not compute as the source does, a sentence each; empty where it is the same function.
    """

    taken: dict[str, dict[str, str]]
    made: dict[str, str]
    left: dict[str, str]
    lost: list[str]

    def rows(self) -> list[tuple[str, str, str, str, int]]:
        """What happened, source, result, how or why, and in how many layers, layers of one kind in one row."""
        everything = [("taken", s, t, how) for s, targets in self.taken.items() for t, how in targets.items()]
        everything += [("made", "", target, how) for target, how in self.made.items()]
        everything += [("left", source, "", why) for source, why in self.left.items()]
        counts: dict[tuple[str, str, str, str], int] = {}
        for what, source, target, how in everything:
            row = (what, _any_layer(source), _any_layer(target), how)
            counts[row] = counts.get(row, 0) + 1
        return [(*row, count) for row, count in counts.items()]


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


@dataclass
class Plan:
    """A conversion, before a number has been read.

    Args:
        config: the config.json of the result.
        pieces: its tensors, in the order in which they are written.
        left: tensors of the source that are not used, and why.
        lost: what is not the same function, a sentence each.
        conditions: for tensors of the source whose values must be so: what they must be, and a test of it.
    """

    config: dict[str, Any]
    pieces: list[Piece]
    left: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    conditions: dict[str, tuple[str, Callable[[Tensor], bool]]] = field(default_factory=dict)

    def account(self) -> Account:
        taken: dict[str, dict[str, str]] = {}
        for piece in self.pieces:
            for source in piece.sources:
                taken.setdefault(source, {})[piece.target] = piece.how
        made = {piece.target: piece.how for piece in self.pieces if not piece.sources}
        return Account(taken, made, {name: why for name, why in self.left.items() if name not in taken}, self.lost)

    def shapes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The result on the meta device, from a source there."""
        with torch.device("meta"):
            return {piece.target: piece.make(*(tensors[name] for name in piece.sources)) for piece in self.pieces}

    def make(self, load: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the result one after another, each from its sources alone.

        Raises:
            ConversionError: at the end, with a sentence for each source that has a NaN or an infinity, or values that
                this conversion cannot take.
        """
        problems: dict[str, str] = {}

        def checked(name: str) -> Tensor:
            tensor = load(name)
            if not tensor.isfinite().all():
                problems[name] = f"{name} has values that are not finite."
            elif name in self.conditions and not self.conditions[name][1](tensor):
                problems[name] = f"{name} must be {self.conditions[name][0]}, which it is not."
            return tensor

        for piece in self.pieces:
            yield piece.target, piece.make(*map(checked, piece.sources)).contiguous()
        used = {name for piece in self.pieces for name in piece.sources}
        for name in self.conditions.keys() - used:
            checked(name)
        if problems:
            raise ConversionError(problems[name] for name in sorted(problems))

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole result at once."""
        return dict(self.make(tensors.__getitem__))


def check_source(
    tensors: Mapping[str, Tensor], needed: Mapping[str, tuple[int, ...]], kind: str, known: Iterable[str] = ()
) -> None:
    """Raises ConversionError unless the tensors are exactly those needed, a sentence for each that is not.

    Args:
        tensors: of the source; shapes and dtypes are looked at.
        needed: name and shape of each tensor that there must be.
        kind: of the source, by its name.
        known: names that may be there too.
    """
    problems = [f"{name} is missing." for name in needed if name not in tensors]
    for name, tensor in tensors.items():
        if name not in needed:
            if name not in known:
                problems.append(f"{name} is no tensor of a {kind} model with this config.")
        elif tuple(tensor.shape) != tuple(needed[name]):
            problems.append(f"{name} has shape {list(tensor.shape)}; its config needs {list(needed[name])}.")
        elif tensor.dtype not in FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            problems.append(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}; it must be {allowed}.")
    if problems:
        raise ConversionError(problems)
