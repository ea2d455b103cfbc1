"""The routes of Ollama's API."""

import msgspec

from banyan.server.http.route import Body, Route
from banyan.server.ollama import embed, models, text
from banyan.server.ollama.dialect import OLLAMA
from banyan.server.ollama.schema import (
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from banyan.server.state import Handler

_POST = ("POST",)

_POST_ROUTES: tuple[tuple[str, Handler, str, type[msgspec.Struct]], ...] = (
    ("/api/chat", text.chat, "Chat", OllamaChatRequest),
    ("/api/generate", text.generate, "Generate a completion", GenerateRequest),
    ("/api/embed", embed.embed, "Create embeddings", EmbedRequest),
    ("/api/embeddings", embed.embed_prompt, "Create one embedding (older form)", EmbedRequest),
    ("/api/show", models.show, "Model information", ShowRequest),
)
_GET_ROUTES: tuple[tuple[str, Handler, str], ...] = (
    ("/api/tags", models.tags, "List models"),
    ("/api/ps", models.running, "List loaded models"),
    ("/api/version", models.version, "API version"),
)
_UNAVAILABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((f"/api/{verb}", _POST) for verb in ("pull", "push", "create", "copy")),
    ("/api/delete", ("DELETE",)),
)


def ollama_routes() -> list[Route]:
    return [
        *(
            Route(path, _POST, handler, dialect=OLLAMA, about=about, body=Body(kind))
            for path, handler, about, kind in _POST_ROUTES
        ),
        *(
            Route(path, ("GET",), handler, dialect=OLLAMA, about=about)
            for path, handler, about in _GET_ROUTES
        ),
        *(
            Route(
                path,
                methods,
                models.no_library,
                dialect=OLLAMA,
                about=models.NO_LIBRARY,
                is_available=False,
            )
            for path, methods in _UNAVAILABLE
        ),
    ]
