"""The downstream tasks: which requests are read, what a model's answers are worth, and the arithmetic of it."""

import gzip
import json
import math

import pytest
import recipes
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

evaluate = recipes.load("evaluate")

QUESTIONS = [  # question, answers, the right one
    ("Is a pointer an address?", [" yes", " no, it is not", " no"], 0),
    ("Is an address a pointer?", [" yes", " no", " perhaps it is"], 2),
    ("Is a?", [" it", " an", " is"], 1),
    ("A pointer is", [" a", " an address", " a pointer"], 1),
]


def rows(shots=0):
    """Of a requests file, with the second copies that such files have."""
    examples = "".join(f"Question: {i}?\nAnswer: {i}\n\n" for i in range(shots))
    for copy in (0, evaluate.SECOND_COPY):
        for doc, (question, answers, right) in enumerate(QUESTIONS):
            for idx, answer in enumerate(answers):
                context = "Answer:" if copy else f"{examples}Question: {question}\nAnswer:"
                request = {"context": context, "continuation": answer}
                yield {"request": request, "doc_id": copy + doc, "idx": idx, "label": right}


def write(folder, name, lines):
    path = folder / evaluate.TASKS[name][0] / "requests.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_second_copies_are_dropped_and_answers_stand_in_order(tmp_path):
    lines = sorted(rows(), key=lambda row: -row["idx"])
    questions = evaluate.read_questions(write(tmp_path, "piqa", lines), 0)
    assert [(q.contexts, q.answers, q.right) for q in questions] == [
        ([f"Question: {question}\nAnswer:"] * 3, answers, right) for question, answers, right in QUESTIONS
    ]


@pytest.mark.parametrize("shots", [0, 1, 5])
def test_the_last_shots_stay(tmp_path, shots):
    questions = evaluate.read_questions(write(tmp_path, "piqa", rows(shots=5)), shots)
    examples = "".join(f"Question: {i}?\nAnswer: {i}\n\n" for i in range(5 - shots, 5))
    assert questions[1].contexts[0] == f"{examples}Question: {QUESTIONS[1][0]}\nAnswer:"


def test_without_examples_the_questions_before_are_shots(tmp_path):
    questions = evaluate.read_questions(write(tmp_path, "sciq", rows()), 1)
    last, first = (f"Question: {QUESTIONS[i][0]}\nAnswer:" for i in (-1, 0))
    assert questions[0].contexts[0] == f"{last} an address\n\n{first}"
    assert questions[1].contexts[0].startswith(f"{first} yes\n\nQuestion: Is an")


