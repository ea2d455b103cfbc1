"""The table of routes, and the HTTP application over it.

Routes of SGLang and OpenAI that this build lacks are in the table too and answer 501, so that no
known route is a silent 404.
"""

import socket
from dataclasses import replace

from banyan.base.errors import RequestError
from banyan.server import embeddings, scores
from banyan.server.admin import control, health, memory, recordings, server_info, weights
from banyan.server.admin.metrics import show_metrics
from banyan.server.anthropic.route import anthropic_routes
from banyan.server.batches import BatchRequest, batch, batches
from banyan.server.console import console_routes
from banyan.server.embeddings import EmbeddingRequest, create_embeddings
from banyan.server.http import auth
from banyan.server.http.app import App
from banyan.server.http.exchange import SEND_TIMEOUT_S, HttpExchange
from banyan.server.http.listen import HttpListener
from banyan.server.http.route import Body, Route
from banyan.server.ollama.route import ollama_routes
from banyan.server.openai import audio
from banyan.server.openai.chat_completions import chat_completions
from banyan.server.openai.completions import completions
from banyan.server.openai.files import file, files
from banyan.server.openai.models import list_models, show_model
from banyan.server.openapi import CHAT, COMPLETION, FLUSH, GENERATE, SPEECH, UPLOAD, VERTEX
from banyan.server.responses.route import responses_routes
from banyan.server.sglang import generate, pins, tokens
from banyan.server.state import Handler, ServerState
from banyan.server.web_pages import page_routes

_GET = ("GET",)
_POST = ("POST",)
_BOTH = ("GET", "POST")
_PUT = ("POST", "PUT")

_PICKLED = (
    "Tensors come here as pickled objects, which may run anything and are never opened: write a "
    "checkpoint of safetensors, for speed in /dev/shm, and POST /update_weights_from_disk."
)
_GROUPED = (
    "There is no group of processes to receive weights from: write a checkpoint where every rank "
    "can read it, and POST /update_weights_from_disk."
)
_ONE_BY_ONE = "Weights are taken whole, by one POST /update_weights_from_disk."
_CHECKSUMS = "Weights are not summed up; /get_weights_by_name shows any tensor of them."
_ADAPTERS = (
    "Tensors come here as pickled objects, which may run anything and are never opened: write a "
    "folder of safetensors, for speed in /dev/shm, and POST /load_lora_adapter."
)
_TIERS = (
    "The store of the cache is not cleared while servers use it: detach it (DELETE "
    "/hicache/storage-backend) and remove its folder."
)
_LAYOUT = "What the store calls its pages depends on this release, and nobody else reads them."
_CORPUS = "Drafts come from what the server has seen, and corpora are not read."
_PROFILE = "No traces are sent; /start_profile and /stop_profile record the steps in a file."
_PEERS = "A server keeps the role of --disaggregation-mode."
_AUDIO = "Speech in both directions at once is not available in this build."
_SETTINGS = "Settings are frozen at start-up; start the server again with other flags."
_GC = "Garbage collection needs no freezing here; nothing was done."

_ADMIN: dict[str, tuple[tuple[str, ...], str]] = {
    "/set_internal_state": (_PUT, _SETTINGS),
    "/clear_hicache_storage_backend": (_POST, _TIERS),
    "/hicache/storage-backend/clear": (_POST, _TIERS),
    "/add_external_corpus": (_POST, _CORPUS),
    "/remove_external_corpus": (_POST, _CORPUS),
    "/list_external_corpora": (_GET, _CORPUS),
    "/set_trace_level": (_BOTH, _PROFILE),
    "/freeze_gc": (_BOTH, _GC),
    "/init_weights_update_group": (_POST, _GROUPED),
    "/destroy_weights_update_group": (_POST, _GROUPED),
    "/update_weights_from_distributed": (_POST, _GROUPED),
    "/update_weights_from_tensor": (_POST, _PICKLED),
    "/update_weights_from_ipc": (_POST, _PICKLED),
    "/begin_weight_update": (_POST, _ONE_BY_ONE),
    "/end_weight_update": (_POST, _ONE_BY_ONE),
    "/weights_checker": (_BOTH, _CHECKSUMS),
    "/slow_down": (_BOTH, _SETTINGS),
    "/pd_role_switch": (_POST, _PEERS),
    "/load_lora_adapter_from_tensors": (_POST, _ADAPTERS),
}
_PLAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "/generate_from_file": (_POST, "Prompts as embeddings are not available in this build."),
    "/get_hicache_l3_cache_layout": (_GET, _LAYOUT),
    "/v1/realtime": (_GET, _AUDIO),
    "/v1/decisions": (_POST, "Typed questions are not available in this build."),
    "/v1/systemone": (_POST, "Typed questions are not available in this build."),
}


