"""The `falcon-hf` command: text from a checkpoint, what it is and remembers, cards, conversion, kernels, the Hub."""

import json
import re
import sys
import time
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .conversion import Account
    from .inspection_falcon_fast_weight import MemoryTrace
    from .modeling_falcon_fast_weight import FalconFastWeightAttention

BUNDLED = "falcon-3a.3-tiny"
INTERRUPTED = 130
LONGEST_PICTURE = 2000  # tokens
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
EQUATIONS = {
    "falcon_1": "S = γ S + η x (v - Sᵀx)ᵀ",
    "falcon_2": "S = S Diag(γ) + x (η ⊙ (v - Sᵀx))ᵀ",
    "falcon_3": "S = γ S + (η / W) Σ x (v - Sᵀx)ᵀ over the last W pairs",
    "falcon_1a": "S = γ S + η x vᵀ",
    "falcon_2a": "S = S Diag(γ) + x (η ⊙ v)ᵀ",
    "falcon_3a": "S = γ S + (η / W) Σ x vᵀ over the last W pairs",
}

app = typer.Typer(
    help="Falcon fast-weight language models: generate text, and look into a checkpoint.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _model_option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Model", **options)


def _text_option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Text", **options)


Model = Annotated[
    str,
    _model_option(
        "--model",
        "-m",
        metavar="NAME",
        help="A bundled checkpoint, a folder, or a Hub name such as owner/model.",
    ),
]
Device = Annotated[
    str,
    _model_option(
        "--device",
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:1, mps and so on; auto is cuda where there is one, else cpu.",
    ),
]
Dtype = Annotated[
    str,
    _model_option(
        "--dtype",
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)}; auto is float32 on a CPU and the checkpoint's own elsewhere.",
    ),
]
TrustRemoteCode = Annotated[
    bool, _model_option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")
]


