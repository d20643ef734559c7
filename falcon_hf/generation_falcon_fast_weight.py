"""Generation with its loop on the device: the host looks once in several tokens, not at each of them.

The state of a sequence has one size, so that one CUDA graph holds several steps of the loop, each of which reads a
token, changes and chooses from its logits, notes the new token, and notes which rows have ended. Elsewhere the same
steps run one after another.

`generate_on_device` is for `custom_generate`. On CUDA `generate` itself goes the same way, one token a replay, so that
nothing about it changes but its speed.

The graph of the last call is kept for the next one that is like it, with a state of its own: caches go in and out by
copying.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.cache_utils import Cache
from transformers.generation import EpsilonLogitsWarper, GenerateDecoderOnlyOutput, GenerationMode

from .cache_falcon_fast_weight import CACHE_NAME, falcon_cache
from .configuration_falcon_fast_weight import FalconFastWeightConfig

# Processors of transformers that look at the scores alone and never wait for the device.
OF_SCORES_ALONE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    LogitNormalization,
)
SHORTEST_TEXT = 16  # new tokens from which on `generate` makes a graph of its own accord
SHORTEST = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
PROCESSORS = (*OF_SCORES_ALONE, *SHORTEST, RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor)
DRAWING = RLock()  # one thread at a time: PyTorch 2.11 refuses to draw anywhere during a capture
KNOWN_MODULES = ("torch.", "transformers.", "transformers_modules.", "falcon_hf.", "falcon_kernels.")


class NotOnDevice(ValueError):
    """What `generate_on_device` does not do, though `generate` without it may."""


@torch.no_grad()
def generate_on_device(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    tokens_per_replay: int = 16,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Greedy search or sampling for `custom_generate`, with several tokens for each time that the host looks.

    ```python
    model.generate(ids, custom_generate=generate_on_device, max_new_tokens=200)
    ```

    The text is that of `generate` alone where greedy, and drawn from the same distribution where sampled, by the
    generator that `torch.manual_seed` seeds. The prompt is read by an ordinary pass. The first call of its kind, by
    rows, options and weights, takes the time of a capture; later ones like it replay its graph.

    A row that has ended is padded. Up to `tokens_per_replay` - 1 tokens more than the text has are computed and thrown
    away; a cache that is returned, or that was given, is put back to the tokens of the text. Streamers get tokens in
    turn, but several at a time. Stopping criteria other than lengths and end tokens (stop strings, your own) are asked
    about every token, after a replay, and the text ends at the very token; `max_time` ends it after a replay. What was
    drawn and thrown away has moved the generator on.

    It does temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, repetition_penalty, min_length, min_new_tokens,
    suppress_tokens and renormalize_logits. With a `compile_config` of mode `default` the pass of a step is compiled by
    torch.compile before it is captured: fewer and larger kernels, and a first call of half a minute or more.

    Args:
        model: a Falcon model without full_attention layers, on one device.
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: as `generate` prepares them.
        streamer, assistant_model, tokenizer: as given to `generate`.
        tokens_per_replay: tokens for each time that the host looks; an argument of `generate` too.

    Returns:
        [B, prompt + new] tokens, or with return_dict_in_generate those and the cache.

    Raises:
        NotOnDevice: for what it does not do, in one sentence; before anything is read.
        RuntimeError: if the steps cannot be captured; a given cache has then read the prompt.
    """
    if not isinstance(tokens_per_replay, int) or tokens_per_replay < 1:
        raise ValueError(f"tokens_per_replay is {tokens_per_replay!r}; it must be a whole number of at least 1.")
    sentence = refusal(model, logits_processor, stopping_criteria, generation_config, assistant_model, model_kwargs)
    if sentence is not None:
        raise NotOnDevice(sentence)
    origin, input_ids = input_ids.device, input_ids.to(model.device)
    (rows, length), most = input_ids.shape, stopping_criteria.max_length
    compiling = generation_config.compile_config
    given = [c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)]
    clocks = [c for c in stopping_criteria if type(c) is MaxTimeCriteria]
    pad = None
    if any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        pad = generation_config._pad_token_tensor.to(input_ids.device)

    outputs: Any = model._prefill(input_ids, generation_config, model_kwargs)
    cache = outputs[CACHE_NAME]
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    del outputs
    first = choose(logits_processor(input_ids, logits), generation_config.do_sample)
    needs_cache = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)

    sequences = input_ids.new_zeros(rows, most)
    sequences[:, :length] = input_ids
    unfinished = torch.ones(rows, dtype=torch.bool, device=input_ids.device)
    settings = Settings(
        rows,
        tokens_per_replay,
        generation_config.do_sample,
        None if pad is None else int(pad),
        tuple(end for c in stopping_criteria if type(c) is EosTokenCriteria for end in c.eos_token_id.tolist()),
        tuple(map(_described, logits_processor)),
        _room(most + tokens_per_replay) if _reads_tokens(logits_processor) else 0,
        None if compiling is None else compiling.to_dict(),
        torch.is_inference_mode_enabled(),
    )
    call = model if compiling is None else model.get_compiled_call(compiling)
    loop = _loop(model, call, cache, settings, logits_processor)
    loop.begin(first, sequences, length, logits_processor)
    made, before = 1, None
    while True:
        sequences[:, length : length + made] = loop.tokens[:, :made]
        kept = made
        if given:
            kept, unfinished = _read_one_by_one(sequences, length, made, unfinished, stopping_criteria, pad)
            loop.unfinished.copy_(unfinished)
            ended = not unfinished.any()
        elif settings.ends:
            running = loop.running[:made].tolist()  # waits for the device
            ended = not all(running)
            kept = running.index(False) + 1 if ended else made
        else:
            ended = False
        if streamer is not None:
            for token in sequences[:, length : length + kept].cpu().unbind(1):
                streamer.put(token)
        length += kept
        if ended or length >= most or any(bool(clock(sequences[:, :length], None).any()) for clock in clocks):
            break
        if needs_cache and tokens_per_replay > 1:
            before = loop.snapshot(before)
        made = min(tokens_per_replay, most - length)
        loop.run(call, made)
    if streamer is not None:
        streamer.end()
    sequences = sequences[:, :length].to(origin)
    if needs_cache:
        if before is not None and kept < loop.read:
            loop.put_back(before)
            model(input_ids=sequences[:, -1 - kept : -1].to(model.device), use_cache=True, **{CACHE_NAME: loop.cache})
        loop.give(cache)
    loop.keep(model)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: cache})


