"""The fine-tuning recipe under ZeRO-3 of DeepSpeed, on two processes, is what it is under DDP."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes import steps_logged
from transformers import AutoModelForCausalLM

import falcon_hf  # noqa: F401

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("trl", reason="trl is not installed")
EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCHERS = {
    "zero3": ["accelerate.commands.launch", "--config_file", str(EXAMPLES / "zero3.yaml"), "--num_processes", "2"],
    "ddp": ["torch.distributed.run", "--nproc_per_node", "2"],
}


def test_the_recipe_under_zero_3_is_that_under_ddp(tmp_path):
    logs, weights = {}, {}
    on_gpus = torch.cuda.device_count() > 1
    for name, launcher in LAUNCHERS.items():
        folder = tmp_path / name
        command = [sys.executable, "-m", *launcher, str(EXAMPLES / "sft.py"), "--steps", "3", "--output", str(folder)]
        environment = os.environ | ({} if on_gpus else {"DS_ACCELERATOR": "cpu"})
        command += [] if on_gpus else ["--cpu"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        logs[name] = [(entry["loss"], entry["grad_norm"]) for entry in steps_logged(folder)]
        weights[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    bound = 2e-2 if on_gpus else 1e-4  # bfloat16 on GPUs
    assert len(logs["ddp"]) == 3
    for have, want in zip(logs["zero3"], logs["ddp"], strict=True):
        assert have == pytest.approx(want, rel=bound)
    assert weights["zero3"].keys() == weights["ddp"].keys()
    if not on_gpus:
        for name, want in weights["ddp"].items():
            torch.testing.assert_close(weights["zero3"][name], want, rtol=0, atol=1e-4)
