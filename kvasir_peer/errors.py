"""Every error that Kvasir peer raises on purpose.

The tree::

    KvasirError                     exit status 1
    ├── UsageError                  exit status 2: the person can mend it
    │   ├── SettingsError           a flag, an environment variable, a configuration file
    │   ├── TicketError             a ticket that does not parse, has a typo, or has expired
    │   └── ModelFileError          missing, not a GGUF, truncated, unknown architecture or tensor
    ├── PlanError                   a ring plan that cannot be (one stage, layers not covered, bad signature)
    ├── ResourceError               too little memory or disk, said before anything is loaded
    ├── WireError                   bytes from another peer that break the protocol (carries a short reason code)
    ├── LinkError                   a link or a peer that cannot be reached, or was lost
    ├── RefusedError                another peer said no (carries its reason)
    ├── EngineError                 the engine process crashed, or cannot do what was asked
    │   └── CacheError              a KV cache does not hold what a row builds on
    ├── NotReadyError               a model cannot be served yet (carries what is missing, and when to ask again)
    └── BusyError                   the queue is full (carries when to ask again)

The text of each is one line: what happened, where, and what to do next.
"""

from __future__ import annotations


class KvasirError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        peer: peer id that the error is about, or None.
        plan: plan id that the error is about, or None.
    """

    exit_status = 1

    def __init__(self, message: str, *, peer: str | None = None, plan: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.plan = plan


class UsageError(KvasirError):
    """Something that the person at the keyboard can mend."""

    exit_status = 2


class SettingsError(UsageError):
    """A flag, an environment variable or a configuration file is wrong."""


class TicketError(UsageError):
    """A ticket does not parse, has a typo, or has expired."""


class ModelFileError(UsageError):
    """A model file is missing, is not a GGUF, is truncated, or holds what we do not know."""


class PlanError(KvasirError):
    """A ring plan that cannot be: one stage, layers not covered, a bad signature."""

    exit_status = 2


class ResourceError(KvasirError):
    """Too little memory or disk; raised before anything is loaded, with the numbers."""

    exit_status = 2


class WireError(KvasirError):
    """Bytes from another peer break the protocol.

    Attributes:
        code: a short stable word, counted in the metrics (``oversize``, ``malformed``, ``unexpected``, ...).
    """

    def __init__(self, code: str, message: str, *, peer: str | None = None, plan: str | None = None) -> None:
        super().__init__(message, peer=peer, plan=plan)
        self.code = code


class LinkError(KvasirError):
    """A peer cannot be reached, or a link to it was lost."""


class RefusedError(KvasirError):
    """Another peer said no; the text is its reason."""


class EngineError(KvasirError):
    """The engine process crashed, or cannot do what was asked."""


class CacheError(EngineError):
    """A KV cache does not hold the positions that a row builds on."""


class NotReadyError(KvasirError):
    """A model cannot be served yet.

    Attributes:
        retry_after: seconds until it makes sense to ask again.
    """

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BusyError(KvasirError):
    """The queue is full.

    Attributes:
        retry_after: seconds until it makes sense to ask again.
    """

    def __init__(self, message: str, *, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
