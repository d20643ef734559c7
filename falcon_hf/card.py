"""The card of a checkpoint, written from its config, its weights and the results that were measured with it."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import StrictDataclassError
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
PAPER = """```bibtex
@article{zhang2026fast,
  title   = {Fast Weight Attention for Continual Learning},
  author  = {Zhang, Yifan and Ta, Steve and Zhang, Jasper and Feng, Jichen and Li, Shuzhen and Zhang, Yongxin and
             Liu, Yifeng and Yuan, Huizhuo and Wang, Mengdi and Gu, Quanquan and Yao, Andrew Chi-Chih},
  journal = {arXiv preprint arXiv:2608.27763},
  year    = {2026}
}
```"""


def write_card(folder: Path, name: str, license: str, results: Path | None = None, language: str | None = None) -> str:
    """The text of a README.md for the Hub.

    Args:
        folder: a saved checkpoint.
        name: of the model, `owner/model` where it is on the Hub.
        license: of the weights, by the Hub's name for it, `apache-2.0` say.
        results: what was measured, as `examples/pretrain.py` writes it into `metrics.json`: a JSON file with
            `evaluation`, an object of data sets with their numbers, and more about the training where it is known.
        language: of the text that it was trained on, by its code, `en` say.

    Raises:
        ValueError: where the folder is no checkpoint of ours, or the results are not those of this model.
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
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name.split('/')[-1]}",
        _what_it_is(config, weights),
        _how_to_use(name, config),
        _figures(measured, results),
        _training(measured),
        _limits(config, measured),
        f"## License and citation\n\nThe weights are under the license `{license}`, the code beside them under the "
        f"Apache License 2.0. The rule is that of *Fast Weight Attention for Continual Learning* "
        f"([arXiv:2608.27763](https://arxiv.org/abs/2608.27763)):\n\n{PAPER}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _what_it_is(config: FalconFastWeightConfig, weights: dict) -> str:
    fast = config.layer_types.count("linear_attention")
    window = f", window of {config.window_size} pairs" if config.window_size > 1 else ""
    step = "direct step size" if config.step_size == "direct" else "step size from a gain over the energy of the keys"
    layers = f"{fast} layers of {config.rule.replace('falcon_', 'Falcon-').upper().replace('FALCON', 'Falcon')}"
    attention = "" if fast == config.num_hidden_layers else f" and {config.num_hidden_layers - fast} of full attention"
    numbers = fast * config.num_attention_heads * config.head_dim * config.value_head_dim
    kind = "language model" if _is_language_model(config) else "model"
    size = f"whose fast-weight layers keep {numbers:,} numbers of memory, however long the text"
    shape = f"memories of {config.head_dim} × {config.value_head_dim}"
    return (
        f"A {kind} of {_count(weights):,} parameters, {size}: {layers}{attention}, each with "
        f"{config.num_attention_heads} heads and {shape} (rule `{config.rule}`{window}, {config.qk_norm} norm of "
        f"queries and keys, {step}).\n\n$${_equation(config)}$$\n\n"
        r"$q_t$, $k_t$ and $v_t$ are query, key and value, $\eta_t$ the step size, $\gamma_t$ the decay"
        + (", $I_t$ the last $W$ pairs." if config.window_size > 1 else ".")
    )


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


def _how_to_use(name: str, config: FalconFastWeightConfig) -> str:
    if not _is_language_model(config):
        return (
            "## Use\n\n```python\nfrom transformers import AutoModel\n\n"
            f'model = AutoModel.from_pretrained("{name}", trust_remote_code=True)\n```'
        )
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)\n'
        f'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)\n'
        'ids = tokenizer("Once", return_tensors="pt").input_ids\n'
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))\n```\n\n"
        "transformers ≥ 5.17 and torch are all it needs: its code lies beside the weights. With `falcon-hf` installed, "
        f"`import falcon_hf` takes the place of `trust_remote_code`, and `falcon-hf generate --model {name}` writes."
    )


def _figures(measured: dict[str, Any], source: Path | None) -> str:
    if not measured:
        return "## Measured\n\nNothing has been measured."
    sets = measured["evaluation"]
    metrics = [metric for metric in NAMES if any(metric in numbers for numbers in sets.values())]
    rows = [f"| data | {' | '.join(NAMES[metric] for metric in metrics)} | tokens |", "|---" * (len(metrics) + 2) + "|"]
    for name, numbers in sets.items():
        values = [f"{numbers[metric]:.4g}" if metric in numbers else "" for metric in metrics]
        rows.append(f"| {name} | {' | '.join(values)} | {_number(numbers.get('tokens'))} |")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    origin = [f"`{source.name}` (SHA-256 {digest}…)"]
    origin += [f"of {measured['date'][:10]}"] if "date" in measured else []
    contexts = sorted({numbers["context"] for numbers in sets.values() if "context" in numbers})
    windows = f", in windows of {' or '.join(f'{c:,}' for c in contexts)} tokens" if contexts else ""
    table = "\n".join(rows)
    return f"## Measured\n\n{table}\n\nFrom {' '.join(origin)}{windows}. Perplexity is per token of its own vocabulary."


def _training(measured: dict[str, Any]) -> str:
    plan, data, lines = measured.get("plan", {}), measured.get("training_data", {}), []
    if data:
        names = ", ".join(f"`{source['name']}`" for source in data.get("sources", []))
        sizes = ", ".join(f"{data[unit]:,} {unit}" for unit in ("documents", "bytes", "tokens") if unit in data)
        lines.append(f"- **Text:** {names or 'unnamed'}: {sizes}.")
    if "steps" in measured and "tokens_seen" in measured:
        batch = f" of {plan['batch_size']} × {plan['sequence_length']:,}" if "batch_size" in plan else ""
        lines.append(f"- **Run:** {measured['tokens_seen']:,} tokens in {measured['steps']:,} steps{batch}.")
    options = ("learning_rate", "warmup", "weight_decay", "seed")
    if chosen := [f"{option.replace('_', ' ')} {plan[option]}" for option in options if option in plan]:
        lines.append(f"- **Options:** {', '.join(chosen)}.")
    if "device" in measured:
        time = f", {measured['seconds']:,.0f} seconds" if "seconds" in measured else ""
        versions = ", ".join(f"{name} {version}" for name, version in measured.get("versions", {}).items())
        lines.append(f"- **Machine:** {measured['device']}{time}" + (f"; {versions}." if versions else "."))
    return "## Training\n\n" + "\n".join(lines) if lines else ""


def _limits(config: FalconFastWeightConfig, measured: dict[str, Any]) -> str:
    lines = ["- A state of constant size cannot hold all of a long text: it forgets."]
    if length := measured.get("plan", {}).get("sequence_length"):
        lines.append(f"- It was trained on sequences of {length:,} tokens.")
    if "full_attention" in config.layer_types:
        lines.append("- The keys and values of its full-attention layers grow with the text.")
    if config.step_size == "direct":
        lines.append("- Its direct step size is a reading of the paper, which names it and does not define it.")
    lines.append("- Nothing but what stands above was measured; do not rely on what it says.")
    return "## Limits\n\n" + "\n".join(lines)


def _is_language_model(config: FalconFastWeightConfig) -> bool:
    return (config.architectures or ["FalconFastWeightForCausalLM"])[0] == "FalconFastWeightForCausalLM"


def _count(weights: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in weights.values())


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
