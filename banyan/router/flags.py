"""The flags of a router: the names and meanings of sglang_router.launch_router. What those know and
this build lacks is refused with a reason.
"""

from dataclasses import replace

from banyan.config.flags.flag import COMMAS, FLOAT, FLOATS, INT, SWITCH, WORDS, Elsewhere, Flag
from banyan.config.flags.server import FLAGS as SERVER_FLAGS

_POLICY = ("cache_aware", "round_robin", "random", "power_of_two", "bucket", "consistent_hashing")
_OTHER_POLICIES = (
    Elsewhere(
        "manual prefix_hash",
        "this router has no such policy",
        "consistent_hashing binds clients by their header x-smg-routing-key, cache_aware prompts",
    ),
)
_PO2 = (("po2", "power_of_two"),)

_WHO = (
    Flag("worker-urls", "pool.urls", "http://host:port of each server to route to", kind=WORDS),
    Flag(
        "pd-disaggregation",
        "pool.is_paired",
        "send every request to a prefill and a decode server at once",
        kind=SWITCH,
    ),
    Flag(
        "prefill",
        "pool.prefill",
        "a prefill server and its bootstrap port, for which it is asked if none is given; once for "
        "each server",
        kind=WORDS,
        shown="URL [PORT]",
    ),
    Flag("decode", "pool.decode", "a decode server; once for each", kind=WORDS, shown="URL"),
    Flag(
        "prefill-bootstrap-ports",
        "pool.ports",
        "bootstrap ports of the prefill servers in their order, or one for all",
        kind=WORDS,
        pattern=r"[0-9]{1,5}",
        shown="PORT …",
    ),
    Flag(
        "worker-startup-timeout-secs",
        "pool.startup_s",
        "the router ends when no server is well so long after its start",
        kind=FLOAT,
        low=0.0,
    ),
    Flag(
        "dp-size",
        "pool.count",
        "start so many servers, with the flags that are not the router's",
        kind=INT,
        aliases=("dp", "data-parallel-size"),
        low=1,
        high=64,
    ),
)
_MODELS = (
    Flag(
        "models",
        "models.names",
        "models to serve, each by a server of its own that starts when a request names it; "
        "NAME=MODEL gives one another name",
        kind=WORDS,
    ),
    Flag(
        "models-dir",
        "models.folder",
        "serve every model in this folder (folders and .gguf files); hub = every model that banyan "
        "list shows",
    ),
    Flag(
        "models-preset",
        "models.preset",
        "YAML file with a mapping from names of models to the flags of their servers",
        shown="FILE",
    ),
    Flag(
        "models-max",
        "models.most",
        "models that are loaded at a time; the least recently used is unloaded for another one",
        kind=INT,
        low=1,
        high=64,
    ),
    Flag(
        "models-memory",
        "models.memory_gib",
        "GiB of memory of all loaded models; default: no bound",
        kind=FLOAT,
        low=0.0,
    ),
    Flag(
        "sleep-idle-seconds",
        "models.idle_s",
        "unload a model after so many seconds without a request; default: never",
        kind=FLOAT,
        low=0.0,
    ),
    Flag(
        "default-model",
        "models.default",
        "model of requests that name none or an unknown one; default: the first, and error 404",
    ),
    Flag(
        "enable-igw",
        "pool.by_model",
        "servers have different models: a request goes to one that has the model it names",
        kind=SWITCH,
    ),
)
_HTTP = (
    Flag("host", "server.host", "address to listen on"),
    Flag("port", "server.port", "port to listen on; 0 = any free one", kind=INT, low=0, high=65535),
    Flag(
        "api-key",
        "server.api_key",
        "keys, separated by spaces; every request must carry one as a bearer token, which goes on "
        "to its server",
    ),
    Flag("api-key-file", "server.api_key_file", "YAML file of callers, as for a server"),
    Flag("admin-api-key", "server.admin_api_key", "key that the routes about workers want"),
    Flag(
        "show-workers",
        "visibility.shows_workers",
        "show addresses and troubles of servers to every key, not only to administrators",
        kind=SWITCH,
    ),
    Flag("require-key", "server.require_key", "refuse to listen openly without a key", kind=SWITCH),
    Flag("allowed-hosts", "server.allowed_hosts", "other names of this router", kind=COMMAS),
    Flag(
        "allowed-origins",
        "server.allowed_origins",
        "web pages that may ask; * = any",
        kind=COMMAS,
        aliases=("cors-allowed-origins",),
    ),
    Flag(
        "max-payload-size",
        "server.max_body_bytes",
        "bytes of the largest body",
        kind=INT,
        low=1024,
        high=1 << 30,
    ),
    Flag(
        "shutdown-grace-period-secs",
        "server.drain_timeout_s",
        "seconds that open requests get after SIGTERM",
        kind=FLOAT,
        aliases=("drain-timeout",),
        low=0.0,
    ),
    Flag(
        "request-timeout-secs",
        "limits.request_s",
        "seconds after which a request ends",
        kind=FLOAT,
        aliases=("timeout",),
        low=0.001,
    ),
    Flag(
        "max-concurrent-requests",
        "limits.concurrent",
        "requests in progress at a time; -1 = no bound",
        kind=INT,
        low=-1,
    ),
    Flag("queue-size", "limits.waiting", "more that wait for a place", kind=INT, low=0, high=10**6),
    Flag(
        "queue-timeout-secs",
        "limits.waiting_s",
        "seconds that one waits for a place",
        kind=FLOAT,
        low=0.001,
    ),
    Flag(
        "rate-limit-tokens-per-second",
        "limits.rate",
        "requests that may begin in a second; default: no bound",
        kind=INT,
        low=0,
    ),
)
_ENCRYPTED = ("ssl-certfile", "ssl-keyfile", "ssl-keyfile-password", "ssl-ca-certs")
_TLS_NAMES = {"ssl-certfile": ("tls-cert-path",), "ssl-keyfile": ("tls-key-path",)}
_HTTPS = tuple(
    replace(flag, aliases=_TLS_NAMES.get(flag.name, ()))
    for flag in SERVER_FLAGS
    if flag.name in (*_ENCRYPTED, "enable-ssl-refresh")
)
"""As of a server, also in the names of SGLang's router."""
_ROUTING = (
    Flag(
        "policy",
        "policy.name",
        "who gets a request",
        choices=_POLICY,
        translate=_PO2,
        elsewhere=_OTHER_POLICIES,
    ),
    Flag(
        "prefill-policy",
        "policy.prefill",
        "who prefills it; default: --policy",
        choices=_POLICY,
        translate=_PO2,
        elsewhere=_OTHER_POLICIES,
    ),
    Flag(
        "decode-policy",
        "policy.decode",
        "who decodes it; default: --policy",
        choices=_POLICY,
        translate=_PO2,
        elsewhere=_OTHER_POLICIES,
    ),
    Flag(
        "cache-threshold",
        "policy.threshold",
        "cache_aware: share of a prompt that a server must have seen to get it for that",
        kind=FLOAT,
        low=0.0,
        high=1.0,
    ),
    Flag(
        "balance-abs-threshold",
        "policy.most_apart",
        "cache_aware: more requests than this between the busiest server and the idlest, and the "
        "load decides",
        kind=INT,
        low=0,
    ),
    Flag(
        "balance-rel-threshold",
        "policy.most_times",
        "cache_aware: and more than this many times as many",
        kind=FLOAT,
        low=1.0,
    ),
    Flag(
        "bucket-adjust-interval-secs",
        "policy.adjust_s",
        "bucket: seconds between two partings of lengths",
        kind=FLOAT,
        low=0.001,
    ),
    Flag(
        "follow-kv-events",
        "policy.follows_events",
        "cache_aware: use the cache events of servers (their --kv-events-config) rather "
        "than estimates; texts are tokenized by a server's /tokenize",
        kind=SWITCH,
    ),
    Flag(
        "max-tree-size",
        "policy.tree_bytes",
        "cache_aware: bytes of prompts that are remembered for each server; 64 take about 200",
        kind=INT,
        low=64,
        high=1 << 40,
    ),
)
_FAILURE = (
    Flag("retry-max-retries", "retry.most", "how often a request is sent again", kind=INT, low=0),
    Flag(
        "retry-initial-backoff-ms",
        "retry.first_pause_s",
        "pause before servers that have been tried are tried again",
        kind=FLOAT,
        low=0.0,
    ),
    Flag(
        "retry-max-backoff-ms", "retry.longest_pause_s", "longest such pause", kind=FLOAT, low=0.0
    ),
    Flag(
        "retry-backoff-multiplier",
        "retry.growth",
        "how pauses grow",
        kind=FLOAT,
        low=1.0,
        high=100.0,
    ),
    Flag(
        "retry-jitter-factor",
        "retry.jitter",
        "share by which pauses are longer or shorter",
        kind=FLOAT,
        low=0.0,
        high=1.0,
    ),
    Flag("disable-retries", "retry.is_off", "send no request again", kind=SWITCH),
    Flag(
        "cb-failure-threshold",
        "breaker.failures",
        "failures in a row after which a server is left alone, if there is another one",
        kind=INT,
        low=1,
    ),
    Flag(
        "cb-success-threshold",
        "breaker.successes",
        "successes in a row after which it counts as any other again",
        kind=INT,
        low=1,
    ),
    Flag(
        "cb-timeout-duration-secs",
        "breaker.open_s",
        "seconds after its last failure that it is left alone",
        kind=FLOAT,
        low=0.001,
    ),
    Flag(
        "cb-window-duration-secs",
        "breaker.window_s",
        "seconds within which failures in a row count together",
        kind=FLOAT,
        low=0.001,
    ),
    Flag("disable-circuit-breaker", "breaker.is_off", "leave no server alone", kind=SWITCH),
    Flag(
        "health-failure-threshold",
        "health.failures",
        "bad answers in a row, or none, after which a server gets no requests",
        kind=INT,
        low=1,
    ),
    Flag(
        "health-success-threshold",
        "health.successes",
        "good answers in a row after which it gets them again",
        kind=INT,
        low=1,
    ),
    Flag(
        "health-check-timeout-secs",
        "health.timeout_s",
        "seconds to wait for such an answer",
        kind=FLOAT,
        low=0.001,
    ),
    Flag(
        "health-check-interval-secs",
        "health.interval_s",
        "seconds between two looks at a server",
        kind=FLOAT,
        low=0.001,
    ),
    Flag(
        "worker-startup-check-interval",
        "health.first_interval_s",
        "the same for one that has not been well yet",
        kind=FLOAT,
        low=0.001,
    ),
    Flag("health-check-endpoint", "health.path", "what servers are asked"),
    Flag("disable-health-check", "health.is_off", "take every server for well", kind=SWITCH),
)
_TELLING = (
    Flag(
        "log-level",
        "observe.log_level",
        "least severe log line that is shown",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"),),
    ),
    Flag(
        "log-format",
        "observe.whole_log_format",
        "json = each line of the log is a JSON object, also from servers that it starts",
        choices=("text", "json"),
    ),
    Flag(
        "log-level-http",
        "observe.http_level",
        "info or debug = one line for each HTTP request",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"),),
    ),
    Flag("enable-metrics", "observe.metrics", "count, and show it at /metrics", kind=SWITCH),
    Flag(
        "prometheus-port",
        "prometheus.port",
        "count, and show it at a port of its own too",
        kind=INT,
        low=1,
        high=65535,
    ),
    Flag("prometheus-host", "prometheus.host", "address of that port; default: --host"),
    Flag(
        "prometheus-duration-buckets",
        "prometheus.buckets",
        "upper bounds in seconds of the times that are counted",
        kind=FLOATS,
        low=0.0,
    ),
)

