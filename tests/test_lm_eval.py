"""The evaluation harness on our checkpoints: log-likelihoods and texts are those of each request alone."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

ROWS = [
    {"question": "A pointer", "choices": ["is an address.", "is a pointer is a pointer"], "answer": 0},
    {"question": "The address of a pointer is", "choices": ["an address", "a"], "answer": 1},
    {"question": "An", "choices": ["address", "pointer, and address"], "answer": 0},
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path):
    """A folder with the tasks, which are JSON as YAML allows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(rows)}, "cache_dir": str(tmp_path / "cache")}
        data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        text = json.dumps({"task": name, "doc_to_text": "{{question}}", **data, **task})
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def expected(folder):
    """By hand, without padding: log-likelihoods of the choices, and eight tokens after each question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    likelihoods, texts = [], []
    for row in ROWS:
        question = tokenizer(row["question"], return_tensors="pt").input_ids
        length = question.shape[1]
        for choice in row["choices"]:
            ids = tokenizer(f"{row['question']} {choice}", return_tensors="pt").input_ids
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, length - 1 : -1].log_softmax(-1)
            likelihoods.append(logits.gather(1, ids[0, length:, None]).sum().item())
        ids = model.generate(question, max_new_tokens=8, do_sample=False)
        texts.append(tokenizer.decode(ids[0, length:], skip_special_tokens=True))
    return likelihoods, texts


def measured(samples):
    likelihoods = [pair[0][0] for sample in samples["choose"] for pair in sample["resps"]]
    return likelihoods, [sample["resps"][0][0] for sample in samples["go_on"]]


@pytest.mark.parametrize("batch_size", [1, 2, "auto"])
def test_in_python_with_any_batch_size(checkpoint, tasks, batch_size):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        "hf",
        model_args={"pretrained": str(checkpoint), "dtype": "float32", "max_length": 64, "max_batch_size": 4},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    (likelihoods, texts), by_hand = measured(found["samples"]), expected(checkpoint)
    assert likelihoods == pytest.approx(by_hand[0], rel=1e-5)
    assert texts == by_hand[1]
    best = [max(by_hand[0][2 * i : 2 * i + 2]) == by_hand[0][2 * i + row["answer"]] for i, row in enumerate(ROWS)]
    assert found["results"]["choose"]["acc,none"] == pytest.approx(sum(best) / 3)


def test_the_command_loads_the_code_that_a_checkpoint_carries(checkpoint, tasks):
    arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoint},trust_remote_code=True,dtype=float32"]
    arguments += ["--tasks", ",".join(TASKS), "--include_path", tasks, "--batch_size", 2, "--device", "cpu"]
    arguments += ["--log_samples", "--output_path", tasks / "results"]
    environment = os.environ | {"HF_HOME": str(tasks / "home"), "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "lm_eval", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    samples = {}
    for name in TASKS:
        (file,) = (tasks / "results").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in file.read_text().splitlines()]
    likelihoods, texts = measured({name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in samples.items()})
    by_hand = expected(checkpoint)
    assert [float(x) for x in likelihoods] == pytest.approx(by_hand[0], rel=1e-5)
    assert texts == by_hand[1]
    assert list((tasks / "home").rglob("modeling_falcon_fast_weight.py"))
