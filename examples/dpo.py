"""Teach a checkpoint to prefer one completion to another (direct preference optimization), with TRL.

    python examples/dpo.py --output runs/sums        right sums of two digits are preferred to wrong ones
    python examples/dpo.py pairs.jsonl --lora 16     pairs of your own, through a LoRA adapter

Data is JSONL with `prompt`, `chosen` and `rejected` in every line. The output is a folder that AutoModelForCausalLM
and `falcon-hf generate` load.

Needs what `pip install "falcon-hf[train]"` brings.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer

from falcon_hf.cli import bundled

COLUMNS = {"prompt", "chosen", "rejected"}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


def sums() -> list[dict]:
    """All sums of two digits, and each with a result that is one too large."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [{"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a, b in pairs]


def read_pairs(path: Path) -> list[dict]:
    """The lines of a .jsonl file, which have to have a prompt and two completions."""
    if not path.is_file() or path.suffix != ".jsonl":
        raise RecipeError(f"{path} is not a file that ends in .jsonl.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict) or set(row) != COLUMNS:
            raise RecipeError(f"{path}, line {number}: all lines have prompt, chosen and rejected.")
        rows.append(row)
    return rows


@app.command()
def main(
    data: Annotated[Path | None, typer.Argument(help="JSONL file; right and wrong sums if not given.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/dpo"),
    model: Annotated[str, typer.Option(help="Bundled name, folder or Hub name.")] = "falcon-3a.3-tiny",
    lora: Annotated[int, typer.Option(min=0, help="Rank of an adapter on all projections; 0 trains all weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs a step and device.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches that make a step.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens of prompt and completion; the rest is cut off.")] = 256,
    learning_rate: float = 1e-4,
    beta: Annotated[float, typer.Option(help="How closely the model is held to what it was.")] = 0.1,
    held_out: Annotated[float, typer.Option(min=0.01, max=0.5, help="Part of the pairs to evaluate on.")] = 0.1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU only, in one or several processes.")] = False,
    seed: int = 0,
) -> None:
    """Train on pairs; prints which part of the held-out pairs has gained on the side of the chosen completion."""
    set_seed(seed)
    pairs = Dataset.from_list(sums() if data is None else read_pairs(data))
    if len(pairs) < 2:
        raise RecipeError(f"{data} holds {len(pairs)} pairs: it takes two, one of them to evaluate on.")
    split = pairs.train_test_split(held_out, seed=seed)
    folder = bundled().get(model, model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # An adapter switched off is the model as it was; without one, that is a copy of its own.
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        ref_model=None if lora else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulate,
            max_length=length,
            learning_rate=learning_rate,
            beta=beta,
            bf16=torch.cuda.is_available() and not cpu,
            use_cpu=cpu,
            seed=seed,
            logging_steps=max(1, steps // 20),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if lora and trainer.is_world_process_zero():
        trainer.model.save_pretrained(output / "adapter")
        trainer.model.merge_and_unload().save_pretrained(output)
        tokenizer.save_pretrained(output)
    elif not lora:
        trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"{output}: {metrics['eval_rewards/accuracies']:.0%} of held-out pairs gained, {steps} steps")
    accelerator = trainer.accelerator
    del trainer  # with a model of several processes alive, closing their group can abort or hang (torch 2.13, gloo)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        app()
    except RecipeError as error:
        sys.exit(f"dpo.py: {error}")
