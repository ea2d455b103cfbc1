"""Pages for browsers: the home page, /docs and /openapi.json.

The pages load nothing: no script, no font, no other file. The console contains the home page for
browsers without scripts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from html import escape

from banyan.server import console
from banyan.server.admin.server_info import living
from banyan.server.http import auth
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.route import Route
from banyan.server.openapi import Document, openapi
from banyan.server.state import ServerState, Service

Describe = Callable[[str, str], Document]
"""(version, path prefix) -> the OpenAPI document."""

_GET = ("GET",)
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")

STYLE = """
:root { color-scheme: light dark; --ink: #1c2420; --paper: #fcfdfb; --line: #d5ddd6;
  --soft: #eef3ee; --leaf: #19683d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e9e3; --paper: #121614; --line: #333d36; --soft: #1c231f; --leaf: #7fcf9f; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
a { color: var(--leaf); } :focus-visible { outline: 3px solid var(--leaf); outline-offset: 2px; }
code, pre { font: .9rem/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .75rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
summary { cursor: pointer; }
summary, .route { margin: 0; padding: .3rem 0; border-bottom: 1px solid var(--line); }
details table { margin: .25rem 0 1rem 1rem; width: calc(100% - 1rem); }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept",
}


def page_routes(others: Sequence[Route]) -> list[Route]:
    """`others` and the routes of the pages, which describe all of them."""
    table: list[Route] = []

    @cache  # the table does not change while the server runs
    def described(version: str, root_path: str) -> Document:
        return openapi(table, version, root_path)

    root = partial(_root, table)
    docs, document = partial(_docs, described), partial(_document, described)
    group = "Pages"
    table += [
        Route("/", _GET, root, about="Home page of this server", group=group, locked=_locked),
        Route("/docs", _GET, docs, about="API reference as a page", group=group, locked=_locked),
        Route("/openapi.json", _GET, document, about="OpenAPI document", group=group),
        Route("/favicon.ico", _GET, _no_icon, auth.OPEN, about="No icon", group=group),
        *others,
    ]
    return list(table)


async def _root(table: Sequence[Route], exchange: HttpExchange, state: ServerState) -> None:
    """A page for browsers, a line for everybody else."""
    if not _is_browser(exchange):
        await exchange.text("Banyan is running\n")
        return
    routes = "".join(
        f"<h3>{escape(group)}</h3><table>{_rows(routes)}</table>"
        for group, routes in _grouped([r for r in table if r.is_available]).items()
    )
    body = (
        f"<h1>Banyan</h1><p>An LLM inference server. See the {_link('docs', 'API reference')} "
        f"and the {_link('openapi.json', 'OpenAPI document')}.</p>"
        f"<table>{_facts(state)}</table><h2>Try it</h2>"
        f"<pre><code>{escape(_command(exchange, state))}</code></pre><h2>Routes</h2>{routes}"
    )
    await _send_first(exchange, state, body)


async def _docs(described: Describe, exchange: HttpExchange, state: ServerState) -> None:
    """The OpenAPI document as a page."""
    document = described(state.version, state.config.server.root_path)
    paths, schemas = document["paths"], document["components"]["schemas"]
    parts = [
        f"<h1>Routes of Banyan</h1><p>{escape(document['info']['description'])} "
        f"{_link('.', 'Home page')}; {_link('openapi.json', 'OpenAPI document')}.</p>"
    ]
    for tag in document["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>")
        for path, methods in paths.items():
            parts += [
                _operation(method.upper(), path, operation, schemas)
                for method, operation in methods.items()
                if operation["tags"] == [tag["name"]]
            ]
    await _send(exchange, "Routes of Banyan", "".join(parts))


async def _document(described: Describe, exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json(described(state.version, state.config.server.root_path))


async def _no_icon(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.whole(b"", 204, "image/x-icon", {"cache-control": "max-age=86400"})


async def _locked(exchange: HttpExchange, state: ServerState) -> None:
    """Refuse with an explanation of how to send the key."""
    asks = {"www-authenticate": "Bearer"}
    line = "This server needs an API key: send the header Authorization: Bearer KEY."
    if not _is_browser(exchange):
        await exchange.json({"error": "Unauthorized", "message": line}, 401, asks)
        return
    curl = f"curl {_address(exchange, state)}/v1/models -H 'Authorization: Bearer '$BANYAN_API_KEY"
    body = f"<h1>Banyan</h1><p>{line}</p><pre><code>{escape(curl)}</code></pre>"
    if exchange.route == "/":
        await _send_first(exchange, state, body, 401, asks)
    else:
        await _send(exchange, "Banyan", body, 401, asks)


def _is_browser(exchange: HttpExchange) -> bool:
    return "text/html" in exchange.request.header(b"accept")


async def _send_first(
    exchange: HttpExchange,
    state: ServerState,
    body: str,
    status: int = 200,
    more: Mapping[str, str] | None = None,
) -> None:
    """Send the console with `body` as its content without scripts; only `body` if disabled."""
    if state.config.server.disable_console:
        await _send(exchange, "Banyan", body, status, more)
        return
    headers = {**HEADERS, **console.HEADERS, **(more or {})}
    await exchange.whole(console.shell(body), status, "text/html; charset=utf-8", headers)


async def _send(
    exchange: HttpExchange,
    title: str,
    body: str,
    status: int = 200,
    more: Mapping[str, str] | None = None,
) -> None:
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )
    await exchange.whole(
        page.encode(), status, "text/html; charset=utf-8", {**HEADERS, **(more or {})}
    )


def _link(to: str, text: str) -> str:
    """A relative link, so that a proxy may add a prefix."""
    return f'<a href="{to}">{escape(text)}</a>'


def _grouped(routes: Sequence[Route]) -> dict[str, list[Route]]:
    groups: dict[str, list[Route]] = {}
    for route in routes:
        groups.setdefault(route.group, []).append(route)
    return groups


def _rows(routes: Sequence[Route]) -> str:
    return "".join(
        f"<tr><td><code>{' '.join(methods)} {escape(path)}</code></td>"
        f"<td>{escape(route.about)}</td></tr>"
        for route in routes
        for path, methods in route.places().items()
    )


def _facts(state: ServerState) -> str:
    """Model, state and load as table rows."""
    trouble, service = state.not_ready_reason(), state.service
    is_waiting = state.paused or state.released
    paused = "paused: requests wait" if is_waiting else "ready"
    found = {"Model": state.served_name, "State": trouble or paused}
    if service is not None:
        found["Context"] = f"{service.limits.total:,} tokens"
        stats = [replica.stats for replica in living(service)]
        found["Requests"] = (
            f"{sum(s.running for s in stats):,} running, {sum(s.waiting for s in stats):,} waiting"
        )
        pages = sum(s.held_pages + s.in_flight_pages for s in stats)
        used = pages * state.config.cache.page_size
        most = service.ready.max_total_tokens * max(1, len(stats))
        found["Cache"] = f"{used:,} of {most:,} tokens in use"
    found["Version"] = state.version
    return "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(value)}</td></tr>'
        for name, value in found.items()
    )


def _command(exchange: HttpExchange, state: ServerState) -> str:
    """A shell command with a request that this server can answer."""
    path, asked = _sample(state.service)
    key = " -H 'Authorization: Bearer '$BANYAN_API_KEY" if state.config.server.has_keys else ""
    return f"curl {_address(exchange, state)}{path}{key} -d '{json.dumps(asked)}'"


def _sample(service: Service | None) -> tuple[str, Document]:
    if service is not None and service.tokenizer is None:
        return "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 8}}
    if service is not None and service.limits.is_embedding:
        return "/v1/embeddings", {"input": "Hello"}
    if service is not None and service.chat is None:
        return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 64}