GROUPS = (
    ("Servers", _WHO),
    ("Several models", _MODELS),
    ("HTTP and limits", _HTTP),
    ("HTTPS", _HTTPS),
    ("Routing", _ROUTING),
    ("Failure", _FAILURE),
    ("Logs and figures", _TELLING),
)

IDLE = {
    "eviction-interval-secs": "what is remembered of prompts is bounded at every moment",
    "log-interval": "there are no lines at intervals",
    "mini-lb": "there is one router, for small and large",
}
"""Flag -> why it is accepted and has nothing to do."""

_PODS = "servers are named by flags or POST /workers, and no Kubernetes API is asked"
_TLS = "servers with https URLs are judged by this machine's authorities, and shown no certificate"
_STORE = "nothing of requests is kept here: a server keeps its responses itself"
_WORDS = "words are the servers' own business: no tokenizer is loaded here"
_TRACE = "no traces are sent"
_ADMIN = "the routes about workers take one key: --admin-api-key"

REFUSED = {
    **dict.fromkeys(
        (
            *("service-discovery", "selector", "service-discovery-port", "prefill-selector"),
            *("service-discovery-namespace", "decode-selector", "bootstrap-port-annotation"),
        ),
        _PODS,
    ),
    **dict.fromkeys(
        (*("client-cert-path", "client-key-path", "ca-cert-paths"),),
        _TLS,
    ),
    **dict.fromkeys(
        (
            *("history-backend", "oracle-wallet-path", "oracle-tns-alias"),
            *("oracle-connect-descriptor", "oracle-username", "oracle-password"),
            *("oracle-pool-min", "oracle-pool-max", "oracle-pool-timeout-secs"),
            *("postgres-db-url", "postgres-pool-max", "redis-url", "redis-pool-max"),
            *("redis-retention-days", "redis-key-prefix"),
        ),
        _STORE,
    ),
    **dict.fromkeys(
        (
            *("router-model-path", "router-tokenizer-path", "router-chat-template"),
            *("tokenizer-cache-enable-l0", "tokenizer-cache-l0-max-entries"),
            *("tokenizer-cache-enable-l1", "tokenizer-cache-l1-max-memory"),
            *("router-reasoning-parser", "router-tool-call-parser"),
        ),
        _WORDS,
    ),
    **dict.fromkeys(("enable-trace", "otlp-traces-endpoint"), _TRACE),
    **dict.fromkeys(
        (
            *("control-plane-api-keys", "control-plane-audit-enabled", "jwt-issuer"),
            *("jwt-audience", "jwt-jwks-uri", "jwt-role-mapping"),
        ),
        _ADMIN,
    ),
    "max-idle-secs": "there is no policy manual",
    "assignment-mode": "there is no policy manual",
    "dp-aware": "a server shares requests out among its replicas itself",
    "log-dir": "the log goes to standard error: redirect that",
    "mcp-config-path": "tools are called by servers: their --tool-server",
    "backend": "servers speak SGLang's routes",
    "request-id-headers": "a server returns its own id as x-request-id and a client's as "
    "x-client-request-id",
    "rust-lb": "there is one router, and it is this one",
    "test-external-dp-routing": "a server shares requests out among its replicas itself",
    "prefill-load-to-lb-ports": "load is what the router has sent",
    "decode-load-to-lb-ports": "load is what the router has sent",
    "enable-pd-load-record": "load is what the router has sent",
}
"""Flag of others -> why it is refused."""
