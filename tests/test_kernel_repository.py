"""The kernels as a repository of their own: current, loaded by Hugging Face's `kernels`, and put into a model."""

import ast
import errno
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import falcon_kernels
import huggingface_hub
import interpreter
import pytest
import torch
from cases import INPUTS, make_inputs, make_state
from falcon_kernels import Rule
from falcon_kernels.layers import FalconAttention
from hub_server import TOKEN, Hub
from tiny_models import CASES, tiny_model, tokens
from transformers import KernelConfig
from transformers.utils import is_kernels_available

from falcon_hf.kernel_repository import VERSION, write_kernel_repository

PACKAGE = Path(falcon_kernels.__file__).parent
VARIANTS = ("torch-cpu", "torch-cuda")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "falcon-kernels"
    write_kernel_repository(folder)
    return folder


@pytest.fixture(scope="module")
def copy(repository):
    """The kernels as the library loads them from a folder."""
    return pytest.importorskip("kernels").get_local_kernel(repository)


def test_each_variant_is_the_package_and_says_so(repository):
    modules = {path.name: path.read_bytes() for path in PACKAGE.glob("*.py")}
    ids = set()
    for variant in VARIANTS:
        folder = repository / "build" / variant
        assert {path.name: path.read_bytes() for path in folder.glob("*.py")} == modules
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["digest"]["files"].keys() == modules.keys()
        assert metadata["id"].startswith(f"falcon_kernels_{variant.removeprefix('torch-')}_")
        ids.add(metadata["id"])
    assert len(ids) == 2
    assert {path.name for path in repository.iterdir()} == {"README.md", "build"}
    ast.parse((repository / "README.md").read_text().split("```python\n")[1].split("```")[0])


def test_metadata_is_what_the_library_reads(repository):
    rust = pytest.importorskip("kernels._rust", reason="kernels 0.17 and later check digests")
    for variant in VARIANTS:
        folder = repository / "build" / variant
        metadata = rust.Metadata.read_from_file(folder / "metadata.json")
        metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, folder))
        assert (metadata.name.python_name, metadata.version) == ("falcon_kernels", VERSION)
        assert variant == f"torch-{str(metadata.backend.backend_type).lower()}"


