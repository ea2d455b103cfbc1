"""The battery: properties that must hold, how each is tried, and how far.

Each line is one call of pytest, so each can be repeated alone. The scorecard shows the text that a
test prints after "figure:". Long tests are in files that pytest collects only by name; the others
belong to `make test`, some with a larger number here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Line:
    """One line of the scorecard."""

    id: str
    what: str
    target: str
    tests: str
    """Arguments of pytest, relative to the repository."""
    variables: str = ""
    """How much of it: "NAME=value NAME=value"."""
    limit_s: int = 900
    is_background: bool = False
    """Runs in parallel with the other lines from the start, at the lowest priority."""

    def with_variables(self, given: Mapping[str, str]) -> "Line":
        """The same with what is set already in the place of its own."""
        own = (pair.split("=", 1) for pair in self.variables.split())
        now = " ".join(f"{name}={given.get(name, value)}" for name, value in own)
        return replace(self, variables=now)

    @property
    def command(self) -> str:
        return f"{self.variables} python -m pytest -s {self.tests}".strip()


SYSTEM, TRUST = "tests/system", "tests/trust"

BATTERY = (
    Line(
        "T9",
        "an hour of mixed load at a low rate, while all other lines run",
        "memory < +1 MB/h after warm-up; descriptors, threads and tasks unchanged; 0 wrong answers",
        f"{TRUST}/soak.py",
        "SOAK_MINUTES=60",
        limit_s=6000,
        is_background=True,
    ),
    Line(
        "T9b",
        "all routes through a router: two servers, three keys, aborts, engines that are killed",
        "memory of each process < +1 MB/h after warm-up; 0 wrong, 0 lost, 0 of another key",
        f"{TRUST}/soak_router.py",
        "ROUTED_MINUTES=26",
        limit_s=3600,
    ),
    Line(
        "T1",
        "20 % of requests disconnect, 5 % are aborted, 5 % reach their deadline",
        "0 leaked pages, slots, descriptors and tasks; the others answer as they do alone",
        f"{SYSTEM}/test_storm.py",
        "STORM=5000",
    ),
    Line(
        "T2",
        "requests that end in every state: in the engine, the API server, a prefill/decode pair",
        "every page and slot is released",
        "tests/scheduler/test_scheduler.py tests/scheduler/test_hicache_fetch.py "
        "tests/engine_client/test_client.py "
        f"{SYSTEM}/test_handoff.py::test_a_client_that_goes_leaves_nothing_on_either_side",
    ),
    Line(
        "T3",
        "an engine killed or stopped at random moments under load, 20 times each",
        "killed: 503 in < 2 s; ready again in < 10 s; each stream ends once; nothing left",
        f'{SYSTEM}/test_self_healing.py -k "one and rank"',
        "FAULTS=40 FAULTS_JUDGED=1",
    ),
    Line(
        "T3b",
        "a rank of two killed or stopped at random moments under load, 20 times each",
        "the same as T3",
        f'{SYSTEM}/test_self_healing.py -k "tp and 2"',
        "FAULTS=40 FAULTS_JUDGED=1",
        limit_s=1800,
    ),
    Line(
        "T3c",
        "tokenizer, template and grammar processes killed 20 times each",
        "later requests succeed; the server stays ready",
        f"{TRUST}/helpers.py",
    ),
    Line(
        "T4",
        "engines and ranks that pause for a while",
        "an error that names the rank after the deadline, none before it",
        f'{SYSTEM}/test_processes.py -k "stopped or pauses or slow_step"',
        "FAULTS=2",
    ),
    Line(
        "T5",
        "a server killed at 12 moments of its start and under load",
        "no process, socket or shared memory is left",
        f'{SYSTEM}/test_faults.py {SYSTEM}/test_shutdown.py -k "killed_at_any or outlives"',
        "FAULT_MOMENTS=12",
    ),
    Line(
        "T6",
        "a server with 100 streams is stopped; servers behind a router are restarted in turn",
        "0 cut streams; new requests get 503 with Retry-After; exit code 0; 0 failed requests",
        f"{TRUST}/drain.py "
        f"{SYSTEM}/test_router.py::test_a_rolling_restart_of_all_servers_fails_no_request",
    ),
    Line(
        "T7",
        "malformed requests: mutated, from schemathesis, each field of each operation",
        "no status >= 500 but 501 and 503; 0 hangs; /livez never blocked; others unaffected",
        f"{TRUST}/malformed.py {TRUST}/every_field.py",
        "MALFORMED=10000",
    ),
    Line(
        "T8",
        "damaged frames between processes; damaged and smuggled requests, and slow clients, "
        "over raw sockets",
        "0 escaped exceptions; one answer for each form; other clients are served",
        f"tests/messages/test_transport.py {TRUST}/wire.py {SYSTEM}/test_hostile_clients.py",
        "FRAMES=500000 RAW=20000",
    ),
    Line(
        "T10",
        "a cache too small for the running requests",
        "retracted requests give the same answers",
        f"{SYSTEM}/test_numerics.py::test_forced_retraction_changes_no_answer "
        f"{SYSTEM}/test_states.py tests/kv_cache tests/scheduler/test_growth.py",
        "STATES=all",
    ),
    Line(
        "T11",
        "the same request alone, in a batch, from the cache, in chunks, on many ranks and stages",
        "the same tokens; the same bits in one layout",
        f"{SYSTEM}/test_numerics.py {SYSTEM}/test_ranks.py {SYSTEM}/test_stages.py",
    ),
    Line(
        "T12",
        "log-probabilities compared with transformers",
        "within 1e-4 in float32, the same most likely token",
        f"{SYSTEM}/test_fidelity.py {SYSTEM}/test_verify.py tests/models/test_llama.py",
    ),
    Line(
        "T14",
        "answers split at random points, through all tool-call and reasoning parsers",
        "streamed = whole; arguments are JSON",
        "tests/parsers/test_tool_calls.py tests/parsers/test_reasoning.py",
        "PARSER_CASES=2000",
    ),
    Line(
        "T15",
        "random outputs of random schemas",
        "all valid, none stuck",
        "tests/grammar/test_schemas.py tests/grammar/test_backends.py",
        "SCHEMA_CASES=40",
    ),
    Line(
        "T16",
        "cached prefixes of another caller",
        "never found: in memory, in the store, between servers",
        f"{SYSTEM}/test_prefix.py {SYSTEM}/test_store.py tests/kv_cache/test_radix_tree.py "
        'tests/server/test_tenants.py -k "salts or tenants or namespaces or belongs or ended_by"',
    ),
    Line(
        "T17",
        "prefill and decode servers that stop, die or send wrong data",
        "each request ends; the other server continues; no wrong answer",
        f"{SYSTEM}/test_handoff.py {SYSTEM}/test_router_pairs.py",
    ),
    Line(
        "T18",
        "servers behind a router that die during an answer, or violate HTTP",
        "another server answers, or one error; nothing twice, nothing to the wrong client",
        f"{SYSTEM}/test_router.py tests/router",
    ),
    Line(
        "T18b",
        "servers behind a router with every status, interim answers, broken bodies, endless heads",
        "each client gets its own answer or an error; refusals for load take no server out",
        "tests/router/test_hostile_workers.py tests/router/test_answers.py "
        "tests/router/test_parts.py",
    ),
    Line(
        "T16b",
        "callers of a router whose servers know it by one key",
        "responses, prefixes and requests stay their caller's",
        "tests/router/test_router_tenants.py tests/server/test_tenants.py",
    ),
    Line(
        "T19",
        "ten times as many requests as can be answered, for a minute",
        "goodput >= 90 % of the peak; each Retry-After right within a factor of 2",
        f"{TRUST}/overload.py",
        "OVERLOAD_S=60",
    ),
    Line(
        "P13",
        "two callers who send 10 : 1; the lowest priority during an overload of the highest",
        "served 1 : 1 while both wait; no wait above the bound",
        f"{TRUST}/shares.py tests/scheduler/test_fair_queue.py",
    ),
    Line(
        "P13b",
        "a caller who fills each bounded store, queue and pool; bodies that take long to read",
        "no other caller is refused or waits for it",
        "tests/server/test_fair_shares.py tests/base/test_fair_share.py "
        "tests/server/test_large_json.py",
    ),
    Line(
        "T20",
        "wrong flags, files, models and ports at start",
        "a fixed exit code and a line that names the mistake",
        f"tests/cli/test_mistakes.py {SYSTEM}/test_start_up.py",
    ),
    Line(
        "T21",
        "/metrics compared with what clients counted",
        "equal counts; sums within 2 %",
        f"{SYSTEM}/test_metrics.py",
    ),
    Line(
        "T22",
        "cache stores that are damaged, full, slow, shared, or lose their writer",
        "never a wrong token",
        f"{SYSTEM}/test_store.py tests/kv_transfer/test_file_store.py",
    ),
    Line(
        "T23",
        "adapters loaded and unloaded under load",
        "each answer comes from its adapter",
        f"{SYSTEM}/test_lora.py",
    ),
    Line(
        "T24",
        "64 file descriptors, another locale, another hash seed, SIGHUP and SIGPIPE, IPv6 only",
        "the server keeps serving",
        f"{TRUST}/surroundings.py",
    ),
    Line(
        "T25",
        "random steps of scheduler and cache, compared with a model of both",
        "no page used twice, none lost, no request forgotten",
        "tests/border --border-steps=60000 --real-border-steps=20000",
    ),
    Line(
        "T26",
        "a mirror of the model hub that lies in each field, or never ends",
        "nothing is written outside the cache; answers are bounded; wrong bytes are not used",
        "tests/hub/test_hostile_hub.py tests/hub/test_downloads.py",
    ),
    Line(
        "T27",
        "requests of common agents; Codex, Claude Code and the AI SDK themselves",
        "each conversation comes to its end",
        "tests/server/agents tests/clients/test_agents.py",
    ),
    Line(
        "T28",
        "files of strangers, damaged, for plan, simulate, replay, lora inspect and quantize",
        "an answer or one error in words, never a traceback",
        "tests/cli/test_hostile_files.py",
    ),
    Line(
        "T29",
        "many requests of each kind, and objects counted before and after",
        "nothing is left that grows with the number of requests",
        "tests/system/test_leaks.py tests/router/test_router_leaks.py",
    ),
)

LEFT_OUT = {
    "T13": "needs evaluation data sets, which are not part of the project. `banyan bench eval` "
    "runs them if they are there. T12 compares answers with transformers.",
    "T2, T17": "every pair of a state and an end is tried, but not a hundred times each.",
    "T8": "half a million frames for each decoder and 20,000 raw requests, of a million and "
    "100,000 wanted. FRAMES and RAW set the numbers.",
    "T9": "one hour, not two. SOAK_MINUTES sets the time.",
    "T9b": "26 minutes, not two hours. ROUTED_MINUTES sets the time.",
    "T14, T15, T25": "2,000 outputs of each parser, 40 schemas and 60,000 steps. `make "
    "test-parsers`, `make test-schemas` and `make test-border` try 10,000, 500 and 1,000,000.",
    "T16": "timing differences between callers are not measured. Callers share no cache entries, "
    "so none are expected.",
}
"""What the battery does not do, and why."""
