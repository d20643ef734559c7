"""A Trainer under FSDP2 on two GPUs saves its checkpoints in shards and goes on from them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes import steps_logged

pytest.importorskip("accelerate", reason="accelerate is not installed")
ROOT = Path(__file__).parents[1]
LAUNCH = [
    *("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "examples" / "fsdp2.yaml")),
    *("--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--num_processes", "2"),
    str(Path(__file__).with_name("sharded_training.py")),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_training_goes_on_from_shards(tmp_path):
    found = []
    for extra in ([], ["--resume"]):
        command = [sys.executable, *LAUNCH, str(tmp_path), *extra]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append({entry["step"]: entry["loss"] for entry in steps_logged(tmp_path)})
        shards = list((tmp_path / "checkpoint-3").glob("pytorch_model_fsdp_*/*.distcp"))
        assert len(shards) == 2, sorted((tmp_path / "checkpoint-3").iterdir())
        shutil.rmtree(tmp_path / "checkpoint-6")
    whole, resumed = found
    assert len(whole) == 6
    assert resumed == pytest.approx(whole, rel=1e-3)
