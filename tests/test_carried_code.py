"""A checkpoint brings its own code along: it loads where neither falcon_hf nor falcon_kernels nor Triton is."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import falcon_kernels
import interpreter
import pytest
import torch
from tiny_models import CASES, tiny_model, tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports, get_relative_imports

from falcon_hf import FalconFastWeightForCausalLM
from falcon_hf.code_falcon_fast_weight import AUTO_MAP, code_files

CLEAN = """
import sys
for name in ("falcon_hf", "falcon_kernels", "triton"):
    sys.modules[name] = None  # importing them is an error
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
"""


def clean_python(code: str, home: Path) -> str:
    """Runs code in a new interpreter that cannot import this package, and gives what it printed."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    command = [sys.executable, "-I", "-c", CLEAN + code]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def modules(tmp_path, monkeypatch) -> None:
    """An empty place for the modules that transformers copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


def test_loads_and_generates_the_same_without_the_package(tmp_path):
    ids, expected = tokens(1, 5), []
    for number, case in enumerate(("falcon_3", "2-gate-values", "3a-hybrid")):
        model = tiny_model(torch.float32, **CASES[case])
        model.save_pretrained(tmp_path / f"model-{number}")
        expected.append(model.generate(ids, max_new_tokens=10, do_sample=False)[0].tolist())
    printed = clean_python(
        f"""
for number in range(3):
    model = AutoModelForCausalLM.from_pretrained(f"model-{{number}}", trust_remote_code=True)
    model.save_pretrained(f"again-{{number}}")
    again = AutoModelForCausalLM.from_pretrained(f"again-{{number}}", trust_remote_code=True)
    options = {{"custom_generate": again.generate_on_device}} if number < 2 else {{}}  # not for full_attention
    print(again.generate(torch.tensor({ids.tolist()}), max_new_tokens=10, do_sample=False, **options)[0].tolist())
head = AutoModelForSequenceClassification.from_pretrained("again-0", trust_remote_code=True, num_labels=3)
head.save_pretrained("head")
""",
        tmp_path,
    )
    assert printed.split("\n")[:3] == [str(line) for line in expected]
    for number in range(3):
        first, second = (
            {p.name: p.read_bytes() for p in (tmp_path / f"{n}-{number}").iterdir()} for n in ("model", "again")
        )
        assert first == second
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "head").score.out_features == 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again-0").__module__.startswith("falcon_hf.")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["falcon_1", "falcon_3a"])
def test_without_the_package_it_runs_its_kernels_on_a_gpu(case, tmp_path):
    ids = tokens(2, 70)
    model = tiny_model(torch.float32, **CASES[case])
    model.save_pretrained(tmp_path / "model")
    expected = model.generate(ids, max_new_tokens=10, do_sample=False).tolist()
    code = f"""
del sys.modules["triton"]
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).cuda()
print(model.generate(torch.tensor({ids.tolist()}).cuda(), max_new_tokens=10, do_sample=False).tolist())
print(sorted(name.split(".")[-1] for name in sys.modules if "triton_attention" in name or "triton_step" in name))
print(type(model).__module__.split(".")[0])
"""
    generated, kernels, module = clean_python(code, tmp_path).splitlines()
    assert generated == str(expected)
    assert kernels == "['falcon_kernels_triton_attention', 'falcon_kernels_triton_step']"
    assert module == "transformers_modules"


@pytest.mark.parametrize("trust", [None, False, True])
def test_the_package_s_code_is_used_where_it_is_installed(trust, tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    (tmp_path / "modeling_falcon_fast_weight.py").write_text("raise AssertionError")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
    assert type(model) is FalconFastWeightForCausalLM
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_falcon_fast_weight.py").read_text() == code_files()["modeling_falcon_fast_weight.py"]


def test_the_code_is_saved_with_every_model_and_is_the_package_s(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    assert {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.py")} == code_files()
    saved = FalconFastWeightForCausalLM.config_class.from_pretrained(tmp_path)
    assert saved.auto_map == AUTO_MAP


def test_the_code_is_flat_and_needs_nothing_but_torch_and_transformers(tmp_path):
    files = code_files()
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    needed = set()
    for path in tmp_path.iterdir():
        needed.update(get_imports(path))
        assert {f"{name}.py" for name in get_relative_imports(path)} <= files.keys()
    assert needed - sys.stdlib_module_names == {"torch", "transformers", "huggingface_hub"}
    assert all(len(text) < 60_000 for text in files.values())
    assert sum(map(len, files.values())) < 560_000
    assert f"its code, {len(files)} files of Python" in (Path(__file__).parents[1] / "README.md").read_text("utf-8")


@pytest.mark.skipif(not (interpreter.USABLE or torch.cuda.is_available()), reason="kernels run nowhere here")
def test_kernels_of_several_copies_live_beside_those_of_the_package(tmp_path, modules):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 20, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    gain = ridge = torch.ones(1, 20, 2, device=device)
    weight = torch.ones(32, 4, device=device)
    step = [x[:, 0] for x in (q, k, v, gain, ridge)]
    packages = {"falcon_kernels.": falcon_kernels}  # by what the names of their modules begin with
    for name in ("one", "two", "a/last", "b/last"):
        tiny_model(torch.float32).save_pretrained(tmp_path / name)
        copy = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(tmp_path / name))
        package = sys.modules[f"{copy.__module__.rpartition('.')[0]}.falcon_kernels"]
        packages[f"{package.__name__}_"] = package
    assert len(packages) == 4  # transformers takes folders of one name and one code for the same

    def run(prefix, package):
        rule = package.Rule("falcon_1")
        out = package.falcon_attention(q, k, v, gain, ridge, rule=rule, impl="triton", output_final_state=True)
        package.falcon_step(*step, out.final_state, rule=rule, impl="triton")
        token = importlib.import_module(prefix + "triton_token")
        torch.testing.assert_close(token.silu_product(q, k), torch.nn.functional.silu(q) * k)
        expected = falcon_kernels.falcon_attention(q, k, v, gain, ridge, rule=rule, impl="torch")
        torch.testing.assert_close(out.output, expected.output, atol=1e-4, rtol=1e-4)
        for function, given in (("short_convolution", (q.flatten(2), weight, 16)), ("gated_norm", (q, weight[:16, 0]))):
            found, expected = (getattr(package, function)(*given, impl=impl) for impl in ("triton", "torch"))
            torch.testing.assert_close(found, expected)
        projected = importlib.import_module(prefix + "triton_mlp").OP(q, k, weight[:, :1].expand(-1, 16))
        torch.testing.assert_close(
            projected, (torch.nn.functional.silu(q) * k).sum(-1, keepdim=True).expand(-1, -1, -1, 32)
        )

    for prefix, package in packages.items():
        run(prefix, package)
    assert len({sys.modules[f"{prefix}triton_layout"].NAMESPACE for prefix in packages}) == 4
    prefix, package = packages.popitem()
    for name in (
        "attention",
        "convolution",
        "mlp",
        "norm",
        "step",
        "token",
    ):  # as a notebook does when they were edited
        importlib.reload(sys.modules[f"{prefix}triton_{name}"])
    run(prefix, package)
