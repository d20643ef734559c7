"""`falcon_kernels::attention` and its backward: the schedule and one core behind one op, of tensors and scalars.

The host sets the pace of small batches. So both are registered with the dispatcher itself and an ordinary autograd
function, a third of the host's time of `torch.library.custom_op`; plain tensors, which nobody traces or transforms, go
to the same functions past the dispatcher; and all that follows from shapes and options is worked out once and kept.

The first call of a plan goes through forward and backward once without launches, so that their kernels are compiled
side by side.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from types import ModuleType

import torch
from torch import Tensor

from . import (
    triton_additive,
    triton_channel,
    triton_channel_regression,
    triton_device,
    triton_regression,
    triton_schedule,
    triton_window,
)
from .launcher import Launcher, are_aligned, compiles, compiling, dtypes_of
from .triton_layout import (
    NAMESPACE,
    NO_TABLES,
    TABLE_BLOCK,
    Layout,
    Tables,
    fill_tables,
    is_plain,
)
from .triton_schedule import Before, Call, Gradients, Kept

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor gain, Tensor? ridge, Tensor? memory, Tensor? previous_key, "
    "Tensor? previous_valid, Tensor? tail_x, Tensor? tail_v, Tensor? tail_valid, Tensor? lengths, Tensor? cu_seqlens"
)
OPTIONS = (
    "int window, bool shifted, int ridge_mode, bool direct, bool residual, bool detach_energy, float epsilon, "
    "float decay_floor, int smoothness, bool before"
)
TENSORS = GIVEN.count("Tensor")
FOUND = 6  # for the backward, after the first two of what the op returns
KEPT = FOUND + 2  # and these two
DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of the given tensors
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(
    f"attention({GIVEN}, {OPTIONS}, bool final, bool keep) -> (Tensor output, Tensor final_memory, Tensor weight, "
    "Tensor log_decay, Tensor energy, Tensor inverse, Tensor states, Tensor residuals)"
)
LIBRARY.define(
    f"attention_backward(Tensor? grad_output, Tensor? grad_final, {GIVEN}, Tensor weight, Tensor log_decay, "
    f"Tensor energy, Tensor inverse, Tensor states, Tensor residuals, Tensor? output, Tensor? final_memory, {OPTIONS}) "
    "-> Tensor[]"
)
attention_op = getattr(torch.ops, NAMESPACE).attention.default
attention_backward_op = getattr(torch.ops, NAMESPACE).attention_backward.default


def _core(window: int, residual: bool, per_channel: bool) -> ModuleType:
    """The module of a rule's kernels, which all have the same functions and a `Plan`."""
    if per_channel:
        return triton_channel_regression if residual else triton_channel
    if not residual:
        return triton_additive
    return triton_regression if window == 1 else triton_window


