"""One process in which Orbax restores many folders, since JAX takes seconds to start; one that ends is followed by another."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

from concord.backends.process import ROOT, Process, WorkerFailure
from concord.backends.worker import environment
from concord.porting.containers import orbax
from concord.porting.located import DELIMITER
from concord.spec.errors import SpecError
from tests.toys.spoiling import ENDED

TIME_LIMIT = 60.0
"""Seconds for a folder; a right one takes a tenth of one."""

MEMORY_LIMIT = 3 << 30
"""Bytes that the process may hold."""

EACH = 1000
"""Folders after which it is replaced: what JAX keeps of each is not held against them."""


class Restorer:
    """Stands in for :func:`concord.porting.containers.orbax._ask`. Use it in a ``with`` block."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.asked = 0

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process:
            self.process.close()
            self.process = None

    def ask(self, what: str, path: Path, between: Path, size: int) -> None:
        """Have a folder restored or saved.

        Raises:
            SpecError: if Orbax cannot, or its process ended.
        """
        target = DELIMITER.join((what, str(path.absolute()), str(between)))
        if self.asked >= EACH:
            self.__exit__()
        try:
            if self.process is None:
                self.process, self.asked = (
                    Process(local=True, time_limit=TIME_LIMIT, memory_limit=MEMORY_LIMIT),
                    0,
                )
                self.process.start(None, "", lambda: None)
                message: Any = {
                    "root": str(ROOT),
                    "environment": environment("cpu", None),
                    "appended": {},
                    "target": target,
                    "serve": f"{__name__}:serve",
                }
            else:
                message = target
            self.asked += 1
            said = json.loads(self.process.exchange(message))
        except WorkerFailure as failure:
            self.process = None
            raise SpecError(f"{path}: Orbax has given no answer: {ENDED}: {failure.detail}") from None
        if said:
            raise SpecError(f"{path}: {said}")


def serve(channel: Any, target: str) -> None:
    """Answer as often as it is asked."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (hard, hard)
    )  # that of who asks is too little for JAX; who asks watches this process
    while True:
        what, path, between = target.split(DELIMITER, 2)
        channel.send(json.dumps(orbax._done(what, Path(path), Path(between))))
        target = channel.receive()