def worth_a_graph(model: PreTrainedModel, input_ids: Tensor, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether `generate` of itself replays a graph for each token: a model that a graph can be kept for, on CUDA, and
    a text of more tokens than a capture costs."""
    if model.device.type not in GRAPHS or stopping_criteria.max_length is None or _depends_on(model) is None:
        return False
    return stopping_criteria.max_length - input_ids.shape[1] >= SHORTEST_TEXT


def refusal(
    model: PreTrainedModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    assistant_model: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why `generate_on_device` does not take a call, in one sentence, or None where it does."""
    if model.config.model_type != FalconFastWeightConfig.model_type:
        kind = FalconFastWeightConfig.model_type
        return f"generate_on_device does not do a model of type {model.config.model_type}; it must be {kind}."
    mode = generation_config.get_generation_mode(assistant_model)
    others = [type(processor).__name__ for processor in logits_processor if type(processor) not in PROCESSORS]
    kept = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in kept if getattr(generation_config, name)]
    layers = getattr(model_kwargs.get(CACHE_NAME), "layers", ())
    what, compile_config = None, generation_config.compile_config
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        what = f"generation by {mode.value.replace('_', ' ')}"
    elif "full_attention" in model.config.layer_types:
        what = "layer_types with full_attention, whose keys and values grow with the text"
    elif others:
        what = f"the logits processor {others[0]}"
    elif asked and generation_config.return_dict_in_generate:
        what = asked[0]
    elif not model_kwargs.get("use_cache", True):
        what = "use_cache=False"
    elif any(getattr(layer, "record_past", False) for layer in layers):
        what = "a cache that records what it reads"
    elif generation_config.is_assistant:
        what = "an assistant's text"
    elif stopping_criteria.max_length is None:
        what = "a text without a largest length"
    elif len({parameter.device for parameter in model.parameters()}) > 1:
        what = "a model on several devices"
    elif any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        what = "a model that is sharded over processes"
    elif compile_config is not None and compile_config.mode not in (None, "default"):
        what = f"compile_config with mode {compile_config.mode!r}"
    elif torch.is_autocast_enabled(model.device.type):
        what = "autocast"
    return None if what is None else f"generate_on_device does not do {what}; leave out custom_generate."


