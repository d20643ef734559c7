"""`transformers serve` answers from a saved checkpoint over HTTP."""

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from falcon_hf.cli import bundled

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason="transformers[serving] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [sys.executable, SERVE, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=output, stderr=output,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(OSError), urlopen(f"{url}/health"):
                break
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def post(url, **body):
    body = {"max_tokens": 8, "temperature": 0, **body}
    with urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})) as answer:
        return answer.read().decode()


@pytest.mark.long
def test_a_saved_checkpoint_is_served(url, tmp_path):
    checkpoint = shutil.copytree(bundled()["falcon-3a.3-tiny"], tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer("A pointer is\n", return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(text, skip_special_tokens=True)

    chat = {"model": str(checkpoint), "messages": [{"role": "user", "content": "A pointer is"}]}
    answer = json.loads(post(f"{url}/v1/chat/completions", **chat))
    assert answer["choices"][0]["message"]["content"] == expected
    lines = post(f"{url}/v1/chat/completions", stream=True, **chat).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    streamed = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(streamed) == expected
    assert len([piece for piece in streamed if piece]) > 1
