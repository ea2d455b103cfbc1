"""The battery: what must hold whatever happens to a server, how it is tried, and how far.

Each line is a call of pytest, so whoever doubts a figure repeats it by itself. What a test prints
behind "figure:" stands in the scorecard. Tests that run for long lie in files that pytest collects
only by their name; the others are those of `make test`, some of them with a larger number.
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
    """What pytest is told to run, relative to the repository."""
    variables: str = ""
    """How much of it: "NAME=value NAME=value"."""
    limit_s: int = 900
    is_beside: bool = False
    """Runs beside the other lines from the start, at the lowest priority."""

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
        "an hour of mixed load at a low rate, beside all other lines",
        "memory < +1 MB/h after warm-up; descriptors, threads and tasks as before; 0 wrong answers",
        f"{TRUST}/soak.py",
        "SOAK_MINUTES=60",
        limit_s=6000,
        is_beside=True,
    ),
    Line(
        "T1",
        "requests of which 20 % disconnect, 5 % are aborted and 5 % reach their deadline",
        "0 leaks of pages, places, descriptors, tasks; survivors as their solo runs",
        f"{SYSTEM}/test_storm.py",
        "STORM=5000",
    ),
    Line(
        "T2",
        "requests that go in every state, in the engine, the front and a pair of servers",
        "every page and place comes back",
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
        "as for an engine",
        f'{SYSTEM}/test_self_healing.py -k "tp and 2"',
        "FAULTS=40 FAULTS_JUDGED=1",
        limit_s=1800,
    ),
    Line(
        "T3c",
        "the processes that tokenize, render and compile killed 20 times each",
        "no request fails that comes later, the server stays ready",
        f"{TRUST}/helpers.py",
    ),
    Line(
        "T4",
        "engines and ranks that stop for a while",
        "told with the rank's name after the deadline; no error before it",
        f'{SYSTEM}/test_processes.py -k "stopped or pauses or slow_step"',
        "FAULTS=2",
    ),
    Line(
        "T5",
        "a server killed at 12 moments of its start and under load",
        "no process, socket or shared memory left",
        f'{SYSTEM}/test_faults.py {SYSTEM}/test_processes.py -k "killed_at_any or outlives"',
        "FAULT_MOMENTS=12",
    ),
    Line(
        "T6",
        "100 streams when a server is told to end; servers behind a router restarted in turn",
        "0 cut streams, new requests 503 with Retry-After, exit code 0; 0 failed requests",
        f"{TRUST}/drain.py "
        f"{SYSTEM}/test_router.py::test_a_rolling_restart_of_all_servers_fails_no_request",
    ),
    Line(
        "T7",
        "requests that are wrong somewhere: mutated, of schemathesis, each field of each operation",
        "0 answers >= 500 but 501 and 503, 0 hangs, /livez never blocked, others unharmed",
        f"{TRUST}/malformed.py {TRUST}/every_field.py",
        "MALFORMED=10000",
    ),
    Line(
        "T8",
        "damaged frames between processes; damaged requests, smuggled requests, slow and deaf "
        "clients over raw sockets",
        "0 exceptions escape; each form has one answer; others are served",
        f"tests/messages/test_transport.py {TRUST}/wire.py {SYSTEM}/test_hostile_clients.py",
        "FRAMES=500000 RAW=20000",
    ),
    Line(
        "T10",
        "a cache too small for what runs",
        "retracted requests answer as if nothing had been",
        f"{SYSTEM}/test_numerics.py::test_forced_retraction_changes_no_answer "
        f"{SYSTEM}/test_states.py tests/kv_cache tests/scheduler/test_growth.py",
        "STATES=all",
    ),
    Line(
        "T11",
        "the same request alone, in company, from the cache, in chunks, on ranks and stages",
        "the same tokens; the same bits in one layout",
        f"{SYSTEM}/test_numerics.py {SYSTEM}/test_ranks.py {SYSTEM}/test_stages.py",
    ),
    Line(
        "T12",
        "log-probabilities beside those of transformers",
        "within 1e-4 in float32, the same first choice",
        f"{SYSTEM}/test_fidelity.py {SYSTEM}/test_verify.py tests/models/test_llama.py",
    ),
    Line(
        "T14",
        "answers cut at random points through all parsers of calls and thoughts",
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
        "prefixes of one caller in the hands of another",
        "never found: in memory, in the store, between servers",
        f"{SYSTEM}/test_prefix.py {SYSTEM}/test_store.py tests/kv_cache/test_radix_tree.py "
        'tests/server/test_tenants.py -k "salts or tenants or namespaces or belongs or ended_by"',
    ),
    Line(
        "T17",
        "prefill and decode servers that stop, die, or say what is wrong",
        "each request ends; the other side serves on; nothing wrong is answered",
        f"{SYSTEM}/test_handoff.py {SYSTEM}/test_router_pairs.py",
    ),
    Line(
        "T18",
        "servers behind a router that die in the middle, or break HTTP",
        "answered by another or one error; nothing twice, and nothing to another client",
        f"{SYSTEM}/test_router.py tests/router",
    ),
    Line(
        "T19",
        "ten times as many requests as can be answered, for a minute",
        "goodput >= 90 % of the peak; each refusal's Retry-After right within a factor of 2",
        f"{TRUST}/overload.py",
        "OVERLOAD_S=60",
    ),
    Line(
        "P13",
        "two callers who offer 10 : 1; the lowest priority beneath an overload of the highest",
        "served 1 : 1 while both wait; nobody waits longer than the bound",
        f"{TRUST}/shares.py tests/scheduler/test_fair_queue.py",
    ),
    Line(
        "T20",
        "flags, files, models and ports that are wrong at the start",
        "a fixed exit code and a line that names it",
        f"tests/cli/test_mistakes.py {SYSTEM}/test_start_up.py",
    ),
    Line(
        "T21",
        "what clients counted beside what /metrics counts",
        "counts exactly, sums within 2 %",
        f"{SYSTEM}/test_metrics.py",
    ),
    Line(
        "T22",
        "stores that are damaged, full, slow, shared, or lose their writer",
        "never a wrong token",
        f"{SYSTEM}/test_store.py tests/kv_transfer/test_file_store.py",
    ),
    Line(
        "T23",
        "adapters that come and go under load",
        "each answer is that of its adapter",
        f"{SYSTEM}/test_lora.py",
    ),
    Line(
        "T24",
        "64 descriptors, another locale, another hash seed, SIGHUP and SIGPIPE, IPv6 alone",
        "serves on",
        f"{TRUST}/surroundings.py",
    ),
    Line(
        "T25",
        "random steps of the scheduler and the cache against a model of both",
        "no page twice, none lost, nobody forgotten",
        "tests/border --border-steps=60000 --real-border-steps=20000",
    ),
)

LEFT_OUT = {
    "T13": "needs data sets of questions that are not part of the project; `banyan bench eval` "
    "asks them where they are. What a model answers is held to transformers in T12.",
    "T2, T17": "every pair of a state and an end is tried, but not a hundred times each.",
    "T8": "half a million frames of each decoder and 20,000 raw requests of the million and the "
    "hundred thousand that were wanted; FRAMES and RAW say how many.",
    "T9": "one hour, not two; SOAK_MINUTES says how long.",
    "T14, T15, T25": "2,000 outputs of each parser, 40 schemas and 60,000 steps; "
    "`make test-parsers`, `make test-schemas`, `make test-border`: 10,000, 500 and a million.",
    "T16": "whether times tell callers apart is not measured: a caller's prompts are computed as "
    "if nobody else had been there, so there is nothing to be told.",
}
"""What the battery does not do, and why."""
