"""The Triton kernels are right on this GPU: values and gradients against float64, and against other implementations.

    python benchmarks/triton_check.py [--jobs 16] [--only WORDS ...] [--wait SECONDS]

Calls that share compiled kernels form a group; processes take groups in turn, since compiling is most of the work, and
are spread over the GPUs. Truth is `impl="torch"` in float64, which tests hold to the recurrence. Memory that kernels
have to fill holds NaN before they do. A second run must give the same bits; whether a row gives the same bits alone as
in its batch is only reported. With the package flash-linear-attention, its gated delta rule, delta rule and simple
linear attention are compared too. Exits with 1 where anything is wrong. `--only` takes groups whose name has all the
words.
"""

import argparse
import fcntl
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from falcon_kernels import FalconState, Rule, falcon_attention
from falcon_kernels.schedule import energy, step_and_log_decay
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from report import report

DEVICE = torch.device("cuda")
RULES = ("falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a")
NAMES = ("q", "k", "v", "gain", "ridge")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
BOUNDS = {"bf16": (5e-3, 1e-2), "fp32": (1e-5, 5e-5), "fp16": (1e-3, 2e-3)}  # values, gradients
# Times as much where keys of such a cosine are written as residuals at a gain of 1.99, which carries rounding over
# hundreds of tokens.
STRAINED = {0.5: 3, 0.9: 3, 0.99: 4, 1.0: 4}
PEER_BOUNDS = (2e-2, 3e-2)  # two bfloat16 implementations apart
DOCUMENTS = (1, 2, 3, 0, 62, 63, 64, 65, 1, 130, 5)
LENGTHS = (1, 63, 64, 65, 1000, 4096)
LARGE = (33, 8192, 64, 128)  # B, T, H, K: the last row begins at number 2^31
SPARE = 16  # processes that may replace others
SPOILT = 3  # exit code of a process whose CUDA context is beyond use


class Group(NamedTuple):
    """What calls share that compiles to the same kernels."""

    rule: str
    dtype: str
    K: int
    V: int
    timing: str = "after"
    state: str = "carried"
    layout: str = "rows"

    @property
    def title(self) -> str:
        return f"{self.rule} {self.dtype} {self.K}x{self.V} {self.timing} {self.state} {self.layout}"


class Case(NamedTuple):
    """One call: its sizes and what is special about its inputs."""

    title: str
    batch: int
    length: int
    heads: int
    cosine: float | None = None  # between any two keys, with a gain of 1.99 and little decay
    scale: float = 1.0  # of queries and keys
    floor: bool = False  # decay at its floor for most tokens
    zero_keys: bool = False
    holes: bool = False  # a mask


def groups() -> list[str]:
    """The titles of all groups, those that take longest first."""
    found = [f"large {rule}" for rule in RULES if rule != "falcon_3"]  # whose windows do not fit beside them
    if importlib.util.find_spec("fla") is not None:
        found = [*PEERS, *found]
    for rule in RULES:
        main = [Group(rule, dtype, K, K) for K in (256, 128, 64) for dtype in ("fp32", "bf16")]
        main += [
            Group(rule, "bf16", 64, 64, "before", "fresh", "documents"),
            Group(rule, "bf16", 64, 64, "before", "carried", "rows"),
            Group(rule, "bf16", 64, 64, "after", "fresh", "rows"),
            Group(rule, "bf16", 128, 128, "after", "carried", "documents"),
            Group(rule, "fp32", 64, 64, "before", "carried", "documents"),
            Group(rule, "fp32", 64, 64, "after", "fresh", "rows"),
        ]
        main += [Group(rule, "bf16", *size) for size in ((16, 16), (96, 96), (192, 192), (64, 128), (128, 64))]
        main += [Group(rule, "fp32", *size) for size in ((32, 32), (96, 32))]
        main += [Group(rule, "fp16", 128, 128)]
        found += [group.title for group in main]
    return found


