"""Loads the recipes of examples/ as modules, without their folder on the path of every other test."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    """examples/NAME.py, loaded once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def steps_logged(folder: Path) -> list[dict]:
    """What a Trainer logged of its steps, of the state that it saved."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]
