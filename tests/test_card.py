"""The card that `falcon-hf card` writes, and what is refused before anything is written or published."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from falcon_hf.card import write_card
from falcon_hf.cli import bundled

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture
def folder(tmp_path, capsys) -> Path:
    tiny_model(torch.float32).save_pretrained(tmp_path)
    capsys.readouterr()  # the progress of saving
    return tmp_path


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"falcon-hf: [^\n]+\n", err), err
    assert all(word in err for word in words), err


def test_the_card_of_the_bundled_checkpoint(call, tmp_path):
    """Whole: metadata that the Hub's client reads, the rule, figures and their source, use, limits, citation."""
    shutil.copytree(bundled()["falcon-3a.3-tiny"], tmp_path / "model")
    measured = RESULTS / "pretrain_falcon-3a.3-tiny.json"
    (tmp_path / "model" / "README.md").unlink()
    given = ("--license", "apache-2.0", "--language", "en", "--name", "me/tiny", "--results", measured)
    code, out, err = call("card", tmp_path / "model", *given)
    assert (code, out) == (0, ""), err
    card = ModelCard.load(tmp_path / "model" / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"], data["license"]) == (
        "transformers",
        "text-generation",
        "apache-2.0",
    )
    assert {"falcon_fast_weight", "custom_code"} <= set(data["tags"])
    figures = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert figures["val", "bits_per_byte"] == 1.1544
    assert len(figures) == 9
    for words in (
        r"S_t = \gamma_t\, S_{t-1} + \frac{\eta_t}{W_t} \sum_{j \in I_t} x_j v_j^\top",
        "7,910,208 parameters",
        "131,072 numbers",
        'AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True)',
        "| val | 1.154 | 19.5 | 2.97 | 572,070 |",
        "`pretrain_falcon-3a.3-tiny.json` (SHA-256",
        "560,005,120 tokens in 8,545 steps of 64 × 1,024",
        "NVIDIA H200, 548 seconds",
        "## Limits",
        "arXiv:2608.27763",
    ):
        assert words in card.content, words


@pytest.mark.parametrize("rule", ["falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a"])
def test_the_equation_is_that_of_the_config(rule, tmp_path):
    options = {"alignment": "same_step", "ridge": "none", "timing": "read_before_write"}
    for number, changed in enumerate(({}, options)):
        tiny_model(torch.float32, rule=rule, **changed).save_pretrained(tmp_path / str(number))
        text = write_card(tmp_path / str(number), "name", "mit")
        assert ("x_t = k_{t-1}," in text, "\\gamma_t" in text.split("$$")[1]) == (not changed, not changed)
        assert ("o_t = S_t^\\top q_t" in text) == (not changed)
        assert ("(v_" in text) == (not rule.endswith("a"))
        assert "Nothing has been measured." in text
        assert ModelCard(text).data.license == "mit"


def test_a_card_that_is_there_stays_unless_told_otherwise(call, folder):
    (folder / "README.md").write_text("mine")
    refused(call("card", folder, "--license", "mit"), "README.md is there already", "--replace")
    assert (folder / "README.md").read_text() == "mine"
    (folder / "metrics.json").write_text(json.dumps({"evaluation": {"val": {"loss": 2.5}}}))
    code, _, err = call("card", folder, "--license", "mit", "--replace")
    assert code == 0
    assert "metrics.json" in err
    assert "| val | 2.5 |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (None, ("cannot read the results",)),
        ("{", ("has no results",)),
        ([], ("has no results",)),
        ({"evaluation": {"val": {"bytes": 3}}}, ("has no results", "bits_per_byte")),
        ({"evaluation": {"val": {"loss": float("nan")}}}, ("finite",)),
        ({"evaluation": {"val": {"loss": "low"}}}, ("finite",)),
        ({"evaluation": {"val": {"loss": 1}}, "parameters": 5}, ("of 5 parameters; this one has",)),
        ({"evaluation": {"val": {"loss": 1}}, "plan": {"rule": "falcon_1"}}, ("rule falcon_1", "falcon_3a")),
    ],
)
def test_wrong_results_are_refused(call, folder, results, words):
    file = folder / "results.json"
    if results is not None:
        file.write_text(results if isinstance(results, str) else json.dumps(results))
    refused(call("card", folder, "--license", "mit", "--results", file), *words)
    assert not (folder / "README.md").exists()


