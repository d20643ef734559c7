"""Models over two processes, by tensor parallelism, FSDP2 and DDP, are those of one process."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from cases import assert_same
from processes import failures, on_ranks
from tiny_models import CASES, RULES, tiny_model, tokens
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from falcon_hf import FalconFastWeightForCausalLM
from falcon_hf.context_parallel import context_parallel, own_part
from falcon_hf.generation_falcon_fast_weight import GRAPHS, NotOnDevice, generate_on_device

RANKS = 2
TENSOR_PARALLEL = DistributedConfig(tp_size=RANKS, tp_plan="auto")
NORMED = "2-attention-first with norms"
OPTIONS = {
    **CASES,
    NORMED: {**CASES["2-attention-first"], "attention_qk_norm": True},
    "three heads": {"num_attention_heads": 3},
}
SHARDED = [*RULES, "2-gate-values", "3a-normalized", "2-attention-first", NORMED]
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
    for _ in range(1 if case == NORMED else 2):  # gradients add up; in transformers not those of Qwen3's norms
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


def no_graph_is_made(folder):
    """`generate` goes token by token where a model's weights lie on several processes."""
    one = FalconFastWeightForCausalLM.from_pretrained(folder, dtype=torch.float64)
    many = FalconFastWeightForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=TENSOR_PARALLEL)
    ids, options = tokens(2, 5), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = one.generate(ids, **options)
    with patch.dict(GRAPHS, cpu=None):
        assert torch.equal(many.generate(ids, **options), want)
    with pytest.raises(NotOnDevice, match="does not do a model that is sharded over processes"):
        many.generate(ids, custom_generate=generate_on_device, **options)


def check_tensor_parallel(folder: Path):
    checks = {case: partial(same_when_tensor_parallel, case, folder / case) for case in SHARDED}
    checks["no graph"] = partial(no_graph_is_made, folder / "falcon_1")
    for name, message in UNEVEN.items():
        checks[name] = partial(heads_are_not_shared_out, folder / name, message)
    return failures(checks)


def steps(model, optimizer, rows, inside=nullcontext):
    """[3] losses of as many steps on `rows`."""
    losses = []
    for _ in range(3):
        with inside():
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


def trained(model, rows, inside=nullcontext):
    """Losses of three steps of AdamW, and the weights after."""
    losses = steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows, inside)
    return losses, [whole(parameter.detach()) for parameter in model.parameters()]


def mean(losses):
    dist.all_reduce(losses)
    return losses / RANKS


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def same_training(case, wrap, context=False):
    """Three steps on two processes, each with half of the rows or of their tokens, beside those of one process."""
    rows = tokens(4, 20)
    want, weights = trained(tiny_model(**CASES[case]), rows)
    model = wrap(tiny_model(**CASES[case]))
    if context:
        have, found = trained(model, own_part(rows), lambda: context_parallel(model))
    else:
        have, found = trained(model, rows.chunk(RANKS)[dist.get_rank()])
    assert_same(have if context else mean(have), want, 1e-6, "losses")
    for mine, other in zip(found, weights, strict=True):
        assert_same(mine, other, 1e-5, "weights")


def same_after_sharded_save(folder):
    """Weights and optimizer of a sharded model, saved as shards and loaded into another, which goes on alike."""
    curves = []
    for seed, way in ((0, save), (1, load)):
        model = sharded(tiny_model(seed=seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, tokens(2, 9, seed=seed))
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        way(state, checkpoint_id=folder / "shards")
        set_state_dict(model, optimizer, **{f"{name}_state_dict": part for name, part in state.items()})
        curves.append(steps(model, optimizer, tokens(2, 9)))
    assert torch.equal(*curves)
    assert curves[0][0] != curves[0][1]


def same_when_transformers_shards(folder):
    one = FalconFastWeightForCausalLM.from_pretrained(folder, dtype=torch.float64)
    many = FalconFastWeightForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=RANKS)
    )
    rows = tokens(4, 20)
    assert_same(mean(trained(many, rows.chunk(RANKS)[dist.get_rank()])[0]), trained(one, rows)[0], 1e-6)


def check_data_parallel(folder: Path):
    checks = {}
    for case in ("falcon_1", "falcon_2", "3a-hybrid"):
        checks[f"{case} DDP"] = partial(same_training, case, DistributedDataParallel)
        checks[f"{case} FSDP"] = partial(same_training, case, sharded)
    for case in ("falcon_1", "falcon_2"):
        checks[f"{case} FSDP, context"] = partial(same_training, case, sharded, context=True)
    checks["saved shards"] = partial(same_after_sharded_save, folder)
    checks["transformers"] = partial(same_when_transformers_shards, folder / "falcon_1")
    return failures(checks)


def check_all(folder: Path):
    return {"tensor parallel": check_tensor_parallel(folder), "data parallel": check_data_parallel(folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for case in [*SHARDED, *UNEVEN]:
        tiny_model(torch.float64, **OPTIONS[case]).save_pretrained(folder / case)
    return on_ranks(RANKS, check_all, folder, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor parallel", "data parallel"])
def test_processes_give_together_what_one_gives(kind, found):
    for rank in found:
        assert len(rank[kind]) >= 7
        assert not "".join(rank[kind].values())


def test_the_fsdp2_recipe_wraps_each_layer():
    config = load_config_from_file(str(Path(__file__).parents[1] / "examples" / "fsdp2.yaml")).fsdp_config
    assert config["fsdp_version"] == 2
    assert config["fsdp_transformer_layer_cls_to_wrap"] in FalconFastWeightForCausalLM._no_split_modules
