"""The common model tests of transformers, from the sdist of the installed version, on our classes.

pip install parameterized && python -m pytest -m long tests/test_upstream.py
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

HERE = Path(__file__).parent
# Parts of the common tests that the sdist lacks: those of generation and of export.
MISSING = {
    "generation/test_utils.py": "class GenerationTesterMixin: ...",
    "exporters/test_export.py": "class ExportTesterMixin: ...",
}


@pytest.mark.long
def test_the_common_tests_of_transformers_pass(tmp_path):
    pytest.importorskip("parameterized", reason="the tests of transformers need it")
    source = f"transformers=={transformers.__version__}"
    options = ["--no-deps", "--no-binary", "transformers", "--dest", str(tmp_path)]
    download = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, source], capture_output=True, text=True, timeout=300
    )
    if download.returncode != 0:
        pytest.skip(f"pip cannot download the sdist of {source}")
    [archive] = tmp_path.glob("*.tar.gz")
    package = tmp_path / "upstream"
    with tarfile.open(archive) as files:
        for member in files:
            if found := re.fullmatch(r"[^/]+/tests/([^/]+\.py)", member.name):
                member.name = found[1]
                files.extract(member, package, filter="data")
    for name, text in MISSING.items():
        (package / name).parent.mkdir()
        (package / name).write_text(text)
        (package / name).with_name("__init__.py").touch()
    (package / "__init__.py").touch()

    (tmp_path / "test_ours.py").write_text((HERE / "upstream_models.py").read_text())
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "test_ours.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    summary = run.stdout.splitlines()[-1]
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", summary)[1]) > 300, summary
