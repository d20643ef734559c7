"""`falcon_kernels::attention` and its backward: the schedule and one core behind one op, of tensors and scalars.

The host sets the pace of small batches. So both are registered with the dispatcher itself and an ordinary autograd
function, a third of the host's time of `torch.library.custom_op`; plain tensors, which nobody traces or transforms, go
to the same functions past the dispatcher; and all that follows from shapes and options is worked out once and kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps

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
from .launcher import Launcher
from .triton_layout import (
    NAMESPACE,
    NO_TABLES,
    TABLE_BLOCK,
    Layout,
    Tables,
    fill_tables,
    is_plain,
    operand_dtype,
)
from .triton_schedule import Before

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor gain, Tensor? ridge, Tensor? memory, Tensor? previous_key, "
    "Tensor? previous_valid, Tensor? tail_x, Tensor? tail_v, Tensor? tail_valid, Tensor? lengths, Tensor? cu_seqlens"
)
OPTIONS = (
    "int window, bool shifted, int ridge_mode, bool direct, bool residual, bool detach_energy, float epsilon, "
    "float decay_floor, int smoothness, bool before"
)
TENSORS = GIVEN.count("Tensor")
KEPT = 6  # for the backward, after the first two of what the op returns
DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of the given tensors
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(
    f"attention({GIVEN}, {OPTIONS}, bool final, bool keep) -> (Tensor output, Tensor final_memory, Tensor weight, "
    "Tensor log_decay, Tensor energy, Tensor inverse, Tensor states, Tensor residuals)"
)
LIBRARY.define(
    f"attention_backward(Tensor? grad_output, Tensor? grad_final, {GIVEN}, Tensor weight, Tensor log_decay, "
    f"Tensor energy, Tensor inverse, Tensor states, Tensor residuals, {OPTIONS}) -> Tensor[]"
)
attention_op = getattr(torch.ops, NAMESPACE).attention.default
attention_backward_op = getattr(torch.ops, NAMESPACE).attention_backward.default


def _parts(residual: bool, dtype: torch.dtype) -> int:
    """The sums in which log decays are given."""
    return 2 if residual and dtype != torch.bfloat16 else 1


def _layout(batch, length, documents, residual, dtype, key_dim, window, per_channel) -> Layout:
    if per_channel:
        chunk = triton_channel.chunk_length(dtype, key_dim)
    elif not residual:
        chunk = triton_additive.chunk_length(dtype, key_dim, window)
    else:
        chunk = triton_regression.CHUNK if window == 1 else triton_window.chunk_length(window)
    return Layout.of(batch, length, documents, chunk)


class Plan:
    """The launches of one op: the schedule's, and those of the core that goes with it. Rates per channel are their
    core's own."""

    def __init__(
        self, shape, value_dim, dtypes, device, documents, masked, carried, aligned, per_channel, options, before
    ):
        batch, length, heads, key_dim = shape
        window, _, _, _, self.residual, *_ = options
        dtype, self.carried = dtypes[0], carried
        self.layout = _layout(batch, length, documents, self.residual, dtype, key_dim, window, per_channel)
        schedule = triton_schedule.Options(*options)
        self.memory = (self.layout.sequences, heads, key_dim, value_dim)
        constants = {"CHUNK": self.layout.chunk, "BLOCK": TABLE_BLOCK, "num_warps": 8}
        self.fill_tables = Launcher(fill_tables, (-(-self.layout.chunks // TABLE_BLOCK),), constants, (), aligned)
        self.per_channel, self.alone = per_channel, self.residual and window == 1
        if per_channel:
            self.kernels = triton_channel_regression if self.residual else triton_channel
        elif self.residual:
            self.kernels = triton_regression if self.alone else triton_window
        else:
            self.kernels = triton_additive
        self.core = self.kernels.Plan(
            self.layout, shape, value_dim, dtype, device, schedule, before, masked, carried, aligned
        )
        if per_channel:
            return
        self.schedule = triton_schedule.Plan(
            self.layout, heads, key_dim, schedule, masked, carried, _parts(self.residual, dtype), aligned
        )

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
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    aligned = all([t is None or t.data_ptr() % 16 == 0 for t in tensors])
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    plan = plan_of(
        q.shape, v.shape[-1], dtypes, q.device, documents, lengths is not None, memory is not None, aligned,
        gain.dim() == 4, options[:-1], options[-1],
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
    q, k, v, gain, ridge, memory, *rest, lengths, _ = tensors
    before = Before(*rest)
    output = torch.empty_like(v)
    final_memory = torch.empty(plan.memory, dtype=torch.float32, device=q.device) if final else None
    if plan.per_channel:
        made = plan.kernels.forward(
            plan.core, tables, q, k, v, gain, ridge, memory, before, lengths, output, final_memory
        )
        return output, final_memory, *(made if keep else (*made[:3], None, None, None))
    weight, log_decay, energy = triton_schedule.forward(plan.schedule, tables, k, gain, ridge, before, lengths)
    kept: tuple[Tensor | None, ...] = (None, None, None)
    if plan.alone:
        made = triton_regression.forward(
            plan.core, tables, q, k, v, weight, log_decay, memory, before.previous_key, output, final_memory
        )
        kept = made if keep else kept
    else:
        states = torch.empty(plan.core.states, dtype=plan.core.operand, device=q.device) if keep else None
        plan.kernels.forward(
            plan.core, tables, q, k, v, weight, log_decay, memory, before, output, states, final_memory
        )
        kept = (None, states, None)
    return output, final_memory, weight, log_decay, energy, *kept


@_on_its_device
def _backward(
    plan: Plan,
    tensors: Sequence[Tensor | None],
    tables: Tables,
    kept: Sequence[Tensor],
    grad_output: Tensor | None,
    grad_final: Tensor | None,
) -> list[Tensor]:
    """Gradients of what is given among `DIFFERENTIABLE`, in that order; `kept` are `_forward`'s results but two."""
    q, k, v, gain, ridge, memory, *rest, lengths, _ = tensors
    grad_output = torch.zeros_like(v) if grad_output is None else _aligned(grad_output.to(v.dtype).contiguous())
    grad_final = None if grad_final is None else _aligned(grad_final.float().contiguous())
    kept = [_aligned(t) for t in kept]
    before = Before(*rest)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_memory = None if memory is None else torch.empty_like(memory)
    grad_before = Before()
    if plan.carried:  # documents without tokens are not visited
        key, _, tail_x, tail_v, _ = (None if t is None else torch.zeros_like(t) for t in before)
        grad_before = Before(key, None, tail_x, tail_v)
    grad_gain, grad_ridge = torch.empty_like(gain), None if ridge is None else torch.empty_like(ridge)
    if plan.per_channel or plan.alone:
        plan.kernels.backward(
            plan.core, tables, grad_output, grad_final, q, k, v, gain, ridge, before, lengths, kept,
            (grad_q, grad_k, grad_v, grad_gain, grad_ridge), grad_memory, grad_before.previous_key,
        )  # fmt: skip
    else:
        weight, log_decay, energy, _, states, _ = kept
        plan.kernels.backward(
            plan.core, tables, grad_output, grad_final, q, k, v, gain, ridge, before, lengths, weight, log_decay,
            energy, states, (grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_memory), grad_before,
        )  # fmt: skip
    found = (grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_memory)
    return [t for t in (*found, grad_before.previous_key, *grad_before[2:4]) if t is not None]


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """As a plan's launches may expect of what is not among the op's own tensors."""
    return tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone()


def _fake(*arguments):
    q, _, v, gain, *_, cu_seqlens = arguments[:TENSORS]
    per_channel = gain.dim() == 4
    window, residual, final, keep = arguments[TENSORS], arguments[TENSORS + 4], *arguments[-2:]
    batch, length, heads, key_dim = q.shape
    value_dim, documents = v.shape[-1], 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    layout = _layout(batch, length, documents, residual, q.dtype, key_dim, window, per_channel)
    memory = v.new_empty(0)
    if final:
        memory = v.new_empty((layout.sequences, heads, key_dim, value_dim), dtype=torch.float32)
    if per_channel:
        numbers = triton_channel.shapes(layout, heads, value_dim)
    else:
        numbers = triton_schedule.shapes(layout, heads, window, _parts(residual, q.dtype))
    inverse, states, residuals = (v.new_empty(0) for _ in range(3))
    wide = operand_dtype(q.dtype)
    if per_channel and keep:
        states = v.new_empty((layout.chunks, heads, key_dim, value_dim), dtype=wide)
        if residual:
            inverse = v.new_empty((layout.chunks, heads, layout.chunk, 16), dtype=torch.float32)
            residuals = v.new_empty(v.shape, dtype=wide)
    elif residual and keep and window == 1:
        inverse = v.new_empty((layout.chunks, heads, layout.chunk, layout.chunk), dtype=torch.float32)
        states = v.new_empty((layout.chunks, heads, value_dim, key_dim), dtype=wide)
        residuals = v.new_empty(v.shape, dtype=wide)
    elif keep:
        matrix = (value_dim, key_dim) if residual else (key_dim, value_dim)
        states = v.new_empty((layout.chunks, heads, *matrix), dtype=wide)
    three = (v.new_empty(shape, dtype=torch.float32) for shape in numbers)
    return v.new_empty(v.shape), memory, *three, inverse, states, residuals


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
        ctx.save_for_backward(*tensors, *found[2:])
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
    return _backward(*planned, arguments[TENSORS : TENSORS + KEPT], grad_output, grad_final)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _op, _device)
    LIBRARY.impl("attention_backward", _backward_op, _device)
LIBRARY.impl("attention", _autograd, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::attention", _fake, lib=LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _fake_backward, lib=LIBRARY)
