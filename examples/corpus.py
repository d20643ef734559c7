"""Build a corpus of English prose from Debian packages, .deb files or folders of text.

    python examples/corpus.py bash-doc debian-policy debian-handbook --output data/corpus
    python examples/corpus.py ~/notes python-doc_3.11_all.deb --output data/corpus --xz

writes train.txt and val.txt, as `pretrain.py tokenize` takes them, and manifest.json with the sources, what was dropped
and the hashes of both. Packages are downloaded with apt-get from the sources that this machine has, into the `packages`
folder of the output, and never installed; that, and .deb files, need a Debian or one of its kin.

Read are HTML pages and plain texts (.txt, .md, .rst, .text, .info), gzipped or not. Kept are paragraphs that look like
English sentences, each once in the whole corpus, so that none of val occurs in train. A document is what is left of a
file. Its path decides whether it is one of val: a file stays where it is when sources are added.

The texts keep the licences of their authors.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

HTML, TEXT = (".html", ".htm", ".xhtml"), (".txt", ".md", ".rst", ".text", ".info")
SHORTEST_DOCUMENT = 200  # characters
LONGEST_PARAGRAPH = 20_000
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
BLOCKS, LEFT_OUT, COMMON = (
    frozenset(names.split())
    for names in (
        # elements that end a paragraph
        "address article aside blockquote body br center dd details div dl dt figcaption figure h1 h2 h3 h4 h5 h6 hr "
        "html li main ol p section summary td th tr ul",
        # elements without prose
        "button footer form head header math nav noscript pre script select style svg table",
        # words of which English prose has at least one in five
        "a all an and any are as at be been but by can do for from had has have he her his i if in into is it its may "
        "more must my no not of on one only or other our out s she should so than that the their them then there these "
        "they this to was we were what when which who will with would you your",
    )
)
CLASSES_LEFT_OUT = re.compile(
    r"\b(breadcrumbs?|code|codehilite|footer|header|highlight|index|literal-block|menu|nav\w*|programlisting|related|"
    r"screen|sidebar|source|sphinxsidebar|toc|toctree-wrapper)\b"
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


class Page(HTMLParser):
    """The paragraphs of an HTML page, without navigation, code and tables."""

    def __init__(self):
        super().__init__()
        self.paragraphs, self.open = [], []
        self.skipped: list[str] = []  # the element that is left out, and those of its name within

    def handle_starttag(self, tag, attributes):
        classes = dict(attributes).get("class") or ""
        if self.skipped:
            if tag == self.skipped[0]:
                self.skipped.append(tag)
        elif tag in LEFT_OUT or (tag in ("div", "ul", "dl") and CLASSES_LEFT_OUT.search(classes)):
            self.end_paragraph()
            self.skipped = [tag]
        elif tag in BLOCKS:
            self.end_paragraph()

    def handle_endtag(self, tag):
        if self.skipped and tag == self.skipped[0]:
            self.skipped.pop()
        elif tag in BLOCKS and not self.skipped:
            self.end_paragraph()

    def handle_data(self, data):
        if not self.skipped:
            self.open.append(data)

    def close(self):
        super().close()
        self.end_paragraph()

    def end_paragraph(self):
        self.paragraphs.append("".join(self.open).replace("¶", ""))
        self.open = []


def paragraphs(path: Path) -> list[str] | None:
    """Those of a file, each on one line; None for a file of another kind."""
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if kind not in (*HTML, *TEXT):
        return None
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.BadGzipFile):
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if kind in HTML:
        page = Page()
        page.feed(text)
        page.close()
        found = page.paragraphs
    else:
        found = re.split(r"\n\s*\n|\f", text.replace("\r\n", "\n"))
    return [" ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", paragraph).split()) for paragraph in found]


def fault(paragraph: str) -> str | None:
    """Why a paragraph is no English prose."""
    words = re.findall(r"[^\W\d_]+", paragraph.lower())
    if len(words) < 10:
        return "fewer than ten words"
    if len(paragraph) > LONGEST_PARAGRAPH:
        return f"longer than {LONGEST_PARAGRAPH:,} characters"
    if not paragraph.rstrip("\"')]”’*").endswith((".", "!", "?", ":", ";")):
        return "no end of a sentence"
    if sum(c.isalpha() or c == " " for c in paragraph) < 0.82 * len(paragraph):
        return "figures, symbols or code"
    if sum(word in COMMON for word in words) < 0.2 * len(words):
        return "not English, or no sentences"
    return None


def unpack(source: str, packages: Path, temporary: Path) -> tuple[Path, dict]:
    """The folder with the files of a source, and what the manifest says of it."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder, {"name": folder.resolve().name}
    deb = folder
    if folder.suffix != ".deb":
        if not PACKAGE.fullmatch(source):
            raise RecipeError(f"{source} is neither a folder nor a .deb file nor the name of a Debian package.")
        if not list(packages.glob(f"{source}_*.deb")):
            run("apt-get", "-q", "download", source, cwd=packages)
        deb = max(packages.glob(f"{source}_*.deb"), key=lambda path: path.stat().st_mtime)
    if not deb.is_file():
        raise RecipeError(f"{deb} is not a file.")
    name, version = (run("dpkg-deb", "--field", deb, field).strip() for field in ("Package", "Version"))
    run("dpkg-deb", "--extract", deb, temporary / name)
    return temporary / name, {
        "name": name,
        "version": version,
        "sha256": hashlib.sha256(deb.read_bytes()).hexdigest(),
    }


