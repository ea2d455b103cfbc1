"""The table of routes, and the application made of it."""

from banyan.server import (
    admin,
    auth,
    health,
    loads,
    native,
    operate,
    parsing,
    profile,
    scores,
    tokens,
    vectors,
)
from banyan.server.anthropic.messages import anthropic_routes
from banyan.server.app import App, Route
from banyan.server.exchange import SEND_TIMEOUT_S, Exchange
from banyan.server.ollama.routes import ollama_routes
from banyan.server.openai.batches import batch, batches
from banyan.server.openai.chat import chat_completions
from banyan.server.openai.completions import completions
from banyan.server.openai.embeddings import create_embeddings
from banyan.server.openai.files import file, files
from banyan.server.openai.models import list_models, show_model
from banyan.server.openai.responses import responses_routes
from banyan.server.state import ServerState
from banyan.server.unavailable import unavailable_routes

_GET = ("GET",)
_POST = ("POST",)
_BOTH = ("GET", "POST")
_PUT = ("POST", "PUT")


async def _root(exchange: Exchange, state: ServerState) -> None:
    await exchange.text("Banyan is running\n")


def all_routes() -> list[Route]:
    open_, adm = auth.OPEN, auth.ADMIN
    return [
        Route("/", _GET, _root),
        Route("/livez", _GET, health.livez, open_),
        Route("/readyz", _GET, health.readyz, open_),
        Route("/ready", _GET, health.readyz, open_),
        Route("/health", _GET, health.health, open_),
        Route("/health_generate", _GET, health.health_generate, open_),
        Route("/ping", _GET, health.health),
        Route("/v1/chat/completions", _POST, chat_completions),
        Route("/invocations", _POST, chat_completions),
        Route("/v1/completions", _POST, completions),
        Route("/v1/models", _GET, list_models),
        Route("/v1/models/", _GET, show_model),
        *responses_routes(),
        Route("/v1/files", _BOTH, files),
        Route("/v1/files/", ("GET", "DELETE"), file),
        Route("/v1/batches", _BOTH, batches),
        Route("/v1/batches/", _BOTH, batch),
        Route("/generate", ("POST", "PUT"), native.generate),
        Route("/open_session", _BOTH, native.open_session),
        Route("/close_session", _BOTH, native.close_session),
        Route("/encode", _PUT, vectors.encode),
        Route("/classify", _PUT, vectors.encode),
        Route("/v1/embeddings", _POST, create_embeddings),
        Route("/v1/classify", _POST, vectors.classify),
        Route("/v1/score", _POST, scores.score),
        Route("/v1/rerank", _PUT, scores.rerank),
        Route("/tokenize", _POST, tokens.tokenize),
        Route("/v1/tokenize", _POST, tokens.tokenize),
        Route("/detokenize", _POST, tokens.detokenize),
        Route("/v1/detokenize", _POST, tokens.detokenize),
        Route("/parse_function_call", _POST, parsing.parse_function_call),
        Route("/separate_reasoning", _POST, parsing.separate_reasoning),
        Route("/get_model_info", _GET, admin.model_info),
        Route("/model_info", _GET, admin.model_info),
        Route("/get_server_info", _GET, admin.server_info),
        Route("/server_info", _GET, admin.server_info),
        Route("/get_load", _GET, loads.get_load),
        Route("/get_weight_version", _GET, admin.weight_version),
        Route("/weight_version", _GET, admin.weight_version),
        Route("/flush_cache", _BOTH, admin.flush_cache, adm),
        Route("/pause_generation", _POST, operate.pause_generation, adm),
        Route("/continue_generation", _POST, operate.continue_generation, adm),
        Route("/update_weights_from_disk", _POST, operate.update_weights_from_disk, adm),
        Route("/update_weight_version", _POST, operate.update_weight_version, adm),
        Route("/configure_logging", _BOTH, operate.configure_logging, adm),
        Route("/start_profile", _BOTH, profile.start_profile, adm),
        Route("/stop_profile", _BOTH, profile.stop_profile, adm),
        Route("/v1/loads", _GET, loads.show_loads),
        Route("/version", _GET, operate.version),
        Route("/abort_request", _POST, admin.abort_request, auth.OWN),
        *anthropic_routes(),
        *ollama_routes(),
        Route("/vertex_generate", _POST, native.vertex),
        *unavailable_routes(),
    ]


def create_app(state: ServerState, send_timeout_s: float = SEND_TIMEOUT_S) -> App:
    """The ASGI application over `state`; it answers health before there is a service."""
    return App(state, all_routes(), send_timeout_s)
