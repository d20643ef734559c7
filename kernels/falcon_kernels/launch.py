"""Launch configurations: fixed, few, and each of them run against float64 on the cards named here.

A card is `large` where a program may have 200 KB of shared memory (Hopper), else `safe`, whose configurations fit in
100 KB. Nothing is tuned at first use.
"""

from functools import cache
from typing import NamedTuple

import torch


def _options(warps: int, registers: int | None, **more: int) -> dict[str, int]:
    """As Triton takes them."""
    return {"num_warps": warps, **more} | ({} if registers is None else {"maxnreg": registers})


class Config(NamedTuple):
    """Sizes of one kernel launch."""

    value_tile: int  # value channels at a time
    warps: int
    stages: int
    key_tile: int = 256  # key channels at a time, in the backward of a chunk
    registers: int | None = None  # of a thread at most; the compiler's choice by default
    once: bool = False  # the backward of a chunk keeps its tiles in shared memory

    def options(self) -> dict[str, int]:
        return _options(self.warps, self.registers, num_stages=self.stages)


LARGEST_WINDOW = 65  # a tile of 128 pairs

# (card, bytes of an operand, `padded` K): forward pass, reverse pass, backward of a chunk
TABLE = {
    ("large", 2, 64): (Config(64, 4, 2, registers=168), Config(64, 4, 3), Config(64, 4, 1, 64, 168, True)),
    ("large", 2, 128): (Config(64, 4, 2), Config(64, 4, 3), Config(64, 4, 1, 64, None, True)),
    ("large", 2, 256): (Config(64, 8, 2), Config(64, 8, 2), Config(64, 8, 1, 64, 128)),
    ("safe", 2, 64): (Config(64, 4, 2), Config(64, 4, 2), Config(64, 4, 1, 64)),
    ("safe", 2, 128): (Config(32, 8, 1), Config(32, 4, 2), Config(32, 8, 1, 64)),
    ("safe", 2, 256): (Config(16, 8, 1), Config(16, 8, 1), Config(32, 8, 1, 64)),
}
WIDE = {  # 4-byte operands, on any card
    16: (Config(32, 8, 1), Config(32, 4, 1), Config(16, 4, 1, once=True)),
    32: (Config(32, 8, 1), Config(32, 4, 1), Config(16, 4, 1, once=True)),
    64: (Config(16, 8, 1), Config(32, 4, 1), Config(16, 4, 1, 64)),
    128: (Config(16, 8, 1), Config(32, 8, 1), Config(16, 8, 1, 64)),
    256: (Config(16, 8, 1), Config(16, 8, 1), Config(16, 8, 1, 64)),
}


class Regression(NamedTuple):
    """Configurations of the kernels of falcon_1. All but the passes take as many key as value channels at a time, the
    gradients at most `key_tile`. `prepare` to `reverse` are what runs where `whole` would not fill the card."""

    invert: Config
    prepare: Config
    carry: Config
    read: Config
    reverse: Config
    gradients: Config
    whole: Config | None = None  # of `_pass` and `_reverse_pass`, where registers hold what they need
    reverse_whole: Config | None = None


