"""The corpus recipe: what it takes from pages, texts and packages, what it drops, and how it splits."""

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import corpus  # noqa: E402

POINTER = "A pointer holds the address of an object, and reading it gives what is stored there at that moment."
THREAD = "The threads of a process share its memory; each of them has a stack and registers of its own."
SIGNAL = "A signal that nobody waits for is lost: so the one who sends it has to know that somebody listens."
LOCK = "Whoever takes two locks takes them in the same order as everybody else, or two will wait for each other."
NEWLINE = "\n"
PAGE = f"""<html><head><title>Of pointers, and what is in the title of a page that has some more words.</title></head>
<body><div class="sphinxsidebar"><div>{SIGNAL}</div><p>{SIGNAL}</div>
<h1>Pointers</h1><p>{POINTER.replace("address", "<em>address</em>").replace(" of ", f" of{NEWLINE}  ", 1)}
<p>{THREAD.replace(";", "&#59;")}</p><pre>{SIGNAL}</pre><table><tr><td>{SIGNAL}</table>
<p>Der Zeiger enthält die Adresse eines Objekts, und wer ihn liest, bekommt, was dort steht, sofort.</p>
<p>for (i = 0; i &lt; 10; i++) {{ a[i] = b[i] + c[i] * 2; }} while (x != 0) x = y[x] + 1, z[x] = 0;</p>
<ul><li>{LOCK}</li></ul></body></html>"""


def run(*arguments):
    command = [sys.executable, EXAMPLES / "corpus.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)


def documents(path):
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    assert data == b"" or data.endswith(b"\n\x1e\n")
    return data.decode().split("\n\x1e\n")[:-1], hashlib.sha256(data).hexdigest()


def write_folder(folder):
    folder.mkdir(parents=True)
    (folder / "page.html").write_text(PAGE)
    (folder / "short.txt").write_text(SIGNAL)
    (folder / "text.md.gz").write_bytes(
        gzip.compress(f"# Signals\n\n{SIGNAL}\n\n{LOCK}\n\n{POINTER}\n\n{SIGNAL[::-1]}:\n".encode())
    )
    (folder / "twice.rst").write_text(f"{POINTER}\n\n{LOCK}\n\n{THREAD}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "broken.txt.gz").write_bytes(b"no gzip")
    (folder / "link.txt").symlink_to(folder / "page.html")
    (folder / "_sources").mkdir()
    (folder / "_sources" / "page.txt").write_text(SIGNAL * 9)
    return folder


def test_prose_is_kept_once_and_the_rest_is_accounted_for(tmp_path):
    folder = write_folder(tmp_path / "notes")
    more = "\n\n".join(f"{text[:-1]} in whichever of the programs." for text in (SIGNAL, LOCK, THREAD))
    (folder / "zz.txt").write_bytes(f"\ufeff{SIGNAL}\r\n\r\n{more}\x1e\x00".encode())
    done = run(folder, "--output", tmp_path / "out", "--val", 0)
    assert done.returncode == 0, done.stderr
    kept, digest = documents(tmp_path / "out" / "train.txt")
    assert kept[0] == "\n\n".join([POINTER, THREAD, LOCK])
    assert kept[1] == "\n\n".join([SIGNAL, more]).replace("\ufeff", "")
    assert len(kept) == 2
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["splits"]["train"] == {
        "documents": 2,
        "bytes": sum(len(document.encode()) for document in kept),
        "sha256": digest,
    }
    (source,) = manifest["sources"]
    assert source == {"name": "notes", "files": 7, "files_of_other_kinds": 2} | {
        name: manifest["splits"]["train"][name] for name in ("documents", "bytes")
    }
    dropped = {reason: counts["paragraphs"] for reason, counts in manifest["dropped"].items()}
    assert dropped == {
        "fewer than ten words": 2,
        "not English, or no sentences": 2,
        "figures, symbols or code": 1,
        "the same as an earlier one": 5,
        "in a file with less than 200 characters left": 2,
    }
    for reason in dropped:
        assert reason in done.stdout


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_packages_and_a_split_that_does_not_move(tmp_path):
    """Files of a package and of a folder; adding a source moves no document from one split to the other."""
    package = tmp_path / "package"
    manual = package / "usr" / "share" / "doc" / "some-doc"
    manual.mkdir(parents=True)
    texts = []
    for i in range(40):
        texts.append("\n\n".join(f"{text[:-1]}, as has been said in number {i}." for text in (POINTER, SIGNAL, LOCK)))
        (manual / f"{i}.txt").write_text(texts[-1])
    (package / "DEBIAN").mkdir()
    control = "Package: some-doc\nVersion: 1.2-3\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: a\n"
    (package / "DEBIAN" / "control").write_text(control)
    deb = tmp_path / "some-doc.deb"
    subprocess.run(["dpkg-deb", "--build", package, deb], check=True, capture_output=True)
    splits = []
    for sources in ([deb], [write_folder(tmp_path / "notes"), deb]):
        output = tmp_path / str(len(sources))
        done = run(*sources, "--output", output, "--val", 0.2, "--xz")
        assert done.returncode == 0, done.stderr
        splits.append([documents(output / f"{name}.txt.xz") for name in ("train", "val")])
    (train, _), (val, digest) = splits[0]
    assert sorted(train + val) == sorted(texts)
    assert 1 <= len(val) <= 20
    assert set(train) < set(splits[1][0][0]) | set(splits[1][1][0])
    assert set(val) <= set(splits[1][1][0])
    assert not set(train) & set(splits[1][1][0])
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert manifest["splits"]["val"]["sha256"] == digest
    assert manifest["sources"][0] == {
        "name": "some-doc",
        "version": "1.2-3",
        "sha256": hashlib.sha256(deb.read_bytes()).hexdigest(),
        "files": 40,
        "files_of_other_kinds": 0,
        "documents": 40,
        "bytes": sum(len(text.encode()) for text in texts),
    }

    from rich.progress import Progress
    from token_files import read_documents

    taken = hashlib.sha256()
    with Progress() as progress:
        assert list(read_documents(tmp_path / "1" / "val.txt.xz", progress, taken)) == val
    assert taken.hexdigest() == digest


@pytest.mark.parametrize(
    ("paragraph", "reason"),
    [
        (POINTER, None),
        (f"({POINTER})", None),
        ("Too short to be of any use.", "fewer than ten words"),
        (POINTER[:-1], "no end of a sentence"),
        (POINTER * 300, "longer than 20,000 characters"),
        ("int a = b[0] + c[1] * 2, d = 0x3f; if (a > 7 && d != e) return f(g, h) + (i << 2); 0, 1, 2, 3;", "figures"),
        ("Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed eiusmod tempor incididunt.", "not English"),
    ],
)
def test_what_is_no_prose(paragraph, reason):
    found = corpus.fault(paragraph)
    assert found == reason if reason is None else found.startswith(reason)


def test_bad_sources_get_one_sentence_and_leave_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.deb").write_bytes(b"no package")
    for source, sentence in (
        ("No Package", "neither a folder nor a .deb file nor the name of a Debian package"),
        (tmp_path / "absent.deb", "is not a file"),
        (tmp_path / "no.deb", "dpkg-deb"),
        (tmp_path / "empty", "no English prose found"),
    ):
        done = run(source, "--output", tmp_path / "out")
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert done.stderr.startswith("corpus.py: ")
        assert done.stderr.count("\n") == 1
        assert not list((tmp_path / "out").glob("*.*"))
