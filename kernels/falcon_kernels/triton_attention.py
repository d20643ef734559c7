"""`falcon_kernels::attention` and its backward: the schedule and one core behind one op, of tensors and scalars.

Both are registered with the dispatcher itself and an ordinary autograd function: a third of the host's time of
`torch.library.custom_op`, and the host sets the pace of small batches. All that follows from shapes and options is
worked out once and kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps

import torch
from torch import Tensor

from . import triton_additive, triton_regression, triton_schedule
from .triton_layout import NAMESPACE, NO_TABLES, Layout
from .triton_schedule import Before

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor gain, Tensor? ridge, Tensor? memory, Tensor? previous_key, "
    "Tensor? previous_valid, Tensor? tail_x, Tensor? tail_v, Tensor? tail_valid, Tensor? lengths, Tensor? cu_seqlens"
)
OPTIONS = (
    "int window, bool shifted, int ridge_mode, bool direct, bool residual, bool detach_energy, float epsilon, "
    "float decay_floor, bool before"
)
TENSORS = GIVEN.count("Tensor")
DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of the given tensors
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(
    f"attention({GIVEN}, {OPTIONS}, bool final, bool keep) -> (Tensor output, Tensor final_memory, Tensor weight, "
    "Tensor log_decay, Tensor energy, Tensor states, Tensor residuals)"
)
LIBRARY.define(
    f"attention_backward(Tensor? grad_output, Tensor? grad_final, {GIVEN}, Tensor weight, Tensor log_decay, "
    f"Tensor energy, Tensor states, Tensor residuals, {OPTIONS}) -> Tensor[]"
)
attention = getattr(torch.ops, NAMESPACE).attention.default
attention_backward = getattr(torch.ops, NAMESPACE).attention_backward.default


class Plan:
    """The launches of one op: the schedule's, and those of the core that goes with it."""

    def __init__(self, shape, value_dim, dtypes, device, documents, masked, carried, aligned, options, before):
        batch, length, heads, key_dim = shape
        window, shifted, _, _, self.residual, *_ = options
        dtype, self.carried = dtypes[0], carried
        self.core: triton_regression.Plan | triton_additive.Plan
        if self.residual:
            chunk = triton_regression.CHUNK
            self.core = triton_regression.Plan(
                shape, value_dim, dtype, device, documents, shifted, before, carried, aligned
            )
        else:
            chunk = triton_additive.chunk_length(dtype, key_dim, window)
        self.layout, schedule = Layout.of(batch, length, documents, chunk), triton_schedule.Options(*options)
        if not self.residual:
            self.core = triton_additive.Plan(
                self.layout, shape, value_dim, dtype, device, schedule, before, masked, carried, aligned
            )
        self.schedule = triton_schedule.Plan(
            self.layout, heads, key_dim, schedule, masked, carried, not self.residual, aligned
        )
        self.memory = (self.layout.sequences, heads, key_dim, value_dim)


plan_of = lru_cache(maxsize=1024)(Plan)


def _plan(tensors: list[Tensor | None], options: tuple, *others: Tensor | None) -> Plan:
    """The plan for the op's own tensors; `others` are given to kernels too."""
    q, _, v, _, _, memory, *_, lengths, cu_seqlens = tensors
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (*tensors, *others))
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return plan_of(
        q.shape, v.shape[-1], dtypes, q.device, documents, lengths is not None, memory is not None, aligned,
        options[:-1], options[-1],
    )  # fmt: skip


