"""Fine-tune a checkpoint on texts or on prompts with their completions, all weights or a LoRA adapter, with TRL.

    python examples/sft.py --output runs/sums                         the bundled checkpoint learns to add digits
    python examples/sft.py notes.txt --output runs/notes --lora 16    continues on a text
    accelerate launch --num_processes 2 examples/sft.py …             on two GPUs
    torchrun --nproc_per_node 2 examples/sft.py --cpu …               in two processes on the CPU

Data is JSONL, with `text`, or `prompt` and `completion` (only this is then learnt), in every line; or a .txt file,
in which a line that holds nothing but U+001E, the record separator, ends a document. Documents are packed: many lie in
one row, each computed as if alone. The output is a folder that AutoModelForCausalLM and `falcon-hf generate` load.

Needs what `pip install "falcon-hf[train]"` brings.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from falcon_hf.cli import bundled
from falcon_hf.finite import StopAtNonFinite

COLUMNS = ({"text"}, {"prompt", "completion"})

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


def sums() -> list[dict]:
    """All sums of two digits."""
    return [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(10) for b in range(10)]


def read_rows(path: Path) -> list[dict]:
    """The documents of a .txt file, or the lines of a .jsonl file, which have to be of one kind."""
    if not path.is_file() or path.suffix not in (".txt", ".jsonl"):
        raise RecipeError(f"{path} is not a file that ends in .txt or .jsonl.")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        documents = [document.removesuffix("\n") for document in re.split(r"(?m)^\x1e\n?", text)]
        return [{"text": document} for document in documents if document]
    rows: list[dict] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict) or set(row) not in COLUMNS or set(row) != set(rows[0] if rows else row):
            raise RecipeError(f"{path}, line {number}: all lines have text, or all have prompt and completion.")
        rows.append(row)
    return rows


@app.command()
def main(
    data: Annotated[Path | None, typer.Argument(help="Text or JSONL file; sums of two digits if not given.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/sft"),
    model: Annotated[str, typer.Option(help="Bundled name, folder or Hub name.")] = "falcon-3a.3-tiny",
    lora: Annotated[int, typer.Option(min=0, help="Rank of an adapter on all projections; 0 trains all weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Packed rows a step and device.")] = 2,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches that make a step.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a row; longer documents are split.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="1e-3 suits adapters, less suits all weights.")] = 1e-3,
    held_out: Annotated[float, typer.Option(min=0.01, max=0.5, help="Part of the documents to evaluate on.")] = 0.1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU only, in one or several processes.")] = False,
    seed: int = 0,
) -> None:
    """Fine-tune a checkpoint; prints the perplexity of held-out documents before and after."""
    set_seed(seed)
    rows = Dataset.from_list(sums() if data is None else read_rows(data))
    if len(rows) < 2:
        raise RecipeError(f"{data} holds {len(rows)} documents: it takes two, one of them to evaluate on.")
    split = rows.train_test_split(held_out, seed=seed)
    folder = bundled().get(model, model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        SFTConfig(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulate,
            max_length=length,
            packing=True,
            packing_strategy="bfd_split",
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            bf16=torch.cuda.is_available() and not cpu,
            use_cpu=cpu,
            seed=seed,
            eval_on_start=True,  # a call of evaluate before train would leave several processes unsynchronized
            logging_steps=max(1, steps // 20),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        callbacks=[StopAtNonFinite()],
    )
    if lora and trainer.is_fsdp_enabled:
        raise RecipeError(f"--lora is {lora}, but FSDP is on: train an adapter in one process or under DDP.")
    trainer.train()
    before, after = trainer.state.log_history[0]["eval_loss"], trainer.evaluate()["eval_loss"]
    if lora and trainer.is_world_process_zero():
        trainer.model.save_pretrained(output / "adapter")
        trainer.model.merge_and_unload().save_pretrained(output)
        tokenizer.save_pretrained(output)
    elif not lora:
        trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"{output}: perplexity {math.exp(before):.3f} before, {math.exp(after):.3f} after {steps} steps")
    accelerator = trainer.accelerator
    del trainer  # with a model of several processes alive, closing their group can abort or hang (torch 2.13, gloo)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        app()
    except RecipeError as error:
        sys.exit(f"sft.py: {error}")
