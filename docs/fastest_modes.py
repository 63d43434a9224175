"""Writes the page of the fastest modes on all measured machines: ``python docs/fastest_modes.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from concord.conformance.run import record
from concord.conformance.wording import markdown_table
from concord.output_files import KINDS
from concord.speed.table import fastest_modes, limits, tasks

ROOT = Path(__file__).parent.parent

PAGE = """# Which mode is fastest where

The tables show the fastest mode of each framework on each measured machine. In parentheses are the time of a
step, and that time as a multiple of the fastest peer's on the same machine. Only correct programs were timed.
[Speed](speed.md) explains modes and peers.

| machine | processor | date | fastest plain matrix product |
| --- | --- | --- | --- |
{machines}

{tables}

`python docs/fastest_modes.py` writes this page from [the records](../../conformance/results/README.md).

## What to do next

- See all modes, measured on one machine: [forward pass](speed-forward.md), [bfloat16](speed-bfloat16.md),
  [training](speed-training.md).
- Measure [your own machine](speed.md).
"""


def about(name: str, records: list[Any]) -> list[str]:
    """The row of a machine."""
    first = records[0]
    where = f"{first['machine']['processor']}, {first['machine']['cores']} cores"
    device = first["settings"]["device"]
    products = {kind: rate for data in records for kind, rate in data["best_product_gflops"].items()}
    return [
        name,
        where if device == "cpu" else f"{device}, beside {where}",
        first["written"][:10],
        limits(products),
    ]


def page() -> str:
    """The page."""
    folders = sorted(path for path in (ROOT / "conformance/results/speed").iterdir() if path.is_dir())
    machines = {
        folder.name: [record.data(record.read(file, KINDS)) for file in sorted(folder.glob("*.json"))]
        for folder in folders
    }
    fastest: dict[str, dict[str, dict[str, str]]] = {}
    for machine, records in machines.items():
        for data in records:
            for task, workloads in tasks(data).items():
                for workload in workloads:
                    dtype = data["workloads"][workload]["dtype"]
                    for backend, mode in fastest_modes(data, workload, "step", "of peer").items():
                        modes = fastest.setdefault(task, {}).setdefault(f"{backend} {dtype}", {})
                        modes[machine] = mode.replace(f" {dtype}", "")
    tables = []
    for task, programs in sorted(fastest.items()):
        measured = [machine for machine in machines if any(machine in modes for modes in programs.values())]
        rows = [
            [program, *(modes.get(machine, "") for machine in measured)]
            for program, modes in programs.items()
        ]
        head = [["backend", *measured], ["---"] * (1 + len(measured))]
        tables.append(f"## {task}\n\n{markdown_table([*head, *rows])}")
    return PAGE.format(
        machines=markdown_table(about(*item) for item in machines.items()), tables="\n\n".join(tables)
    )


if __name__ == "__main__":
    (ROOT / "docs/guides/speed-modes.md").write_text(page())
