"""Six steps of a Trainer that saves after the third, or the last three of them: sharded_training.py FOLDER [--resume].

For `accelerate launch --config_file examples/fsdp2.yaml --fsdp_state_dict_type SHARDED_STATE_DICT`.
"""

import sys

import torch
from tiny_models import tiny_model, tokens
from transformers import Trainer, TrainingArguments

folder, resume = sys.argv[1], sys.argv[2:] == ["--resume"]
arguments = TrainingArguments(
    folder, max_steps=6, save_steps=3, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2,
    bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(), report_to=[], seed=0,
)  # fmt: skip
rows = [{"input_ids": row, "labels": row} for row in tokens(24, 20)]
trainer = Trainer(tiny_model(torch.float32, seed=int(resume)), arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
trainer.save_state()
accelerator = trainer.accelerator
del trainer  # with a model of several processes alive, closing their group can abort or hang
accelerator.free_memory()
accelerator.wait_for_everyone()
accelerator.end_training()
