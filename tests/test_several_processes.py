"""Models over two processes, by tensor parallelism, FSDP2 and DDP, are those of one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import assert_same
from processes import failures, on_ranks
from tiny_models import CASES, tiny_model, tokens
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from falcon_hf import FalconFastWeightForCausalLM

RANKS = 2
TENSOR_PARALLEL = DistributedConfig(tp_size=RANKS, tp_plan="auto")
SHARDED = [case for case in CASES if case != "3a-hybrid"]  # which has one key-value head
UNEVEN = {
    "3a-hybrid": "num_key_value_heads is 1, which 2 processes cannot share; tp_size must divide it",
    "three heads": "num_attention_heads is 3, which 2 processes cannot share; tp_size must divide it",
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_when_tensor_parallel(case, folder):
    """Logits, loss, gradients, generated tokens and saved weights of a model whose heads lie on two processes."""
    one = FalconFastWeightForCausalLM.from_pretrained(folder, dtype=torch.float64)
    many = FalconFastWeightForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=TENSOR_PARALLEL)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    want, have = one(**inputs), many(**inputs)
    assert_same(whole(have.logits), want.logits, 1e-11, "logits")
    assert_same(whole(have.loss), want.loss, 1e-6, "loss")
    for _ in range(2):  # gradients add up
        many(**inputs).loss.backward()
        one(**inputs).loss.backward()
    for (name, mine), (_, other) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        assert_same(whole(mine.grad), other.grad, 1e-6, f"gradient of {name}")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(many.generate(ids, **options), one.generate(ids, **options))
    many.save_pretrained(saved := folder.with_name(f"{folder.name} again"))
    dist.barrier()
    again = FalconFastWeightForCausalLM.from_pretrained(saved, dtype=torch.float64)
    assert all(map(torch.equal, again.parameters(), one.parameters()))


def heads_are_not_shared_out(folder, message):
    with pytest.raises(ValueError, match=message):
        FalconFastWeightForCausalLM.from_pretrained(folder, distributed_config=TENSOR_PARALLEL)


def check_tensor_parallel(folder: Path):
    checks = {case: partial(same_when_tensor_parallel, case, folder / case) for case in SHARDED}
    for name, message in UNEVEN.items():
        checks[name] = partial(heads_are_not_shared_out, folder / name, message)
    return failures(checks)


def check_all(folder: Path):
    return {"tensor parallel": check_tensor_parallel(folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for case in [*SHARDED, *UNEVEN]:
        options = CASES.get(case, {"num_attention_heads": 3})
        tiny_model(torch.float64, **options).save_pretrained(folder / case)
    return on_ranks(RANKS, check_all, folder, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor parallel"])
def test_processes_give_together_what_one_gives(kind, found):
    for rank in found:
        assert len(rank[kind]) >= 7
        assert not "".join(rank[kind].values())