def run(*command: object, **options) -> str:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    except FileNotFoundError as error:
        raise RecipeError(f"{command[0]} is missing: packages need Debian's tools, folders of text do not.") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise RecipeError(f"{' '.join(map(str, command))} failed: {reason.rstrip('.')}.")
    return done.stdout


def files_of(folder: Path) -> list[Path]:
    """In one order everywhere; without links, and without the sources that Sphinx puts beside its pages."""
    found = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if not path.is_symlink() and path.is_file() and "_sources" not in path.parts)


def is_held_out(place: str, part: float) -> bool:
    """Whether a file at `name/of/its/place` belongs to val."""
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big") < part * 2**64


@contextmanager
def written_whole(paths: list[Path]) -> Iterator[list[BinaryIO]]:
    """Open files, in their places when all of them are complete and not before."""
    partial = [path.with_name(path.name + ".partial") for path in paths]
    opener = lzma.open if paths[0].suffix == ".xz" else open
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(opener(path, "wb")) for path in partial]
        for path, place in zip(partial, paths, strict=True):
            path.replace(place)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


def keep(found: list[str], seen: set[bytes], dropped: dict[str, Counter]) -> Iterator[str]:
    """The paragraphs that are prose and new."""
    for paragraph in filter(None, found):
        digest = hashed(paragraph)
        reason = fault(paragraph) or ("the same as an earlier one" if digest in seen else None)
        if reason is None:
            seen.add(digest)
            yield paragraph
        else:
            drop(dropped, reason, paragraph)


def hashed(paragraph: str) -> bytes:
    return hashlib.sha256(paragraph.encode()).digest()


def drop(dropped: dict[str, Counter], reason: str, *paragraphs: str) -> None:
    characters = sum(map(len, paragraphs))
    dropped.setdefault(reason, Counter()).update(paragraphs=len(paragraphs), characters=characters)


@app.command()
def main(
    sources: Annotated[list[str], typer.Argument(help="Names of Debian packages, .deb files, folders of text.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    val: Annotated[float, typer.Option(min=0, max=0.5, help="Part of the files that is held out.")] = 0.01,
    xz: Annotated[bool, typer.Option("--xz", help="Write .txt.xz, a quarter of the size.")] = False,
) -> None:
    """Build train.txt and val.txt."""
    packages = output / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    names = ("train", "val")
    paths = [output / f"{name}.txt{'.xz' if xz else ''}" for name in names]
    splits = {name: Counter(documents=0, bytes=0) for name in names}
    digests = {name: hashlib.sha256() for name in names}
    seen: set[bytes] = set()
    dropped: dict[str, Counter] = {}
    described = []
    with written_whole(paths) as opened, tempfile.TemporaryDirectory() as temporary, Pool() as pool:
        files_by_name = dict(zip(names, opened, strict=True))
        for source in sources:
            folder, facts = unpack(source, packages, Path(temporary))
            files = files_of(folder)
            counts = Counter(files=len(files), files_of_other_kinds=0, documents=0, bytes=0)
            results = pool.imap(paragraphs, files, chunksize=8)
            for path, found in zip(files, track(results, facts["name"], len(files)), strict=True):
                if found is None:
                    counts["files_of_other_kinds"] += 1
                    continue
                kept = list(keep(found, seen, dropped))
                document = "\n\n".join(kept)
                if len(document) < SHORTEST_DOCUMENT:
                    seen.difference_update(map(hashed, kept))
                    drop(dropped, f"in a file with less than {SHORTEST_DOCUMENT} characters left", *kept)
                    continue
                place = f"{facts['name']}/{path.relative_to(folder).as_posix()}"
                name = "val" if is_held_out(place, val) else "train"
                data = f"{document}\n\x1e\n".encode()
                files_by_name[name].write(data)
                digests[name].update(data)
                for counted in (counts, splits[name]):
                    counted.update(documents=1, bytes=len(data) - len("\n\x1e\n"))
            described.append(facts | counts)
        if not splits["train"]["documents"]:
            raise RecipeError(f"{', '.join(sources)}: no English prose found in HTML pages or plain texts.")
    facts = {name: splits[name] | {"sha256": digests[name].hexdigest()} for name in names}
    manifest = {"sources": described, "held_out": val, "splits": facts, "dropped": dropped}
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

    table = Table("paragraphs dropped because", "paragraphs", "characters")
    for reason, counts in sorted(dropped.items(), key=lambda item: -item[1]["characters"]):
        table.add_row(reason, f"{counts['paragraphs']:,}", f"{counts['characters']:,}")
    Console().print(table)
    for name, path in zip(names, paths, strict=True):
        print(f"{path}: {splits[name]['documents']:,} documents, {splits[name]['bytes']:,} bytes")


if __name__ == "__main__":
    try:
        app()
    except RecipeError as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        sys.exit(2)