def cases(group: Group) -> list[Case]:
    few, full = 2, 12  # heads and rows: less than one program a processor, and more
    if group.layout == "documents":
        return [Case("documents", 1, sum(DOCUMENTS), few), Case("many heads", 1, sum(DOCUMENTS), 2 * full)]
    if group.dtype == "fp16":
        return [Case("T=1000", few, 1000, few), Case("q·k past 65504", few, 200, few, scale=90.0)]
    found = [
        Case("full card", full, 130, full),
        Case("holes", 5, 150, few, holes=True),
        Case("holes, full card", full, 150, full, holes=True),
    ]
    if group.K != group.V or group.K not in (64, 128, 256) or (group.timing, group.state) != ("after", "carried"):
        return [Case("T=65", few, 65, few), Case("T=1000", few, 1000, few), *found]
    # A single token of a few heads has so few gains that one gradient near 0 is a large relative error.
    found += [Case(f"T={length}", *((full, 1, full) if length == 1 else (few, length, few))) for length in LENGTHS]
    found += [Case(f"cosine {c}", few, 500, few, cosine=c) for c in (0.5, 0.9, 0.99, 1.0)]
    if group.rule == "falcon_1" and group.K <= 128:  # then in one pass; the others here are split
        found += [Case(f"cosine {c}, full card", full, 500, full, cosine=c) for c in (0.5, 0.9, 0.99, 1.0)]
        found += [Case(f"T={length}, full card", full, length, full) for length in (63, 64, 65, 1000)]
    return [
        *found,
        # A previous key's gradient is one number times a query here: of few heads, one near 0 is a large error.
        Case("decay at its floor", few, 200, full, floor=True),
        Case("zero keys", few, 200, few, zero_keys=True),
    ]


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def rule_of(group: Group, case: Case) -> Rule:
    options: dict[str, Any] = {"ridge": "direct"} if case.floor else {"epsilon": 0.0} if case.zero_keys else {}
    return Rule(group.rule, timing=f"read_{group.timing}_write", **options)


def inputs(group: Group, case: Case) -> list[Tensor]:
    """q, k, v, gain, ridge: RMS-normalized features, decays of a few to a few hundred tokens."""
    B, T, H = case[1:4]
    K, V, dtype = group.K, group.V, DTYPES[group.dtype]
    q, k, v = normal(B, T, H, K, seed=0), normal(B, T, H, K, seed=1), normal(B, T, H, V, seed=2)
    rates = (B, T, H, V) if Rule(group.rule).per_channel else (B, T, H)
    gain, ridge = 2 * torch.sigmoid(normal(*rates, seed=3)), torch.sigmoid(normal(B, T, H, seed=4) - 3)
    if case.cosine is not None:
        k = case.cosine**0.5 * normal(1, 1, 1, K, seed=5) + (1 - case.cosine) ** 0.5 * k
        gain, ridge = gain.clamp(1.99, 1.99), ridge / 100
    q, k = (case.scale * torch.nn.functional.rms_norm(t, (K,)) for t in (q, k))
    if case.floor:
        gain = 1.5 + gain / 4
        ridge = torch.where(torch.arange(T, device=DEVICE) % 40 < 30, 1e5, 0.1)[None, :, None].expand(B, T, H)
    if case.zero_keys:
        k[:, torch.arange(T, device=DEVICE) % 40 < 7] = 0
    given = [q.to(dtype), k.to(dtype), v.to(dtype), gain.contiguous(), ridge.contiguous()]
    if case.holes:
        for t in given:
            t[~mask_of(case)] = torch.nan
    return given


