"""Memories of many prompts: each is read once, and whatever begins like one of them goes on from there."""

import copy
import hashlib
import os
import re
import threading
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache

from .cache_falcon_fast_weight import CACHE_NAME, falcon_cache
from .memory_falcon_fast_weight import model_hash, pack, unpack, write_atomically

OWN_ARGUMENTS = ("past_key_values", "cache", "inputs_embeds", "cache_implementation", "use_cache")


class MemoryStore:
    """The states of a model after prompts that it has read, found again by the tokens.

    ```python
    store = MemoryStore(model, max_bytes=100_000_000)
    store.read(document)  # [1, T]
    answer = store.generate(torch.cat([document, question], 1), max_new_tokens=50)  # reads the question only
    ```

    States are exact: only a boundary at which a state was stored is ever gone on from. Where the weights of the model
    change, what it stored before is no longer found. Several threads may use one store, and several processes one
    folder.

    Args:
        model: the model, with a language head for `generate`.
        max_bytes: bound on the bytes of all memories together; the least recently used make room for new ones.
        folder: where to keep them as files of `save_memory`, for later processes too; in RAM by default. Files of
            other names are left alone; memories of other models count towards max_bytes.

    Raises:
        ValueError: if max_bytes is below 1.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int, folder: str | Path | None = None):
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1.")
        self.model = model
        self.max_bytes = max_bytes
        self._shelf: _Shelf = _Ram() if folder is None else _Folder(Path(folder))
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all memories in the store."""
        with self._lock:
            return sum(self._shelf.sizes().values())

    def __len__(self) -> int:
        """How many memories are in the store."""
        with self._lock:
            return len(self._shelf.sizes())

    def put(self, input_ids: Tensor, cache: Cache) -> bool:
        """Stores a copy of what `cache` holds after the tokens `input_ids`.

        Args:
            input_ids: [1, T], all tokens that the cache has read, without padding.
            cache: from the store's model.

        Returns:
            Whether it is stored: not where it alone is larger than max_bytes.

        Raises:
            ValueError: if the cache is not of the model, or not of one row and T tokens.
            OSError: if the folder cannot be written.
        """
        _check_one_row(input_ids)
        data = pack(cache, self.model, input_ids)
        length = input_ids.shape[1]
        name = _name(model_hash(self.model), length, _prefix_hashes(input_ids, {length})[length])
        if len(data) > self.max_bytes:
            return False
        with self._lock:
            sizes = self._shelf.sizes()
            total = sum(sizes.values()) - sizes.pop(name, 0) + len(data)
            for oldest, size in sizes.items():
                if total <= self.max_bytes:
                    break
                self._shelf.remove(oldest)
                total -= size
            self._shelf.write(name, data)
        return True

    def longest_prefix(self, input_ids: Tensor) -> tuple[Cache | None, int]:
        """The state after the longest stored prefix of `input_ids`, all of them included.

        Args:
            input_ids: [1, T].

        Returns:
            A cache of the caller's own and the number of tokens that it has read; None and 0 where no prefix is stored.
        """
        _check_one_row(input_ids)
        model = model_hash(self.model)
        with self._lock:
            names = self._shelf.sizes()
        lengths = {length for length in map(_length, names) if length <= input_ids.shape[1]}
        for length, digest in sorted(_prefix_hashes(input_ids, lengths).items(), reverse=True):
            name = _name(model, length, digest)
            if name not in names:
                continue
            try:
                with self._lock:
                    data = self._shelf.read(name)
                if data is None:
                    continue
                cache = unpack(data, self.model, name, input_ids)
                if cache.get_seq_length() != length:
                    raise ValueError(f"{name!r} is the memory of {cache.get_seq_length()} tokens, not of {length}.")
                return cache, length
            except (OSError, ValueError) as error:
                warnings.warn(f"A memory is dropped from the store: {error}", stacklevel=2)
                with self._lock, suppress(OSError):
                    self._shelf.remove(name)
        return None, 0

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> Cache:
        """Reads `input_ids` from their longest stored prefix on, and stores the state after them.

        Args:
            input_ids: [1, T].

        Returns:
            A cache of the caller's own that has read all T tokens.
        """
        cache, length = self.longest_prefix(input_ids)
        if cache is None:
            cache = falcon_cache(self.model.config)
        if length < input_ids.shape[1]:
            trunk: Any = self.model.base_model
            trunk(input_ids=input_ids[:, length:].to(self.model.device), past_key_values=cache, use_cache=True)
            self._put_or_warn(input_ids, cache)
        return cache

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """`model.generate(input_ids, **kwargs)`, reading only what follows the longest stored prefix.

        The state after the prompt is stored. At least the last token of a prompt is always read, for what follows it:
        so a prompt given twice is read from the longest stored prefix shorter than itself.

        Args:
            input_ids: [1, T], the whole prompt, without padding.
            kwargs: as in `generate`, samples and beams included.

        Returns:
            What `generate` returns, with the whole prompt in it.

        Raises:
            ValueError: if input_ids are not one row, or kwargs have padding or another cache.
        """
        _check_one_row(input_ids)
        for name in OWN_ARGUMENTS:
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} is given, but a MemoryStore generates from input_ids and its own cache.")
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise ValueError("attention_mask has zeros; a MemoryStore takes prompts without padding.")
        cache, _ = self.longest_prefix(input_ids[:, :-1])
        if cache is None:
            cache = falcon_cache(self.model.config)
        else:
            cache.batch_repeat_interleave(_rows(self.model, kwargs))
        after_prompt = _AfterPrompt(cache)
        processors = LogitsProcessorList([after_prompt, *(kwargs.pop("logits_processor", None) or [])])
        model: Any = self.model
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=processors,
            use_cache=True,
            **{CACHE_NAME: cache},
            **kwargs,
        )
        if after_prompt.copy is not None:
            self._put_or_warn(input_ids, after_prompt.copy)
        return output

    def _put_or_warn(self, input_ids: Tensor, cache: Cache) -> None:
        try:
            self.put(input_ids, cache)
        except OSError as error:
            warnings.warn(f"A memory is not stored: {error}", stacklevel=3)