def all_routes(has_console: bool = True) -> list[Route]:
    groups = {
        "Health": _health_routes(),
        "OpenAI": _openai_routes(),
        "Anthropic": anthropic_routes(),
        "Ollama": ollama_routes(),
        "SGLang": _sglang_routes(),
        "Embeddings and scores": _embedding_routes(),
        "Tokenizer and parsers": _text_routes(),
        "Server information": _information_routes(),
        "Administration": _admin_routes(),
        "Console": console_routes() if has_console else [],
        "Not available": unavailable_routes(),
    }
    others = [replace(route, group=name) for name, group in groups.items() for route in group]
    return page_routes(others)


def _health_routes() -> list[Route]:
    open_ = auth.OPEN
    return [
        Route("/livez", _GET, health.livez, open_, about="Liveness: the process responds"),
        Route("/readyz", _GET, health.readyz, open_, about="Readiness: requests are admitted"),
        Route("/ready", _GET, health.readyz, open_, about="Same as /readyz"),
        Route("/health", _GET, health.health, open_, about="Health: the engine makes progress"),
        Route(
            "/health_generate",
            _GET,
            health.health_generate,
            open_,
            about="Health check that generates one token",
        ),
        Route("/ping", _GET, health.health, about="Same as /health"),
        Route("/metrics", _GET, show_metrics, open_, about="Metrics in Prometheus text format"),
    ]


def _openai_routes() -> list[Route]:
    return [
        Route(
            "/v1/chat/completions",
            _POST,
            chat_completions,
            about="Create a chat completion",
            body=CHAT,
        ),
        Route(
            "/invocations",
            _POST,
            chat_completions,
            about="Create a chat completion (Amazon SageMaker)",
            body=CHAT,
        ),
        Route(
            "/v1/completions", _POST, completions, about="Create a text completion", body=COMPLETION
        ),
        Route("/v1/models", _GET, list_models, about="List the served models"),
        Route("/v1/models/", _GET, show_model, about="Get one model", below={"{model}": _GET}),
        *responses_routes(),
        Route(
            "/v1/audio/transcriptions",
            _POST,
            audio.transcriptions,
            about="Transcribe a file of speech",
            body=SPEECH,
        ),
        Route(
            "/v1/audio/translations",
            _POST,
            audio.translations,
            about="Translate a file of speech into English text",
            body=SPEECH,
        ),
        Route("/v1/files", _BOTH, files, about="List or upload batch files", body=UPLOAD),
        Route(
            "/v1/files/",
            ("GET", "DELETE"),
            file,
            about="Get or delete a file",
            below={"{file_id}": ("GET", "DELETE"), "{file_id}/content": _GET},
        ),
        Route(
            "/v1/batches", _BOTH, batches, about="List or create batches", body=Body(BatchRequest)
        ),
        Route(
            "/v1/batches/",
            _BOTH,
            batch,
            about="Get or cancel a batch",
            below={"{batch_id}": _GET, "{batch_id}/cancel": _POST},
        ),
    ]


def _sglang_routes() -> list[Route]:
    return [
        Route(
            "/generate",
            _PUT,
            generate.generate,
            about="Generate from text or token ids (SGLang)",
            body=GENERATE,
        ),
        Route(
            "/open_session",
            _BOTH,
            generate.open_session,
            about="Open a session that keeps earlier turns",
            body=Body(generate.OpenSession, is_query=True),
        ),
        Route(
            "/close_session",
            _BOTH,
            generate.close_session,
            about="Close a session",
            body=Body(generate.CloseSession, is_query=True),
        ),
        Route(
            "/vertex_generate",
            _POST,
            generate.vertex,
            about="Generate (Google Vertex AI format)",
            body=VERTEX,
        ),
    ]


