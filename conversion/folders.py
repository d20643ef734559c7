"""From folder to folder: reads headers, plans, and writes shard after shard, of which one lies in memory."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from falcon_hf.card import weight_files
from falcon_hf.code_falcon_fast_weight import carry_code

from . import fla, llama, rules, training
from .falcon import KIND, falcon_config
from .plan import Account, ConversionError, Plan

TARGETS = ("falcon", "fla", *(rule for family in rules.FAMILIES for rule in family), *training.LAYOUTS)
CARRIED = re.compile(
    r"generation_config\.json|LICENSE(\.\w+)?|tokenizer\.json|tokenizer\.model|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|vocab\.txt|merges\.txt|chat_template\.jinja"
)
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
}
SAFE_PICKLE = (".pt", ".pth", ".ckpt")
MAX_SHARD_BYTES = 5_000_000_000


class Checkpoint:
    """A config and named tensors, of which only what is asked for is read.

    Args:
        config: the content of config.json.
        tensors: name, shape and dtype of each tensor, on the meta device.
        load: gives a tensor by its name.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], load: Callable[[str], Tensor]):
        self.config, self.tensors, self.load = config, tensors, load

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Checkpoint":
        """A checkpoint that lies in memory."""
        return cls(dict(config), {name: tensor.to("meta") for name, tensor in tensors.items()}, tensors.__getitem__)


def make_plan(
    source: Checkpoint,
    to: str = "falcon",
    *,
    keep_attention: Collection[int] | Callable[[int], Collection[int]] = (),
    nearest: bool = False,
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Plan:
    """What a conversion will do, from the names and shapes of a checkpoint alone.

    Args:
        source: the checkpoint.
        to: `falcon`, or for Falcon checkpoints `fla`, a rule, or the layout of training code, `nanogpt`, `torchtitan`.
        keep_attention: of a Transformer, the layers that stay attention, or a function from their number to those.
        nearest: whether to take what is another function as a start for training.
        fields: of the Falcon config, for a Transformer: `rule` and its options.
        seed: of what is drawn at random.

    Raises:
        ConversionError: where this cannot be done, a sentence for each reason.
    """
    if to not in TARGETS:
        raise ConversionError([f"to is {to!r}; it must be one of {', '.join(TARGETS)}."])
    kind = source.config.get("model_type")
    if source.config.get("quantization_config"):
        raise ConversionError(["The checkpoint is quantized; convert the one that it was made from."])
    if kind != KIND and to != "falcon":
        raise ConversionError([f"model_type is {kind}; to {to!r} goes a {KIND} checkpoint only."])
    if kind not in llama.KINDS and (keep_attention or fields):
        raise ConversionError(
            [f"model_type is {kind}; layers to keep and fields are for {', '.join(llama.KINDS)} only."]
        )
    if kind == KIND:
        config = falcon_config(source.config)
        if to == "falcon":
            return training.to_falcon(config, source.tensors)
        if to == "fla":
            return fla.from_falcon(config, source.tensors, source.load)
        if to in training.LAYOUTS:
            return training.from_falcon(config, source.tensors, to)
        return rules.to_rule(config, source.tensors, to)
    if kind in fla.KINDS or kind in fla.REASONS:
        return fla.to_falcon(source.config, source.tensors, nearest)
    if kind in llama.KINDS:
        return llama.to_falcon(source.config, source.tensors, keep_attention, fields, seed)
    known = ", ".join(sorted({*fla.KINDS, *llama.KINDS, KIND}))
    raise ConversionError([f"model_type is {kind}; it must be one of {known}."])


def convert(
    source: Path,
    target: Path | None,
    to: str = "falcon",
    *,
    config: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    **options: Any,
) -> Account:
    """Converts a checkpoint. Nothing is written unless all of it is right.

    Args:
        source: the folder of a checkpoint with config.json and safetensors, whole or in shards; or one file of training
            code, .safetensors, or .pt, of which tensors are read and no code is run.
        target: the folder to write, which must not exist; None only plans.
        to: as in `make_plan`, and further options there.
        config: the config.json of a file, where there is none beside it.
        max_shard_bytes: size of the largest file to write, and about what is held in memory.
        progress: called with the name of each tensor that was written, bytes so far, and bytes in all.

    Returns:
        Where every tensor went.

    Raises:
        ConversionError: with a sentence for each tensor that is missing, unknown, misshapen or not finite, or each
            option that makes the model another function.
        OSError: where a file cannot be read or written.
    """
    if target is not None and target.exists():
        raise ConversionError([f"{target} is there already; give a folder that is not."])
    with open_checkpoint(source, config) as checkpoint:
        plan = make_plan(checkpoint, to, **options)
        if target is None:
            return plan.account()
        new_folders = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f".{target.name}-{uuid4().hex}.tmp")
        written.mkdir()
        try:
            _write_weights(plan, checkpoint, written, max_shard_bytes, progress)
            text = json.dumps(plan.config, indent=2, sort_keys=True) + "\n"
            (written / "config.json").write_text(text, encoding="utf-8")
            folder = source if source.is_dir() else source.parent
            for path in folder.iterdir():
                if CARRIED.fullmatch(path.name):
                    shutil.copy(path, written / path.name)
            if to != "fla" and to not in training.LAYOUTS:
                carry_code(written)
            os.replace(written, target)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            for folder in new_folders:
                folder.rmdir()
            raise
    return plan.account()


