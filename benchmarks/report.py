"""What every benchmark shares: medians, the machine and its versions, a table on the screen and a JSON file."""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def median_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Median wall-clock time of `run` on the CPU after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait_for_turn(output: Path) -> None:
    """Says beside `output` that this process is warm, and waits until it is told there that nothing else runs."""
    output.with_suffix(".ready").touch()
    while not output.with_suffix(".go").exists():
        time.sleep(0.05)


def environment() -> dict[str, object]:
    """Versions, processor and date of a measurement."""
    import transformers

    info: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def report(name: str | None, title: str, rows: list[dict[str, object]], **facts: object) -> None:
    """Prints `rows` as a table and writes them with their environment to results/NAME.json, unless `name` is None."""
    if name is not None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps({"environment": environment(), **facts, "rows": rows}, indent=1) + "\n")
        print(f"written to {path}")
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
