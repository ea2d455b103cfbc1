"""Orders: what every rank of a replica does between two steps, and what came of it.

An order is carried out on all ranks or on none: each gets ready first, and only when all of them
could does it happen.
"""

import msgspec

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)
"""What may be released: the model's weights; the pages of the KV cache."""


class TakeWeights(msgspec.Struct, frozen=True, array_like=True, tag="take_weights"):
    """Take the weights of another checkpoint in the place of the present ones."""

    path: str
    version: str
    """Names these weights to the prefix cache: pages of others are not shared."""
    flush: bool = True
    """Empty the prefix cache as well."""
    is_trial: bool = False
    """Only see whether they can be taken."""


class ReleaseMemory(msgspec.Struct, frozen=True, array_like=True, tag="release_memory"):
    """Give memory back to the system. Nothing runs until all of it is there again."""

    tags: list[str]
    """Of MEMORY_TAGS."""
    is_trial: bool = False
    """Only see whether it can be released."""


class ResumeMemory(msgspec.Struct, frozen=True, array_like=True, tag="resume_memory"):
    """Take back what was released: pages are empty, weights are loaded again."""

    tags: list[str]


class ReadWeight(msgspec.Struct, frozen=True, array_like=True, tag="read_weight"):
    """Tell the numbers of one tensor of the checkpoint; changes nothing. The reply's body is JSON:
    lists of numbers."""

    name: str
    rows: int
    """At most so many, from the first."""


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag="start_profile"):
    """Record what the steps do, each rank for itself."""

    folder: str
    """"" = that of the flag."""
    prefix: str
    time_us: int
    """The same number in the file names of all ranks."""
    steps: int = 0
    """The recording ends by itself after so many; 0 = it does not."""


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag="stop_profile"):
    """Write the file of what was recorded."""


class ForgetDrafts(msgspec.Struct, frozen=True, array_like=True, tag="forget_drafts"):
    """Forget what drafts are made from. No request runs."""


class TakeAdapter(msgspec.Struct, frozen=True, array_like=True, tag="take_adapter"):
    """Load an adapter beside the weights. The reply's body is a digest of its files."""

    number: int
    """From 1 on; what joins call it."""
    path: str
    digest: str = ""
    """What it must be; "" = whatever is there."""
    room_bytes: int = -1
    """Most memory that it may take on each rank; -1 = any."""


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """Let go of an adapter; no slot has it."""

    number: int


class RecordExperts(msgspec.Struct, frozen=True, array_like=True, tag="record_experts"):
    """Record which experts tokens choose, stop it, or write down what has been recorded."""

    what: str
    """ "start", "stop" or "dump"."""
    time_us: int = 0
    """In the name of the file of a dump."""


class PlaceExperts(msgspec.Struct, frozen=True, array_like=True, tag="place_experts"):
    """Let the experts of some layers lie elsewhere; their weights go from rank to rank. No token
    changes by it."""

    layers: list[int]
    places: list[list[int]]
    """The expert at each place of each of them, through all ranks."""


class AttachStore(msgspec.Struct, frozen=True, array_like=True, tag="attach_store"):
    """Keep pages of the cache in a store that outlives the process. Nothing runs, and there is no
    store yet."""

    store: str
    """Its name (kv_transfer/store.py, STORES)."""
    options: bytes
    """JSON object: what the store itself is told."""
    write: str
    """When pages are stored: a policy of kv_cache/hierarchical_cache.py."""
    prefetch: str
    """How long requests wait for it: a policy of scheduler/hicache_fetch.py."""
    threshold: int
    """Tokens; fewer are not looked for."""
    timeout_s: float
    timeout_per_ki_s: float
    """Most seconds that a request waits, and for each 1024 tokens."""
    is_trial: bool = False
    """Only see whether it can be attached."""


class DetachStore(msgspec.Struct, frozen=True, array_like=True, tag="detach_store"):
    """Let go of the store. Nothing runs; what is on its way there is not waited for."""

    is_trial: bool = False
    """Only see whether it can be let go."""


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
    """Outcome of one order, of all ranks together; while it is gathered, of one of them."""

    ok: bool
    """No rank had a reason not to; else nothing has changed on any of them."""
    text: str = ""
    body: bytes = b""
    size_bytes: int = 0
    """Of memory that what was taken needs on the rank where it needs most; told where there was no
    room for it, too."""
