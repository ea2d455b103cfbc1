"""The parts of the Config that concern those who ask and those who look: the server, and what it
tells of itself. See `config/schema.py`, which has the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str = ""
    api_key_file: str = ""
    """Callers with names, keys, weights and limits; read again when it changes."""
    admin_api_key: str = ""
    allowed_hosts: str = ""
    """Names beside the server's own that the header Host may have, with commas; "*" = any."""
    allowed_origins: str = ""
    """Origins whose web pages may ask and read answers, with commas; "*" = any."""
    chat_template: str = ""
    completion_template: str = ""
    tool_parser: str = "auto"
    """"auto" = the one that the chat template asks for, "none" = tool calls stay text."""
    reasoning_parser: str = "auto"
    """The same for thinking."""
    stream_interval: int = 1
    incremental_output: bool = False
    """/generate streams only the new text of each chunk instead of the whole so far."""
    skip_tokenizer: bool = False
    drain_timeout_s: float = 30.0
    keep_alive_s: int = 30
    """How long a connection without a request stays open."""
    heartbeat_timeout_s: float = 20.0
    """Silence of the engine after which /health is 503."""
    engine_restarts: int = 5
    """How often in a row an engine that is lost is started again; 0 = never."""
    engine_proof_s: float = 600.0
    """An engine that has served for longer is sound: the count begins anew."""
    max_new_tokens: int = 0
    """Most tokens of an answer, whatever is asked; 0 = what fits the context."""
    max_body_bytes: int = 32 << 20
    storage_path: str = ""
    """Folder of uploaded files and batches; "" = one of the user's own for each port."""
    tool_servers: str = ""
    """"demo", HOST:PORT and URLs, separated by commas, whose tools /v1/responses may call."""
    root_path: str = ""
    cache_report: bool = False
    allow_auto_truncate: bool = False
    strict_requests: bool = False
    sampling_defaults: str = "model"
    preferred_sampling: dict[str, object] = field(default_factory=dict[str, object])
    chat_tokens: int = 0
    """Longest answer of a chat where neither request nor operator bounds it; 0 = what fits."""
    score_delimiter: int = -1
    """Token between query and item of /v1/score; -1 = none."""
    skip_warmup: bool = False
    warmups: str = ""
    """Names of what runs before the server is ready, separated by commas."""
    batch_encode: bool = False
    """The texts of one request are tokenised in one call, several at a time."""
    tokenizer_workers: int = 1
    """Processes that tokenise; 1 = the server's own."""
    gathers_texts: bool = False
    """Texts of requests that come at about the same time are tokenised in one call."""
    gathered_texts: int = 32
    """Texts of one such call."""
    gathering_s: float = 0.002
    """How long the first of them waits for others."""
    random_seed: int = -1
    """Start of the seeds that requests without one get; -1 = drawn afresh."""
    logit_processors: bool = False
    """Requests may name installed logit processors."""
    hidden_states: bool = False
    """Requests may ask for hidden states."""
    ssl_cert: str = ""
    """File of the certificate; "" = connections are not encrypted."""
    ssl_key: str = ""
    """File of its key; "" = it is in the same file."""
    ssl_password: str = ""
    ssl_ca: str = ""
    """File of certificates that those of clients must be signed by; "" = clients need none."""
    ssl_refresh: bool = False
    """A certificate that changes is taken without a restart."""
    disable_console: bool = False
    """Browsers that open / get a page that says what the server is, and not the console."""
    grpc_mode: bool = False
    """Serve gRPC on `port` instead of HTTP."""
    grpc_http_port: int | None = None
    """Serve HTTP on this port too, with `grpc_mode`."""
    require_key: bool = False
    """Refuse to listen on a non-loopback address without an API key."""

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_cert else "http"

    @property
    def tokenizer_waits(self) -> bool:
        """Whether tokenising a text waits for other requests or processes."""
        return self.waiting_texts > 0

    @property
    def waiting_texts(self) -> int:
        """Texts that may wait so at a time."""
        workers = self.tokenizer_workers if self.tokenizer_workers > 1 else 0
        return workers + (self.gathered_texts if self.gathers_texts else 0)


VLLM = "vllm"


@dataclass(frozen=True)
class ObserveConfig:
    log_level: str = "info"
    journal: str = ""
    """File that records every message, plan and result; "" = none."""
    journal_bytes: int = 256 << 20
    recorder_bytes: int = 16 << 20
    """Memory for the latest of such records, of each engine that a server starts; 0 = none."""
    log_requests: bool = False
    log_detail: int = 2
    """What those lines tell: 0 = lengths and times, 1 = sampling parameters too, 2 = the beginning
    of prompt and answer too, 3 = all of them."""
    http_level: str = "warning"
    """"info" and "debug" show one line for each HTTP request."""
    step_log_interval: int = 40
    """Steps with decode rows between two lines about the load; 0 = none."""
    profile_dir: str = ""
    """Folder of profiles; "" = that of temporary files."""
    metrics: bool = False
    """Count requests and tokens, and tell them at /metrics."""
    metrics_names: str = "sglang"
    """Whose names they have there: "sglang" or VLLM."""
    labels_header: str = "x-custom-labels"
    label_names: tuple[str, ...] = ()
    """Labels of those figures that requests may bring, as a JSON object in that header."""
    ttft_buckets: tuple[float, ...] = ()
    itl_buckets: tuple[float, ...] = ()
    e2e_buckets: tuple[float, ...] = ()
    """Upper bounds in seconds; () = the usual ones."""
    length_histograms: bool = False
    """Count prompts and answers by their length too."""
    prompt_buckets: tuple[str, ...] = ()
    output_buckets: tuple[str, ...] = ()
    """Upper bounds in tokens, or the rule for them (server/admin/metrics.py)."""
    kv_events: dict[str, object] = field(default_factory=dict[str, object])
    """Where engines tell what their caches hold (config/kv_events.py); {} = nowhere."""
    times: bool = False
    """A line in the log for each request that ends: where its time went."""
    writes_records: bool = False
    """Files with a record of each request are written, in the folder `records`."""
    records: str = ""
    dumps: str = ""
    """Folder of the requests that came before an engine was lost; "" = none are kept."""
    sigquit_handler: str = ""
    """module:function that SIGQUIT calls in the server; "" = none."""
    traces: bool = False
    """Send a span for each request, and for each of its phases."""
    traces_endpoint: str = "http://localhost:4318/v1/traces"
    """Where they are sent to, as OTLP over HTTP."""
    traces_service: str = "banyan"
    """How this server is called there."""
    slow_gc_s: float = 0.0
    """Collections of garbage that take longer are reported; 0 = none are."""
    log_format: str = "text"
    """Of the lines that `log_requests` asks for: "text" or "json"."""
    notes: tuple[str, ...] = ()
    """Lines for people: flags and variables that were given and have no effect here."""
    origins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Schema field -> who has set it; absent where the default stands."""
