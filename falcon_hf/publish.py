"""A saved checkpoint to the Hub: checked first, then all of it in one commit."""

import json
import re
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from . import modeling_falcon_fast_weight as modeling
from .card import read_checkpoint, weight_files
from .code_falcon_fast_weight import AUTO_MAP, code_files

ARCHITECTURES = [place.split(".")[1] for auto, place in AUTO_MAP.items() if auto != "AutoConfig"]
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
OTHERS = re.compile(
    r"config\.json|model\.safetensors\.index\.json|generation_config\.json|README\.md|LICENSE(\.\w+)?"
    r"|tokenizer\.json|tokenizer\.model|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|vocab\.txt|merges\.txt|chat_template\.jinja"
)


def publish(
    folder: Path, repository: str, private: bool = False, branch: str | None = None, token: str | None = None
) -> tuple[str, list[str]]:
    """Publishes card, config, weights, tokenizer and code; weights there that these replace are deleted.

    Args:
        folder: a saved checkpoint with its card, README.md.
        repository: `owner/name`, made where it does not exist.
        private: whether a new repository is private.
        branch: where to, made from `main` where it does not exist; by default `main`.
        token: of the Hub; by default the one that `hf auth login` stored.

    Returns:
        The address of the commit, and the names in the folder that were not published.

    Raises:
        ValueError: where the checkpoint is not whole; nothing is sent then.
    """
    check_checkpoint(folder)
    names = sorted(path.name for path in folder.iterdir())
    weights = {path.name for path in weight_files(folder)}
    taken = [name for name in names if name in weights or OTHERS.fullmatch(name)]
    config = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), "auto_map": AUTO_MAP}
    made = {**code_files(), "config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    api = HfApi(token=token)
    repository = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
    if branch is not None:
        api.create_branch(repository, branch=branch, exist_ok=True)
    there = api.list_repo_files(repository, revision=branch)
    stale = [name for name in there if WEIGHTS.fullmatch(name) and name not in taken]
    commit = api.create_commit(
        repository,
        [
            *(CommitOperationAdd(name, folder / name) for name in taken if name not in made),
            *(CommitOperationAdd(name, text.encode()) for name, text in made.items()),
            *(CommitOperationDelete(name) for name in stale),
        ],
        commit_message="Upload model",
        revision=branch,
    )
    return str(commit.commit_url), [name for name in names if name not in taken and name not in made]


def check_checkpoint(folder: Path) -> None:
    """Raises ValueError unless the folder has a card, and exactly the weights that its config asks for."""
    config, weights = read_checkpoint(folder)
    if not (folder / "README.md").is_file():
        raise ValueError(f"{folder} has no README.md; falcon-hf card {folder} --license apache-2.0 writes one.")
    architecture = (config.architectures or [""])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{folder} has architecture {architecture!r}; it must be one of {', '.join(ARCHITECTURES)}.")
    with torch.device("meta"):
        model = getattr(modeling, architecture)(config)
    needed = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    for names, what in ((needed.keys() - weights.keys() - tied, "lacks"), (weights.keys() - needed.keys(), "has")):
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            because = "needs" if what == "lacks" else "does not know"
            raise ValueError(f"{folder} {what} the weight {min(names)}{rest}, which its config {because}.")
    for name, shape in weights.items():
        if shape != needed[name]:
            raise ValueError(f"{folder} has {name} of shape {list(shape)}; its config needs {list(needed[name])}.")
