"""Models go to the Hub and come back, through the real client and a small server that speaks its protocol."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub
from tiny_models import tiny_model

from falcon_hf import FalconFastWeightForCausalLM
from falcon_hf.code_falcon_fast_weight import code_files

HIDE = "import sys\nfor name in ('falcon_hf', 'falcon_kernels', 'triton'): sys.modules[name] = None\n"


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


def client(hub: Hub, home: Path, code: str, clean: bool = False) -> subprocess.CompletedProcess:
    """Runs code in a new interpreter whose Hub is `hub`, and which with `clean` cannot import this package."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = ["-I", "-c", HIDE + code] if clean else ["-c", code]
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300
    )


def test_a_pushed_model_loads_without_the_package(hub, checkpoint, tmp_path):
    """Sharded, private, on a branch: each push is one commit, and nobody reads it without the token."""
    done = client(
        hub,
        tmp_path / "home",
        f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
import falcon_hf
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})
tokenizer = AutoTokenizer.from_pretrained({str(checkpoint)!r})
tokenizer.push_to_hub("me/model", private=True, token={TOKEN!r})
model.push_to_hub("me/model", token={TOKEN!r}, max_shard_size="10KB")
model.config.eos_token_id = 7
model.push_to_hub("me/model", token={TOKEN!r}, revision="other")
ids = tokenizer("A pointer", return_tensors="pt").input_ids
print(model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist())
""",
    )
    assert done.returncode == 0, done.stderr
    files = hub.files("me/model")
    assert {name: text.encode() for name, text in code_files().items()}.items() <= files.items()
    assert "model.safetensors.index.json" in files
    assert {"README.md", "tokenizer.json", "config.json"} <= files.keys()
    assert "model.safetensors" in hub.files("me/model", "other")
    assert [len(commits) for commits in hub.branches["me/model"].values()] == [3, 4]
    assert hub.private == {"me/model": True}
    hub.cut = ["GET /me/model/resolve"]  # the client takes up where it was cut
    loaded = client(
        hub,
        tmp_path / "elsewhere",
        f"""
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
given = dict(token={TOKEN!r}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("me/model", **given)
ids = AutoTokenizer.from_pretrained("me/model", **given)("A pointer", return_tensors="pt").input_ids
print(model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist())
model.push_to_hub("me/again", token={TOKEN!r})
other = AutoModelForCausalLM.from_pretrained("me/model", revision="other", **given)
assert other.config.eos_token_id == 7 != model.config.eos_token_id
for token in (False, "hf_wrong"):
    try:
        AutoConfig.from_pretrained("me/model", token=token, trust_remote_code=True, force_download=True)
    except OSError as error:
        print("refused")
""",
        clean=True,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == done.stdout + "refused\n" * 2
    assert not hub.cut
    again = hub.files("me/again")
    assert {name: text.encode() for name, text in code_files().items()}.items() <= again.items()
    assert b"me/model" not in again["config.json"]


def test_what_fails_publishes_nothing_and_can_be_repeated(hub, tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "README.md").write_text("My own card.")
    hub.cut = ["PUT /large", "POST /api/models/me/model/commit"]
    done = client(
        hub,
        tmp_path / "home",
        f"""
import falcon_hf
model = falcon_hf.FalconFastWeightForCausalLM.from_pretrained({str(tmp_path / "model")!r})
for token in ("hf_wrong", {TOKEN!r}, {TOKEN!r}):
    try:
        model.save_pretrained({str(tmp_path / "saved")!r}, push_to_hub=True, repo_id="me/model", token=token)
        print("published")
    except Exception as error:
        print(str(error).splitlines()[0])
""",
    )
    assert done.returncode == 0, done.stderr
    wrong, cut, published = done.stdout.splitlines()
    assert "401" in wrong
    assert "hf_wrong" not in wrong
    assert "disconnected" in cut
    assert published == "published"
    assert len(hub.branches["me/model"]["main"]) == 2
    assert {"model.safetensors", "config.json", *code_files()} <= hub.files("me/model").keys()
    assert hub.files("me/model")["README.md"] == b"My own card."
    assert (
        sum(request.startswith("PUT /large") for request in hub.requests) == 2
    )  # cut, and again; not at the third push
    assert {path.name for path in (tmp_path / "saved").iterdir()} == hub.files("me/model").keys() - {".gitattributes"}


def test_push(hub, checkpoint, tmp_path):
    """The command, run three times: refused, then sharded weights, then whole ones in their place."""
    model = FalconFastWeightForCausalLM.from_pretrained(checkpoint)
    for name, size in (("sharded", "10KB"), ("whole", "1GB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).write_bytes((checkpoint / file).read_bytes())
        for path in (tmp_path / name).glob("*.py"):
            path.unlink()  # an older checkpoint has no code yet
        (tmp_path / name / "optimizer.pt").write_bytes(b"large and of no use to others")
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n")
    done = client(
        hub,
        tmp_path / "home",
        f"""
import os, sys
from falcon_hf import cli
for token, name in (("hf_wrong", "sharded"), ({TOKEN!r}, "sharded"), ({TOKEN!r}, "whole")):
    os.environ["HF_TOKEN"] = token
    sys.argv = ["falcon-hf", "push", f"{tmp_path}/{{name}}", "me/model", "--private"]
    try:
        cli.main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    _, first, second = hub.branches["me/model"]["main"]
    assert done.stdout.splitlines() == [
        "ended with 2",
        *(f"{hub.url}/me/model/commit/{first}", "ended with None"),
        *(f"{hub.url}/me/model/commit/{second}", "ended with None"),
    ]
    assert "falcon-hf: cannot publish me/model: the Hub does not take your token for it; hf auth login" in done.stderr
    assert "not published: optimizer.pt" in done.stderr
    assert hub.private == {"me/model": True}
    common = {".gitattributes", "README.md", "config.json", "generation_config.json", *code_files()}
    common |= {"tokenizer.json", "tokenizer_config.json"}
    assert hub.commits[second].keys() == common | {"model.safetensors"}
    assert {name for name in hub.commits[first] if name.endswith(".index.json")} == {"model.safetensors.index.json"}
    assert b"auto_map" in hub.commits[second]["config.json"]


def test_a_push_that_fails_says_why_and_publishes_nothing(hub, checkpoint, tmp_path):
    """A card that the Hub does not take, connections that are cut, storage it does not offer; then onto a branch."""
    pytest.importorskip("hf_xet")
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    shutil.copytree(tmp_path / "model", tmp_path / "unheard-of")
    (tmp_path / "unheard-of" / "README.md").write_text("---\nlicense: unheard-of\n---\n")
    hub.cut = ["PUT /large", "POST /api/models/me/model/commit"]
    done = client(
        hub,
        tmp_path / "home",
        f"""
import os, sys
from huggingface_hub import constants
from falcon_hf import cli
os.environ["HF_TOKEN"] = {TOKEN!r}
for name, xet in (("unheard-of", False), ("model", True), ("model", False), ("model", False)):
    constants.HF_HUB_DISABLE_XET = not xet
    sys.argv = ["falcon-hf", "push", f"{tmp_path}/{{name}}", "me/model", "--branch", "next"]
    try:
        cli.main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert not hub.cut
    (first,) = hub.branches["me/model"]["main"]
    assert hub.branches["me/model"]["next"][0] == first
    (published,) = hub.branches["me/model"]["next"][1:]
    ended = ["ended with 2"] * 3
    assert done.stdout.splitlines() == [*ended, f"{hub.url}/me/model/commit/{published}", "ended with None"]
    said = [line for line in done.stderr.splitlines() if line.startswith("falcon-hf: ")]
    assert said[0] == 'falcon-hf: Invalid metadata in README.md. - "license" must be one of a list'
    for line, words in zip(said[1:], ("403", "disconnected"), strict=True):
        assert line.startswith("falcon-hf: cannot publish me/model: ")
        assert words in line, line


def test_a_full_disk_publishes_nothing_and_spoils_no_download(hub, tmp_path):
    """As far as the files of a process are limited in size: the weights do not fit, all else does."""
    pytest.importorskip("resource")
    done = client(
        hub,
        tmp_path / "home",
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
import torch
from tiny_models import tiny_model
from falcon_hf import FalconFastWeightForCausalLM
model = tiny_model(torch.float32, vocab_size=4000)
unlimited = getrlimit(RLIMIT_FSIZE)
for room in (False, True):
    setrlimit(RLIMIT_FSIZE, unlimited if room else (100_000, unlimited[1]))
    try:
        model.push_to_hub("me/model", token={TOKEN!r})
        print("published", flush=True)
    except Exception as error:
        print(str(error).splitlines()[0], flush=True)
for room in (False, True):
    setrlimit(RLIMIT_FSIZE, unlimited if room else (100_000, unlimited[1]))
    try:
        read = FalconFastWeightForCausalLM.from_pretrained("me/model")
        print(torch.equal(read.lm_head.weight, model.lm_head.weight))
    except OSError as error:
        print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    not_published, published, not_loaded, loaded = done.stdout.splitlines()
    assert "File too large" in not_published
    assert "File too large" in not_loaded
    assert (published, loaded) == ("published", "True")
    assert len(hub.branches["me/model"]["main"]) == 2
