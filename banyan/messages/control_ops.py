"""Control ops: operations that every rank of a replica applies between two steps, and their reply.

All ranks apply an op or none does: each prepares first, and it is applied only if all succeeded.
"""

import msgspec

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
GRAPHS = "cuda_graph"
MEMORY_TAGS = (WEIGHTS, KV_CACHE, GRAPHS)
"""Memory that can be released: the model's weights, the pages of the KV cache, graphs."""
USUAL_TAGS = (WEIGHTS, KV_CACHE)
"""Released if a request names none; a device's graphs end with either and return with both."""


class TakeWeights(msgspec.Struct, frozen=True, array_like=True, tag="take_weights"):
    """Replace the weights by the weights of another checkpoint."""

    path: str
    version: str
    """Name of these weights in the prefix cache: pages of other weights are not shared."""
    flush: bool = True
    """Empty the prefix cache as well."""
    is_trial: bool = False
    """Only check whether they can be loaded."""


class ReleaseMemory(msgspec.Struct, frozen=True, array_like=True, tag="release_memory"):
    """Return memory to the system. No step runs until all of it is resumed."""

    tags: list[str]
    """A subset of MEMORY_TAGS."""
    is_trial: bool = False
    """Only check whether it can be released."""


class ResumeMemory(msgspec.Struct, frozen=True, array_like=True, tag="resume_memory"):
    """Allocate released memory again: pages are empty, weights are reloaded."""

    tags: list[str]


class ReadWeight(msgspec.Struct, frozen=True, array_like=True, tag="read_weight"):
    """Return the numbers of one checkpoint tensor. The reply's body is JSON: lists of numbers."""

    name: str
    rows: int
    """At most this many rows, from the first."""


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag="start_profile"):
    """Start a profile; each rank records its own steps."""

    folder: str
    """"" = the folder of the flag."""
    prefix: str
    time_us: int
    """Time stamp in the file names, the same on all ranks."""
    steps: int = 0
    """Stop after this many steps; 0 = only by StopProfile."""


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag="stop_profile"):
    """Stop the profile and write its file."""


class ForgetDrafts(msgspec.Struct, frozen=True, array_like=True, tag="forget_drafts"):
    """Clear the drafter's memory. No request runs."""


class TakeAdapter(msgspec.Struct, frozen=True, array_like=True, tag="take_adapter"):
    """Load a LoRA adapter. The reply's body is a digest of its files."""

    number: int
    """Its number in joins, from 1 on."""
    path: str
    digest: str = ""
    """Required digest; "" = any."""
    room_bytes: int = -1
    """Most bytes that it may take on each rank; -1 = no limit."""


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """Unload an adapter that no slot uses."""

    number: int


class RecordExperts(msgspec.Struct, frozen=True, array_like=True, tag="record_experts"):
    """Start or stop recording the experts that tokens choose, or write the record to a file."""

    what: str
    """ "start", "stop" or "dump"."""
    time_us: int = 0
    """Time stamp in the file name of a dump."""


class PlaceExperts(msgspec.Struct, frozen=True, array_like=True, tag="place_experts"):
    """Move experts of some layers to other ranks. No token changes."""

    layers: list[int]
    places: list[list[int]]
    """The expert at each place of each layer, over all ranks."""


class AttachStore(msgspec.Struct, frozen=True, array_like=True, tag="attach_store"):
    """Attach a cache store that outlives the process. No step runs and no store is attached."""

    store: str
    """Its name (kv_transfer/store.py, STORES)."""
    options: bytes
    """JSON object: options of the store itself."""
    write: str
    """When pages are stored: a policy of kv_cache/hierarchical_cache.py."""
    prefetch: str
    """How long requests wait for it: a policy of scheduler/hicache_fetch.py."""
    threshold: int
    """Fewest tokens of a lookup."""
    timeout_s: float
    timeout_per_ki_s: float
    """Most seconds that a request waits: a base, plus this for each 1024 tokens."""
    is_trial: bool = False
    """Only check whether it can be attached."""


class DetachStore(msgspec.Struct, frozen=True, array_like=True, tag="detach_store"):
    """Detach the store. No step runs; pending writes are dropped."""

    is_trial: bool = False
    """Only check whether it can be detached."""


ControlOp = (
    TakeWeights
    | ReleaseMemory
    | ResumeMemory
    | ReadWeight
    | StartProfile
    | StopProfile
    | ForgetDrafts
    | TakeAdapter
    | DropAdapter
    | RecordExperts
    | PlaceExperts
    | AttachStore
    | DetachStore
)


class ControlOpReply(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Outcome of a control op: of one rank while gathering, then of all ranks together."""

    ok: bool
    """All ranks applied it; False = nothing has changed on any rank."""
    text: str = ""
    body: bytes = b""
    size_bytes: int = 0
    """Memory of the loaded object on the rank that needs most. Also set if memory was missing."""