def choose(scores: Tensor, sample: bool) -> Tensor:
    """[B] tokens for [B, vocab_size] scores: the likeliest, or drawn.

    The token of the largest p / e, with e from the exponential distribution, is distributed as p. This is what
    `torch.multinomial` does too, once it has looked at the values of p.
    """
    if not sample:
        return scores.argmax(-1)
    chances = scores.softmax(-1)
    with DRAWING:
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


class Settings(NamedTuple):
    """What a graph depends on, apart from the model."""

    rows: int
    steps: int
    sample: bool
    pad: int | None  # what a row that has ended goes on with
    ends: tuple[int, ...]  # tokens that end a row
    processors: tuple[tuple, ...]
    room: int  # places for tokens, if a processor reads them
    compiling: dict[str, Any] | None  # options of torch.compile
    inference: bool  # whether in inference mode, whose tensors cannot be written outside of it


class Loop:
    """The buffers of a decoding loop, and its steps, which write nothing else and never wait.

    Args:
        cache: the state that the steps go on from; they write on in it.
        settings: what they do.
        processors: what changes the scores, as `generate` prepares it.
        vocab_size: number of scores.
        device: where all is.
    """

    def __init__(
        self,
        cache: Cache,
        settings: Settings,
        processors: LogitsProcessorList,
        vocab_size: int,
        device: torch.device,
    ):
        self.cache, self.settings = cache, settings
        rows, steps = settings.rows, settings.steps
        number = {"dtype": torch.int64, "device": device}
        flag = {"dtype": torch.bool, "device": device}
        self.token = torch.zeros(rows, 1, **number)  # the newest one, not read yet
        self.tokens = torch.zeros(rows, steps, **number)  # those of a run
        self.unfinished = torch.ones(rows, **flag)
        self.running = torch.ones(steps, **flag)  # whether a row was left after each step of a run
        self.length = torch.zeros((), **number)  # of the text with its newest token
        self.least = torch.zeros((), **number)  # length of the text before which it cannot end
        self.text = torch.zeros(rows, settings.room, **number)  # tokens for processors; the newest where there is none
        self.ends = torch.tensor(settings.ends, **number)
        self.processors = [self._on_device(processor, vocab_size) for processor in processors]
        self.read = 0  # tokens that the last run read

    def begin(self, first: Tensor, sequences: Tensor, length: int, processors: LogitsProcessorList) -> None:
        """Takes [B] first tokens after the `length` tokens of [B, ...] sequences."""
        self.unfinished.fill_(True)
        self.length.fill_(length)
        self.least.fill_(max((_least(processor) for processor in processors if type(processor) in SHORTEST), default=0))
        if self.settings.room:
            self.text.copy_(first[:, None].expand_as(self.text))
            counted = torch.arange(length, device=first.device) >= _ignored(processors, sequences)[:, None]
            self.text[:, :length] = torch.where(counted, sequences[:, :length], first[:, None])
        self.take(first, 0)

    def run(self, call: Callable, steps: int) -> None:
        """Makes so many tokens, or more, with `call` for the pass of the model."""
        for step in range(steps):
            self.step(call, step)
        self.read = steps

    def step(self, call: Callable, place: int) -> None:
        """Reads the newest token and chooses the next, the one at `place` of this run."""
        outputs = call(input_ids=self.token, use_cache=True, logits_to_keep=1, **{CACHE_NAME: self.cache})
        scores = outputs.logits[:, -1].float()
        for process in self.processors:
            scores = process(scores)
        self.take(choose(scores, self.settings.sample), place)

    def take(self, chosen: Tensor, place: int) -> None:
        """Notes [B] tokens, and which rows they end."""
        if self.settings.pad is not None:
            chosen = chosen.masked_fill(~self.unfinished, self.settings.pad)
            self.unfinished.logical_and_((chosen[:, None] != self.ends).all(-1))
            self.running[place] = self.unfinished.any()
        self.tokens[:, place] = chosen
        self.token[:, 0] = chosen
        if self.settings.room:
            self.text.scatter_(1, self.length.expand_as(self.token), self.token)
        self.length.add_(1)

    def snapshot(self, older: list[Tensor] | None) -> list[Tensor]:
        """A copy of the state, in the place of an older one."""
        tensors = _tensors(self.cache)
        if older is None:
            return [tensor.clone() for tensor in tensors]
        torch._foreach_copy_(older, tensors)
        return older

    def put_back(self, snapshot: list[Tensor]) -> None:
        torch._foreach_copy_(_tensors(self.cache), snapshot)

    def give(self, cache: Cache) -> None:
        """Writes the state into the cache of the caller; here they are one."""

    def keep(self, model: PreTrainedModel) -> None:
        """Keeps what a later call can use; here that is nothing."""

    def _on_device(self, processor: Any, vocab_size: int) -> Callable[[Tensor], Tensor]:
        """What a processor of transformers does, from and to [B, vocab_size] scores."""
        kind = type(processor)
        if kind in OF_SCORES_ALONE:
            return lambda scores: processor(None, scores)
        if kind is RepetitionPenaltyLogitsProcessor:
            penalize = RepetitionPenaltyLogitsProcessor(processor.penalty)
            return lambda scores: penalize(self.text, scores)
        tokens = processor.eos_token_id if kind in SHORTEST else processor.suppress_tokens
        chosen = torch.zeros(vocab_size, dtype=torch.bool, device=self.token.device)
        chosen[tokens.to(chosen.device)] = True
        if kind in SHORTEST:
            return lambda scores: scores.masked_fill(chosen & (self.length < self.least), -torch.inf)
        return lambda scores: scores.masked_fill(chosen, -torch.inf)


