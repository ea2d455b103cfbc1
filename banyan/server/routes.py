"""The table of routes, and the application made of it."""

from dataclasses import replace

from banyan.server.admin import control as operate
from banyan.server.admin import experts, health, loads, memory, profile, requests
from banyan.server.admin import flight_recorder as recording
from banyan.server.admin import hicache as stores
from banyan.server.admin import lora as adapters
from banyan.server.admin import server_info as facts
from banyan.server.admin.metrics import show_metrics
from banyan.server.admin.unavailable import unavailable_routes
from banyan.server.anthropic.messages import anthropic_routes
from banyan.server.batches.route import BatchRequest, batch, batches
from banyan.server.console.files import console_routes
from banyan.server.embeddings import scores
from banyan.server.embeddings import sglang as vectors
from banyan.server.embeddings.openai import EmbeddingRequest, create_embeddings
from banyan.server.http import auth
from banyan.server.http.app import App
from banyan.server.http.exchange import SEND_TIMEOUT_S
from banyan.server.http.route import Body, Route
from banyan.server.ollama.routes import ollama_routes
from banyan.server.openai.chat.route import chat_completions
from banyan.server.openai.completions import completions
from banyan.server.openai.files import file, files
from banyan.server.openai.models import list_models, show_model
from banyan.server.openapi.bodies import CHAT, COMPLETION, FLUSH, GENERATE, UPLOAD, VERTEX
from banyan.server.openapi.pages import page_routes
from banyan.server.responses.route import responses_routes
from banyan.server.sglang import generate, parsing, pins, tokens
from banyan.server.state import ServerState

_GET = ("GET",)
_POST = ("POST",)
_BOTH = ("GET", "POST")
_PUT = ("POST", "PUT")


def all_routes(has_console: bool = True) -> list[Route]:
    groups = {
        "Health": _health_routes(),
        "OpenAI": _openai_routes(),
        "Anthropic": anthropic_routes(),
        "Ollama": ollama_routes(),
        "Native": _native_routes(),
        "Vectors and scores": _vector_routes(),
        "Tokens and parsers": _text_routes(),
        "Facts": _fact_routes(),
        "Operation": _operation_routes(),
        "Console": console_routes() if has_console else [],
        "Not in this build": unavailable_routes(),
    }
    others = [replace(route, group=name) for name, group in groups.items() for route in group]
    return page_routes(others)


def _health_routes() -> list[Route]:
    open_ = auth.OPEN
    return [
        Route("/livez", _GET, health.livez, open_, about="the process answers"),
        Route("/readyz", _GET, health.readyz, open_, about="a request would be admitted"),
        Route("/ready", _GET, health.readyz, open_, about="as /readyz"),
        Route("/health", _GET, health.health, open_, about="the engine makes progress"),
        Route("/health_generate", _GET, health.health_generate, open_, about="a token comes"),
        Route("/ping", _GET, health.health, about="as /health"),
        Route("/metrics", _GET, show_metrics, open_, about="figures for Prometheus"),
    ]


def _openai_routes() -> list[Route]:
    by_name = {"{model}": _GET}
    of_file = {"{file_id}": ("GET", "DELETE"), "{file_id}/content": _GET}
    of_batch = {"{batch_id}": _GET, "{batch_id}/cancel": _POST}
    new_batch = Body(BatchRequest)
    return [
        Route("/v1/chat/completions", _POST, chat_completions, about="a chat's answer", body=CHAT),
        Route("/invocations", _POST, chat_completions, about="SageMaker's chat", body=CHAT),
        Route("/v1/completions", _POST, completions, about="a text goes on", body=COMPLETION),
        Route("/v1/models", _GET, list_models, about="the model that is served"),
        Route("/v1/models/", _GET, show_model, about="one model", below=by_name),
        *responses_routes(),
        Route("/v1/files", _BOTH, files, about="list, or take, a batch's files", body=UPLOAD),
        Route("/v1/files/", ("GET", "DELETE"), file, about="one file", below=of_file),
        Route("/v1/batches", _BOTH, batches, about="list, or begin, batches", body=new_batch),
        Route("/v1/batches/", _BOTH, batch, about="one batch", below=of_batch),
    ]


def _native_routes() -> list[Route]:
    opening = Body(generate.OpenSession, is_query=True)
    closing = Body(generate.CloseSession, is_query=True)
    return [
        Route("/generate", _PUT, generate.generate, about="texts or ids go on", body=GENERATE),
        Route("/open_session", _BOTH, generate.open_session, about="begin turns", body=opening),
        Route("/close_session", _BOTH, generate.close_session, about="forget them", body=closing),
        Route("/vertex_generate", _POST, generate.vertex, about="Vertex AI's form", body=VERTEX),
    ]


def _vector_routes() -> list[Route]:
    of_native, of_inputs = Body(vectors.NativeRequest), Body(vectors.ClassifyRequest)
    of_texts, of_pairs = Body(EmbeddingRequest), Body(scores.ScoreRequest)
    of_documents = Body(scores.RerankRequest)
    return [
        Route("/encode", _PUT, vectors.encode, about="vectors of prompts", body=of_native),
        Route("/classify", _PUT, vectors.encode, about="scores of prompts", body=of_native),
        Route("/v1/embeddings", _POST, create_embeddings, about="vectors of texts", body=of_texts),
        Route("/v1/classify", _POST, vectors.classify, about="classes of texts", body=of_inputs),
        Route("/v1/score", _POST, scores.score, about="how well items fit", body=of_pairs),
        Route("/v1/rerank", _PUT, scores.rerank, about="documents by fit", body=of_documents),
    ]


