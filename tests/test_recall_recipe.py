"""The probe of continual learning: its streams, what counts as kept, rebound and stale, and what is shown of it."""

import json

import pytest
import recipes
import torch
from transformers import AutoTokenizer

side_by_side = recipes.load("side_by_side")
recall = recipes.load("recall")

FALCON = "falcon-1.3"


def task(**fields):
    given = {"facts": 8, "questions": 6, "keys": 32, "values": 5, "rebind": 0.5, "curriculum": 0.0, "samples": 40}
    return recall.Recall(**{**given, **fields})


def batch(of, size=300, seed=0):
    return of.batch(size, torch.Generator().manual_seed(seed), 0.0)


def replay(row, of):
    """What a reader with a notebook answers: (facts, [(position, key)], {key: values so far}) of a row of tokens."""
    mark, at, values = of.keys + of.values, 0, {}
    while row[at] != mark:
        values.setdefault(row[at], []).append(row[at + 1])
        at += 2
    asked = []
    while at < len(row) and len(asked) < of.questions:
        assert row[at] == mark
        asked.append((at + 1, row[at + 1]))
        at += 2
    assert set(row[at:]) <= {mark}
    return sum(map(len, values.values())), asked, values


@pytest.mark.parametrize("rebind", [0.0, 0.5, 1.0])
def test_the_newest_value_is_right_and_asked_for_at_the_key_alone(rebind):
    of = task(rebind=rebind)
    ids, targets = batch(of)
    assert ids.shape == targets.shape == (300, 2 * (8 + 6))
    lengths = []
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        facts, asked, values = replay(row, of)
        lengths.append(facts)
        assert {i: t for i, t in enumerate(target) if t != side_by_side.UNSCORED} == {
            i: values[k][-1] for i, k in asked
        }
        assert all(k < of.keys <= v < of.keys + of.values for k, vs in values.items() for v in vs)
        if rebind == 0:
            assert len(values) == facts
        if rebind == 1:
            assert len(values) == 1
    assert set(lengths) == set(range(1, 9))


def test_how_often_keys_come_again():
    of = task(facts=64, keys=256)
    drawn = of.draw(torch.full((200,), 64), 64, torch.Generator().manual_seed(0))
    new = (drawn.subject == torch.arange(64)).double().mean()
    assert new == pytest.approx((1 + 63 * 0.5) / 64, abs=0.02)
    assert all(len(set(row)) == len(set(s)) for row, s in zip(drawn.key.tolist(), drawn.subject.tolist(), strict=True))


class Reader(torch.nn.Module):
    """Answers from the row itself: the key's `newest` or `first` value, or that of the `last` or `oldest` fact."""

    device = torch.device("cpu")

    def __init__(self, of, how):
        super().__init__()
        self.of, self.how = of, how

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, self.of.vocab_size)
        for i, row in enumerate(input_ids.tolist()):
            facts, asked, values = replay(row, self.of)
            for at, key in asked:
                answers = {
                    "newest": values[key][-1],
                    "first": values[key][0],
                    "last": row[2 * facts - 1],
                    "oldest": row[1],
                }
                logits[i, at, answers[self.how]] = 1
        return type("Output", (), {"logits": logits})


def test_measures_by_hand():
    """A reader that never gives anything up keeps all, and is stale wherever values changed; and so on."""
    of = task(values=1000)  # so that two values of a key are hardly ever the same
    for how, kept, rebound, stale in (("newest", 1, 1, 0), ("first", 1, 0, 1)):
        outcome = of.measure(Reader(of, how), 8)
        for kind, expected in (("kept", kept), ("rebound", rebound), ("stale", stale)):
            hits, asked = outcome[kind]
            assert asked.sum() > 50
            assert hits.sum() / asked.sum() == pytest.approx(expected, abs=0.02)
    outcome = of.measure(Reader(of, "last"), 8)
    hits, asked = outcome["kept"]
    assert hits[0] == asked[0] > 0  # the newest fact
    assert hits[1:].sum() == 0 < asked[1:].sum()  # and no older one
    drawn = of.draw(
        torch.full((of.samples,), 8), 8, torch.Generator().manual_seed(side_by_side.seed_of("evaluation", 8))
    )
    about_the_oldest = (drawn.subject.gather(1, drawn.newest) == 0) & (drawn.times > 1)
    stale = of.measure(Reader(of, "oldest"), 8)["stale"][0]
    assert 0 < stale.sum() == about_the_oldest.sum() < outcome["stale"][1].sum()  # another key's old value is not stale
    total = outcome["kept"][1].sum() + outcome["rebound"][1].sum()
    assert total == of.samples * of.questions


def test_ages_count_the_facts_since():
    of = task(rebind=0.0)
    drawn = of.draw(torch.tensor([5, 8]), 8, torch.Generator().manual_seed(0))
    ids, _ = of.write(drawn)
    for row, count, ages in zip(ids.tolist(), (5, 8), drawn.age.tolist(), strict=True):
        _, asked, _ = replay(row, of)
        places = [row[: 2 * count : 2].index(key) for _, key in asked]
        assert ages == [count - 1 - place for place in places]


def test_octaves_by_hand():
    hits, asked = torch.tensor([1, 1, 2, 0, 3, 0, 1]), torch.tensor([2, 1, 3, 4, 4, 0, 2])
    assert recall.by_octave(hits, asked) == [(0, 0.5), (1, 0.75), (3, 0.4)]
    assert recall.by_octave(hits[:4], asked[:4]) == [(0, 0.5), (1, 0.75), (3, 0.0)]
    assert recall.by_octave(hits[5:6], asked[5:6]) == [(0, None)]


def test_evaluation_counts_up_to_four_times_the_training():
    figures = task(facts=6, keys=24).evaluate(Reader(task(facts=6, keys=24), "newest"), lambda x, _: x)
    assert list(figures["by_count"]) == [1, 2, 4, 6, 8, 12, 16]
    assert figures["by_count"][1] == {"kept": 1.0, "rebound": None, "stale": None}
    assert figures["by_count"][16] == {"kept": 1.0, "rebound": 1.0, "stale": 0.0}
    assert [age for age, _ in figures["by_age"][12]["kept"]] == [0, 1, 3, 7]
    with pytest.raises(side_by_side.RecipeError, match="--keys is 23: it may not be below 24"):
        task(facts=6, keys=23)


def call(*arguments):
    recall.app([str(argument) for argument in arguments], standalone_mode=False)


def test_tiny_learns_and_reports(tmp_path):
    pytest.importorskip("matplotlib")
    options = ("--size", "tiny", "--facts", 2, "--questions", 4, "--samples", 50, "--model", FALCON)
    call("train", "--output", tmp_path, *options, "--steps", 80, "--batch-size", 32, "--log-every", 10)
    result = json.loads((tmp_path / f"{FALCON}-seed0" / "result.json").read_text())
    losses = [entry["loss"] for entry in result["log"]]
    assert losses[0] > 0.9
    assert losses[-1] < 0.5
    assert result["evaluation"]["by_count"]["1"]["kept"] > 0.95  # of two values
    call("report", tmp_path)
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 3
    assert table[2].startswith(f"| {FALCON}, 1 × 0.1M | ")
    assert (tmp_path / "curve.svg").read_text().count("</svg>") == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / f"{FALCON}-seed0" / "model")
    assert tokenizer("k0 v1 ? k7").input_ids == [0, 9, 10, 7]