def _address(exchange: HttpExchange, state: ServerState) -> str:
    """The base URL under which the client reached this server."""
    server, host = state.config.server, exchange.request.header(b"host")
    scheme = "https" if exchange.request.header(b"x-forwarded-proto") == "https" else "http"
    if not _HOST.fullmatch(host):
        host = f"{server.host}:{server.port}"
    return f"{scheme}://{host}{server.root_path.rstrip('/')}"


def _operation(method: str, path: str, operation: Document, schemas: Mapping[str, Document]) -> str:
    """One operation: a line, with its fields in a table that unfolds."""
    line = f"<code>{method} {escape(path)}</code> {escape(operation['summary'])}"
    rows = [
        _row(p["name"], p["schema"], p["required"], p["in"])
        for p in operation.get("parameters", ())
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        needed = schema.get("required", ())
        rows += [
            _row(name, one, name in needed, media if media != "application/json" else "body")
            for name, one in schema["properties"].items()
        ]
    if not rows:
        return f'<p class="route">{line}</p>'
    head = "<tr><th>Field</th><th>Type</th><th>In</th></tr>"
    return f"<details><summary>{line}</summary><table>{head}{''.join(rows)}</table></details>"


def _row(name: str, schema: Document, is_required: bool, where: str) -> str:
    words = _type(schema) + (", required" if is_required else "")
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(words)}</td>"
        f"<td>{escape(where)}</td></tr>"
    )


def _type(schema: Document) -> str:
    """A JSON Schema in a few words."""
    if reference := schema.get("$ref"):
        return reference.rpartition("/")[2]
    if options := schema.get("anyOf"):
        return " or ".join(words for words in map(_type, options) if words != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = schema.get("type")
    return kind if isinstance(kind, str) else "anything"
