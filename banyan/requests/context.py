"""RequestContext: everything below a handler that depends on the caller, whatever the transport."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.base.errors import RequestError
from banyan.base.ids import fresh_id


@dataclass
class RequestContext:
    """One request of one caller. A listener creates it; it holds nothing of HTTP.

    Attributes:
        id: used in logs and answers.
        headers: by lower-case name (`headers.get`).
        is_strict: fields without effect are refused (--strict-requests).
        tenant: digest of the caller's key. It owns what the request creates, and is part of the
            prefix-cache namespace.
        key_name: name of the caller's key in --api-key-file; "" = none.
        is_admin: may end the requests of others.
        deadline_s: monotonic time at which the request must have ended; None = no limit.
        warnings: reports for the answer about parts of the request without effect.
    """

    id: str = field(default_factory=fresh_id)
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_strict: bool = False
    tenant: bytes = b""
    key_name: str = ""
    is_admin: bool = False
    deadline_s: float | None = None
    warnings: list[str] = field(default_factory=list[str])

    def warn(self, text: str) -> None:
        """Report in the answer a part of the request that has no effect."""
        self.warnings.append(text)

    def warn_or_refuse(self, name: str, why: str, is_strict: bool = False) -> None:
        """Report the field `name`, which has no effect.

        Args:
            is_strict: refuse it on any server.

        Raises:
            RequestError: 400, under --strict-requests or with `is_strict`.
        """
        if is_strict or self.is_strict:
            raise RequestError(
                f"{name[:80]!r} is not honoured by this server",
                param=name[:80],
                code="field_not_honoured",
                hint="Leave it out, or start without --strict-requests",
            )
        self.warn(f"{name[:80]}: {why}")

    def time_left_s(self) -> float | None:
        """Seconds until the deadline; None = no limit."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()