class _AfterPrompt(LogitsProcessor):
    """Keeps a copy of one row of `cache` as it is when the first token is chosen."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.copy: Cache | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.copy is None:
            self.copy = copy.deepcopy(self.cache)
            self.copy.crop(input_ids.shape[1] - self.copy.get_seq_length())  # candidates of assisted decoding
            self.copy.batch_select_indices(torch.tensor([0]))
        return scores


class _Shelf(Protocol):
    """Bytes by name."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each, the least recently used first."""

    def read(self, name: str) -> bytes | None:
        """The bytes, which are now the most recently used; None where there are none of that name."""

    def write(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class _Ram:
    def __init__(self):
        self.items: dict[str, bytes] = {}

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.items.items()}

    def read(self, name: str) -> bytes | None:
        data = self.items.pop(name, None)
        if data is not None:
            self.items[name] = data
        return data

    def write(self, name: str, data: bytes) -> None:
        self.items.pop(name, None)
        self.items[name] = data

    def remove(self, name: str) -> None:
        self.items.pop(name, None)


class _Folder:
    """Files whose time of modification is that of their last use."""

    def __init__(self, path: Path):
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def sizes(self) -> dict[str, int]:
        found = []
        for path in self.path.iterdir():
            if NAME.fullmatch(path.name):
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
        return {name: size for _, name, size in sorted(found)}

    def read(self, name: str) -> bytes | None:
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        self._touch(name)
        return data

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, data)
        self._touch(name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def _touch(self, name: str) -> None:
        now = time.time_ns()  # finer than the clock of most file systems
        with suppress(OSError):  # a folder that may only be read, or another process that removed it
            os.utime(self.path / name, ns=(now, now))


NAME = re.compile(r"[0-9a-f]{16}-(\d+)-[0-9a-f]{64}\.safetensors")


def _name(model: str, length: int, digest: str) -> str:
    return f"{model[:16]}-{length}-{digest}.safetensors"


def _length(name: str) -> int:
    return int(NAME.fullmatch(name)[1])


def _prefix_hashes(input_ids: Tensor, lengths: Collection[int]) -> dict[int, str]:
    """SHA-256 of the first so many tokens of [1, T], for each of `lengths`."""
    row = input_ids[0].to("cpu", torch.int64).numpy()
    digest, start, hashes = hashlib.sha256(), 0, {}
    for length in sorted(lengths):
        digest.update(row[start:length].tobytes())
        hashes[length], start = digest.hexdigest(), length
    return hashes


def _rows(model: PreTrainedModel, kwargs: dict[str, Any]) -> int:
    """Rows that `generate` makes of one prompt."""
    configs: Any = (kwargs.get("generation_config"), model.generation_config)
    rows = 1
    for name in ("num_beams", "num_return_sequences"):
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        rows = max(rows, next((value for value in values if value is not None), 1))
    return rows


def _check_one_row(input_ids: Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; a MemoryStore takes one prompt, [1, T].")


__all__ = ["MemoryStore"]
