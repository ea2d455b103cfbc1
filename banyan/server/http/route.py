"""Route: a row of the table of routes, with its description for OpenAPI."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from banyan.server.http import auth
from banyan.server.http.dialect import OPENAI, Dialect
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.limits import JSON_MEDIA

S = TypeVar("S")
"""The state that handlers of a table share."""

WITH_BODY = ("POST", "PUT")
"""Methods whose body is read."""


@dataclass(frozen=True)
class Body:
    """The request body of a route.

    Attributes:
        kind: struct with its fields.
        is_query: the body is optional, and its fields may be in the query.
    """

    kind: type[msgspec.Struct]
    media: str = JSON_MEDIA
    is_query: bool = False


@dataclass(frozen=True)
class Route(Generic[S]):
    """One path. A path that ends in "/" also serves everything below it (`HttpExchange.tail`).

    Attributes:
        about: summary for OpenAPI.
        below: for a path that ends in "/": rest of the path with {names} -> its methods.
        group: OpenAPI tag.
        locked: handles requests without a key, instead of a bare 401.
        is_available: False = it only says that the feature is absent.
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
        """Path template -> methods, for every path of the route."""
        if not self.below:
            return {self.path: self.methods}
        return {self.path + rest: methods for rest, methods in self.below.items()}
