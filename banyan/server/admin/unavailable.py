"""Routes that clients of SGLang and OpenAI know and this build lacks: each says so, with 501.

The table is the promise that no known route is a silent 404.
"""

from banyan.base.errors import RequestError
from banyan.server.http import auth
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.route import Route
from banyan.server.state import Handler, ServerState

_BOTH = ("GET", "POST")
_POST = ("POST",)
_GET = ("GET",)
_PUT = ("POST", "PUT")

_WEIGHTS = "Weights are taken from files only; POST /update_weights_from_disk names where."
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
_AUDIO = "Audio models are not available in this build."
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
    "/init_weights_send_group_for_remote_instance": (_POST, _WEIGHTS),
    "/send_weights_to_remote_instance": (_POST, _WEIGHTS),
    "/remote_instance_transfer_engine_info": (_GET, _WEIGHTS),
    "/get_remote_instance_transfer_engine_info": (_GET, _WEIGHTS),
    "/slow_down": (_BOTH, _SETTINGS),
    "/pd_role_switch": (_POST, _PEERS),
    "/load_lora_adapter_from_tensors": (_POST, _ADAPTERS),
}

_LOADS = "/v1/loads?format=prometheus shows the load."
_PLAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "/generate_from_file": (_POST, "Prompts as embeddings are not available in this build."),
    "/get_hicache_l3_cache_layout": (_GET, _LAYOUT),
    "/v1/audio/transcriptions": (_POST, _AUDIO),
    "/v1/realtime": (_GET, _AUDIO),
    "/v1/decisions": (_POST, "Typed questions are not available in this build."),
    "/v1/systemone": (_POST, "Typed questions are not available in this build."),
}


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