def test_the_command_writes_a_new_folder_or_nothing(call, tmp_path, monkeypatch):
    folder = tmp_path / "made" / "falcon-kernels"
    code, out, err = call("kernels", folder, "--name", "me/fast")
    assert (code, out, err) == (0, "", f"{folder} written\n")
    assert 'get_kernel("me/fast", version=1, trust_remote_code=True)' in (folder / "README.md").read_text()
    (folder / "README.md").write_text("mine")
    assert call("kernels", folder)[::2] == (
        2,
        f"falcon-hf: {folder} is there already; a kernel repository is written into a new folder.\n",
    )
    assert (folder / "README.md").read_text() == "mine"
    assert call("kernels", tmp_path / "other", "--name", "fast")[0] == 2
    write = Path.write_bytes

    def full_disk(path, data):
        if path.name == "metadata.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    code, _, err = call("kernels", tmp_path / "other")
    assert (code, err) == (2, f"falcon-hf: cannot write {tmp_path / 'other'}: No space left on device.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


RUNS = [*((name, "torch") for name in falcon_kernels.RULES), ("falcon_1", "triton"), ("falcon_2a", "triton")]


@pytest.mark.parametrize(("name", "impl"), RUNS)
def test_a_copy_computes_what_the_package_does(copy, name, impl):
    """Forward and backward, the package's own rule and states being taken and given back."""
    if impl == "triton" and not (interpreter.USABLE or torch.cuda.is_available()):
        pytest.skip("kernels run nowhere here")
    rule = Rule(name)
    results = []
    for package in (falcon_kernels, copy):
        inputs = make_inputs(rule, B=1, T=20, H=2, K=16, V=16, dtype=torch.float32)
        leaves = [inputs[name].requires_grad_() for name in INPUTS]
        out = package.falcon_attention(*leaves, rule=rule, impl=impl, output_final_state=True)
        state = falcon_kernels.FalconState(*out.final_state)
        rest = package.falcon_attention(*leaves, rule=rule, impl=impl, initial_state=state)
        gradients = torch.autograd.grad(out.output.square().sum() + rest.output.sum(), leaves)
        results.append([out.output, *(t for t in out.final_state if t is not None), rest.output, *gradients])
    for mine, its in zip(*results, strict=True):
        assert torch.equal(mine, its)
    assert type(out.final_state) is copy.FalconState is not falcon_kernels.FalconState


@pytest.mark.skipif(not (interpreter.USABLE or torch.cuda.is_available()), reason="kernels run nowhere here")
def test_ops_of_a_copy_lie_in_the_namespace_of_its_id(repository, copy):
    variant = "torch-cuda" if torch.version.cuda else "torch-cpu"
    name = json.loads((repository / "build" / variant / "metadata.json").read_text())["id"]
    assert copy.__name__ == name
    for package in (falcon_kernels, copy):
        for module in ("triton_attention", "triton_step"):
            importlib.import_module(f"{package.__name__}.{module}")
        ops = getattr(torch.ops, package.__name__)
        assert ops.attention.default.namespace == package.__name__
        assert ops.step.default.namespace == package.__name__


def test_the_same_kernels_in_two_folders_are_loaded_once(copy, tmp_path):
    import kernels

    write_kernel_repository(tmp_path / "again")
    again = kernels.get_local_kernel(tmp_path / "again")
    assert again is not copy
    assert again.falcon_attention is copy.falcon_attention


def test_the_layer_takes_a_token_without_gradients_as_a_step():
    rule = Rule("falcon_3a")
    token, state = [make_inputs(rule, T=1)[name] for name in INPUTS], make_state(rule)
    before = state.map(torch.clone)
    wanted, after = falcon_kernels.falcon_step(*(t[:, 0] for t in token), state.map(torch.clone), rule=rule)
    token[2].requires_grad_()
    out = FalconAttention()(*token, rule, state)
    assert all(map(torch.equal, state[:-1], before[:-1]))  # all but the normalizer, which it has not
    torch.testing.assert_close(out.output[:, 0], wanted)
    with torch.no_grad():
        out = FalconAttention()(*token, rule, state)
    assert out.final_state is state
    assert all(map(torch.equal, state[:-1], after[:-1]))
    assert torch.equal(out.output[:, 0], wanted)


@pytest.mark.parametrize("case", ["falcon_3", "2-gate-values", "3a-normalized"])
def test_the_layer_is_put_into_a_model(repository, copy, case):
    """Loss, gradients and generated text are those of the model with its own layer."""
    import kernels

    kernels.replace_kernel_forward_from_hub(FalconAttention, "FalconAttention")  # what transformers does, where it can
    ids, results = tokens(2, 9), []
    layer = kernels.LocalLayerRepository(repository, layer_name="FalconAttention")
    for given in (False, True):
        model = tiny_model(torch.float32, **CASES[case])
        if given:
            with kernels.use_kernel_mapping({"FalconAttention": {"cpu": layer}}, inherit_mapping=False):
                mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
                kernels.kernelize(model, mode=mode, device="cpu")
        forwards = {block.linear_attn.recurrence.forward.__func__ for block in model.model.layers}
        assert forwards == {(copy.layers if given else falcon_kernels.layers).FalconAttention.forward}
        loss = model(ids, labels=ids).loss
        loss.backward()
        text = model.generate(ids, max_new_tokens=5, do_sample=False)
        results.append([loss, text, *(weight.grad for weight in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(not is_kernels_available(), reason="transformers takes another version of kernels")
@pytest.mark.parametrize("configured", [False, True])
def test_use_kernels_of_transformers_takes_the_layer(repository, copy, configured, tmp_path, monkeypatch):
    import kernels

    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    layer = kernels.LocalLayerRepository(repository, layer_name="FalconAttention")
    options, mapping = {"use_kernels": True}, {"FalconAttention": {"cpu": layer}}
    if configured:  # a KernelConfig is for GPUs: so told to take its entry on a CPU

        def add(name, device, repo, mode, mapping):
            assert (name, device) == ("FalconAttention", "cpu")
            mapping[name] = {device: {mode: layer}}

        monkeypatch.setattr("transformers.utils.kernel_config.add_to_mapping_local", add)
        given = {"FalconAttention": f"{repository}:FalconAttention"}
        options, mapping = {"kernel_config": KernelConfig(given, use_local_kernel=True)}, {}
    with kernels.use_kernel_mapping(mapping):
        read = type(model).from_pretrained(tmp_path, **options)
    forwards = {block.linear_attn.recurrence.forward.__func__ for block in read.model.layers}
    assert forwards == {copy.layers.FalconAttention.forward}
    assert torch.equal(model(tokens(2, 9)).logits, read(tokens(2, 9)).logits)


@pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="huggingface_hub 1 uploads no kernels")
def test_published_with_the_documented_command_and_loaded_from_the_hub(repository, tmp_path):
    pytest.importorskip("kernels")
    help_text = (Path(falcon_kernels.__file__).parents[2] / "falcon_hf" / "cli.py").read_text()
    command = "hf upload me/falcon-kernels falcon-kernels --repo-type kernel --revision v1 --delete"
    assert f'{command} "build/*"' in help_text
    with Hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
        run = {"cwd": repository.parent, "env": environment, "capture_output": True, "text": True, "timeout": 300}
        hf = [sys.executable, "-m", "huggingface_hub.cli.hf", *command.split()[1:], "build/*"]
        done = subprocess.run(hf, **run)
        assert done.returncode == 0, done.stderr
        files = hub.files("kernels/me/falcon-kernels", "v1")
        wanted = {str(p.relative_to(repository)): p.read_bytes() for p in repository.rglob("*.*") if p.is_file()}
        assert files == {**wanted, ".gitattributes": b""}
        code = """
import torch
from kernels import get_kernel
try:
    get_kernel("me/falcon-kernels", version=1)
except ValueError:
    print("refused")
falcon = get_kernel("me/falcon-kernels", version=1, trust_remote_code=True)
x, gain = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1)
print(falcon.falcon_attention(x, x, x, gain, gain, rule=falcon.Rule("falcon_1")).output.isfinite().all().item())
"""
        loaded = subprocess.run([sys.executable, "-I", "-c", code], **run)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines() == ["refused", "True"]