class Plan:
    """The launches of one op."""

    def __init__(
        self, shape, value_dim, dtypes, device, documents, masked, carried, aligned, per_channel, options, before
    ):
        batch, length, heads, key_dim = shape
        window, _, _, _, residual, *_ = options
        dtype, self.carried = dtypes[0], carried
        self.compiles = compiles(device)
        self.compiled: set[tuple[bool, bool]] = set()  # for which `final` and `keep`
        self.core = _core(window, residual, per_channel)
        self.layout = Layout.of(batch, length, documents, self.core.chunk_length(dtype, key_dim, window))
        self.launches = self.core.Plan(
            self.layout, shape, value_dim, dtype, device, triton_schedule.Options(*options), before, masked, carried,
            aligned,
        )  # fmt: skip
        self.memory = (self.layout.sequences, heads, key_dim, value_dim)
        constants = {"CHUNK": self.layout.chunk, "BLOCK": TABLE_BLOCK, "num_warps": 8}
        self.fill_tables = Launcher(fill_tables, (-(-self.layout.chunks // TABLE_BLOCK),), constants, (), aligned)

    def tables(self, cu_seqlens: Tensor | None) -> Tables:
        """Where the documents of `cu_seqlens` lie."""
        if cu_seqlens is None:
            return NO_TABLES
        sequences, chunks = self.layout.sequences, self.layout.chunks
        cu_seqlens = cu_seqlens.to(torch.int64)
        found = Tables(cu_seqlens, cu_seqlens.new_empty(sequences + 1), cu_seqlens.new_empty(chunks))
        self.fill_tables(*found, sequences, chunks, sequences.bit_length())
        return found


plan_of = lru_cache(maxsize=1024)(Plan)


def _on_its_device(run: Callable) -> Callable:
    """`run`, of a plan and tensors, with their device current, which is where Triton launches."""

    @wraps(run)
    def guarded(plan, tensors, *rest):
        with triton_device.current(tensors[0].device):
            return run(plan, tensors, *rest)

    return guarded


@_on_its_device
def _tables(plan: Plan, tensors: list[Tensor | None]) -> Tables:
    return plan.tables(tensors[-1])


def _planned(arguments: Sequence) -> tuple[Plan, list[Tensor | None], Tables]:
    """The plan for an op's arguments, its tensors as the kernels take them, and where documents lie."""
    tensors = [None if t is None else t.contiguous() for t in arguments[:TENSORS]]
    options = arguments[TENSORS : TENSORS + OPTIONS.count(",") + 1]
    q, _, v, gain, _, memory, *_, lengths, cu_seqlens = tensors
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    plan = plan_of(
        q.shape, v.shape[-1], dtypes_of(tensors), q.device, documents, lengths is not None, memory is not None,
        are_aligned(tensors), gain.dim() == 4, options[:-1], options[-1],
    )  # fmt: skip
    return plan, tensors, _tables(plan, tensors)


@_on_its_device
def _forward(
    plan: Plan, tensors: list[Tensor | None], tables: Tables, final: bool, keep: bool
) -> tuple[Tensor | None, ...]:
    """What the op returns, None for what is not wanted.

    Args:
        tensors: those of `GIVEN`, contiguous.
            q, k: [B, T, H, K]; v: [B, T, H, V]; gain, ridge: [B, T, H]; or gain: [B, T, H, V].
            memory: [S, H, K, V] float32 from before the call, S being B or the number of documents; None for a fresh
                state, with which go no previous keys and no tails.
            previous_key: [S, H, K]; previous_valid: [S] bool; tail_x, tail_v: [S, W - 1, H, .]; tail_valid: [S, W - 1]
                bool; 0 where not valid.
            lengths: [B] int64 tokens of each row, the rest of which does nothing; cu_seqlens: [S + 1].
        final, keep: whether the final memory, and what the backward needs, are wanted.
    """
    if plan.compiles and (final, keep) not in plan.compiled:
        plan.compiled.add((final, keep))
        with compiling():
            output, final_memory, *kept = _forward(plan, tensors, tables, final, keep)
            if keep:
                _backward(plan, tensors, tables, (*kept, output, final_memory), output, None)
    call = _call(tensors, tables)
    output = torch.empty_like(call.v)
    final_memory = torch.empty(plan.memory, dtype=torch.float32, device=call.v.device) if final else None
    made = plan.core.forward(plan.launches, call, output, final_memory, keep)
    return output, final_memory, *(made[:FOUND] if keep else (None,) * FOUND)


@_on_its_device
def _backward(
    plan: Plan,
    tensors: Sequence[Tensor | None],
    tables: Tables,
    kept: Sequence[Tensor | None],
    grad_output: Tensor | None,
    grad_final: Tensor | None,
) -> list[Tensor]:
    """Gradients of what is given among `DIFFERENTIABLE`, in that order; `kept` is `Kept`, all."""
    call = _call(tensors, tables)
    grad_output = (
        torch.zeros_like(call.v) if grad_output is None else _aligned(grad_output.to(call.v.dtype).contiguous())
    )
    grad_final = None if grad_final is None else _aligned(grad_final.float().contiguous())
    before = Before()
    if plan.carried:  # documents without tokens are not visited
        key, _, tail_x, tail_v, _ = (None if t is None else torch.zeros_like(t) for t in call.before)
        before = Before(key, None, tail_x, tail_v)
    into = Gradients(*(None if t is None else torch.empty_like(t) for t in tensors[:6]), before)
    plan.core.backward(plan.launches, call, Kept(*map(_aligned, kept)), grad_output, grad_final, into)
    return [t for t in (*into[:6], before.previous_key, *before[2:4]) if t is not None]


def _call(tensors: Sequence[Tensor | None], tables: Tables) -> Call:
    *given, previous_key, previous_valid, tail_x, tail_v, tail_valid, lengths, _ = tensors
    return Call(*given, Before(previous_key, previous_valid, tail_x, tail_v, tail_valid), lengths, tables)


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """As a plan's launches may expect of what is not among the op's own tensors."""
    return tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone()


def _fake(*arguments):
    q, _, v, gain, *_, cu_seqlens = arguments[:TENSORS]
    window, residual, final, keep = arguments[TENSORS], arguments[TENSORS + 4], *arguments[-2:]
    batch, length, heads, key_dim = q.shape
    value_dim, documents = v.shape[-1], 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    core = _core(window, residual, gain.dim() == 4)
    layout = Layout.of(batch, length, documents, core.chunk_length(q.dtype, key_dim, window))
    memory = v.new_empty(0)
    if final:
        memory = v.new_empty((layout.sequences, heads, key_dim, value_dim), dtype=torch.float32)
    kept = core.kept(layout, q.shape, value_dim, window, q.dtype) if keep else [None] * FOUND
    made = (v.new_empty(0) if t is None else v.new_empty(t[0], dtype=t[1]) for t in kept)
    return v.new_empty(v.shape), memory, *made


def _fake_backward(grad_output, grad_final, *arguments):
    return [arguments[i].new_empty(arguments[i].shape) for i in DIFFERENTIABLE if arguments[i] is not None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plain, *arguments):
        tensors: Sequence[Tensor | None] = arguments[:TENSORS]
        ctx.plan = None
        if plain:
            ctx.plan, tensors, ctx.tables = planned = _planned(arguments)
            found = _forward(*planned, arguments[-2], True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                found = attention_op(*arguments[:-1], True)
        read = found[:2] if arguments[3].dim() == 4 else (None, None)  # where rates are per channel
        ctx.save_for_backward(*tensors, *found[2:], *read)
        ctx.options = arguments[TENSORS:-2]
        ctx.mark_non_differentiable(*[t for t in found[2:] if t is not None])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx, grad_output, grad_final, *_):
        if torch.is_grad_enabled():
            raise RuntimeError("falcon_attention with impl='triton' has no second derivatives; use impl='torch'.")
        saved = ctx.saved_tensors
        if ctx.plan is None:
            found = attention_backward_op(grad_output, grad_final, *saved, *ctx.options)
        else:
            found = _backward(ctx.plan, saved[:TENSORS], ctx.tables, saved[TENSORS:], grad_output, grad_final)
        grads = iter(found)
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i in DIFFERENTIABLE:
            if saved[i] is not None:
                result[i + 1] = next(grads)
        return tuple(result)


def _with_gradients(arguments) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


def attention(*arguments) -> tuple[Tensor, Tensor | None]:
    """Output and, where `final`, memory.

    Args:
        arguments: `GIVEN`, as in `_forward`; `OPTIONS`, of which ridge_mode is a value of `triton_schedule.RIDGE`,
            smoothness one of `triton_smoothness.SMOOTHNESS`, direct has gain be the step size, and before reads before
            the write; then `final`.
    """
    arguments = (*arguments, False)
    if torch.compiler.is_compiling() or not is_plain(arguments[0]):
        return attention_op(*arguments)[:2]
    if _with_gradients(arguments):
        return _Attention.apply(True, *arguments)[:2]
    return _forward(*_planned(arguments), arguments[-2], False)[:2]


def _autograd(*arguments):
    if _with_gradients(arguments):
        return _Attention.apply(False, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_op(*arguments)


def _op(*arguments):
    """`_forward` for the dispatcher, which knows no absent results."""
    found = _forward(*_planned(arguments), *arguments[-2:])
    return tuple(arguments[0].new_empty(0) if t is None else t for t in found)


def _backward_op(grad_output, grad_final, *arguments):
    planned = _planned((*arguments[:TENSORS], *arguments[TENSORS + KEPT :]))
    kept = [t if t is not None and t.numel() else None for t in arguments[TENSORS : TENSORS + KEPT]]
    return _backward(*planned, kept, grad_output, grad_final)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _op, _device)
    LIBRARY.impl("attention_backward", _backward_op, _device)
LIBRARY.impl("attention", _autograd, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::attention", _fake, lib=LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _fake_backward, lib=LIBRARY)
