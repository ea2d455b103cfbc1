"""Route: one row of the table of routes, and what it says of itself to people and generators."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from banyan.server.http import auth
from banyan.server.http.dialect import OPENAI, Dialect
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.limits import JSON_MEDIA

S = TypeVar("S")
"""What the handlers of a table share."""

WITH_BODY = ("POST", "PUT")
"""Methods whose body is read."""


@dataclass(frozen=True)
class Body:
    """What a route reads of a body.

    Attributes:
        kind: its fields.
        is_query: it may be left out, and its fields given in the query.
    """

    kind: type[msgspec.Struct]
    media: str = JSON_MEDIA
    is_query: bool = False


@dataclass(frozen=True)
class Route(Generic[S]):
    """One path. A path that ends in "/" also serves everything below it (`HttpExchange.tail`).

    Attributes:
        about: what it does, in a few words.
        below: of a path that ends in "/": what may follow, with {names}, and its methods.
        group: heading under which people find it.
        locked: answers who has no key, in the place of a bare 401.
        is_available: it does more than to say that this build has it not.
    """

    path: str
    methods: tuple[str, ...]
    handler: Callable[[HttpExchange, S], Coroutine[Any, Any, None]]
    guard: str = auth.KEY
    dialect: Dialect = OPENAI
    about: str = ""
    body: Body | None = None
    below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    group: str = ""
    locked: Callable[[HttpExchange, S], Coroutine[Any, Any, None]] | None = None
    is_available: bool = True

    def places(self) -> dict[str, tuple[str, ...]]:
        """Every path that it serves, as a template, and the methods there."""
        if not self.below:
            return {self.path: self.methods}
        return {self.path + rest: methods for rest, methods in self.below.items()}
