"""A memory as a file: the state of a model after some tokens, for that very model and no other."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from falcon_kernels import FalconState
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from .cache_falcon_fast_weight import FalconFastWeightCacheLayer, falcon_cache

FORMAT, VERSION = "falcon memory", "1"
SAMPLES = 16  # elements of each weight, at least, that are compared before a remembered hash is trusted
# Fields that do not change what a model makes of its tokens.
NOT_COMPUTED = ("use_cache", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
_HASHES: WeakKeyDictionary[PreTrainedModel, tuple[object, str]] = WeakKeyDictionary()


def save_memory(cache: Cache, path: str | Path, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
    """Writes what `cache` holds to a safetensors file, whole or not at all.

    The file names config, dtype and weights of the model (`weights_hash` says what that costs) and is for that
    model only. Keys and values of full_attention layers are in it too; they grow with the tokens.

    Args:
        cache: from `model`, with at least one token read.
        path: the file; an older one is replaced once the new one is complete.
        model: the model that filled the cache.
        input_ids: [B, T], all tokens that the cache has read; the file keeps their hash, not them.

    Raises:
        ValueError: if the cache is empty or not of this model, or input_ids are not as many as it has read.
        OSError: if the file cannot be written; an older one is then as it was.
    """
    write_atomically(Path(path), pack(cache, model, input_ids))


def load_memory(path: str | Path, model: PreTrainedModel, input_ids: Tensor | None = None) -> Cache:
    """A new cache with the state that `save_memory` wrote, on the devices of the model.

    The model goes on from it exactly as from the one saved: `model.generate(ids, past_key_values=cache)` with all
    tokens, those read included. One memory serves B rows or beams after `cache.batch_repeat_interleave(B)`, and
    `copy.deepcopy(cache)` keeps it from being written on. A model in another dtype is refused: its weights are
    rounded differently, so its memory would be a different one.

    Args:
        path: the file.
        model: the model that wrote it, or the same checkpoint loaded again in the same dtype.
        input_ids: [B, T] that must begin with the tokens of the memory; not checked by default.

    Raises:
        ValueError: if the file is damaged, no memory, of another model or of other tokens.
        OSError: if the file cannot be read.
    """
    return unpack(Path(path).read_bytes(), model, str(path), input_ids)


def pack(cache: Cache, model: PreTrainedModel, input_ids: Tensor | None = None) -> bytes:
    """The file of `save_memory`, as bytes."""
    tensors = _tensors(cache, model.config)
    rows, length = next(iter(tensors.values())).shape[0], cache.get_seq_length()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": config_json(model.config),
        "dtype": _dtype_name(model),
        "weights": weights_hash(model),
        "tokens": str(length),
    }
    if input_ids is not None:
        if list(input_ids.shape) != [rows, length]:
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)}; it must be [{rows}, {length}], the rows and tokens that "
                "cache has read."
            )
        metadata["input_ids"] = tokens_hash(input_ids)
    return save(tensors, {**metadata, "hash": _content_hash(tensors, metadata)})


def unpack(data: bytes, model: PreTrainedModel, source: str, input_ids: Tensor | None = None) -> Cache:
    """The cache in the bytes of a memory file; errors name `source`."""
    try:
        tensors = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except SafetensorError as error:
        raise ValueError(f"{source!r} is truncated or no safetensors file ({error}); it must be a memory.") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{source!r} is a safetensors file, but not one that save_memory wrote.")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{source!r} is a memory of format {metadata.get('version')}; this release reads {VERSION}.")
    if metadata.pop("hash", None) != _content_hash(tensors, metadata):
        raise ValueError(f"{source!r} is damaged: its content is not what was saved.")
    _refuse_other_model(metadata, model, source)
    length = int(metadata["tokens"])
    if input_ids is not None and "input_ids" not in metadata:
        raise ValueError(f"input_ids is given, but {source!r} was saved without its tokens; load it without them.")
    if input_ids is not None and metadata["input_ids"] != tokens_hash(input_ids[:, :length]):
        raise ValueError(f"input_ids must begin with the {length} tokens that {source!r} has read, but does not.")
    return _cache(tensors, length, model)


def config_json(config: PreTrainedConfig) -> str:
    """The fields of `config` that say what a model computes."""
    ours = {field.name for field in fields(config)} - {field.name for field in fields(PreTrainedConfig)}
    return json.dumps({name: getattr(config, name) for name in sorted(ours - {*NOT_COMPUTED})}, sort_keys=True)


def tokens_hash(input_ids: Tensor) -> str:
    """Hash of [B, T] tokens, whatever their integer type and device."""
    return _hash([("", input_ids.to(torch.int64))])


def model_hash(model: PreTrainedModel) -> str:
    """Hash of all that a memory of `model` depends on."""
    return hashlib.sha256(f"{config_json(model.config)}{_dtype_name(model)}{weights_hash(model)}".encode()).hexdigest()


@torch.no_grad()  # with gradients, views of weights that other threads use can deadlock inside PyTorch (seen with 2.13)
def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 of all weights of `model`, their names, shapes and dtypes.

    The first call for a model object reads every byte: about 0.02 s for the bundled checkpoint and 0.25 s for
    `falcon-3a.3-130m`, in float32 on one core of an AMD EPYC. Later calls take 1 to 2 ms while names, addresses,
    version counters and a sample of each weight stay what they were, and hash all again when one of them changed.
    A few elements changed behind autograd's back (`weight.data[0, 0] = 1`) are not noticed after the first call.
    """
    weights = dict(model.named_parameters())
    marks: object = None
    if not any(weight.is_inference() for weight in weights.values()):  # these count no versions
        samples = ((name, weight.flatten()[:: max(1, weight.numel() // SAMPLES)]) for name, weight in weights.items())
        marks = (_hash(samples), [(weight.data_ptr(), weight._version) for weight in weights.values()])
    remembered = _HASHES.get(model)
    if remembered is None or marks is None or remembered[0] != marks:
        remembered = _HASHES[model] = (marks, _hash(weights.items()))
    return remembered[1]


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file such that `path` holds either all of `data` or what it held before."""
    written = path.with_name(f".{path.name}-{uuid4().hex}.tmp")
    try:
        with open(written, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {list(data.shape)};".encode())
        digest.update(data.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _content_hash(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    return hashlib.sha256(f"{_hash(tensors.items())}{sorted(metadata.items())}".encode()).hexdigest()


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _refuse_other_model(metadata: dict[str, str], model: PreTrainedModel, source: str) -> None:
    theirs, ours = json.loads(metadata["config"]), json.loads(config_json(model.config))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"{source!r} is the memory of a model with {name} {theirs.get(name)!r}; this one has "
                f"{ours.get(name)!r}."
            )
    if metadata["dtype"] != _dtype_name(model):
        raise ValueError(
            f"{source!r} is the memory of a model in {metadata['dtype']}; this one is in {_dtype_name(model)}."
        )
    if metadata["weights"] != weights_hash(model):
        raise ValueError(f"{source!r} is the memory of a model with other weights; it must be loaded into its own.")


def _tensors(cache: Cache, config: Any) -> dict[str, Tensor]:
    """All tensors of a cache by name, on the CPU, each with its batch first."""
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"cache has {len(cache.layers)} layers; a memory of this model has {config.num_hidden_layers}."
        )
    tensors: dict[str, Tensor | None] = {}
    for index, (layer, kind) in enumerate(zip(cache.layers, config.layer_types, strict=True)):
        right_class = FalconFastWeightCacheLayer if kind == "linear_attention" else DynamicLayer
        if type(layer) is not right_class:
            raise ValueError(
                f"cache has a {type(layer).__name__} at layer {index}; a memory needs a {right_class.__name__} there."
            )
        if not layer.is_initialized:
            raise ValueError(f"cache has read no tokens at layer {index}; a memory needs at least one.")
        if isinstance(layer, FalconFastWeightCacheLayer):
            named = {**layer.state._asdict(), "conv_window": layer.conv_window}
            expected = _shapes(config, layer.state.memory.shape[0])
            shapes = {name: tuple(tensor.shape) for name, tensor in named.items() if tensor is not None}
            if shapes != expected:
                raise ValueError(f"cache has {shapes} at layer {index}; a memory of this model has {expected}.")
        else:
            named = {"keys": layer.keys, "values": layer.values}
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in named.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}


def _shapes(config: Any, rows: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a fast-weight layer keeps."""
    heads, keys, values = config.num_attention_heads, config.head_dim, config.value_head_dim
    state = FalconState(*FalconState.shapes(config.rule_object, rows, heads, keys, values))
    window = (rows, config.conv_size - 1, heads * (2 * keys + values)) if config.conv_size else None
    return {name: shape for name, shape in {**state._asdict(), "conv_window": window}.items() if shape is not None}


def _cache(tensors: dict[str, Tensor], length: int, model: PreTrainedModel) -> Cache:
    """The inverse of `_tensors`; the cache takes the tensors over."""
    cache = falcon_cache(model.config)
    trunk: Any = model.base_model
    for index, layer in enumerate(cache.layers):
        device = next(trunk.layers[index].parameters()).device
        prefix = f"layers.{index}."
        named = {name.removeprefix(prefix): x.to(device) for name, x in tensors.items() if name.startswith(prefix)}
        if isinstance(layer, FalconFastWeightCacheLayer):
            window = named.pop("conv_window", None)
            layer.lazy_initialization(FalconState(**named), window)
            layer.update(layer.state, window, length)
        else:
            layer.update(named["keys"], named["values"])
    return cache


__all__ = ["load_memory", "save_memory"]
