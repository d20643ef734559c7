"""The card of a checkpoint, written from its config, its weights and the results that were measured with it."""

import hashlib
import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from jinja2 import Environment, StrictUndefined, TemplateSyntaxError, UndefinedError
from safetensors import SafetensorError, safe_open

from .configuration_falcon_fast_weight import FalconFastWeightConfig

NAMES = {"bits_per_byte": "bits per byte", "perplexity": "perplexity", "loss": "loss (nats)", "accuracy": "accuracy"}
WRITES = {  # by rule, beside the memory that has faded
    "falcon_1": r"\eta_t\, x_t\,(v_t - S_{t-1}^\top x_t)^\top",
    "falcon_2": r"x_t\,(\eta_t \odot (v_t - S_{t-1}^\top x_t))^\top",
    "falcon_3": r"\frac{\eta_t}{W_t} \sum_{j \in I_t} x_j\,(v_j - S_{t-1}^\top x_j)^\top",
    "falcon_1a": r"\eta_t\, x_t v_t^\top",
    "falcon_2a": r"x_t\,(\eta_t \odot v_t)^\top",
    "falcon_3a": r"\frac{\eta_t}{W_t} \sum_{j \in I_t} x_j v_j^\top",
}


def cards_folder() -> Path:
    """Where the template and the checkpoints lie that travel with the package."""
    try:
        return Path(str(resources.files("falcon_hf.model_cards")))
    except ModuleNotFoundError:  # run from a source tree that is not installed
        return Path(__file__).parent.parent / "model_cards"


def write_card(
    folder: Path,
    name: str,
    license: str,
    results: Path | None = None,
    language: str | None = None,
    template: Path | None = None,
) -> str:
    """The text of a README.md for the Hub.

    Args:
        folder: a saved checkpoint.
        name: of the model, `owner/model` where it is on the Hub.
        license: of the weights, by the Hub's name for it, `apache-2.0` say.
        results: what was measured, as `examples/pretrain.py` writes it into `metrics.json`: a JSON file with
            `evaluation`, an object of data sets with their numbers, and more about the training where it is known.
        language: of the text that it was trained on, by its code, `en` say.
        template: the card in the language of Jinja; by default `template.md` of `model_cards`, which shows what there
            is to fill in.

    Raises:
        ValueError: where the folder is no checkpoint of ours, the results are not those of this model, or the template
            cannot be filled in.
    """
    for option, value, allowed in (
        ("name", name, r"([\w.-]+/)?[\w.-]+"),
        ("license", license, r"[\w.-]+"),
        ("language", language or "en", r"[\w-]+"),
    ):
        if not re.fullmatch(allowed, value):
            raise ValueError(f"{option} is {value!r}; it must be made of letters, digits, '-', '_' and '.'.")
    config, weights = read_checkpoint(folder)
    measured = _read_results(results, config, weights)
    data = ModelCardData(
        license=license,
        language=language,
        library_name="transformers",
        pipeline_tag="text-generation" if _is_language_model(config) else None,
        tags=["falcon_fast_weight", "fast-weights", "recurrent", "linear-attention", "custom_code"],
        model_name=name,
        eval_results=_eval_results(measured) or None,
    )
    fast_layers = config.layer_types.count("linear_attention")
    sets = measured.get("evaluation", {})
    facts = {
        "card_data": data.to_yaml(),
        "name": name,
        "license": license,
        "config": config,
        "is_language_model": _is_language_model(config),
        "parameters": _count(weights),
        "fast_layers": fast_layers,
        "memory": fast_layers * config.num_attention_heads * config.head_dim * config.value_head_dim,
        "rule_name": f"Falcon-{config.rule.removeprefix('falcon_').upper()}",
        "equation": _equation(config),
        "results": measured,
        "source": results and {"name": results.name, "sha256": hashlib.sha256(results.read_bytes()).hexdigest()},
        "metrics": {metric: NAMES[metric] for metric in NAMES if any(metric in numbers for numbers in sets.values())},
        "contexts": sorted({numbers["context"] for numbers in sets.values() if "context" in numbers}),
        "plan": measured.get("plan", {}),
        "data": measured.get("training_data", {}),
        "versions": measured.get("versions", {}),
    }
    return _fill_in(template or cards_folder() / "template.md", facts)