class UserError(Exception):
    """Something that the user can put right, said in one sentence."""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"falcon-hf {metadata.version('falcon-hf')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to go on from; read from standard input where it is left out."),
    ] = None,
    model: Model = BUNDLED,
    max_new_tokens: Annotated[int, _text_option("--max-new-tokens", "-n", help="Stop after so many tokens.")] = 128,
    sample: Annotated[
        bool | None,
        _text_option(
            "--sample/--greedy",
            help="Draw tokens at random, or take the likeliest each time; by default as the checkpoint says.",
        ),
    ] = None,
    temperature: Annotated[float | None, _text_option(help="Below 1 is more predictable, above 1 more varied.")] = None,
    top_k: Annotated[int | None, _text_option(help="Draw from the k likeliest tokens; 0 is all.")] = None,
    top_p: Annotated[
        float | None, _text_option(help="Draw from the likeliest tokens that hold this much probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _text_option(help="Above 1 makes tokens that have been there less likely.")
    ] = None,
    seed: Annotated[int | None, _text_option(help="The same seed draws the same text again.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write on from a prompt.

    The text goes to standard output as it is made, prompt first. Speed and size of the state go to standard
    error. --temperature, --top-k and --top-p imply --sample.

    **Examples**

        falcon-hf generate "A pointer is"

        falcon-hf generate "A pointer is" --greedy -n 40

        falcon-hf generate --temperature 0.7 --top-p 0.9 --seed 1 < chapter.txt > more.txt

        falcon-hf generate "Once" --model runs/my-model --device cuda --dtype bfloat16
    """
    options = _generation_options(max_new_tokens, sample, temperature, top_k, top_p, repetition_penalty, seed)
    text = _read_prompt(prompt)
    network, tokenizer = _load(model, device, dtype, trust_remote_code)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    if ids.shape[1] == 0:
        raise UserError("the prompt has no tokens; give some text.")
    if seed is not None:
        from transformers import set_seed

        set_seed(seed)
    from .generation_falcon_fast_weight import NotOnDevice

    with _status(f"reading {ids.shape[1]:,} tokens") as status:
        try:
            writer = Writer(tokenizer, text, before_text=status.stop)
            output = _generate(network, ids, writer, options)
        except NotOnDevice:
            writer = Writer(tokenizer, text, before_text=status.stop)
            output = _generate(network, ids, writer, options, on_device=False)
        except ValueError as error:
            raise UserError(_first_sentence(error)) from error
    from .cache_falcon_fast_weight import cache_nbytes

    size = cache_nbytes(_cache_of(output))
    _say(
        f"{ids.shape[1]:,} tokens read in {writer.reading_seconds:.2f} s, {writer.count:,} written at "
        f"{writer.tokens_per_second:,.1f} tokens/s, {size:,} bytes of state"
    )


@app.command()
def info(
    model: Model = BUNDLED,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say what a checkpoint is: its rule, its size, and what it keeps of a sequence.

    **Examples**

        falcon-hf info

        falcon-hf info --model runs/my-model
    """
    network, _ = _load(model, device, dtype, trust_remote_code)
    _check_type(network, model, "info")
    for name, value in _facts(network):
        print(f"{name:<18} {value}")


@app.command()
def inspect(
    text: Annotated[
        str | None, typer.Argument(help="The text to read; read from standard input where it is left out.")
    ] = None,
    model: Model = BUNDLED,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, a .png; an older one is replaced.")
    ] = Path("memory.png"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Draw what the memories of a checkpoint do while it reads a text.

    The picture has the surprise of each token, how far each head's memory was from the value that came, and how long
    each head keeps what it wrote. Needs matplotlib: pip install "falcon-hf[plots]".

    **Examples**

        falcon-hf inspect "A pointer holds an address. A null pointer holds none."

        falcon-hf inspect --model runs/my-model --output chapter.png < chapter.txt
    """
    draw = _draw()
    if output.suffix.lower() != ".png":
        raise UserError(f"--output is {str(output)!r}; it must end in .png.")
    if not output.parent.is_dir():
        raise UserError(f"--output is {str(output)!r}, but there is no folder {str(output.parent)!r}.")
    text = _read_prompt(text, "text")
    network, tokenizer = _load(model, device, dtype, trust_remote_code)
    _check_type(network, model, "inspect")
    ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.shape[1] < 2:
        raise UserError("the text is shorter than two tokens; give more of it.")
    if ids.shape[1] > LONGEST_PICTURE:
        raise UserError(f"the text has {ids.shape[1]:,} tokens; a picture shows at most {LONGEST_PICTURE:,}.")
    from .inspection_falcon_fast_weight import inspect_memory

    with _status(f"reading {ids.shape[1]:,} tokens"):
        try:
            trace = inspect_memory(network, ids)
        except ValueError as error:
            raise UserError(_first_sentence(error)) from error
    tokens = [_label(tokenizer.decode([token])) for token in ids[0].tolist()]
    try:
        with _status("drawing"):
            draw(trace, tokens, output, Path(model).name or model, network.config.rule_object)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}.") from error
    _print_trace(trace, tokens)
    _say(f"{ids.shape[1]:,} tokens drawn in {output}")


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A saved checkpoint.")]


@app.command()
def card(
    folder: Folder,
    license: Annotated[str, typer.Option("--license", help="Of the weights, by the Hub's name: apache-2.0, mit, ...")],
    name: Annotated[
        str | None, typer.Option("--name", help="owner/model on the Hub; by default the name of the folder.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FILE",
            help="What was measured; by default metrics.json of the folder, if it is there.",
        ),
    ] = None,
    language: Annotated[str | None, typer.Option("--language", help="Of the text it was trained on: en, say.")] = None,
    template: Annotated[
        Path | None,
        typer.Option("--template", metavar="FILE", help="A card of your own to fill in, in the language of Jinja."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a README.md that is there.")] = False,
) -> None:
    """Write the card of a checkpoint, README.md in its folder: its rule, how to use it, what was measured.

    **Examples**

        falcon-hf card runs/my-model --license apache-2.0 --name me/my-model --language en
    """
    from .card import write_card
    from .memory_falcon_fast_weight import write_atomically

    target = folder / "README.md"
    if target.exists() and not replace:
        raise UserError(f"{target} is there already; --replace writes a new one in its place.")
    if results is None and (folder / "metrics.json").is_file():
        results = folder / "metrics.json"
    try:
        text = write_card(folder, name or folder.resolve().name, license, results, language, template)
        write_atomically(target, text.encode())
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}.") from error
    _say(f"{target} written" + (f" with the figures of {results}" if results else "; there were no figures to put in"))


@app.command()
def push(
    folder: Folder,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="owner/model; made where it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    branch: Annotated[str | None, typer.Option("--branch", help="Where to; by default main.")] = None,
) -> None:
    """Publish a checkpoint on the Hub, with card, tokenizer and code, in one commit.

    Log in beforehand with hf auth login. What fails publishes nothing and can be repeated.

    **Examples**

        falcon-hf push runs/my-model me/my-model --private
    """
    _check_repository("REPO", repository)
    with _status("checking"):
        from .publish import publish
    try:
        address, left = publish(folder, repository, private, branch)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error  # the Hub's words on a card have several lines
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            why = "the Hub does not take your token for it; hf auth login stores another."
        else:
            why = _first_sentence(error)
        raise UserError(f"cannot publish {repository}: {why}") from error
    print(address)
    if left:
        _say(f"not published: {', '.join(left)}")


@app.command()
def kernels(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Made by this; must not be there.")],
    name: Annotated[
        str, typer.Option("--name", help="owner/name that its card gives as its place on the Hub.")
    ] = "owner/falcon-kernels",
) -> None:
    """Write the kernels as a repository for Hugging Face's kernels library.

    It loads from the folder with kernels.get_local_kernel, and from the Hub with kernels.get_kernel when it is
    published there with hf upload (huggingface_hub 2), whose branch v1 is the version.

    **Examples**

        falcon-hf kernels falcon-kernels --name me/falcon-kernels

        hf upload me/falcon-kernels falcon-kernels --repo-type kernel --revision v1 --delete "build/*"
    """
    from .kernel_repository import write_kernel_repository

    _check_repository("--name", name)
    try:
        write_kernel_repository(folder, name)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}.") from error
    _say(f"{folder} written")


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="The folder of a checkpoint, or one file of training code (.safetensors, .pt)."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Argument(metavar="OUTPUT", help="The folder to write; it must not exist. Left out, nothing is written."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHAT",
            help="falcon; or from a Falcon checkpoint: another rule that is the same function (falcon_2, ...), fla, "
            "nanogpt, torchtitan.",
        ),
    ] = "falcon",
    keep_attention: Annotated[
        str,
        typer.Option(
            "--keep-attention",
            metavar="LAYERS",
            help="Layers of a Transformer that stay attention: 0,8,16; or every:4, which is 0,4,8 and so on; or all.",
        ),
    ] = "",
    set_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="A field of the new config, from a Transformer: rule=falcon_1, say. Can be given again.",
        ),
    ] = None,
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Take what is another function as a start for training.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The config.json of a file that has none beside it.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of the largest file: 5GB, 500MB, ...")
    ] = "5GB",
    seed: Annotated[int, typer.Option("--seed", help="Of what has no source and is drawn at random.")] = 0,
    account: Annotated[
        Path | None, typer.Option("--account", metavar="FILE", help="Where every tensor went, as JSON.")
    ] = None,
) -> None:
    """Make a Falcon checkpoint of another model's, or the other way round, and say where every tensor went.

    Takes DeltaNet and linear attention of flash-linear-attention, which stay the same function; Llama, Mistral, Qwen
    and SmolLM, as a start for training, but for the layers that are kept; and checkpoints of training code.

    **Examples**

        falcon-hf convert delta_net-1.3B my-falcon

        falcon-hf convert SmolLM2-135M my-hybrid --keep-attention every:8 --set rule=falcon_1

        falcon-hf convert my-falcon my-falcon-3 --to falcon_3

        falcon-hf convert ckpt.pt my-falcon --config config.json
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    for path, what in ((output, "OUTPUT"), (account, "--account")):
        if path is not None and path.exists():
            raise UserError(f"{what} is {str(path)!r}, which is there already; give a name that is not.")
    options = {
        "keep_attention": keep_layers(keep_attention),
        "fields": dict(map(parse_field, set_fields or [])),
        "max_shard_bytes": _bytes(max_shard_size),
    }
    with _status("loading"):
        from .conversion import convert as run
    console = _errors()
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        try:
            result = run(source, output, to, config=config, nearest=nearest, seed=seed, progress=progress, **options)
            if account is not None:
                from .memory_falcon_fast_weight import write_atomically

                write_atomically(account, (json.dumps(asdict(result), indent=2) + "\n").encode())
        except ValueError as error:
            problems = str(error).splitlines()
            last = f"\ncannot convert {source}; nothing was written." if len(problems) > 1 else ""
            raise UserError("\n".join(problems) + last) from error
        except OSError as error:
            raise UserError(f"cannot convert {source}: {error.strerror or error}.") from error
    _print_account(result)
    if output is not None:
        _say(f"{len(result.made) + sum(map(len, result.taken.values())):,} tensors written in {output}")


def main() -> None:
    """Runs the command; what the user did wrong is one line on standard error and exit code 2."""
    streams: tuple[Any, ...] = (sys.stdin, sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(encoding="utf-8")
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except UserError as error:
        code = _complain(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # that of errors on the command line
            raise
        code = _complain(error.format_message())
    if code == INTERRUPTED:
        _say("")  # ends the line that the text stopped in
    sys.exit(code)


class Writer:
    """Writes the tokens of `generate` to standard output, each as soon as its text is complete.

    Decodes a few recent tokens at a time, so that the cost of a token does not grow with the text.

    Args:
        tokenizer: turns ids into text.
        prompt: what to write before the first new token, as it is.
        before_text: called once, before the first character is written.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt: str, before_text) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.before_text = before_text
        self.ids: list[int] = []  # the newest ones, some of them written already
        self.settled = 0  # how many of them are written
        self.count = 0
        self.started = self.first = self.last = time.perf_counter()

    def put(self, value: "torch.Tensor") -> None:
        """The prompt at the first call, then one token a call."""
        new = value.reshape(-1).tolist()
        self.last = time.perf_counter()
        if not self.ids:
            self.ids, self.started = new, self.last
            return
        if self.count == 0:
            self.first = self.last
            self.before_text()
            self._write(self.prompt)
            self.ids = self.ids[-8:]  # tokens before a token can change its text: a space, say
            self.settled = len(self.ids)
        self.count += 1
        self.ids += new
        self._write_new(hold_back=True)

    def end(self) -> None:
        """Writes what is left, and the line break that ends the text."""
        self._write_new(hold_back=False)
        self._write("\n")

    @property
    def reading_seconds(self) -> float:
        return self.first - self.started

    @property
    def tokens_per_second(self) -> float:
        """Speed of the tokens after the first, which comes with the reading of the prompt."""
        if self.count > 1:
            return (self.count - 1) / (self.last - self.first)
        return self.count / self.reading_seconds

    def _write_new(self, hold_back: bool) -> None:
        before, text = self._decode(self.ids[: self.settled]), self._decode(self.ids)
        if hold_back and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # a character of several tokens
        self._write(text[len(before) :])
        if len(text) > len(before):
            self.ids = self.ids[self.settled :]
            self.settled = len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **options))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def bundled() -> dict[str, Path]:
    """Name and folder of each checkpoint that travels with the package."""
    from .card import cards_folder

    return {path.parent.name: path.parent for path in sorted(cards_folder().glob("*/config.json"))}


def _generation_options(
    max_new_tokens: int,
    sample: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
) -> dict[str, Any]:
    """What `generate` is told: only what the user asked for, the checkpoint decides the rest."""
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {max_new_tokens}; it must be at least 1.")
    if temperature is not None and not temperature > 0:
        raise UserError(f"--temperature is {temperature:g}; it must be above 0, or leave it out and say --greedy.")
    if top_k is not None and top_k < 0:
        raise UserError(f"--top-k is {top_k}; it must be at least 0.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p is {top_p:g}; it must be above 0 and at most 1.")
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise UserError(f"--repetition-penalty is {repetition_penalty:g}; it must be above 0.")
    if seed is not None and not 0 <= seed < 2**32:
        raise UserError(f"--seed is {seed}; it must lie between 0 and {2**32 - 1}.")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = [name for name, value in sampling.items() if value is not None]
    if given and sample is False:
        option = "--" + given[0].replace("_", "-")
        raise UserError(f"{option} is for drawing at random; leave out either it or --greedy.")
    asked = {
        **sampling,
        "repetition_penalty": repetition_penalty,
        "do_sample": True if given else sample,
        "max_new_tokens": max_new_tokens,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _generate(
    network: Any, ids: "torch.Tensor", writer: Writer, options: dict[str, Any], on_device: bool = True
) -> Any:
    """What `generate` returns, with its loop on the device where graphs are replayed there and if that is wanted."""
    from .generation_falcon_fast_weight import GRAPHS, generate_on_device

    if on_device and network.config.model_type == "falcon_fast_weight" and network.device.type in GRAPHS:
        options = {**options, "custom_generate": generate_on_device}
    return network.generate(ids, streamer=writer, return_dict_in_generate=True, use_cache=True, **options)


def _read_prompt(prompt: str | None, what: str = "prompt") -> str:
    if prompt is None:
        if sys.stdin.isatty():
            command = "generate" if what == "prompt" else "inspect"
            raise UserError(f'no {what}: give one, as in falcon-hf {command} "A pointer is", or pipe a text in.')
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: byte {error.start} cannot be read.") from None
    if not prompt:
        raise UserError(f"the {what} is empty; give some text.")
    return prompt


def _load(name: str, device: str, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint, ready to use."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    place, on_hub = _find(name)
    warnings.simplefilter("ignore")
    with _status(f"loading {name}") as status:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        where = _device(device)
        logging.set_verbosity_error()
        if on_hub:
            status.stop()  # the Hub's client shows how far a download is
        else:
            logging.disable_progress_bar()
        if dtype == "auto" and where.type == "cpu":
            dtype = "float32"
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place, trust_remote_code=trust_remote_code, dtype=dtype, output_loading_info=True
            )
        except Exception as error:
            raise UserError(f"cannot load {name}: {_first_sentence(error)}") from error
        network, report = loaded
        for problem in ("missing", "unexpected", "mismatched"):
            if keys := sorted(str(key) for key in report[f"{problem}_keys"]):
                raise UserError(f"cannot load {name}: {len(keys)} {problem} weights, the first is {keys[0]}.")
        return network.to(where).eval(), tokenizer


def _check_repository(option: str, name: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{option} is {name!r}; it must be owner/name.")


def _find(name: str) -> tuple[str, bool]:
    """Where a checkpoint lies, and whether that is the Hub."""
    known = bundled()
    if name in known:
        return str(known[name]), False
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"--model is {name!r}, a folder without config.json; it must be a saved checkpoint.")
        return name, False
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        names = ", ".join(known) or "there is none here"
        raise UserError(
            f"--model is {name!r}; it must be a bundled checkpoint ({names}), an existing folder, "
            "or a Hub name such as owner/model."
        )
    return name, True


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise UserError(f"--device is {name!r}; this machine has {', '.join(['cpu', *here])}.") from None
    return device


def _check_type(network: Any, model: str, command: str) -> None:
    if network.config.model_type != "falcon_fast_weight":
        raise UserError(
            f"--model is {model!r}, of type {network.config.model_type}; "
            f"{command} is for checkpoints of type falcon_fast_weight."
        )


def _draw() -> Any:
    """The function that draws, which needs an extra."""
    try:
        from .picture import draw
    except ImportError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise UserError(
            'the picture needs matplotlib, which is not installed; pip install "falcon-hf[plots]" brings it.'
        ) from None
    return draw


def _label(token: str) -> str:
    """The text of a token for a label: without the space around it, never empty, at most 16 characters."""
    text = token.strip() or token.encode("unicode_escape").decode().replace(" ", "␣") or "<empty>"
    return text if len(text) <= 16 else text[:15] + "…"


def _print_trace(trace: "MemoryTrace", tokens: list[str]) -> None:
    """Prints the heads that keep longest and shortest, and the tokens of largest surprise."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heads = trace.half_life.shape[1]
    lives = trace.half_life.flatten()
    order = lives.argsort(descending=True, stable=True).tolist()
    count = min(3, len(order) // 2) or 1
    keeps = Table("layer", "head", "half-life (tokens)", box=SIMPLE_HEAD, title="heads that keep longest and shortest")
    for rank, places in enumerate((order[:count], order[count:][-count:])):
        for place in places:
            keeps.add_row(str(trace.layers[place // heads]), str(place % heads), f"{lives[place].item():,.1f}")
        if rank == 0:
            keeps.add_section()
    surprises = Table("number", "token", "−log p (nats)", box=SIMPLE_HEAD, title="tokens that surprise it most")
    for place in trace.token_loss.nan_to_num(-1).topk(min(3, len(tokens) - 1)).indices.tolist():
        surprises.add_row(str(place), Text(tokens[place]), f"{trace.token_loss[place].item():.2f}")
    console = Console(file=sys.stdout)
    console.print(keeps)
    console.print(surprises)


def keep_layers(text: str) -> Any:
    """The layers that `--keep-attention` names, as a function of their number."""
    if text == "all":
        return range
    if match := re.fullmatch(r"every:([1-9]\d*)", text):
        return lambda count: range(0, count, int(match[1]))
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise UserError(f"--keep-attention is {text!r}; it must be numbers such as 0,8,16, every:4, or all.")
    return [int(number) for number in text.split(",") if number]


def parse_field(text: str) -> tuple[str, Any]:
    """Name and value of `FIELD=VALUE`, the value as JSON, or as it stands where it is none."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set is {text!r}; it must be FIELD=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text.upper())
    if match is None or match[1] == "0":
        raise UserError(f"--max-shard-size is {text!r}; it must be a size such as 5GB or 500MB.")
    return int(match[1]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]


def _print_account(account: "Account") -> None:
    """Prints where the tensors went, layers of one kind in one line, and what the result does not compute alike."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("", "layers", box=SIMPLE_HEAD)
    table.add_column("tensor", overflow="fold")
    table.add_column("how, or why not")
    for what, before, after, how, count in account.rows():
        names = [before] if before == after else [before, f"→ {after}"] if before and after else [before or after]
        table.add_row(what, str(count), "\n".join(names), how)
    console = Console(file=sys.stdout)
    console.print(table)
    for sentence in account.lost or ["The same function as its source."]:
        console.print(sentence, highlight=False)


def _facts(network: Any) -> list[tuple[str, str]]:
    """What `info` prints, line by line."""
    import torch

    from .cache_falcon_fast_weight import cache_nbytes
    from .modeling_falcon_fast_weight import FalconFastWeightAttention

    config = network.config
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=network.device)
        one, two = (cache_nbytes(_cache_of(network(ids[:, :n], use_cache=True))) for n in (1, 2))
    element = network.dtype.itemsize
    width = config.num_attention_heads * (config.head_dim + config.value_head_dim)
    key_value = config.num_hidden_layers * width * element
    weights = sum(weight.numel() for weight in network.parameters())
    facts = [
        ("rule", config.rule),
        ("equation", EQUATIONS[config.rule]),
        ("weights", f"{weights:,} in {str(network.dtype).removeprefix('torch.')}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}"),
        (
            "heads",
            f"{config.num_attention_heads} with memories of {config.head_dim} x {config.value_head_dim}",
        ),
    ]
    for tokens in (1024, 32768):
        state = one + (two - one) * (tokens - 1)
        kept = f"{state:,} bytes of state; a Transformer of this shape keeps {key_value * tokens:,}"
        facts.append((f"at {tokens:,} tokens", kept))
    layers = [module for module in network.modules() if isinstance(module, FalconFastWeightAttention)]
    for layer in layers:
        lengths = ", ".join(f"{length:,.0f}" for length in _memory_lengths(layer))
        facts.append((f"memory, layer {layer.layer_idx}", f"{lengths} tokens, by head"))
    return facts


def _memory_lengths(layer: "FalconFastWeightAttention") -> list[float]:
    """For each head the n where it forgets 1 / n of its memory at a token, by the layer's biases alone.

    The input moves gain and ridge away from their biases, and keys are taken to have their expected energy.
    """
    import torch
    from falcon_kernels.schedule import step_and_log_decay

    from .modeling_falcon_fast_weight import expected_energy

    with torch.no_grad():
        nothing = layer.gain_proj.weight.new_zeros(1, 1, layer.config.hidden_size)
        energy = torch.full((1, 1, layer.num_heads), expected_energy(layer.config), device=nothing.device)
        active = torch.ones_like(energy, dtype=torch.bool)
        gain, ridge = layer._gain(nothing), layer._ridge(nothing)
        _, log_decay = step_and_log_decay(energy, gain, ridge, active, layer.rule)
    return (-1 / torch.expm1(log_decay).reshape(layer.num_heads, -1).mean(1)).tolist()


def _cache_of(output: Any) -> Any:
    """The cache in an output of transformers, where it is called cache or, before 5.24, past_key_values."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def _status(message: str):
    """A turning wheel with a message on standard error; nothing where that is not a terminal."""
    return _errors().status(message)


def _errors() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return re.split(r"(?<=[.!?]) ", text)[0] or type(error).__name__


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _complain(message: str) -> int:
    _say(f"falcon-hf: {message}")
    return 2


if __name__ == "__main__":
    main()