def mask_of(case: Case) -> Tensor:
    """Holes anywhere, a row that begins late, one that ends early, and one without a token."""
    mask = normal(case.batch, case.length, seed=6) < 1
    mask[1, : case.length // 2] = False
    mask[2, case.length // 2 :] = False
    mask[3] = False
    return mask


def state_of(group: Group, rule: Rule, rows: int, heads: int) -> FalconState | None:
    """A state in mid-sequence, but for its last row, which has not begun."""
    if group.state == "fresh":
        return None
    state = FalconState.zeros(rule, rows, heads, group.K, group.V, dtype=DTYPES[group.dtype], device=DEVICE)
    state = state.map(lambda t: torch.ones_like(t) if t.dtype == torch.bool else normal(*t.shape, seed=7).to(t.dtype))
    if rows > 1:
        state.previous_valid[-1] = False
        if state.tail_valid is not None:
            state.tail_valid[-1] = False
    return state


class Call(NamedTuple):
    """All that goes into one call and its backward."""

    rule: Rule
    given: list[Tensor]
    state: FalconState | None
    cotangents: tuple[Tensor, Tensor]  # of output and memory
    mask: Tensor | None = None
    bounds: Tensor | None = None

    @classmethod
    def of(cls, group: Group, case: Case) -> "Call":
        rule, given = rule_of(group, case), inputs(group, case)
        mask = mask_of(case) if case.holes else None
        bounds = None
        if group.layout == "documents":
            bounds = torch.tensor([0, *DOCUMENTS], device=DEVICE).cumsum(0)
        rows = case.batch if bounds is None else len(DOCUMENTS)
        of_output = normal(*given[2].shape, seed=8).bfloat16()
        of_memory = normal(rows, case.heads, group.K, group.V, seed=9).bfloat16()
        return cls(rule, given, state_of(group, rule, rows, case.heads), (of_output, of_memory), mask, bounds)

    def row(self, index: int) -> "Call":
        """One row of the batch alone."""
        one = slice(index, index + 1)
        given, state, mask = [t[one] for t in self.given], self.state, self.mask
        state = None if state is None else state.map(lambda t: t[one])
        of_output, of_memory = (t[one] for t in self.cotangents)
        return self._replace(
            given=given, state=state, cotangents=(of_output, of_memory), mask=None if mask is None else mask[one]
        )

    def results(self, impl: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output, memory and all gradients, by name; everything converted to `dtype` first."""

        def leaf(t):
            t = t.detach()
            return t.to(dtype or t.dtype).clone().requires_grad_() if t.is_floating_point() else t

        given, state = [leaf(t) for t in self.given], None if self.state is None else self.state.map(leaf)
        leaves = dict(zip(NAMES, given, strict=True))
        if state is not None:
            fields = zip(FalconState._fields, state, strict=True)
            leaves |= {name: t for name, t in fields if t is not None and t.is_floating_point()}
        found = falcon_attention(
            *given, rule=self.rule, initial_state=state, output_final_state=True, mask=self.mask,
            cu_seqlens=self.bounds, impl=impl,
        )  # fmt: skip
        values = (found.output, found.final_state.memory)
        cotangents = [c.to(t.dtype) for c, t in zip(self.cotangents, values, strict=True)]
        grads = torch.autograd.grad(values, list(leaves.values()), cotangents, materialize_grads=True)
        grads = {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
        return {"output": values[0].detach(), "memory": values[1].detach()} | grads


def error(have: Tensor, want: Tensor) -> float:
    """Relative RMS error; infinite where anything is not finite, or anything at all where nothing is wanted."""
    if not torch.isfinite(have).all():
        return float("inf")
    off, size = (have.double() - want.double()).norm().item(), want.double().norm().item()
    return off / size if size else float("inf") if off else 0.0


def bound(name: str, group: Group, case: Case) -> float:
    """How far `name` of a call's results may be off."""
    allowed = BOUNDS[group.dtype][name.startswith("d")]
    if case.cosine is None or not Rule(group.rule).residual:
        return allowed
    if (name, group.dtype, case.cosine) == ("dgain", "bf16", 1.0):
        allowed *= 2**0.5  # residuals, rounded forwards, times their gradients, rounded backwards: off by both
    return allowed * STRAINED[case.cosine]


def check(group: Group, case: Case) -> dict[str, Any]:
    """Errors of one call, how they stand beside those of the PyTorch form, and what is wrong."""
    call = Call.of(group, case)
    want = call.results("torch", torch.float64)
    begun = time.perf_counter()
    have = call.results("triton")
    torch.cuda.synchronize()
    first_call = time.perf_counter() - begun
    again = call.results("triton")
    torchs = call.results("torch")
    found = {name: error(have[name], t) for name, t in want.items()}
    ratios = {n: found[n] / max(error(torchs[n], want[n]), 1e-7) for n in ("output", "dq", "dk", "dv")}
    wrong = [f"{n} {e:.2g}" for n, e in found.items() if not e <= bound(n, group, case)]
    wrong += [f"{n} differs when run again" for n in have if not torch.equal(have[n], again[n])]
    alone = None
    if call.bounds is None and case.batch > 1:
        alone = all(torch.equal(t, have[n][:1]) for n, t in call.row(0).results("triton").items())
    return {
        "case": case.title,
        "errors": found,
        "over torch": max(ratios.values()),
        "alone": alone,
        "first call, s": first_call,
        "wrong": wrong,
    }


def check_group(group: Group) -> list[dict[str, Any]]:
    """All cases of a group, or none where the kernels refuse its sizes."""
    from falcon_kernels import triton_api

    nothing = [torch.empty(1, 1, 1, width, dtype=DTYPES[group.dtype], device=DEVICE) for width in group[2:4]]
    sentence = triton_api.refusal(nothing[0], nothing[0], nothing[1], Rule(group.rule))
    if sentence is not None:
        return [failure(group.title, sentence, wrong=[])]
    return [attempt(case.title, lambda case=case: [check(group, case)])[0] for case in cases(group)]


def attempt(title: str, run: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `run` returns, or a failure in its place."""
    try:
        return run()
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        why = f"{type(problem).__name__} at {Path(last.filename).name}:{last.lineno}: {problem}"[:500]
        return [failure(title, why, wrong=[why])]


def failure(case: str, why: str, wrong: list[str]) -> dict[str, Any]:
    return {"case": case, "note": why, "errors": {}, "over torch": 0.0, "alone": None, "wrong": wrong}


def check_large(name: str) -> list[dict[str, Any]]:
    """More than 2^31 numbers in a tensor: the first and the last sequence of many, beside the same sequences alone."""
    B, T, H, K = LARGE
    assert (B - 1) * T * H * K >= 2**31
    rule, packed = Rule(name), name == "falcon_3a"
    generator = torch.Generator(DEVICE).manual_seed(0)

    def numbers(*size, dtype=torch.bfloat16):
        return torch.randn(*size, generator=generator, device=DEVICE, dtype=dtype)

    def made(batch, length):
        size = (1, batch * length, H) if packed else (batch, length, H)
        q, k, v, of_output = (numbers(*size, K) for _ in range(4))
        rates = (*size, K) if rule.per_channel else size
        gain = torch.sigmoid(numbers(*rates, dtype=torch.float32))
        ridge = torch.sigmoid(numbers(*size, dtype=torch.float32) - 3)
        return [q, k, v, gain, ridge], of_output, torch.arange(batch + 1, device=DEVICE) * length if packed else None

    def results(tensors, of_output, bounds):
        leaves = [t.requires_grad_() for t in tensors]
        output = falcon_attention(*leaves, rule=rule, cu_seqlens=bounds, impl="triton").output
        grads = torch.autograd.grad(output, leaves, of_output)
        return dict(zip(("output", *(f"d{name}" for name in NAMES)), (output.detach(), *grads), strict=True))

    begun = time.perf_counter()
    results(*made(3, 130))  # compiles, as does the next
    results(*made(1, T)[:2], None)
    first_call = time.perf_counter() - begun
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time has room
        return compared(made, results, packed, first_call)


def compared(made, results, packed: bool, first_call: float) -> list[dict[str, Any]]:
    """The large call, made with nothing else so large beside it."""
    B, T, *_ = LARGE
    given, of_output, bounds = made(B, T)
    have = results(given, of_output, bounds)
    rows_found = []
    for index in (0, B - 1):
        place = (slice(0, 1), slice(index * T, (index + 1) * T)) if packed else (slice(index, index + 1),)
        want = results([t.detach()[place].clone() for t in given], of_output[place], None)
        found = {name: error(have[name][place], t) for name, t in want.items()}
        value, gradient = BOUNDS["bf16"]
        wrong = [f"{n} {e:.2g}" for n, e in found.items() if not e <= (gradient if n.startswith("d") else value)]
        alone = all(torch.equal(have[name][place], t) for name, t in want.items())
        title = f"{'document' if packed else 'row'} {index} of {B}"
        row = {"case": title, "errors": found, "over torch": 0.0, "alone": alone, "first call, s": first_call}
        rows_found.append(row | {"wrong": wrong})
    del given, of_output, have
    torch.cuda.empty_cache()  # before another process goes on
    return rows_found


def peer_inputs(rule: Rule, case: Case) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Leaves q, k, v, gain and ridge, and from them the shifted keys, eta and log gamma, differentiable."""
    group = Group(rule.name, "bf16", 64, 64, state="fresh")
    given = [t.requires_grad_() for t in inputs(group, case)]
    k, gain, ridge = given[1], given[3], given[4] if rule.ridge != "none" else None
    x = torch.nn.functional.pad(k[:, :-1], (0, 0, 0, 0, 1, 0))
    active = (torch.arange(k.shape[1], device=DEVICE) > 0)[None, :, None]
    squares = energy(x.float(), torch.ones_like(gain), rule)
    return given, x, *step_and_log_decay(squares, gain, ridge, active, rule)


def one_configuration() -> None:
    """Takes the first configuration of every autotuned kernel: trying them all takes minutes."""
    from triton.runtime.autotuner import Autotuner

    for kernel in (t for t in gc.get_objects() if issubclass(type(t), Autotuner)):
        kernel.configs = kernel.configs[:1]


def check_peer(name: str) -> list[dict[str, Any]]:
    """Outputs beside another package's, and for the ungated delta rule gradients too."""
    rule_name, _, peer = name.split()
    rule = Rule(rule_name, ridge="none" if peer == "chunk_delta_rule" else "scale_coupled")
    given, x, eta, log_decay = peer_inputs(rule, Case("peer", 2, 1000, 4))
    q, v = given[0], given[2]
    if peer == "chunk_delta_rule":
        from fla.ops.delta_rule import chunk_delta_rule

        one_configuration()
        theirs = chunk_delta_rule(q, x, v, eta, scale=1.0)[0]
    elif peer == "chunk_gated_delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        one_configuration()
        decay = log_decay.exp()
        scaled = (decay[..., None] * v).to(v.dtype)
        with torch.no_grad():
            theirs = chunk_gated_delta_rule(q, x, scaled, log_decay, eta / decay, scale=1.0)[0]
    else:
        from fla.ops.simple_gla import chunk_simple_gla

        one_configuration()
        with torch.no_grad():
            theirs = chunk_simple_gla(q, x, (eta[..., None] * v).to(v.dtype), log_decay, scale=1.0)[0]
    ours = falcon_attention(*given[:4], given[4] if rule.ridge != "none" else None, rule=rule, impl="triton").output
    found = {"output": error(ours, theirs.detach())}
    if theirs.requires_grad:
        of_output = normal(*v.shape, seed=8).to(v.dtype)
        mine, other = (torch.autograd.grad(t, given[:4], of_output) for t in (ours, theirs))
        found |= {f"d{n}": error(a, b) for n, a, b in zip(NAMES, mine, other, strict=False)}
    wrong = [f"{n} {e:.2g}" for n, e in found.items() if not e <= PEER_BOUNDS[n.startswith("d")]]
    rows = [{"case": "T=1000", "errors": found, "over torch": 0.0, "alone": None, "wrong": wrong}]
    return [*rows, *strained_peer(rule)] if peer == "chunk_delta_rule" else rows


def strained_peer(rule: Rule) -> list[dict[str, Any]]:
    """Errors against float64 of both, where keys repeat at a gain of 1.99."""
    from fla.ops.delta_rule import chunk_delta_rule

    rows: list[dict[str, Any]] = []
    for cosine in (0.9, 0.99, 1.0):
        given, x, eta, _ = peer_inputs(rule, Case("", 2, 500, 2, cosine=cosine))
        q, k, v, gain, _ = (t.detach() for t in given)
        want = falcon_attention(*(t.double() for t in (q, k, v, gain)), None, rule=rule, impl="torch").output
        theirs = chunk_delta_rule(q, x.detach(), v, eta.detach(), scale=1.0)[0]
        ours = falcon_attention(q, k, v, gain, None, rule=rule, impl="triton").output
        for who, output in (("the peer", theirs), ("ours", ours)):
            row = {"case": f"{who} at cosine {cosine}", "errors": {"output": error(output, want)}, "over torch": 0.0}
            rows.append(row | {"alone": None, "wrong": []})
    return rows


PEERS = ("falcon_1 beside chunk_gated_delta_rule", "falcon_1a beside chunk_simple_gla",
         "falcon_1 beside chunk_delta_rule")  # fmt: skip


def run(title: str) -> list[dict[str, Any]]:
    """The cases of one group, by its title."""
    if title in PEERS:
        return check_peer(title)
    if title.startswith("large "):
        return check_large(title.split()[1])
    rule, dtype, size, *rest = title.split()
    return check_group(Group(rule, dtype, *(int(n) for n in size.split("x")), *rest))


def worker(folder: Path, titles: list[str]) -> int:
    """Takes groups that no other process has taken, one after another."""
    warnings.simplefilter("ignore")
    for number, title in enumerate(titles):
        try:
            (folder / f"{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        begun = time.perf_counter()
        # Also fills what torch.empty and its like return, which others' kernels need not bear.
        torch.use_deterministic_algorithms(title not in PEERS, warn_only=True)
        rows = attempt("all", lambda title=title: run(title))
        result = {"seconds": time.perf_counter() - begun, "rows": rows}
        (folder / f"{number}.json").write_text(json.dumps(result))
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return SPOILT
    return 0


def run_all(titles: list[str], jobs: int, wait: float) -> dict[str, dict[str, Any]]:
    """Results by title from that many processes; a process that dies fails the group that it had and is replaced."""
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + wait
        processes: list[subprocess.Popen] = []
        jobs = min(jobs, len(titles))
        while time.monotonic() < deadline:
            running = sum(process.poll() is None for process in processes)
            left = len(titles) - len(list(folder.glob("*.taken")))
            if left and running < jobs and len(processes) < jobs + SPARE:
                log = (folder / f"{len(processes)}.log").open("w")
                command = [sys.executable, __file__, "--worker", name, *titles]
                gpu = str(len(processes) % max(1, torch.cuda.device_count()))
                environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu}
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            elif not running:
                break
            else:
                time.sleep(0.2)
        for process in processes:
            process.kill()
            process.wait()
        found = {}
        for number, title in enumerate(titles):
            result = folder / f"{number}.json"
            if result.exists():
                found[title] = json.loads(result.read_text())
            else:
                taken = (folder / f"{number}.taken").exists()
                why = "its process died or took too long" if taken else "not reached in time"
                found[title] = {"seconds": 0.0, "rows": [failure("none", why, wrong=[why])]}
        if not any((folder / f"{number}.json").exists() for number in range(len(titles))):
            print((folder / "0.log").read_text()[-3000:])
    return found


def summary(title: str, seconds: float, rows: list[dict[str, Any]]) -> dict[str, object]:
    """The worst of a group's cases."""

    def worst(gradients: bool) -> str:
        found = [(e, n) for r in rows for n, e in r["errors"].items() if n.startswith("d") == gradients]
        return "{:.1e} {}".format(*max(found)) if found else "-"

    alone = [r["alone"] for r in rows if r["alone"] is not None]
    wrong = sum(len(r["wrong"]) for r in rows)
    return {
        "group": title,
        "cases": sum(bool(r["errors"]) for r in rows),
        "worst value": worst(False),
        "worst gradient": worst(True),
        "over torch": max(r["over torch"] for r in rows),
        "row alone": f"{sum(alone)}/{len(alone)}",
        "s": seconds,
        "verdict": f"{wrong} WRONG" if wrong else "refused" if not any(r["errors"] for r in rows) else "ok",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=[], help="words that the names of groups must have")
    parser.add_argument("--wait", type=float, default=500, help="seconds after which what still runs has failed")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(Path(arguments.worker[0]), arguments.worker[1:])
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "140")  # of the table
    begun = time.perf_counter()
    titles = [title for title in groups() if set(arguments.only) <= set(title.split())]
    if not titles:
        parser.error(f"no group has all of {' '.join(arguments.only)}.")
    found = run_all(titles, arguments.jobs, arguments.wait)
    rows = [summary(title, **result) for title, result in found.items()]
    spent = time.perf_counter() - begun
    report("triton_errors", "relative RMS errors of impl='triton'", rows, seconds=spent, bounds=BOUNDS, groups=found)
    wrong = [(title, r) for title, result in found.items() for r in result["rows"] if r["wrong"]]
    for title, row in wrong:
        print(f"WRONG {title}, {row['case']}: {'; '.join(row['wrong'])}")
    print(f"{len(wrong)} of {sum(len(r['rows']) for r in found.values())} cases wrong after {spent:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
