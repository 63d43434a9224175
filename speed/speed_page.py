"""The page of a record of measurements."""

from __future__ import annotations

from pathlib import Path

from concord.conformance.run import record
from concord.conformance.run.page import render
from concord.conformance.run.record import Record
from concord.speed.measurement_record import check
from concord.speed.table import (
    HARMLESS,
    Entry,
    busy_before,
    fastest_first,
    limits,
    size_of,
    tasks,
    to_deploy,
    unmeasured,
    versions_of,
)


def speed_page(written: Record) -> str:
    """Render a record as HTML."""
    data = record.data(written)
    check(data)
    unmet = unmeasured(data).items()
    works = [
        {
            "name": task,
            "source": work["source"],
            "size": size_of(work),
            "fastest": to_deploy(data, names),
            "rows": fastest_first(data, names),
        }
        for task, names in tasks(data).items()
        for work in [data["workloads"][names[0]]]
    ]
    return render(
        "speed.html",
        written,
        Path(__file__).parent / "templates",
        headline=_headline(data),
        **({"tone": "broken" if busy_before(data) else "quiet"} if written.exit_code == 0 else {}),
        compared=[
            _compared(data),
            *([] if works else ["Nothing was measured."]),
            f"Fastest plain matrix product: {limits(data['best_product_gflops'])}."
            f"{'' if data['complete'] else ' Not complete.'}",
        ],
        works=works,
        failures=[group for group in unmet if group[0][1] not in HARMLESS],
        absent=[group for group in unmet if group[0][1] in HARMLESS],
        colours=list(dict.fromkeys(entry["backend"] for entry in data["entries"])),
    )


def _compared(data: Entry) -> str:
    names = (f"{name} {version or ''}".strip() for name, version in versions_of(data).items())
    settings = data["settings"]
    return (
        f"The times of {', '.join(names)} on {', '.join(data['workloads'])} were measured in turn, on "
        f"{settings['device']} with {settings['threads']} threads."
    )


def _headline(data: Entry) -> str:
    measurements = sum(bool(entry["summary"]) for entry in data["entries"])
    wrong = sum(entry["status"] == "withheld" for entry in data["entries"])
    busy = f"{busy}, so these times are unreliable: " if (busy := busy_before(data)) else ""
    text = (
        f"{busy}{measurements} measurement{'' if measurements == 1 else 's'}, all of programs that conformed"
    )
    return text + (f"; {wrong} withheld, because their results are wrong" if wrong else "")