class GraphLoop(Loop):
    """A loop whose steps are captured once in a graph and replayed together, with a state of its own."""

    def __init__(self, model: PreTrainedModel, call: Callable, settings: Settings, processors: LogitsProcessorList):
        cache = falcon_cache(model.config)  # type: ignore[arg-type]
        super().__init__(cache, settings, processors, model.config.vocab_size, model.device)
        self.depends_on = _depends_on(model)
        self.read = settings.steps
        model(input_ids=self.token, use_cache=True, **{CACHE_NAME: cache})  # makes the tensors of the state
        self.graph = GRAPHS[model.device.type](lambda place: self.step(call, place), settings.steps, model.device)

    def run(self, call: Callable, steps: int) -> None:
        with DRAWING:
            self.graph.replay()

    def load(self, cache: Cache) -> None:
        """Takes the state in a cache."""
        torch._foreach_copy_(_tensors(self.cache), _tensors(cache))

    def give(self, cache: Cache) -> None:
        torch._foreach_copy_(_tensors(cache), _tensors(self.cache))

    def keep(self, model: PreTrainedModel) -> None:
        if self.depends_on is not None:
            KEPT[model] = self


@contextmanager
def without_collection() -> Iterator[None]:
    """While a CUDA graph is captured: an older one in a cycle of garbage frees its memory, which ends the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def capture(step: Callable[[int], None], count: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """The CUDA graph of `count` steps. The random numbers that follow are as if there had been no capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.random.fork_rng([device]), torch.cuda.device(device):
        other, current = torch.cuda.Stream(), torch.cuda.current_stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):  # what is done once only, such as compiling kernels, is done here
            for _ in range(2):
                step(0)
        current.wait_stream(other)
        with without_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for place in range(count):
                step(place)
    return graph