def _text_routes() -> list[Route]:
    text, ids = Body(tokens.TokenizeRequest), Body(tokens.DetokenizeRequest)
    call, thought = Body(parsing.ParseCallsRequest), Body(parsing.SeparateRequest)
    calls, thoughts = parsing.parse_function_call, parsing.separate_reasoning
    return [
        Route("/tokenize", _POST, tokens.tokenize, about="text to token ids", body=text),
        Route("/v1/tokenize", _POST, tokens.tokenize, about="text to token ids", body=text),
        Route("/detokenize", _POST, tokens.detokenize, about="token ids to text", body=ids),
        Route("/v1/detokenize", _POST, tokens.detokenize, about="token ids to text", body=ids),
        Route("/parse_function_call", _POST, calls, about="tool calls in a text", body=call),
        Route("/separate_reasoning", _POST, thoughts, about="thinking in a text", body=thought),
    ]


def _fact_routes() -> list[Route]:
    model, server = facts.model_info, facts.server_info
    return [
        Route("/model_info", _GET, model, about="what is served"),
        Route("/get_model_info", _GET, model, about="as /model_info"),
        Route("/server_info", _GET, server, about="settings, memory, counters"),
        Route("/get_server_info", _GET, server, about="as /server_info"),
        Route("/v1/loads", _GET, loads.show_loads, about="load; ?format=prometheus for gauges"),
        Route("/get_load", _GET, loads.get_load, about="load in short"),
        Route("/weight_version", _GET, facts.weight_version, about="label of the weights"),
        Route("/get_weight_version", _GET, facts.weight_version, about="as /weight_version"),
        Route("/version", _GET, operate.version, about="version of the server"),
    ]


def _operation_routes() -> list[Route]:
    adm = auth.ADMIN
    begin, end = profile.start_profile, profile.stop_profile
    choices = "expert_distribution_record"
    weights, label = operate.update_weights_from_disk, operate.update_weight_version
    pause, go_on = operate.pause_generation, operate.continue_generation
    logs, ending = operate.configure_logging, facts.abort_request
    of_disk, of_label = Body(operate.WeightsRequest), Body(operate.VersionRequest)
    of_memory, sleep, wake = Body(memory.MemoryRequest), memory.release, memory.resume
    a_weight, of_weight = operate.get_weights_by_name, Body(operate.WeightRequest, is_query=True)
    of_logs = Body(operate.LoggingRequest, is_query=True)
    come, leave = adapters.load_adapter, adapters.unload_adapter
    of_coming, of_leaving = Body(adapters.LoadRequest), Body(adapters.UnloadRequest)
    of_profile = Body(profile.ProfileRequest, is_query=True)
    of_pause, of_ending = Body(operate.PauseRequest, is_query=True), Body(facts.AbortRequest)
    listing = requests.list_requests
    store, of_store = stores.storage_backend, Body(stores.StoreRequest)
    ways = ("GET", "PUT", "DELETE")
    of_pin, of_unpin = Body(pins.PinRequest), Body(pins.UnpinRequest, is_query=True)
    return [
        Route("/requests", _GET, listing, auth.OWN, about="what runs and what waits"),
        Route("/abort_request", _POST, ending, auth.OWN, about="end requests", body=of_ending),
        Route("/flush_cache", _BOTH, facts.flush_cache, adm, about="empty the cache", body=FLUSH),
        Route("/pin_prefix", _POST, pins.pin_prefix, adm, about="keep a prompt", body=of_pin),
        Route("/unpin_prefix", _POST, pins.unpin_prefix, adm, about="let it go", body=of_unpin),
        Route("/pinned_prefixes", _GET, pins.pinned_prefixes, adm, about="what is kept"),
        Route("/hicache/storage-backend", ways, store, adm, about="attach a store", body=of_store),
        Route("/pause_generation", _POST, pause, adm, about="plan no steps", body=of_pause),
        Route("/continue_generation", _POST, go_on, adm, about="plan steps again"),
        Route("/update_weights_from_disk", _POST, weights, adm, about="load others", body=of_disk),
        Route("/get_weights_by_name", _BOTH, a_weight, adm, about="of a tensor", body=of_weight),
        Route("/update_weight_version", _POST, label, adm, about="label them", body=of_label),
        Route("/release_memory_occupation", _BOTH, sleep, adm, about="sleep", body=of_memory),
        Route("/resume_memory_occupation", _BOTH, wake, adm, about="wake", body=of_memory),
        Route("/configure_logging", _BOTH, logs, adm, about="what is logged", body=of_logs),
        Route("/load_lora_adapter", _POST, come, adm, about="one more adapter", body=of_coming),
        Route("/unload_lora_adapter", _POST, leave, adm, about="one less", body=of_leaving),
        Route("/start_profile", _BOTH, begin, adm, about="record the steps", body=of_profile),
        Route("/stop_profile", _BOTH, end, adm, about="write the record"),
        Route(f"/start_{choices}", _BOTH, experts.start_record, adm, about="count experts"),
        Route(f"/stop_{choices}", _BOTH, experts.stop_record, adm, about="count them no more"),
        Route(f"/dump_{choices}", _BOTH, experts.dump_record, adm, about="write the counts"),
        Route("/flight_recorder", _BOTH, recording.flight_recorder, adm, about="latest decisions"),
    ]


def create_app(state: ServerState, send_timeout_s: float = SEND_TIMEOUT_S) -> App:
    """The ASGI application over `state`; it answers health before there is a service."""
    return App(state, all_routes(not state.config.server.disable_console), send_timeout_s)
