"""The schema of a record of measurements (docs/guides/speed.md)."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict  # typing's own suffices from Python 3.12 on

from concord.conformance.record_fields import Count

Number = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=1e-30, le=1e30, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=2**53)]
Name = Annotated[str, Field(max_length=300)]


class Open(TypedDict):
    """A dictionary that allows additional keys."""

    # A later version may write additional keys, which are kept.
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class Machine(Open):
    """Processor and versions."""

    python: str
    numpy: str
    system: str
    processor: str | None
    cores: Count | None
    concord: NotRequired[str | None]


class SpeedSettings(Open):
    """Settings that all entries share."""

    device: str
    turns: Count
    budget: Number | None
    threads: Count | None
    cores_busy_before: NotRequired[Number]


class BackendAbout(Open):
    """A backend's description."""

    thread_switches: NotRequired[dict[str, Any] | None]


class TimedRecipe(Open):
    """The optimizer of a training step."""

    algorithm: str
    learning_rate: Positive


class Work(Open):
    """A timed model and batch."""

    preset: Name
    source: str
    kind: str
    padding: str
    dtype: str
    recipe: NotRequired[TimedRecipe | None]
    key: str
    config: dict[str, Any]
    batch: Size
    tokens: Size
    real_tokens: Count
    flops: Positive
    real_flops: Positive


class Turn(Open):
    """The steps of one turn."""

    seconds: list[Positive]
    peak_memory_bytes: Count | None
    busy_cores: Number


class Summary(Open):
    """The figures of an entry."""

    median_seconds: Positive
    min_seconds: Positive
    low_seconds: Positive
    high_seconds: Positive
    spread: Number | None
    steady: bool | None
    of_best_peer: Positive | None
    steps: Count
    real_tokens_per_second: Number
    gflops: Positive
    share_of_best_product: Number | None
    compile_seconds: Number
    peak_memory_bytes: Count | None
    busy_cores: Number


class MeasuredEntry(Open):
    """One backend in one mode on one workload."""

    backend: Name
    mode: Name
    workload: str
    implementation: str
    execution: str
    status: str
    detail: str
    turns: list[Turn]
    summary: Summary | None
    build_seconds: NotRequired[Number]
    compile_seconds: NotRequired[Number]
    first_seconds: NotRequired[Number]
    product_gflops: NotRequired[Number | None]
    peer_seconds: NotRequired[Positive | None]
    error_in_tolerances: NotRequired[Number | None]


class Measurements(Open):
    """The whole record."""

    seconds: Number
    complete: bool
    machine: Machine
    settings: SpeedSettings
    workloads: dict[Name, Work]
    backends: dict[Name, Annotated[dict[str, BackendAbout], Field(min_length=1)]]
    best_product_gflops: dict[str, Number]
    entries: list[MeasuredEntry]