@pytest.fixture(scope="module")
def llama(checkpoint):
    """A model that is no Falcon, with the tokenizer of the checkpoint."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return AutoModelForCausalLM.from_config(config).eval(), AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("family", ["llama", "falcon"])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_scores_are_those_of_each_text_alone(llama, checkpoint, family, tokens):
    """Token by token by hand, whatever the batches; also of texts that are longer than the context."""
    model, tokenizer = llama
    if family == "falcon":
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    pairs = [(f"Question: {q}\nAnswer:", answer) for q, answers, _ in QUESTIONS for answer in answers]
    pairs.append(("A pointer is an address. " * 5 + "A", " pointer"))
    texts = [evaluate.encode(tokenizer, *pair, []) for pair in pairs]
    with Progress(disable=True) as progress:
        scores = evaluate.score(model, texts, 30, tokens, progress, "test")
    assert max(len(ids) for ids, _ in texts) > 31
    for (ids, scored), score in zip(texts, scores, strict=True):
        total, greedy = 0.0, True
        shown = ids[-31:]
        for at in range(len(shown) - scored, len(shown)):
            with torch.no_grad():
                chances = model(input_ids=torch.tensor([shown[:at]])).logits[0, -1].double().log_softmax(-1)
            total += chances[shown[at]].item()
            greedy &= chances.argmax().item() == shown[at]
        assert score.log_probability == pytest.approx(total, abs=1e-4)
        assert score.greedy == greedy


def test_encoding_gives_the_border_to_the_answer(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def split(*pair, begin=()):
        ids, scored = evaluate.encode(tokenizer, *pair, list(begin))
        return tokenizer.decode(ids[:-scored]), tokenizer.decode(ids[-scored:])

    assert split("A pointer", " is") == ("A pointer", " is")
    assert split("A pointer ", "is") == ("A pointer", " is")
    assert split("A poin", "ter is") == ("A ".strip(), " pointer is")  # one token, cut by the border
    assert split("", "A")[1] == "A"
    ids, scored = evaluate.encode(tokenizer, "", "A pointer", [7])
    assert ids[0] == 7
    assert scored == len(ids) - 1


def scores(*values):
    return [evaluate.Score(value, False) for value in values]


def test_accuracies_by_hand():
    """Two of three right by sums, and one when each is divided by the characters after the space."""
    questions = [
        evaluate.Question([""] * 2, [" ab", " abcd"], 0),
        evaluate.Question([""] * 2, [" a", " abcdefghij"], 0),
        evaluate.Question([""] * 2, ["abc", " ab"], 1),
    ]
    #       -2 > -3, but -1 < -0.75;  -1 > -4, but -1 < -0.4;  -4 < -3, and -1.33 > -1.5
    result = evaluate.figures("piqa", questions, scores(-2, -3, -1, -4, -4, -3))
    assert result["acc"] == pytest.approx(3 / 3)
    assert result["acc_norm"] == pytest.approx(0 / 3)
    result = evaluate.figures("piqa", questions, scores(-4, -3, -1, -4, -4, -1))
    assert result == {
        "questions": 3,
        "acc": pytest.approx(2 / 3),
        "acc_norm": pytest.approx(1 / 3),
        "acc_stderr": pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2)),
        "acc_norm_stderr": pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2)),
    }


def test_lambada_by_hand():
    questions = [evaluate.Question([""], [" word"], 0)] * 4
    given = [
        evaluate.Score(-value, greedy) for value, greedy in ((1.0, True), (2.0, False), (3.0, False), (6.0, False))
    ]
    result = evaluate.figures("lambada", questions, given)
    assert result["acc"] == 0.25
    assert result["perplexity"] == pytest.approx(math.exp(3))
    assert result["perplexity_stderr"] == pytest.approx(math.exp(3) * math.sqrt((4 + 1 + 0 + 9) / 3 / 4))


def test_the_command_end_to_end(checkpoint, tmp_path):
    for name in evaluate.TASKS:
        if name != "lambada":
            write(tmp_path, name, rows(shots=0 if name == "sciq" else 5))
    texts = [{"request": {"context": q, "continuation": a[0]}, "doc_id": i, "idx": 0, "label": a} for i, (q, a, _) in
             enumerate(QUESTIONS)]  # fmt: skip
    write(tmp_path, "lambada", texts)
    figures = {}
    for shots in (0, 1):
        output = tmp_path / "out" / f"{shots}.json"
        evaluate.app(
            [str(checkpoint), str(tmp_path), "--shots", str(shots), "--output", str(output)], standalone_mode=False
        )
        figures[shots] = json.loads(output.read_text())
    assert list(figures[0]["tasks"]) == list(evaluate.TASKS)
    assert "lambada" not in figures[1]["tasks"]
    assert figures[0]["tasks"]["piqa"]["questions"] == 4
    eight = [of[of["reported"]] for name, of in figures[0]["tasks"].items() if name != "lambada"]
    assert figures[0]["mean_of_eight"] == pytest.approx(sum(eight) / 8)


def test_bad_input_gets_one_sentence(checkpoint, tmp_path):
    write(tmp_path, "piqa", rows(shots=2))
    damaged = write(tmp_path, "sciq", rows())
    damaged.write_bytes(damaged.read_bytes()[:-9])
    write(tmp_path, "winogrande", [{"doc_id": 1}])
    for arguments, sentence in (
        (["--task", "boolq"], "it may be piqa"),
        (["--task", "hellaswag"], "is missing"),
        (["--task", "piqa", "--shots", "3"], "has 2 examples"),
        (["--task", "sciq"], "not a file of requests"),
        (["--task", "winogrande"], "not a file of requests"),
        (["--task", "lambada", "--shots", "1"], "zero-shot"),
        (["--task", "piqa", "--dtype", "int8"], "it may be float32"),
        (["--task", "piqa", "--begin"], "no bos token"),
    ):
        with pytest.raises(evaluate.RecipeError, match=sentence) as error:
            evaluate.app([str(checkpoint), str(tmp_path), *arguments], standalone_mode=False)
        assert "\n" not in str(error.value)
