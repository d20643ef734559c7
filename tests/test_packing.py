"""Packed documents in training, as each collator of transformers and TRL marks them, equal the documents alone."""

import pytest
import torch
from test_training import train
from tiny_models import CASES, RULES, tiny_model, tokens
from transformers import DataCollatorWithFlattening

import falcon_hf.modeling_falcon_fast_weight as modeling

LENGTHS = (3, 1, 9, 2, 5)
DOCUMENTS = [{"input_ids": tokens(length, seed=i).tolist()} for i, length in enumerate(LENGTHS)]
POSITIONS, FLASH, SEQ_IDX = "return_position_ids", "return_flash_attn_kwargs", "return_seq_idx"
COLLATIONS = {
    "positions": {},
    "positions-from-2": {"position_ids_start": 2},
    "flash": {FLASH: True},
    "all": {FLASH: True, SEQ_IDX: True},
    "flash-only": {POSITIONS: False, FLASH: True},
    "seq-idx-only": {POSITIONS: False, SEQ_IDX: True},
}


def collated(options):
    try:
        collator = DataCollatorWithFlattening(**options)
    except TypeError:
        pytest.skip(f"this transformers has no collator with {options}")
    return collator(DOCUMENTS)


def loss_and_gradients(case, batches):
    """The mean loss of all tokens that are predicted in the batches, and its gradients."""
    model = tiny_model(**CASES[case]).train()
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    losses = [model(**batch, num_items_in_batch=count).loss for batch in batches]
    sum(losses).backward()
    return {"loss": sum(losses).detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


def assert_as_alone(case, packed):
    alone = [torch.tensor([document["input_ids"]]) for document in DOCUMENTS]
    expected = loss_and_gradients(case, [{"input_ids": ids, "labels": ids} for ids in alone])
    ours = loss_and_gradients(case, [packed])
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=2e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("case", [*RULES, "3a-hybrid"])
@pytest.mark.parametrize("collation", COLLATIONS)
def test_flattened_documents_equal_each_alone(case, collation):
    batch = collated(COLLATIONS[collation])
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    assert_as_alone(case, batch)


@pytest.mark.parametrize("case", [*RULES, "3a-hybrid"])
def test_what_trl_packs_equals_each_alone(case):
    sft = pytest.importorskip("trl.trainer.sft_trainer", reason="trl is not installed")
    ids = [token for document in DOCUMENTS for token in document["input_ids"]]
    collator = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collator([{"input_ids": ids, "labels": ids, "seq_lengths": list(LENGTHS)}])
    assert {"position_ids", "cu_seq_lens_q", "max_length_q"} <= batch.keys()
    assert_as_alone(case, batch)


@pytest.mark.parametrize("collation", COLLATIONS)
def test_trainer_takes_flattened_batches(collation, tmp_path):
    collated(COLLATIONS[collation])
    data = [{"input_ids": (ids := tokens(LENGTHS[i % 5] + 1, seed=i)), "labels": ids} for i in range(8)]
    for example in data:
        example["labels"] = torch.cat([torch.tensor([-100]), example["input_ids"][1:]])
    options = {"max_steps": 1, "gradient_checkpointing": True, "data": data}
    alone = train(tmp_path, **options, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    collator = DataCollatorWithFlattening(**COLLATIONS[collation])
    packed = train(tmp_path, **options, data_collator=collator)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


def test_documents_may_be_numbered_in_rows_of_a_batch():
    model, ids = tiny_model(**CASES["3a-hybrid"]), tokens(2, 6)
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 2, 2]])
    with torch.no_grad():
        packed = model(ids, seq_idx=numbers).logits
        for row, start, end in ((0, 0, 2), (0, 2, 6), (1, 0, 4), (1, 4, 6)):
            alone = model(ids[row : row + 1, start:end]).logits[0]
            torch.testing.assert_close(packed[row, start:end], alone, rtol=0, atol=1e-11)
    for extra in ({"attention_mask": torch.ones_like(ids)}, {"cache": modeling.falcon_cache(model.config)}):
        with pytest.raises(ValueError, match="seq_idx is given with attention_mask or cache"):
            model(ids, seq_idx=numbers, **extra)
