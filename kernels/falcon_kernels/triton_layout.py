"""Where sequences and their chunks lie, for kernels that read B x T tokens of a batch as one long row.

A sequence is a row of the batch, or a document of a packed row. Its tokens are numbered from 0 (`place`), its chunks
too; pair j of a sequence is (x_j, v_j), with x_j = k_{j-1} where the keys are shifted. Pairs before the call have
negative numbers and lie in the tail; x_0 of shifted keys is the previous key.
"""

import zlib
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of the custom ops: the package that these modules are in, so that each copy of them in a process has one of its own.
PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = PACKAGE if PACKAGE.isidentifier() else f"falcon_kernels_{zlib.crc32(PACKAGE.encode()):08x}"
# No recompilation when these change.
NUMBERS = ["length", "longest", "heads", "parts", "group_chunks", "part_chunks", "places", "offset"]
OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products of inputs of `dtype`, and all that is kept, are rounded to."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Layout(NamedTuple):
    """Chunks of `chunk` tokens. With packing as many as any bounds can need, so that no shape depends on values."""

    chunk: int
    sequences: int  # S
    length: int  # T
    chunks: int  # all of them
    longest: int  # chunks that one sequence can have
    packed: bool

    @classmethod
    def of(cls, batch: int, length: int, documents: int, chunk: int) -> Self:
        """The layout of tensors [B, T, ...]; `documents` is 0 without packing."""
        longest = -(-length // chunk)
        if documents:
            return cls(chunk, documents, length, length // chunk + documents, longest, True)
        return cls(chunk, batch, length, batch * longest, longest, False)


class Tables(NamedTuple):
    """Where packed documents lie, int64; all None without packing."""

    bounds: Tensor | None = None  # [S + 1]
    first: Tensor | None = None  # [S + 1] first chunk of each sequence
    owner: Tensor | None = None  # [chunks] sequence of each chunk


NO_TABLES = Tables()
TABLE_BLOCK = 1024  # chunks whose sequences one program finds


@triton.jit(do_not_specialize=["sequences", "chunks", "bits"])
def fill_tables(bounds, first, owner, sequences, chunks, bits, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """`first`, which every program fills for itself, and `owner`; sequences < 2^bits."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([1], tl.int64)
    tl.store(first + tl.arange(0, 1), total)
    for begin in range(0, sequences, BLOCK):
        there = begin + i < sequences
        at = bounds + begin + i
        tokens = tl.load(at + 1, mask=there, other=0) - tl.load(at, mask=there, other=0)
        chunks_of = (tokens + CHUNK - 1) // CHUNK
        tl.store(first + 1 + begin + i, total + tl.cumsum(chunks_of, 0), mask=there)
        total += tl.sum(chunks_of, 0)
    tl.debug_barrier()
    number = tl.program_id(0) * BLOCK + i
    sequence = i * 0
    for k in range(bits):
        candidate = sequence + (1 << (bits - 1 - k))
        start = tl.load(first + candidate, mask=candidate < sequences, other=0)
        sequence = tl.where((candidate < sequences) & (start <= number), candidate, sequence)
    tl.store(owner + number, sequence.to(tl.int64), mask=number < chunks)


def is_plain(tensor: Tensor) -> bool:
    """Whether nothing stands between a call and its kernels: no subclass, tracing, or transform."""
    known = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return known and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None


@triton.jit
def span(sequence, bounds, length, PACKED: tl.constexpr):
    """First token, int64, and number of tokens of a sequence, int32."""
    if PACKED:
        low = tl.load(bounds + sequence)
        count = (tl.load(bounds + sequence + 1) - low).to(tl.int32)
    else:
        low = sequence * length
        count = (sequence * 0 + length).to(tl.int32)
    return low, count


@triton.jit
def chunk_of(number, bounds, first, owner, length, longest, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Sequence of a chunk, the sequence's first token and length, and the place at which the chunk starts."""
    if PACKED:
        sequence = tl.load(owner + number)
        start = ((number - tl.load(first + sequence)) * CHUNK).to(tl.int32)
    else:
        sequence = number // longest
        start = ((number - sequence * longest) * CHUNK).to(tl.int32)
    low, count = span(sequence, bounds, length, PACKED)
    return sequence, low, count, start


@triton.jit
def of_part(number, heads, group_chunks, part_chunks, offset):
    """A chunk and head, counted over all chunks, of its number in a part, which has up to `part_chunks` chunks of each
    group of `group_chunks` from `offset` on; and whether there is one."""
    chunk = number // heads
    place = offset + chunk % part_chunks
    return (chunk // part_chunks * group_chunks + place) * heads + number % heads, place < group_chunks


@triton.jit
def token_rows(tensor, first, row, head, heads, WIDTH: tl.constexpr):
    """Pointers [R] to the rows of the tokens `first` + row [R], int64 and int32: 32 bits reach over a chunk."""
    return tensor + (first * heads + head) * WIDTH + row * (heads * WIDTH)


@triton.jit
def x_rows(
    k, previous, tail, sequence, low, start, row, head, heads,
    K: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Pointers [R] to the rows of write features of the pairs start + row [R]; the keys are shifted by SHIFT."""
    rows = token_rows(k, low + start - SHIFT, row, head, heads, K)
    place = start + row
    if SHIFT and CARRIED:
        rows = tl.where(place == 0, previous + (sequence * heads + head) * K, rows)
    if W > 1 and CARRIED:
        rows = tl.where(place < 0, tail + ((sequence * (W - 1) + W - 1 + place) * heads + head) * K, rows)
    return rows


@triton.jit
def exists(place, there, SHIFT: tl.constexpr, CARRIED: tl.constexpr):
    """Which of the pairs `place` [R] that are `there` may be read: without a carried state none before the first."""
    if CARRIED:
        return there
    else:
        return there & (place >= SHIFT)


@triton.jit
def v_rows(
    v, tail, sequence, low, start, row, head, heads, V: tl.constexpr, W: tl.constexpr, CARRIED: tl.constexpr
):  # fmt: skip
    """Pointers [R] to the rows of values of the pairs start + row [R]."""
    rows = token_rows(v, low + start, row, head, heads, V)
    place = start + row
    if W > 1 and CARRIED:
        rows = tl.where(place < 0, tail + ((sequence * (W - 1) + W - 1 + place) * heads + head) * V, rows)
    return rows


@triton.jit
def _inside(there, columns, WIDTH: tl.constexpr):
    if (columns.shape[0] * 0 + WIDTH) % columns.shape[0] == 0:  # an int beside a constexpr in the interpreter
        return there[:, None]
    else:
        return there[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_rows(rows, there, columns, WIDTH: tl.constexpr):
    """[R, columns] of rows of WIDTH numbers, 0 past the width and where not `there`; columns start at a whole tile."""
    return tl.load(rows[:, None] + columns[None, :], mask=_inside(there, columns, WIDTH), other=0.0)


@triton.jit
def load_rows_again(rows, there, columns, WIDTH: tl.constexpr):
    """`load_rows` from cache, of what the compiler would else keep in registers since the first time."""
    inside = _inside(there, columns, WIDTH)
    return tl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0, cache_modifier=".ca")


@triton.jit
def store_rows(rows, tile, there, columns, WIDTH: tl.constexpr):
    tl.store(rows[:, None] + columns[None, :], tile, mask=_inside(there, columns, WIDTH))


@triton.jit
def _pointers(at, columns):
    return at[0] + (at[1][:, None] + columns[None, :])


@triton.jit
def load_tile(at, there, columns, WIDTH: tl.constexpr):
    """`load_rows` of rows at (base, offsets [R]): fewer registers, the base being one and offsets of 32 bits."""
    return tl.load(_pointers(at, columns), mask=_inside(there, columns, WIDTH), other=0.0)


@triton.jit
def load_tile_again(at, zero, there, columns, WIDTH: tl.constexpr):
    """`load_tile` from cache, as `load_rows_again`.

    zero: not known to the compiler, so that it does not keep addresses either; a multiple of 64 to it.
    """
    pointers = _pointers((at[0], at[1] + zero), columns)
    return tl.load(pointers, mask=_inside(there, columns, WIDTH), other=0.0, cache_modifier=".ca")


@triton.jit
def store_tile(at, tile, there, columns, WIDTH: tl.constexpr):
    tl.store(_pointers(at, columns), tile, mask=_inside(there, columns, WIDTH))


@triton.jit
def moved(numbers, by, row):
    """[R] of the numbers `by` rows further down, 0 where there are none."""
    place = row + by
    inside = (place >= 0) & (place < row.shape[0])
    return tl.where(inside, tl.gather(numbers, tl.where(inside, place, row), 0), 0.0)
