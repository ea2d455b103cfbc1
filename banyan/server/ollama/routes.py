"""The routes of Ollama's API."""

from banyan.server.app import Handler, Route
from banyan.server.ollama import embed, models, text
from banyan.server.ollama.dialect import OLLAMA

_GET, _POST, _DELETE = ("GET",), ("POST",), ("DELETE",)

_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/api/chat", _POST, text.chat),
    ("/api/generate", _POST, text.generate),
    ("/api/embed", _POST, embed.embed),
    ("/api/embeddings", _POST, embed.embed_prompt),
    ("/api/tags", _GET, models.tags),
    ("/api/show", _POST, models.show),
    ("/api/ps", _GET, models.running),
    ("/api/version", _GET, models.version),
    ("/api/pull", _POST, models.no_library),
    ("/api/push", _POST, models.no_library),
    ("/api/create", _POST, models.no_library),
    ("/api/copy", _POST, models.no_library),
    ("/api/delete", _DELETE, models.no_library),
)


def ollama_routes() -> list[Route]:
    return [Route(path, methods, handler, dialect=OLLAMA) for path, methods, handler in _ROUTES]