@contextmanager
def open_checkpoint(source: Path, config: Path | None = None) -> Iterator[Checkpoint]:
    """A checkpoint of files, open for as long as the context lasts. Arguments as in `convert`."""
    if not source.exists():
        raise ConversionError(
            [
                f"{source} does not exist; it must be the folder of a checkpoint, or a file. One of the Hub is fetched "
                "by hf download owner/model --local-dir FOLDER."
            ]
        )
    if config is None:
        config = (source if source.is_dir() else source.parent) / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "model_type" not in content:
            raise ValueError("it has no model_type")
    except FileNotFoundError:
        raise ConversionError([f"{config} does not exist; the config of a checkpoint is needed."]) from None
    except ValueError as error:
        raise ConversionError([f"{config} is no config of a model: {error}."]) from None
    if source.suffix in SAFE_PICKLE and source.is_file():
        held = _read_pickle(source)
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in held.items()}
        yield Checkpoint(content, shapes, lambda name: held[name].clone())
        return
    if source.is_file() and source.suffix != ".safetensors":
        raise ConversionError([f"{source} must be .safetensors, or {', '.join(SAFE_PICKLE)} of training code."])
    with ExitStack() as stack:
        try:
            files = _weight_files(source) if source.is_dir() else [source]
            places = {}
            tensors = {}
            for path in files:
                file = stack.enter_context(safe_open(path, "pt"))
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype(), torch.uint8)
                    places[name] = file
                    tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        except (SafetensorError, FileNotFoundError) as error:
            raise ConversionError([f"{path} cannot be read: {error}."]) from None
        yield Checkpoint(content, tensors, lambda name: places[name].get_tensor(name))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / ".metadata").exists():
        raise ConversionError(
            [
                f"{folder} is a distributed checkpoint; python -m torch.distributed.checkpoint.format_utils "
                f"dcp_to_torch {folder} model.pt makes one file of it."
            ]
        )
    try:
        return weight_files(folder)
    except ValueError as error:
        raise ConversionError([str(error)]) from None


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, read without running code, and without reading all of it into memory."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConversionError(
            [f"{path} cannot be read as tensors alone; save its weights as safetensors: {reason}"]
        ) from None
    for key in ("model", "model_state_dict", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConversionError([f"{path} must hold named tensors, or such under model, model_state_dict or state_dict."])
    return content


def _write_weights(
    plan: Plan,
    source: Checkpoint,
    folder: Path,
    max_shard_bytes: int,
    progress: Callable[[str, int, int], None],
) -> None:
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in plan.shapes(source.tensors).items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    made = plan.make(source.load)
    done, total = 0, sum(sizes.values())
    for file, names in zip(files, shards, strict=True):
        shard = {}
        for name in names:
            shard[name] = next(made)[1]
            done += sizes[name]
            progress(name, done, total)
        save_file(shard, folder / file, metadata={"format": "pt"})
    next(made, None)  # what was found wrong on the way is said at the end
    if len(files) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