def _embedding_routes() -> list[Route]:
    prompts = Body(embeddings.EncodeRequest)
    return [
        Route("/encode", _PUT, embeddings.encode, about="Embed prompts (SGLang)", body=prompts),
        Route(
            "/classify",
            _PUT,
            embeddings.encode,
            about="Classification or reward scores of prompts (SGLang)",
            body=prompts,
        ),
        Route(
            "/v1/embeddings",
            _POST,
            create_embeddings,
            about="Create embeddings",
            body=Body(EmbeddingRequest),
        ),
        Route(
            "/v1/classify",
            _POST,
            embeddings.classify,
            about="Classify texts",
            body=Body(embeddings.ClassifyRequest),
        ),
        Route(
            "/v1/score",
            _POST,
            scores.score,
            about="Score items against a query",
            body=Body(scores.ScoreRequest),
        ),
        Route(
            "/v1/rerank",
            _PUT,
            scores.rerank,
            about="Rank documents by relevance",
            body=Body(scores.RerankRequest),
        ),
        *(
            Route(
                path,
                _POST,
                scores.rerank_results,
                about="Rank documents by relevance (Cohere, Jina)",
                body=Body(scores.RerankRequest),
            )
            for path in ("/v2/rerank", "/rerank")
        ),
    ]


def _text_routes() -> list[Route]:
    text, ids = Body(tokens.TokenizeRequest), Body(tokens.DetokenizeRequest)
    return [
        Route("/tokenize", _POST, tokens.tokenize, about="Text to token ids", body=text),
        Route("/v1/tokenize", _POST, tokens.tokenize, about="Text to token ids", body=text),
        Route("/detokenize", _POST, tokens.detokenize, about="Token ids to text", body=ids),
        Route("/v1/detokenize", _POST, tokens.detokenize, about="Token ids to text", body=ids),
        Route(
            "/parse_function_call",
            _POST,
            tokens.parse_function_call,
            about="Extract tool calls from a text",
            body=Body(tokens.ParseCallsRequest),
        ),
        Route(
            "/separate_reasoning",
            _POST,
            tokens.separate_reasoning,
            about="Split a text into reasoning and answer",
            body=Body(tokens.SeparateRequest),
        ),
    ]


def _information_routes() -> list[Route]:
    model, server = server_info.model_info, server_info.server_info
    label = server_info.weight_version
    return [
        Route("/model_info", _GET, model, about="Model information"),
        Route("/get_model_info", _GET, model, about="Same as /model_info"),
        Route(
            "/server_info",
            _GET,
            server_info.server_info,
            about="Resolved settings, memory and counters",
        ),
        Route("/get_server_info", _GET, server, about="Same as /server_info"),
        Route(
            "/v1/loads",
            _GET,
            server_info.show_loads,
            about="Load per replica; ?format=prometheus for gauges",
        ),
        Route("/get_load", _GET, server_info.get_load, about="Load per replica, short form"),
        Route(
            "/weight_version",
            _GET,
            server_info.weight_version,
            about="Version label of the weights",
        ),
        Route("/get_weight_version", _GET, label, about="Same as /weight_version"),
        Route("/version", _GET, control.version, about="Server version"),
    ]


def _admin_routes() -> list[Route]:
    return [*_request_control_routes(), *_cache_routes(), *_weight_routes(), *_diagnostic_routes()]


def _request_control_routes() -> list[Route]:
    return [
        Route(
            "/requests",
            _GET,
            control.list_requests,
            auth.OWN,
            about="List running and queued requests",
        ),
        Route(
            "/abort_request",
            _POST,
            control.abort_request,
            auth.OWN,
            about="Abort requests",
            body=Body(control.AbortRequest),
        ),
        Route(
            "/pause_generation",
            _POST,
            control.pause_generation,
            auth.ADMIN,
            about="Pause generation",
            body=Body(control.PauseRequest, is_query=True),
        ),
        Route(
            "/continue_generation",
            _POST,
            control.continue_generation,
            auth.ADMIN,
            about="Resume generation",
        ),
    ]


def _cache_routes() -> list[Route]:
    return [
        Route(
            "/flush_cache",
            _BOTH,
            memory.flush_cache,
            auth.ADMIN,
            about="Flush the prefix cache",
            body=FLUSH,
        ),
        Route(
            "/pin_prefix",
            _POST,
            pins.pin_prefix,
            auth.ADMIN,
            about="Pin a prompt in the prefix cache",
            body=Body(pins.PinRequest),
        ),
        Route(
            "/unpin_prefix",
            _POST,
            pins.unpin_prefix,
            auth.ADMIN,
            about="Unpin a prompt",
            body=Body(pins.UnpinRequest, is_query=True),
        ),
        Route(
            "/pinned_prefixes", _GET, pins.pinned_prefixes, auth.ADMIN, about="List pinned prompts"
        ),
        Route(
            "/hicache/storage-backend",
            ("GET", "PUT", "DELETE"),
            memory.storage_backend,
            auth.ADMIN,
            about="Show, attach or detach the storage of the hierarchical cache",
            body=Body(memory.StoreRequest),
        ),
        Route(
            "/release_memory_occupation",
            _BOTH,
            memory.release,
            auth.ADMIN,
            about="Release device memory (sleep)",
            body=Body(memory.MemoryRequest),
        ),
        Route(
            "/resume_memory_occupation",
            _BOTH,
            memory.resume,
            auth.ADMIN,
            about="Take device memory again (wake up)",
            body=Body(memory.MemoryRequest),
        ),
    ]