def read_checkpoint(folder: Path) -> tuple[FalconFastWeightConfig, dict[str, tuple[int, ...]]]:
    """The config of a saved checkpoint, and the shape of each of its weights. ValueError where it is none of ours."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; it must be the folder of a saved checkpoint.")
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is no JSON: {error}.") from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind != FalconFastWeightConfig.model_type:
        raise ValueError(f"{folder} is a checkpoint of type {kind}; it must be {FalconFastWeightConfig.model_type}.")
    try:
        config = FalconFastWeightConfig.from_dict(fields)
    except StrictDataclassError as error:
        raise ValueError(f"{folder / 'config.json'} is wrong: {' '.join(str(error).split())}") from None
    weights = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                weights.update({key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}.") from None
    return config, weights


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights. ValueError where they are not safetensors, or whole and in shards at once."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists() and whole.exists():
        raise ValueError(f"{folder} has both {whole.name} and {index.name}; it must have one of them.")
    if not index.exists() and not whole.exists():
        raise ValueError(f"{folder} has no {whole.name}; weights of other formats are not taken.")
    if whole.exists():
        return [whole]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} has no weight_map; it must be as transformers writes it.") from None
    return sorted(folder / name for name in names)


def _read_results(path: Path | None, config: FalconFastWeightConfig, weights: dict) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        evaluation = results["evaluation"]
        numbers = [data[metric] for data in evaluation.values() for metric in NAMES if metric in data]
        parts = [results.get(part, {}) for part in ("plan", "training_data", "versions")]
        good = numbers and all(math.isfinite(number) for number in numbers) and all(type(p) is dict for p in parts)
    except OSError as error:
        raise ValueError(f"cannot read the results {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(
            f"{path} has no results; it must be JSON with an object evaluation, of data sets with finite numbers for "
            f"some of {', '.join(NAMES)}."
        )
    count = _count(weights)
    if results.get("parameters", count) != count:
        raise ValueError(f"{path} is about a model of {results['parameters']:,} parameters; this one has {count:,}.")
    rule = results.get("plan", {}).get("rule", config.rule)
    if rule != config.rule:
        raise ValueError(f"{path} is about a model of rule {rule}; this one has {config.rule}.")
    return results


def _eval_results(measured: dict[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_name=NAMES[metric].capitalize(),
            metric_value=round(numbers[metric], 4),
        )
        for name, numbers in measured.get("evaluation", {}).items()
        for metric in NAMES
        if metric in numbers
    ]


def _fill_in(template: Path, facts: dict[str, Any]) -> str:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["number"] = "{:,}".format
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render(facts)
    except OSError as error:
        raise ValueError(f"cannot read the template {template}: {error.strerror}.") from None
    except TemplateSyntaxError as error:
        raise ValueError(f"{template} is no template of Jinja: line {error.lineno}, {error.message}") from None
    except (UndefinedError, TypeError, ValueError) as error:
        raise ValueError(f"{template} cannot be filled in: {error}") from None


def _equation(config: FalconFastWeightConfig) -> str:
    decay = r"S_{t-1}\,\mathrm{Diag}(\gamma_t)" if config.rule in ("falcon_2", "falcon_2a") else r"\gamma_t\, S_{t-1}"
    if config.ridge == "none":
        decay = "S_{t-1}"
    key = "k_{t-1}" if config.alignment == "next_latent" else "k_t"
    state = "S_t" if config.timing == "read_after_write" else "S_{t-1}"
    read = rf"{state}^\top q_t"
    if config.normalized_read:
        read += r" \text{, over the sum of its weights}"
    return rf"S_t = {decay} + {WRITES[config.rule]}, \qquad x_t = {key}, \qquad o_t = {read}"


def _is_language_model(config: FalconFastWeightConfig) -> bool:
    return (config.architectures or ["FalconFastWeightForCausalLM"])[0] == "FalconFastWeightForCausalLM"


def _count(weights: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in weights.values())