REGRESSION = {  # keys as in TABLE
    ("large", 2, 64): Regression(
        Config(32, 1, 3, registers=168),
        Config(64, 4, 1),
        Config(64, 4, 3),
        Config(64, 4, 1),
        Config(64, 4, 3),
        Config(64, 4, 1),
        Config(64, 4, 1, registers=168),
        Config(64, 4, 3),
    ),
    ("large", 2, 128): Regression(
        Config(64, 1, 3, registers=168),
        Config(64, 4, 3),
        Config(128, 8, 3),
        Config(128, 4, 2, registers=168),
        Config(128, 8, 2),
        Config(128, 4, 2, 64),
        Config(128, 8, 3),
        Config(128, 8, 2),
    ),
    ("large", 2, 256): Regression(
        Config(64, 1, 3),
        Config(64, 4, 2),
        Config(32, 8, 3),
        Config(256, 8, 2, registers=128),
        Config(32, 8, 2),
        Config(64, 4, 2),
    ),
    ("safe", 2, 64): Regression(
        Config(32, 1, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(32, 4, 1),
        Config(32, 4, 1),
    ),
    ("safe", 2, 128): Regression(
        Config(32, 1, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(64, 4, 1),
        Config(32, 4, 1),
        Config(64, 4, 1),
        Config(32, 8, 1),
        Config(32, 8, 1),
    ),
    ("safe", 2, 256): Regression(
        Config(32, 1, 1), Config(64, 4, 1), Config(32, 4, 1), Config(64, 4, 1), Config(16, 4, 1), Config(64, 4, 1)
    ),
}
WIDE_REGRESSION = {  # 4-byte operands, on any card, by K
    64: Regression(
        Config(16, 1, 1),
        Config(32, 4, 1),
        Config(16, 4, 1),
        Config(32, 4, 1),
        Config(16, 4, 1),
        Config(16, 4, 1),
        Config(16, 8, 1),
        Config(16, 8, 1),
    ),
    128: Regression(
        Config(16, 1, 1), Config(32, 4, 1), Config(16, 8, 1), Config(32, 4, 1), Config(16, 8, 1), Config(16, 4, 1)
    ),
    256: Regression(
        Config(16, 1, 1), Config(32, 4, 1), Config(16, 8, 1), Config(32, 4, 1), Config(16, 8, 1), Config(16, 4, 1)
    ),
}


class Channel(NamedTuple):
    """Configurations of the kernels of the rules with a rate per value channel; all but the passes and solves take
    `key_tile` key channels at a time."""

    rates: Config
    forward: Config
    read: Config
    reverse: Config
    ask: Config
    across: Config
    channels: Config
    keys: Config
    solve: Config
    within: Config
    unsolve: Config


def _channel(passes: Config, solves: Config, tile: int = 64, registers: int | None = None) -> Channel:
    """Passes and solves go along sequences; the other kernels, each on a chunk, are launched alike everywhere: a warp
    has a block of 16 tokens; but where there are no products, fewer channels and more warps have more loads on the way.
    """
    chunk = Config(tile, 4, 1, tile)
    read = chunk._replace(registers=registers)
    channels = Config(32, 8, 1)
    return Channel(chunk, passes, read, passes, read, chunk, channels, chunk, solves, chunk, solves)


CHANNEL = {  # keys as in TABLE
    ("large", 2, 64): _channel(Config(64, 4, 3), Config(32, 1, 3), registers=168),
    ("large", 2, 128): _channel(Config(64, 4, 3), Config(16, 1, 3), registers=168),
    ("large", 2, 256): _channel(Config(64, 8, 2), Config(16, 4, 3), registers=168),
    ("safe", 2, 64): _channel(Config(64, 4, 2), Config(32, 1, 2)),
    ("safe", 2, 128): _channel(Config(64, 4, 1), Config(16, 1, 2)),
    ("safe", 2, 256): _channel(Config(64, 8, 1), Config(16, 4, 2)),
}
WIDE_CHANNEL = {  # 4-byte operands, on any card, by K
    64: _channel(Config(32, 4, 1), Config(32, 4, 2), 32),
    128: _channel(Config(16, 8, 1), Config(16, 8, 2), 32),
    256: _channel(Config(16, 8, 1), Config(16, 8, 2), 32),
}


class Window(NamedTuple):
    """Configurations of the kernels of falcon_3. All but the passes take as many key as value channels at a time, at
    most `key_tile`."""

    local: Config
    carry: Config
    reverse: Config
    solutions: Config
    gradients: Config
    add_bound: Config
    collect: Config


def _window(carry: Config, reverse: Config, tile: int = 64) -> Window:
    """`carry` and `reverse` go along sequences. With more than two warps the two kernels that go along the blocks of
    a chunk would read past their shared memory, as `padded` says."""
    blocks, gradients = Config(tile, 1, 1), Config(tile, 2, 1)
    return Window(blocks, carry, reverse, blocks, gradients, Config(tile, 4, 1), Config(64, 1, 1))


WINDOW = {  # keys as in TABLE
    ("large", 2, 64): _window(Config(64, 4, 3), Config(64, 4, 3)),
    ("large", 2, 128): _window(Config(128, 8, 3), Config(128, 8, 2))._replace(solutions=Config(128, 2, 1, 64)),
    ("large", 2, 256): _window(Config(32, 4, 1), Config(32, 4, 1)),
    ("safe", 2, 64): _window(Config(64, 4, 1), Config(64, 4, 1)),
    ("safe", 2, 128): _window(Config(64, 4, 1), Config(32, 4, 1)),
    ("safe", 2, 256): _window(Config(32, 4, 1), Config(16, 4, 1)),
}
WIDE_WINDOW = {  # 4-byte operands, on any card, by K
    64: _window(Config(16, 4, 1), Config(16, 4, 1), 32),
    128: _window(Config(16, 8, 1), Config(16, 8, 1), 32),
    256: _window(Config(16, 8, 1), Config(16, 8, 1), 32),
}


class Walk(NamedTuple):
    """Sizes of a launch whose programs take one tile after another."""

    tile: int  # numbers at a time: rows x channels, these made up to a power of two
    steps: int  # tiles at most
    warps: int
    registers: int | None = None  # as in Config

    def options(self) -> dict[str, int]:
        return _options(self.warps, self.registers)


# By bytes: forward, backward; the registers let 25 and 12 programs run on a multiprocessor at a time.
CONVOLUTION = {2: (Walk(256, 32, 1, 80), Walk(256, 64, 1, 168)), 4: (Walk(512, 32, 4),) * 2}
NORM = {2: (Walk(1024, 4, 4), Walk(1024, 16, 4)), 4: (Walk(512, 4, 4), Walk(512, 16, 4))}
SUM_TILE, WIDEST_SUM = 1024, 8192  # numbers at a time of sums with their norm, or else one row, of at most so many


def padded(channels: int, operand_bytes: int) -> int:
    """Channels of a tile that holds all of them: a power of two.

    At least 64 of 2 bytes: with 32 columns on the right, kernels on Hopper read past their shared memory (Triton 3.6).
    """
    return max(64 if operand_bytes == 2 else 16, 1 << (channels - 1).bit_length())


@cache
def card(device: torch.device) -> tuple[str, int]:
    """Class of a card and its number of multiprocessors; the CPU, on which kernels are interpreted, counts as one."""
    if device.type != "cuda":
        return "safe", 1
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return "large" if shared >= 200 * 1024 else "safe", properties.multi_processor_count


def configs(device: torch.device | str, operand_bytes: int, key_tile: int, tile: int) -> tuple[Config, Config, Config]:
    """Configurations of the forward pass, the reverse pass and the backward of a chunk of `tile` pairs.

    device: or the class of a card.
    """
    kind = device if isinstance(device, str) else card(device)[0]
    found = WIDE[key_tile] if operand_bytes == 4 else TABLE[kind, operand_bytes, key_tile]
    if tile <= 64:
        return found
    most = 64 if kind == "large" and operand_bytes == 2 else 32
    wide = {"warps": 8, "stages": 1, "registers": None, "once": False}
    forward, reverse, backward = (c._replace(value_tile=min(c.value_tile, most), **wide) for c in found)
    return forward, reverse, backward


def regression(device: torch.device, operand_bytes: int, key_tile: int) -> Regression:
    """Configurations of the kernels of falcon_1."""
    key_tile = max(key_tile, 64)
    return WIDE_REGRESSION[key_tile] if operand_bytes == 4 else REGRESSION[card(device)[0], operand_bytes, key_tile]


def channel(device: torch.device, operand_bytes: int, key_tile: int) -> Channel:
    """Configurations of the kernels of the rules with a rate per value channel."""
    key_tile = max(key_tile, 64)
    return WIDE_CHANNEL[key_tile] if operand_bytes == 4 else CHANNEL[card(device)[0], operand_bytes, key_tile]


def fused(device: torch.device, config: Config | None, rows: int, value_dim: int, packed: bool) -> bool:
    """Whether falcon_1 takes `rows` in one pass of `config`: where programs for rows x value tiles fill the card.

    Not documents of a packed row, the longest of which can be most of the row: a long chain is faster split.
    """
    if config is None or packed:
        return False
    return 8 * rows * -(-value_dim // config.value_tile) >= 7 * card(device)[1]


def window(device: torch.device, operand_bytes: int, key_tile: int) -> Window:
    """Configurations of the kernels of falcon_3."""
    key_tile = max(key_tile, 64)
    return WIDE_WINDOW[key_tile] if operand_bytes == 4 else WINDOW[card(device)[0], operand_bytes, key_tile]


def at_once(device: torch.device, warps: int) -> int:
    """As many programs of so many warps as run at a time where a thread has 80 registers."""
    return card(device)[1] * max(1, 24 // warps)


def parts(device: torch.device, programs: int) -> int:
    """Into how many launches to cut `programs` of a chunk each, so that less of what they leave is held at a time.

    Each of them still fills the card four times: eight programs run on a multiprocessor at a time.
    """
    return max(1, programs // (32 * card(device)[1]))


def narrower(device: torch.device, config: Config, rows: int, value_dim: int, key_tile: int) -> Config:
    """`config` with its value tile halved, down to 16, while programs for `rows` x tiles fill half of the card at most.

    A program then has a multiprocessor to itself: chunks are loaded two ahead where they fit.
    """
    kind, processors = card(device)
    tile = config.value_tile
    while tile > 16 and 2 * rows * -(-value_dim // tile) <= processors:
        tile //= 2
    if tile == config.value_tile:
        return config
    stages = 3 if kind == "large" and key_tile <= 128 else config.stages
    return config._replace(value_tile=tile, warps=4, stages=stages)


def alone(device: torch.device, config: Config, rows: int, value_dim: int) -> Config:
    """`config` of a warp a program with value tiles of 16, where each of these warps has a quarter of a multiprocessor
    to itself: what then counts is how long it takes for a block."""
    if config.warps > 1 or rows * -(-value_dim // 16) > 4 * card(device)[1]:
        return config
    return config._replace(value_tile=16)


def chunk_length(operand_bytes: int, key_tile: int, window: int) -> int:
    """C: what a tile of 64 pairs leaves beside the W - 1 before the chunk.

    The tile has 32 or 16 pairs where the operands have 4 bytes, and more where else half of them would not be left.
    """
    tile = 64 if operand_bytes == 2 else 32 if key_tile <= 128 else 16
    while tile < 2 * (window - 1):
        tile *= 2
    return tile - (window - 1)


def segments(device: torch.device, programs: int, chunks: int) -> int:
    """Into how many parts to cut sequences of up to `chunks` chunks so that `programs` of them fill the card.

    One part is the fused pass. More parts cost a second reading of keys and values, so that they have at least eight
    chunks each, and a batch that fills the card is never cut. Two programs run on a multiprocessor at a time.
    """
    processors = card(device)[1]
    if programs >= processors:
        return 1
    return max(1, min(2 * processors // programs, chunks // 8))