def _weight_routes() -> list[Route]:
    return [
        Route(
            "/update_weights_from_disk",
            _POST,
            weights.update_weights_from_disk,
            auth.ADMIN,
            about="Load other weights from disk",
            body=Body(weights.WeightsRequest),
        ),
        Route(
            "/init_weights_send_group_for_remote_instance",
            _POST,
            weights.init_weights_send_group,
            auth.ADMIN,
            about="Open ports where a new server takes the weights",
            body=Body(weights.SendGroupRequest),
        ),
        Route(
            "/send_weights_to_remote_instance",
            _POST,
            weights.send_weights,
            auth.ADMIN,
            about="Send the weights to a new server",
            body=Body(weights.SendWeightsRequest),
        ),
        *(
            Route(
                path,
                _GET,
                weights.transfer_engine_info,
                auth.ADMIN,
                about="Where a new server takes the weights",
            )
            for path in (
                "/remote_instance_transfer_engine_info",
                "/get_remote_instance_transfer_engine_info",
            )
        ),
        Route(
            "/get_weights_by_name",
            _BOTH,
            weights.get_weights_by_name,
            auth.ADMIN,
            about="Values of one weight tensor",
            body=Body(weights.WeightRequest, is_query=True),
        ),
        Route(
            "/update_weight_version",
            _POST,
            weights.update_weight_version,
            auth.ADMIN,
            about="Set the version label of the weights",
            body=Body(weights.VersionRequest),
        ),
        Route(
            "/load_lora_adapter",
            _POST,
            weights.load_adapter,
            auth.ADMIN,
            about="Load a LoRA adapter",
            body=Body(weights.LoadRequest),
        ),
        Route(
            "/unload_lora_adapter",
            _POST,
            weights.unload_adapter,
            auth.ADMIN,
            about="Unload a LoRA adapter",
            body=Body(weights.UnloadRequest),
        ),
    ]


def _diagnostic_routes() -> list[Route]:
    return [
        Route(
            "/configure_logging",
            _BOTH,
            control.configure_logging,
            auth.ADMIN,
            about="Change request logging",
            body=Body(control.LoggingRequest, is_query=True),
        ),
        Route(
            "/start_profile",
            _BOTH,
            recordings.start_profile,
            auth.ADMIN,
            about="Start the profiler",
            body=Body(recordings.ProfileRequest, is_query=True),
        ),
        Route(
            "/stop_profile",
            _BOTH,
            recordings.stop_profile,
            auth.ADMIN,
            about="Stop the profiler and write its trace",
        ),
        Route(
            "/start_expert_distribution_record",
            _BOTH,
            recordings.start_record,
            auth.ADMIN,
            about="Start recording the expert distribution",
        ),
        Route(
            "/stop_expert_distribution_record",
            _BOTH,
            recordings.stop_record,
            auth.ADMIN,
            about="Stop recording the expert distribution",
        ),
        Route(
            "/dump_expert_distribution_record",
            _BOTH,
            recordings.dump_record,
            auth.ADMIN,
            about="Write the recorded expert distribution",
        ),
        Route(
            "/flight_recorder",
            _BOTH,
            recordings.flight_recorder,
            auth.ADMIN,
            about="Download the latest scheduling decisions",
        ),
    ]


def unavailable_routes() -> list[Route]:
    found = [(auth.ADMIN, *one) for one in _ADMIN.items()]
    found += [(auth.KEY, *one) for one in _PLAIN.items()]
    return [
        Route(path, methods, _refusal(text), guard, about=text, is_available=False)
        for guard, path, (methods, text) in found
    ]


def _refusal(text: str) -> Handler:
    async def refuse(exchange: HttpExchange, state: ServerState) -> None:
        raise RequestError(text, status=501, code="not_available")

    return refuse


def open_http_listener(state: ServerState, listener: socket.socket) -> HttpListener:
    return HttpListener(create_app(state), listener, state.config.server)


def create_app(state: ServerState, send_timeout_s: float = SEND_TIMEOUT_S) -> App:
    """The ASGI application over `state`. Health routes respond before the service is ready."""
    return App(state, all_routes(not state.config.server.disable_console), send_timeout_s)
