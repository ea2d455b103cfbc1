"""The routes of Ollama's API."""

import msgspec

from banyan.server.http.route import Body, Route
from banyan.server.ollama import embed, models, text
from banyan.server.ollama.dialect import OLLAMA
from banyan.server.ollama.schema import ChatRequest, EmbedRequest, GenerateRequest, ShowRequest
from banyan.server.state import Handler

_POST = ("POST",)

_READING: tuple[tuple[str, Handler, str, type[msgspec.Struct]], ...] = (
    ("/api/chat", text.chat, "a chat's answer", ChatRequest),
    ("/api/generate", text.generate, "a prompt's answer", GenerateRequest),
    ("/api/embed", embed.embed, "vectors of texts", EmbedRequest),
    ("/api/embeddings", embed.embed_prompt, "vector of a text", EmbedRequest),
    ("/api/show", models.show, "facts about the model", ShowRequest),
)
_TELLING: tuple[tuple[str, Handler, str], ...] = (
    ("/api/tags", models.tags, "the model as a list"),
    ("/api/ps", models.running, "the model that is loaded"),
    ("/api/version", models.version, "version of the API"),
)
_LACKING: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((f"/api/{verb}", _POST) for verb in ("pull", "push", "create", "copy")),
    ("/api/delete", ("DELETE",)),
)


def ollama_routes() -> list[Route]:
    return [
        *(
            Route(path, _POST, handler, dialect=OLLAMA, about=about, body=Body(kind))
            for path, handler, about, kind in _READING
        ),
        *(
            Route(path, ("GET",), handler, dialect=OLLAMA, about=about)
            for path, handler, about in _TELLING
        ),
        *(
            Route(
                *(path, methods, models.no_library),
                dialect=OLLAMA,
                about=models.NO_LIBRARY,
                is_available=False,
            )
            for path, methods in _LACKING
        ),
    ]