def _contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _forward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op; its arguments as in `GIVEN` and `OPTIONS`, then `final` and `keep`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; gain, ridge: [B, T, H].
        memory: [S, H, K, V] float32 from before the call, S being B or the number of documents; None for a fresh state,
            with which go no previous keys and no tails.
        previous_key: [S, H, K]; previous_valid: [S] bool; tail_x, tail_v: [S, W - 1, H, .]; tail_valid: [S, W - 1]
            bool; 0 where not valid.
        lengths: [B] int64 tokens of each row, the rest of which does nothing; cu_seqlens: [S + 1].
        ridge_mode: a value of `triton_schedule.RIDGE`; direct: gain is the step size; before: read before the write.
        final, keep: whether the final memory, and what the backward needs, are wanted; else they are empty.
    """
    tensors, final, keep = _contiguous(arguments[:TENSORS]), arguments[-2], arguments[-1]
    q, k, v, gain, ridge, memory, *rest, lengths, cu_seqlens = tensors
    plan, before = _plan(tensors, arguments[TENSORS:-2]), Before(*rest)
    tables = NO_TABLES if cu_seqlens is None else plan.layout.tables(cu_seqlens)
    weight, log_decay, energy = triton_schedule.forward(plan.schedule, tables, k, gain, ridge, before, lengths)
    output = torch.empty_like(v)
    final_memory = torch.empty(plan.memory, dtype=torch.float32, device=q.device) if final else None
    states = residuals = None
    if plan.residual:
        states, residuals = triton_regression.forward(
            plan.core, q, k, v, weight, log_decay, memory, before.previous_key, cu_seqlens, output, final_memory, keep
        )
    else:
        states = v.new_empty(plan.core.states, dtype=plan.core.operand) if keep else None
        triton_additive.forward(
            plan.core, tables, q, k, v, weight, log_decay, memory, before, output, states, final_memory
        )
    found = (output, final_memory, weight, log_decay, energy, states, residuals)
    return tuple(v.new_empty(0) if t is None else t for t in found)  # type: ignore[return-value]


def _fake(*arguments):
    q, _, v, gain, *_, cu_seqlens = arguments[:TENSORS]
    residual, final, keep = arguments[TENSORS + 4], *arguments[-2:]
    batch, length, heads, key_dim = q.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    memory = v.new_empty((sequences, heads, key_dim, v.shape[-1]), dtype=torch.float32) if final else v.new_empty(0)
    states, residuals = v.new_empty(0), v.new_empty(0)
    numbers, weights = gain.shape, gain.shape
    if not residual:
        window = arguments[TENSORS]
        chunk = triton_additive.chunk_length(q.dtype, key_dim, window)
        chunks = Layout.of(batch, length, 0 if cu_seqlens is None else sequences, chunk).chunks
        numbers = (chunks, heads, chunk + window - 1)
        weights = (min(window, 2), *numbers)
    if keep and not residual:
        states = v.new_empty((chunks, heads, key_dim, v.shape[-1]), dtype=wide)
    elif keep:
        states = v.new_empty(triton_regression.states_shape(q, v, cu_seqlens), dtype=wide)
        residuals = v.new_empty(v.shape, dtype=wide)
    three = (v.new_empty(shape, dtype=torch.float32) for shape in (weights, numbers, numbers))
    return v.new_empty(v.shape), memory, *three, states, residuals


def _backward(grad_output: Tensor | None, grad_final: Tensor | None, *arguments) -> list[Tensor]:
    """Gradients of what is given among `DIFFERENTIABLE`, in that order; after the arguments, what `_forward` kept."""
    tensors, kept = _contiguous(arguments[:TENSORS]), arguments[TENSORS : TENSORS + 5]
    q, k, v, gain, ridge, memory, *rest, lengths, cu_seqlens = tensors
    weight, log_decay, energy, states, residuals = kept
    grad_output = torch.zeros_like(v) if grad_output is None else grad_output.to(v.dtype).contiguous()
    grad_final = None if grad_final is None else grad_final.float().contiguous()
    plan = _plan(tensors, arguments[TENSORS + 5 :], grad_output, grad_final, *kept)
    before = Before(*rest)
    tables = NO_TABLES if cu_seqlens is None else plan.layout.tables(cu_seqlens)
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    grad_memory = None if memory is None else torch.empty_like(memory)
    grad_before = Before()
    if plan.carried:  # documents without tokens are not visited
        key, _, tail_x, tail_v, _ = (None if t is None else torch.zeros_like(t) for t in before)
        grad_before = Before(key, None, tail_x, tail_v)
    if plan.residual:
        grad_weight, grad_log_decay = torch.empty_like(weight), torch.empty_like(log_decay)
        triton_regression.backward(
            plan.core, q, k, v, weight, log_decay, before.previous_key, cu_seqlens, states, residuals, grad_output,
            grad_final, (grad_q, grad_k, grad_v, grad_weight, grad_log_decay, grad_memory, grad_before.previous_key),
        )  # fmt: skip
        grad_gain, grad_ridge = triton_schedule.backward(
            plan.schedule, tables, k, gain, ridge, before, lengths, energy, grad_weight, grad_log_decay, grad_k,
            grad_before,
        )  # fmt: skip
    else:
        grad_gain, grad_ridge = (None if t is None else torch.empty_like(t) for t in (gain, ridge))
        triton_additive.backward(
            plan.core, tables, grad_output, grad_final, q, k, v, gain, ridge, before, lengths, weight, log_decay,
            energy, states, (grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_memory), grad_before,
        )  # fmt: skip
    found = (grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_memory)
    return [t for t in (*found, grad_before.previous_key, *grad_before[2:4]) if t is not None]


def _fake_backward(grad_output, grad_final, *arguments):
    return [arguments[i].new_empty(arguments[i].shape) for i in DIFFERENTIABLE if arguments[i] is not None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            found = attention(*arguments[:-1], True)
        ctx.save_for_backward(*arguments[:TENSORS], *found[2:])
        ctx.options = arguments[TENSORS:-2]
        ctx.mark_non_differentiable(*found[2:])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx, grad_output, grad_final, *_):
        if torch.is_grad_enabled():
            raise RuntimeError("falcon_attention with impl='triton' has no second derivatives; use impl='torch'.")
        saved = ctx.saved_tensors
        grads = iter(attention_backward(grad_output, grad_final, *saved, *ctx.options))
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i in DIFFERENTIABLE:
            if saved[i] is not None:
                result[i] = next(grads)
        return tuple(result)


def _autograd(*arguments):
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return _Attention.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*arguments)


def _on_its_device(run: Callable, place: int) -> Callable:
    """`run` with the device of its argument number `place` current, which is where Triton launches."""

    @wraps(run)
    def guarded(*arguments):
        tensor = arguments[place]
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return run(*arguments)
        with torch.cuda.device_of(tensor):
            return run(*arguments)

    return guarded


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _on_its_device(_forward, 0), _device)
    LIBRARY.impl("attention_backward", _on_its_device(_backward, 2), _device)
LIBRARY.impl("attention", _autograd, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::attention", _fake, lib=LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _fake_backward, lib=LIBRARY)
