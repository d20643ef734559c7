"""The kernels as a repository for Hugging Face's `kernels`, which loads it from a folder or from the Hub.

Its layout and metadata are those of https://huggingface.co/docs/kernels/kernel-requirements. Each build variant is the
package `falcon_kernels` as it is: its modules import one another by relative names only.
"""

import base64
import hashlib
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

NAME = "falcon-kernels"
VERSION = 1  # of the interface, raised where it stops taking what it took; the branch v1 on the Hub
BACKENDS = ("cpu", "cuda")
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernel
- fast-weights
- linear-attention
---

# falcon-kernels

Fast-weight attention by the six rules of [Fast Weight Attention for Continual
Learning](https://arxiv.org/abs/2608.27763), forward and backward: Triton kernels on NVIDIA GPUs, plain PyTorch
elsewhere. Python ≥ 3.11, torch ≥ 2.6. Written by `falcon-hf kernels` from the package falcon-hf.

```python
import torch
from kernels import get_kernel

falcon = get_kernel("{repository}", version={version}, trust_remote_code=True)
B, T, H, K, V = 2, 100, 4, 32, 64
q, k = torch.randn(2, B, T, H, K)  # after norm and feature map
v = torch.randn(B, T, H, V)
gain, ridge = 2 * torch.rand(B, T, H), torch.rand(B, T, H)
out = falcon.falcon_attention(q, k, v, gain, ridge, rule=falcon.Rule("falcon_1")).output
```

`layers.FalconAttention` is the layer of that name in Falcon models of transformers, which use the kernels that they
bring along unless they are given these:

```python
from transformers import AutoModelForCausalLM, KernelConfig

layer = ("{repository}:FalconAttention", {{"version": {version}, "trust_remote_code": True}})
model = AutoModelForCausalLM.from_pretrained(
    "owner/model", trust_remote_code=True, device_map="cuda", kernel_config=KernelConfig({{"FalconAttention": layer}})
)
```
"""


def write_kernel_repository(folder: Path, repository: str = f"owner/{NAME}") -> None:
    """Writes the repository into a new folder, all of it or nothing.

    Args:
        folder: must not exist.
        repository: the name on the Hub that its card has.

    Raises:
        ValueError: where the folder is there already.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already; a kernel repository is written into a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as written:
        for name, data in kernel_files(repository).items():
            path = Path(written) / "repository" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        shutil.move(Path(written) / "repository", folder)


def kernel_files(repository: str) -> dict[str, bytes]:
    """Name and content of each file."""
    package = Path(find_spec("falcon_kernels").origin).parent
    modules = {path.name: path.read_bytes() for path in sorted(package.glob("*.py"))}
    digests = {name: hashlib.sha256(data).digest() for name, data in modules.items()}
    content = hashlib.sha256(b"".join(digests.values())).hexdigest()[:8]
    files = {"README.md": CARD.format(repository=repository, version=VERSION).encode()}
    for backend in BACKENDS:
        metadata = {
            "name": NAME,
            "id": f"falcon_kernels_{backend}_{content}",  # the name of the imported package, and of its ops
            "version": VERSION,
            "license": "apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {
                "algorithm": "sha256",
                "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
            },
        }
        variant = f"build/torch-{backend}"
        files |= {f"{variant}/{name}": data for name, data in modules.items()}
        files[f"{variant}/metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    return files
