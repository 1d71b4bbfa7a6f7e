"""What a role says about itself while it starts and works: one small record, printed by the command.

Roles call a :data:`Report`; the command prints it as a line for people or, for another process, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Final, Literal

Step = Literal[
    "start",  # the process is up; text is the peer id
    "relay",  # a relay was reached, or lost
    "manifest",  # a model file is being read and hashed
    "plan",  # a plan came, or a new one
    "fetch",  # chunks of the own slice are coming
    "load",  # the engine reads the weights
    "ready",  # the role does its work from now on
    "problem",  # something that the person may have to mend
    "stop",  # the role ends
]

UNITS: Final = ("", "bytes", "layers", "tensors", "peers")


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing that happened.

    Attributes:
        step: what kind of thing.
        text: one line for people; says what, never how far (that is in the numbers).
        done: how much of ``total`` is done, in ``unit``.
        total: 0 where there is nothing to count.
        unit: one of :data:`UNITS`.
        stage: of a ring that the role has a place in, counted from 1; 0 without one.
    """

    step: Step
    text: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    stage: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Progress | None:
        """The record of such a line, or None where the line is something else."""
        try:
            raw = json.loads(line)
        except ValueError:
            return None
        if not isinstance(raw, dict) or set(raw) != {field.name for field in fields(cls)}:
            return None
        return cls(**raw)

    def line(self) -> str:
        """One line for people, such as ``fetch: layers 0 to 9 (41.0 of 62.3 MB)``."""
        text = f"{self.step}: {self.text}" if self.text else self.step
        if self.total and self.unit == "bytes":
            return f"{text} ({self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB)"
        if self.total:
            return f"{text} ({self.done} of {self.total} {self.unit})".replace(" )", ")")
        return text


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """A report that nobody reads."""
