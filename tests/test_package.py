"""What a user installs: what is in it, what it needs, and that the pages about it are true."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STAND_IN = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, decorated): return decorated
def __getattr__(name):
    return Anything
"""
RUN_A_RULE = """
import torch
from falcon_kernels import Rule, falcon_attention
x, gain = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1)
assert falcon_attention(x, x, x, gain, gain, rule=Rule("falcon_1")).output.isfinite().all()
"""


def python(code: str) -> None:
    """Runs code in a new interpreter, from the root of the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports_of(file: Path) -> list[tuple[int, str]]:
    """Level (0 is absolute) and module of every import in a file, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


def test_imports_and_runs_without_triton_or_training_libraries():
    absent = ["triton", "accelerate", "datasets", "trl", "peft", "matplotlib", "psutil"]
    hide = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    python(f"{hide}import falcon_hf\n{RUN_A_RULE}")


def test_importing_brings_in_no_training_stack():
    names = ["transformers.trainer", "datasets", "trl", "peft", "matplotlib", "typer", "rich"]
    hide = "import sys\nsys.modules['kernels'] = None\n"  # which transformers imports where it can, rich with it
    python(f"{hide}import falcon_hf\nloaded = {set(names)} & set(sys.modules)\nassert not loaded, loaded")


def test_nothing_here_is_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert "kernels" not in PROJECT["tool"]["setuptools"]["packages"]


def test_transformers_finds_the_real_kernels_package_from_the_repository_root(tmp_path):
    version = import_utils.KERNELS_MIN_VERSION
    package, info = tmp_path / "kernels", tmp_path / f"kernels-{version}.dist-info"
    package.mkdir()
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    package.joinpath("__init__.py").write_text(STAND_IN)
    python(f"""
import sys
sys.path.insert(1, {str(tmp_path)!r})  # behind the repository, and before one that is installed
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available()
import transformers.models.llama.modeling_llama, falcon_hf, kernels
assert kernels.__file__ == {str(package / "__init__.py")!r}, kernels.__file__
""")


@pytest.mark.parametrize("file", sorted((ROOT / "kernels/falcon_kernels").glob("*.py")), ids=lambda file: file.name)
def test_kernels_import_only_their_siblings_and_torch(file):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for level, module in imports_of(file):
        assert level <= 1
        assert "." not in module if level else module.split(".")[0] in allowed, module


@pytest.mark.parametrize(
    "file", sorted((ROOT / "falcon_hf").glob("*_falcon_fast_weight.py")), ids=lambda file: file.name
)
def test_model_files_import_only_their_siblings_by_relative_names(file):
    for level, module in imports_of(file):
        assert level == 0 or (level == 1 and module and "." not in module), module
        assert not module.startswith("falcon_hf")


def test_wheel_carries_everything(tmp_path):
    source = tmp_path / "source"
    for name in ("falcon_hf", "kernels", "conversion", "model_cards"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    folders = {"falcon_hf": "falcon_hf", "falcon_kernels": "kernels/falcon_kernels"}
    folders |= {"falcon_hf/conversion": "conversion", "falcon_hf/model_cards": "model_cards"}
    for target, folder in folders.items():
        wanted = {f"{target}/{file.name}" for file in (ROOT / folder).glob("*.py")}
        assert wanted <= names, wanted - names
    cards = {
        f"falcon_hf/{file.relative_to(ROOT).as_posix()}" for file in ROOT.glob("model_cards/*/*") if file.is_file()
    }
    assert cards <= names, cards - names
    card = "falcon_hf/model_cards/falcon-3a.3-tiny/"
    assert "falcon_hf/model_cards/template.md" in names
    needed = ("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    assert {card + name for name in needed} <= names
    assert not {name for name in names if name.startswith(("kernels/", "tests/"))}
    assert "falcon-hf = falcon_hf.cli:main" in wheel.read(f"{wheel_info(names)}/entry_points.txt").decode()


def wheel_info(names: set[str]) -> str:
    return next(name.split("/")[0] for name in names if ".dist-info/" in name)


def test_version_is_the_same_everywhere():
    version = PROJECT["project"]["version"]
    assert metadata.version("falcon-hf") == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_readme_commands_are_those_of_the_pipeline():
    commands = re.findall(r"^pip install .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_readme_names_files_that_exist():
    links = re.findall(r"\]\((?!http|#)([^)#]+)|src(?:set)?=\"(?!http)([^\"]+)", README)
    missing = [link for pair in links for link in pair if link and not (ROOT / link).exists()]
    assert not missing


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