def test_a_template_of_one_s_own(call, folder):
    own = folder / "own.md"
    own.write_text("---\n{{ card_data }}\n---\n{{ name }} has {{ parameters | number }} weights.\n")
    given = ("card", folder, "--license", "mit", "--name", "me/tiny", "--template")
    assert call(*given, own)[0] == 0
    card = ModelCard.load(folder / "README.md")
    count = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    assert (card.data.license, card.text.strip()) == ("mit", f"me/tiny has {count:,} weights.")
    hub_s = Path(huggingface_hub.__file__).parent / "templates" / "modelcard_template.md"
    assert call(*given, hub_s, "--replace")[0] == 0
    assert ModelCard.load(folder / "README.md").data.license == "mit"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ nmae }}", ("own.md cannot be filled in", "'nmae' is undefined")),
        ("{{ name | number }}", ("own.md cannot be filled in",)),
        ("a\n{% if %}", ("own.md is no template of Jinja: line 2",)),
        (None, ("cannot read the template",)),
    ],
)
def test_wrong_templates_are_refused(call, folder, text, words):
    own = folder / "own.md"
    if text is not None:
        own.write_text(text)
    refused(call("card", folder, "--license", "mit", "--template", own), *words)
    assert not (folder / "README.md").exists()


def test_wrong_names_are_refused(call, folder):
    refused(call("card", folder, "--license", "my own"), "license is 'my own'")
    refused(call("card", folder, "--license", "mit", "--name", "a/b/c"), "name is 'a/b/c'")
    refused(call("card", folder), "--license")
    refused(call("push", folder, "model"), "REPO is 'model'", "owner/name")


@pytest.fixture
def offline(monkeypatch) -> None:
    def no_hub(*_, **__):
        raise AssertionError("something was sent")

    monkeypatch.setattr("falcon_hf.publish.HfApi", no_hub)


def change(folder: Path, **weights: torch.Tensor | None) -> None:
    """Puts weights into the checkpoint, or takes them away where they are None."""
    file = folder / "model.safetensors"
    changed = {**load_file(file), **{name.replace("__", "."): weight for name, weight in weights.items()}}
    save_file({name: weight for name, weight in changed.items() if weight is not None}, file, {"format": "pt"})


def test_nothing_is_sent_of_a_checkpoint_that_is_not_whole(call, folder, offline, capsys):
    refused(call("push", folder, "me/model"), "has no README.md", "falcon-hf card")
    (folder / "README.md").write_text("A card.")
    change(folder, model__norm__weight=None)
    refused(call("push", folder, "me/model"), "lacks the weight model.norm.weight, which its config needs")
    change(folder, model__norm__weight=torch.ones(3))
    refused(call("push", folder, "me/model"), "model.norm.weight of shape [3]; its config needs [24]")
    change(folder, model__norm__weight=torch.ones(24), model__extra=torch.ones(1))
    refused(call("push", folder, "me/model"), "has the weight model.extra, which its config does not know")
    (folder / "model.safetensors").write_bytes(b"not weights")
    refused(call("push", folder, "me/model"), "model.safetensors cannot be read")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(call("push", folder, "me/model"), "has no model.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(call("push", folder, "me/model"), "has no weight_map")
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors.index.json").unlink()
    tiny_model(torch.float32).save_pretrained(folder)
    capsys.readouterr()
    for text, words in (
        (
            json.dumps({**config, "architectures": ["FalconFastWeightAttention"]}),
            "has architecture 'FalconFastWeightAttention'",
        ),
        (json.dumps({**config, "rule": "falcon_9"}), "falcon_9"),
        (json.dumps({**config, "hidden_size": "wide"}), "hidden_size"),
        (json.dumps({"model_type": "llama"}), "type llama"),
        ("[]", "type None"),
        ("{", "no JSON"),
    ):
        (folder / "config.json").write_text(text)
        refused(call("push", folder, "me/model"), words)
    refused(call("push", folder / "nowhere", "me/model"), "has no config.json")
