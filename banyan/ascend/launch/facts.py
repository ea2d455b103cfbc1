"""A launch on Ascend devices: arguments, variables, chip, network and model.

Nothing here looks at a machine. An unknown value is None, and no rule guesses it. Arguments come
from a command line or from a Config, by the names of the flag tables; only unknown flags and
impossible values are refused.

Also findings, and the table of their sentences (`rules.tsv`): severity, the problem with its
numbers, the remedy, and the source of the rule. `rules_page` prints it as docs/ascend_rules.md.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_object
from banyan.base.log import printable
from banyan.config.argv import plain, read_mapping, split
from banyan.config.cli import default_of, value_of
from banyan.config.env import Environment
from banyan.config.flags.flag import LISTS, Replaced
from banyan.config.flags.table import CONFIG_FILE, GROUPS, Known, find, spellings
from banyan.config.schema import Config

DESCRIPTION = "quant_model_description.json"
"""The file that ModelSlim writes next to its weights."""
_MOST_BYTES = 1 << 20
MODEL = "model-path"
_MOST_VARIABLES_BYTES = 1 << 16


@dataclass(frozen=True)
class Soc:
    """A chip, and what rules ask of it.

    Attributes:
        devices: of one machine; both dies of an A3 card count.
        dispatch_tokens: most tokens that one rank sends at once to experts, low latency.
        normal_tokens: the same in normal mode; `far_tokens` beyond one machine.
        needs_rdma: machines reach each other over RDMA, not over links of the devices.
    """

    name: str
    devices: int
    dispatch_tokens: int
    normal_tokens: int
    far_tokens: int
    fuses_experts: bool
    needs_rdma: bool


SOCS = MappingProxyType(
    {
        "A2": Soc("A2", 8, 256, 8192, 4096, fuses_experts=False, needs_rdma=True),
        "A3": Soc("A3", 16, 512, 8192, 8192, fuses_experts=True, needs_rdma=False),
    }
)


@dataclass(frozen=True)
class LaunchModel:
    """Facts of a model that rules depend on.

    Attributes:
        is_latent: attends over latents (MLA); q_rank: of its queries, 0 = whole.
        is_sparse: an indexer chooses what it attends to (DSA).
        draft_layers: layers that predict further tokens (MTP).
        is_modelslim: ModelSlim has quantised it; None = nobody has looked.
    """

    name: str
    hidden: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    is_latent: bool = False
    q_rank: int = 0
    is_sparse: bool = False
    draft_layers: int = 0
    is_modelslim: bool | None = None


_R1 = LaunchModel(
    "deepseek-r1",
    hidden=7168,
    experts=256,
    experts_per_token=8,
    shared_experts=1,
    is_latent=True,
    q_rank=1536,
    draft_layers=1,
)
KNOWN = (replace(_R1, name="deepseek-v3.2", is_sparse=True), replace(_R1, name="deepseek-v3"), _R1)
"""Models of the recipes, by how their names begin: a plan needs no weights. The first fits."""


@dataclass(frozen=True)
class Launch:
    """One node's start.

    Attributes:
        arguments: flag (its name in the tables) -> value; what nobody gave is not in it.
        interfaces: network interface -> addresses of the machine; None = of another machine.
        packages: names that can be imported; None = of another machine.
        is_relaxed: also take what later releases take.
    """

    arguments: Mapping[str, object]
    variables: Mapping[str, str]
    soc: Soc
    interfaces: Mapping[str, tuple[str, ...]] | None = None
    packages: frozenset[str] | None = None
    model: LaunchModel | None = None
    is_relaxed: bool = False

    def text(self, flag: str, default: str = "") -> str:
        return str(self.arguments.get(flag, default))

    def number(self, flag: str, default: int = 0) -> int:
        value = self.arguments.get(flag, default)
        return value if isinstance(value, int) else default

    def is_on(self, flag: str) -> bool:
        return self.arguments.get(flag) is True

    def variable(self, name: str) -> str:
        return self.variables.get(name, "").strip()

    def is_set(self, name: str) -> bool:
        """Whether a variable asks for something: set, and not to 0."""
        return self.variable(name).lower() not in ("", "0", "false")

    def count(self, name: str) -> int | None:
        """A variable's whole number; None when it is not set or none."""
        text = self.variable(name)
        return int(text) if text.removeprefix("-").isdigit() else None

    @property
    def role(self) -> str:
        """ "prefill", "decode", or "" where one server does both."""
        mode = self.text("disaggregation-mode")
        return "" if mode == "null" else mode

    @property
    def tp(self) -> int:
        return self.number("tensor-parallel-size", 1)

    @property
    def dp(self) -> int:
        return self.number("data-parallel-size", 1)

    @property
    def ep(self) -> int:
        """Ranks of the experts: with an exchange between them, all."""
        given = self.number("expert-parallel-size", 0)
        return given or (self.tp if self.exchange != "none" else 1)

    @property
    def cp(self) -> int:
        return self.number("attn-cp-size", 1)

    @property
    def nodes(self) -> int:
        return self.number("nnodes", 1)

    @property
    def attention_ranks(self) -> int:
        """Ranks that share one attention."""
        shared = self.cp * (self.dp if self.is_on("enable-dp-attention") else 1)
        return max(1, self.tp // shared)

    @property
    def running_per_replica(self) -> int:
        """Requests of one group of attention ranks at once; 0 = nobody said."""
        return -(-self.number("max-running-requests") // self.dp)

    @property
    def draft_tokens(self) -> int:
        """Tokens of a request in one decode step."""
        return max(1, self.number("speculative-num-draft-tokens"))

    @property
    def exchange(self) -> str:
        return self.text("moe-a2a-backend", "none")

    @property
    def deepep_mode(self) -> str:
        """The mode that runs; "auto" where both may."""
        mode = self.text("deepep-mode", "auto")
        by_role = {"prefill": "normal", "decode": "low_latency"}
        return by_role.get(self.role, mode) if mode == "auto" else mode

    @property
    def has_graphs(self) -> bool:
        return not self.is_on("disable-cuda-graph")


def read_model(folder: str) -> LaunchModel | None:
    """The facts in a checkpoint's folder; None where it has no config.json."""
    place = Path(folder)
    try:
        with open(place / "config.json", "rb") as file:
            read: object = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not is_object(read):
        return None
    inner = read.get("text_config")
    facts = inner if is_object(inner) else read

    def number(*keys: str) -> int:
        found = (facts.get(key) for key in keys)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), 0)

    return LaunchModel(
        name=place.name,
        hidden=number("hidden_size"),
        experts=number("n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=number("num_experts_per_tok"),
        shared_experts=number("n_shared_experts")
        or int(number("shared_expert_intermediate_size") > 0),
        is_latent=number("kv_lora_rank") > 0,
        q_rank=number("q_lora_rank"),
        is_sparse=number("index_topk") > 0,
        draft_layers=number("num_nextn_predict_layers"),
        is_modelslim=(place / DESCRIPTION).is_file(),
    )


def known_model(source: str) -> LaunchModel | None:
    """The facts of a model by its name, for machines that do not have it."""
    name = source.rstrip("/").rpartition("/")[2].lower()
    return next((model for model in KNOWN if name.startswith(model.name)), None)


def arguments_of_words(argv: Sequence[str], environment: Environment) -> dict[str, object]:
    """Flag -> value; the command line over variables over files, as a start reads them.

    Raises:
        ConfigError: an unknown flag, or a value that it does not take.
    """
    said: dict[str, object] = {}
    files: list[str] = []
    for part in split(argv):
        name = plain(part.spelled)
        if not part.spelled:
            said[MODEL] = part.words[0]
        elif name == CONFIG_FILE:
            files += part.words
        else:
            known = find(name, abbreviate=True)
            _put(known, _value(known, part.words, part.spelled), said)
    variables: dict[str, object] = {}
    for name, text in environment.flags.items():
        known = spellings().get(name)
        if known is not None and text:
            words = text.split() if known.kind in LISTS else [text]
            _put(known, _value(known, words, name), variables)
    in_files: dict[str, object] = {}
    for path in files:
        for key, value in read_mapping(path, f"--{CONFIG_FILE}").items():
            known = find(plain(key), abbreviate=False)
            if value is not None:
                _put(
                    known, value if _is_others(known, value) else known.check(value, key), in_files
                )
    return {**in_files, **variables, **said}


def arguments_of_config(config: Config) -> dict[str, object]:
    """The same for a start whose flags are read: those that are not what nobody said."""
    return {
        flag.name: value
        for _, flags in GROUPS
        for flag in flags
        if (value := value_of(config, flag)) != default_of(flag)
    }


def _value(known: Known, words: Sequence[str], spelled: str) -> object:
    """As of any flag; what other builds take and this one has not is taken as it is written."""
    if words and _is_others(known, words[0]):
        return words[0]
    return known.from_words(words, spelled)


def _is_others(known: Known, value: object) -> bool:
    return any(value in other.values.split() for other in known.elsewhere)


def _put(known: Known, value: object, into: dict[str, object]) -> None:
    if isinstance(known, Replaced):
        if value is not False:
            into[known.successor] = known.value
    else:
        into[known.name] = value


def read_variables(path: str) -> Mapping[str, str]:
    """A file of NAME=VALUE lines, as containers and shells take them.

    Raises:
        ConfigError: it cannot be read, or a line is none of these.
    """
    try:
        text = Path(path).read_bytes()[: _MOST_VARIABLES_BYTES + 1]
    except OSError as error:
        raise ConfigError(f"cannot read --env {path}: {error.strerror}") from None
    if len(text) > _MOST_VARIABLES_BYTES:
        raise ConfigError(f"--env {path} is larger than {_MOST_VARIABLES_BYTES:,} bytes")
    return dict(_lines(text.decode("utf-8", "replace"), path))


def _lines(text: str, path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        given = line.strip().removeprefix("export ").strip()
        if not given or given.startswith("#"):
            continue
        name, equals, value = given.partition("=")
        if not equals or not name.strip().replace("_", "").isalnum():
            raise ConfigError(
                f"--env {path}, line {number}: {printable(given, 60)!r} is not NAME=VALUE"
            )
        yield name.strip(), value.strip().strip("\"'")


ERROR, WARNING = "error", "warning"
_SEVERITIES = MappingProxyType({"E": ERROR, "W": WARNING})
_LONGEST = 300


@dataclass(frozen=True)
class Sentence:
    """A line of the table; `text` and `use` have the numbers' names in braces."""

    rule: str
    severity: str
    text: str
    use: str
    source: str


@dataclass(frozen=True)
class Breach:
    """A rule that a launch does not keep, with the numbers of its sentence."""

    rule: str
    numbers: Mapping[str, object]


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        rule: number of the rule, and a letter for the case.
        severity: ERROR or WARNING.
    """

    rule: str
    severity: str
    text: str
    use: str
    source: str

    @property
    def is_error(self) -> bool:
        return self.severity == ERROR

    @property
    def line(self) -> str:
        return f"{self.text} ({self.use}) [{self.rule}, {self.source}]"


def breach(rule: str, **numbers: object) -> Breach:
    return Breach(rule, numbers)


@cache
def sentences() -> Mapping[str, Sentence]:
    with open(Path(__file__).parent / "rules.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return MappingProxyType(
        {
            row["rule"]: Sentence(
                row["rule"], _SEVERITIES[row["severity"]], row["text"], row["do"], row["source"]
            )
            for row in rows
        }
    )


def finding_of(found: Breach, *, is_mild: bool = False) -> Finding:
    """The finding of a breach; a mild one is a warning, whatever its severity in the table."""
    sentence = sentences()[found.rule]
    numbers = {name: printable(str(value), _LONGEST) for name, value in found.numbers.items()}
    return Finding(
        rule=found.rule,
        severity=WARNING if is_mild else sentence.severity,
        text=sentence.text.format(**numbers),
        use=sentence.use.format(**numbers),
        source=sentence.source,
    )


_HEAD = """# Rules of a launch on Ascend NPUs

Printed by `banyan check --rules`; a test keeps this file equal to it.

Each start with `--device npu` is checked by these rules: errors end it, warnings are logged.
`banyan check` does the same for any command line, also for machines that are not this one, and
`banyan doctor --device npu` for the machine itself (23). Words in braces are the numbers of the
case. `flag` rules come from the documents' table of flags for A2 and A3, which
`banyan config --device npu` prints.

*Source*: the documents' feature table, parameter guide and install page; the operators' published
contracts; torch_npu (what its parsers take); SGLang (what its launcher refuses).

"""


def rules_page() -> str:
    return _HEAD + "".join(_table_lines())


def _table_lines() -> Iterator[str]:
    yield "| rule | | problem | what to do | source |\n|---|---|---|---|---|\n"
    for each in sentences().values():
        problem, use = (part.replace("|", "\\|") for part in (each.text, each.use))
        yield f"| {each.rule} | {each.severity} | {problem} | {use} | {each.source} |\n"
