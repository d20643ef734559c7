"""The code that a checkpoint carries, so that transformers loads it where this package is not installed.

transformers takes flat folders only: files that import one another as `from .name import ...`, found by reading such
lines, and no package that is not installed outside of `try`. So the modules are written as
`falcon_kernels/rule.py` → `falcon_kernels_rule.py`, with their imports changed and nothing else. Such a copy saves the
files that it came in.
"""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

MODEL, CONFIG = "modeling_falcon_fast_weight", "configuration_falcon_fast_weight"
KERNELS = "falcon_kernels"
AUTO_MAP = {
    "AutoConfig": f"{CONFIG}.FalconFastWeightConfig",
    "AutoModel": f"{MODEL}.FalconFastWeightModel",
    "AutoModelForCausalLM": f"{MODEL}.FalconFastWeightForCausalLM",
    "AutoModelForSequenceClassification": f"{MODEL}.FalconFastWeightForSequenceClassification",
    "AutoModelForTokenClassification": f"{MODEL}.FalconFastWeightForTokenClassification",
}


def carry_code(folder: Path) -> None:
    """Writes the code into the folder of a saved model, and into its config.json where each class lies."""
    for name, text in code_files().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = AUTO_MAP
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def code_files() -> dict[str, str]:
    """Name and text of each file."""
    here = Path(__file__).parent
    if __name__ != "falcon_hf.code_falcon_fast_weight":
        model = here / f"{MODEL}.py"
        return {Path(path).name: Path(path).read_text("utf-8") for path in (model, *get_relative_import_files(model))}
    kernels = Path(find_spec(KERNELS).origin).parent
    files: dict[str, str] = {}
    waiting = [MODEL]
    while waiting:
        name = waiting.pop()
        if f"{name}.py" in files:
            continue
        in_kernels = name.startswith(KERNELS)
        module = name.removeprefix(KERNELS).removeprefix("_") or "__init__" if in_kernels else name
        source = ((kernels if in_kernels else here) / f"{module}.py").read_text("utf-8")
        text, imported = _flat(source, in_kernels)
        origin = f"{KERNELS if in_kernels else 'falcon_hf'}/{module}.py"
        files[f"{name}.py"] = f"# {origin} of falcon-hf (Apache License 2.0), as a checkpoint carries it.\n{text}"
        waiting += imported
    return dict(sorted(files.items()))


def _flat(source: str, in_kernels: bool) -> tuple[str, list[str]]:
    """A module with its imports as they must be beside its siblings, and the names of these."""
    lines: list[str | None] = [*source.splitlines()]
    imported, unseen = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            at, indent = node.lineno - 1, " " * node.col_offset
            if node.level == 1 and not node.module:
                files = [_file(alias.name, in_kernels) for alias in node.names]
                pairs = zip(files, node.names, strict=True)
                lines[at] = "\n".join(f"{indent}from . import {file} as {alias.name}" for file, alias in pairs)
                lines[at + 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno)
                unseen.update(files)
                imported += files
            elif node.level == 1 or node.module.split(".")[0] == KERNELS:
                file = _file(node.module, in_kernels) if node.level else node.module.replace(".", "_")
                lines[at] = lines[at].replace(f"from {'.' * node.level}{node.module} ", f"from .{file} ", 1)
                imported.append(file)
        elif isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == "triton":
            at = node.lineno - 1
            lines[at] = f"try:  # so that transformers does not ask for it\n    {lines[at]}\nfinally:\n    pass"
    if unseen:
        lines.append("\nif False:  # transformers takes along the files that lines like these name")
        lines += [f"    from .{file} import *" for file in sorted(unseen)]
    return "\n".join(line for line in lines if line is not None) + "\n", imported


def _file(module: str, in_kernels: bool) -> str:
    return f"{KERNELS}_{module}" if in_kernels else module
