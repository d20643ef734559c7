"""How much of an evaluation split also stands in the training text: the share of its 13-word runs found there.

python benchmarks/overlap.py train.txt.xz val.txt.xz ...
"""

import lzma
import sys
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import report

RUN = 13


def runs(path: Path) -> np.ndarray:
    """A 64-bit hash of every run of 13 words in a text file, document bounds ignored."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        words = np.fromiter((zlib.crc32(word) for line in file for word in line.split()), dtype=np.uint64)
    mixed = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    total = np.zeros(len(words) - RUN + 1, dtype=np.uint64)
    for i in range(RUN):
        total = total * np.uint64(0xD1B54A32D192ED03) + (mixed[i : i + len(total)] ^ (mixed[i : i + len(total)] >> 29))
    return total


def main() -> None:
    train, *splits = map(Path, sys.argv[1:])
    known = np.unique(runs(train))
    rows = []
    for split in splits:
        found = runs(split)
        places = np.searchsorted(known, found).clip(max=len(known) - 1)
        share = float((known[places] == found).mean())
        rows.append({"split": split.name, "runs": len(found), "in the training text, %": 100 * share})
    report("overlap", f"{RUN}-word runs that also stand in {train.name}", rows)


if __name__ == "__main__":
    main()