GRAPHS: dict[str, Callable[[Callable[[int], None], int, torch.device], Any]] = {"cuda": capture}  # by kind of device
KEPT: WeakKeyDictionary[PreTrainedModel, GraphLoop] = WeakKeyDictionary()  # the last one of each model


def _loop(
    model: PreTrainedModel, call: Callable, cache: Cache, settings: Settings, processors: LogitsProcessorList
) -> Loop:
    """A loop that goes on from `cache`; a graph belongs to this call alone until it is kept again."""
    if model.device.type not in GRAPHS:
        return Loop(cache, settings, processors, model.config.vocab_size, model.device)
    loop = KEPT.pop(model, None)
    if loop is None or loop.settings != settings or loop.depends_on != _depends_on(model):
        del loop  # its memory is for the next
        try:
            with DRAWING:
                loop = GraphLoop(model, call, settings, processors)
        except RuntimeError as error:
            raise RuntimeError(f"the loop cannot be captured ({error}); leave out custom_generate.") from error
    loop.load(cache)
    return loop


def _depends_on(model: PreTrainedModel) -> tuple | None:
    """What of a model must be as it was for its graph to be replayed; None if that cannot be told.

    Adapters can be switched without any weight changing, and hooks can do anything.
    """
    modules = list(model.modules())
    for module in modules:
        hooked = module._forward_hooks or module._forward_pre_hooks
        if hooked or not type(module).__module__.startswith(KNOWN_MODULES):
            return None
    tensors = (*model.parameters(), *model.buffers())
    return tuple(map(id, modules)), tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors)


def _tensors(cache: Cache) -> list[Tensor]:
    """The state of all layers."""
    layers: Any = cache.layers
    every = (tensor for s in layers for tensor in (*s.state, s.conv_window, s.cumulative_length))
    return [tensor for tensor in every if tensor is not None]


def _read_one_by_one(
    sequences: Tensor, length: int, made: int, unfinished: Tensor, criteria: StoppingCriteriaList, pad: Tensor | None
) -> tuple[int, Tensor]:
    """Asks the criteria about each of the `made` tokens after `length`: how many are in the text, which rows go on."""
    for place in range(length, length + made):
        if pad is not None:
            sequences[:, place] = torch.where(unfinished, sequences[:, place], pad)
        unfinished = unfinished & ~criteria(sequences[:, : place + 1], None)
        if not unfinished.any():
            return place + 1 - length, unfinished
    return made, unfinished


def _described(processor: Any) -> tuple:
    """A processor as a value: equal ones do the same to scores, given texts and lengths."""
    changing = ("min_length", "min_new_tokens", "prompt_length_to_skip", "prompt_ignore_length")
    values = {name: value for name, value in vars(processor).items() if name not in changing}
    return type(processor), *((n, v.tolist() if isinstance(v, Tensor) else v) for n, v in sorted(values.items()))


def _least(processor: Any) -> int:
    """Tokens that a text has at least, its prompt included."""
    if type(processor) is MinLengthLogitsProcessor:
        return processor.min_length
    return processor.prompt_length_to_skip + processor.min_new_tokens


def _reads_tokens(processors: LogitsProcessorList) -> bool:
    return any(type(processor) is RepetitionPenaltyLogitsProcessor for processor in processors)


def _ignored(processors: LogitsProcessorList, sequences: Tensor) -> Tensor:
    """[B] leading places whose tokens are not penalized as repeated."""
    penalty = next(processor for processor in processors if type(processor) is RepetitionPenaltyLogitsProcessor)
    ignored = getattr(penalty, "prompt_ignore_length", None)
    return torch.as_tensor(0 if ignored is None else ignored, device=sequences.device).expand(sequences.shape[0])


def _room(places: int) -> int:
    """A power of two, so that texts of similar lengths share a graph."""
    return 1 << (places - 1).bit_length()


__all__ = ["NotOnDevice", "generate_on_device"]
