"""`banyan translate "vllm serve …"`: another engine's command line as a line of this one.

Each row of `translate.tsv` is a flag of another program:

- program, theirs: the program and its spellings of the flag, or a variable that it reads
- takes: number of words after it; `+` takes words up to the next flag, `?` takes one if it is there
- ours: the flags here, with {} for the word; "" = nothing is left to do; `!` = it is not translated
- note: why nothing is left to do, or what to use
"""

import csv
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import printable
from banyan.config.argv import split
from banyan.config.cli import parse
from banyan.config.devices import outcome_device
from banyan.config.env import Environment, read_environment
from banyan.config.flags.outcome import REFUSED, outcome_of
from banyan.config.flags.table import CONFIG_FILE, find

USAGE = """banyan translate "COMMAND LINE"

Prints the line of this engine for a start line of another one: vllm serve, llama-server, ollama
serve or run, text-generation-launcher, or python -m sglang.launch_server. Each flag follows with
what becomes of it on this machine. Nothing is started.

Ends with 0 when every flag was translated and works, and with 2 when one was left out or refused.

  banyan translate "vllm serve Qwen/Qwen3-0.6B --max-model-len 8192 --port 8000"
"""

LEFT_OUT = 2
_MAX_CHARS = 1 << 16
_VLLM, _LLAMA, _OLLAMA, _TGI = "vllm", "llama-server", "ollama", "text-generation-launcher"
_SGLANG = "sglang"
_MODULES = {
    "vllm.entrypoints.openai.api_server": (_VLLM, "serve"),
    "sglang.launch_server": (_SGLANG, "serve"),
    "sglang_router.launch_router": (_SGLANG, "router"),
    "sglang.srt.disaggregation.launch_lb": (_SGLANG, "lb"),
    "sglang.bench_serving": (_SGLANG, "bench serving"),
}
"""Module that `python -m` starts -> the table of its flags, and our verb."""
_COMMANDS = {
    "vllm": (_VLLM, ("serve",)),
    "llama-server": (_LLAMA, ()),
    "ollama": (_OLLAMA, ("serve", "run")),
    "text-generation-launcher": (_TGI, ()),
    "sglang": (_SGLANG, ("serve",)),
}
"""Command -> the table of its flags, and the verbs of it that are translated."""
_PORTS = {_VLLM: "8000", _LLAMA: "8080", _OLLAMA: "11434", _TGI: "80"}
"""Where a program listens if nothing is said; clients of it keep their address."""
_CACHE_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "auto", "q8_0": "int8"}
_SAMPLING = "--preferred-sampling-params"
_EMBEDDING_TASKS = ("embed", "embedding", "classify", "score", "reward", "pooling")


@dataclass(frozen=True)
class TheirFlag:
    """A row of the table."""

    takes: str
    ours: str
    note: str


@dataclass
class _Line:
    """What has been translated so far."""

    words: list[str] = field(default_factory=list[str])
    remarks: list[tuple[str, list[str], str]] = field(
        default_factory=list[tuple[str, list[str], str]]
    )
    """(their words, ours, what is to be said of them)"""
    is_whole: bool = True
    """Whether nothing was left out."""

    def leave_out(self, theirs: str, why: str) -> None:
        self.remarks.append((theirs, [], f"left out: {why}"))
        self.is_whole = False


def translate(argv: Sequence[str]) -> int:
    """Print the line and the outcome of each flag; returns the exit code."""
    if not argv or "-h" in argv or "--help" in argv[:1]:
        print(USAGE)
        return 0
    text = argv[0] if len(argv) == 1 else shlex.join(argv)
    if len(text) > _MAX_CHARS:
        raise ConfigError(
            f"the line has {len(text)} characters; the limit is {_MAX_CHARS}",
            hint="give one command line",
        )
    verb, line = read_line(text)
    print(shlex.join(["banyan", *verb.split(), *line.words]))
    outcomes = _outcomes(line, read_environment()) if verb == "serve" else {}
    width = max((len(theirs) for theirs, _, _ in line.remarks), default=0)
    for theirs, ours, remark in line.remarks:
        said = [shlex.join(ours)] if ours else []
        said += [remark] if remark else []
        said += [outcomes[word] for word in ours if word in outcomes]
        print(f"  {theirs:<{width}}  {'; '.join(said)}")
    return 0 if line.is_whole else LEFT_OUT


def read_line(text: str) -> tuple[str, _Line]:
    """Our verb, and the translated words with what is to be said of them.

    Raises:
        ConfigError: the line starts no program that is known here.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"the line cannot be read: {error}", hint="check its quotes") from None
    program, verb, rest, variables = _find_program(words)
    line = _Line()
    if program == _SGLANG:
        line.words += rest
        if verb == "serve":
            line.remarks += [
                (each.spelled, [each.spelled], "") for each in split(rest) if each.spelled
            ]
        return verb, line
    for name, value in variables.items():
        if name in flags_of(program):
            _put(line, flags_of(program)[name], f"{name}={value}", [value], rest)
    _read_flags(line, program, rest)
    port = _PORTS[program]
    if verb == "serve" and not any(word in ("--port", "-p") for word in line.words):
        line.words += ["--port", port]
        line.remarks.append(("(no port)", ["--port", port], f"where {program} listens"))
    return verb, line


def _find_program(words: Sequence[str]) -> tuple[str, str, list[str], dict[str, str]]:
    """The table, our verb, the words after the command, and variables that are set before it."""
    variables = dict[str, str]()
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            variables[name] = value
            continue
        if word == "-m" and at + 1 < len(words) and words[at + 1] in _MODULES:
            program, verb = _MODULES[words[at + 1]]
            return program, verb, list(words[at + 2 :]), variables
        command = word.rsplit("/", 1)[-1]
        if command in _COMMANDS:
            program, verbs = _COMMANDS[command]
            rest = list(words[at + 1 :])
            if not verbs:
                return program, "serve", rest, variables
            if rest and rest[0] in verbs:
                return program, rest[0], rest[1:], variables
    known = ", ".join([*_COMMANDS, *(f"python -m {name}" for name in _MODULES)])
    raise ConfigError(
        f"the line starts no known program: {printable(' '.join(words), 80)}",
        hint=f"known are {known}",
    )


def _read_flags(line: _Line, program: str, words: Sequence[str]) -> None:
    """Translate the words after the command; a word without a flag is the model or a prompt."""
    table = flags_of(program)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        spelled, equals, text = word.partition("=")
        if not spelled.startswith("-") or spelled == "-":
            line.words.append(word)
            continue
        spelled = spelled.replace("_", "-")
        flag = table.get(spelled)
        if flag is None:
            skipped = [] if equals or at >= len(words) or words[at].startswith("-") else [words[at]]
            at += len(skipped)
            line.leave_out(" ".join([word, *skipped]), f"{program} has no such flag in the table")
            continue
        given = [text] if equals else []
        count = {"+": len(words), "?": 1}.get(flag.takes) or int(flag.takes.replace("+", "0"))
        while len(given) < count and at < len(words):
            is_flag = words[at].startswith("-") and not re.fullmatch(r"-\d.*", words[at])
            if is_flag and flag.takes in "+?":
                break
            given.append(words[at])
            at += 1
        if flag.takes == "1" and not given:
            raise ConfigError(f"{spelled} has no value", hint="complete the line")
        _put(line, flag, " ".join([spelled, *given]), given, words)


def _put(
    line: _Line, flag: TheirFlag, theirs: str, given: Sequence[str], words: Sequence[str]
) -> None:
    if flag.ours == "!":
        line.leave_out(theirs, flag.note)
        return
    ours = _our_words(flag, given, words)
    if ours[:1] == [_SAMPLING] and _SAMPLING in line.words:
        at = line.words.index(_SAMPLING) + 1
        line.words[at] = json.dumps(json.loads(line.words[at]) | json.loads(ours[1]))
    else:
        line.words += ours
    nothing = "" if ours else f"nothing to do: {flag.note or 'this is the default'}"
    line.remarks.append((theirs, ours, nothing or flag.note))


def _our_words(flag: TheirFlag, given: Sequence[str], words: Sequence[str]) -> list[str]:
    """The words here for a flag with its value."""
    value = given[0] if given else ""
    special: dict[str, Callable[[], list[str]]] = {
        "{task}": lambda: ["--is-embedding"] if value in _EMBEDDING_TASKS else [],
        "{address}": lambda: _address_words(value),
        "{context}": lambda: ["--context-length", value] if value != "0" else [],
        "--enable-priority-scheduling": lambda: [flag.ours] if value == "priority" else [],
    }
    if flag.ours in special:
        return special[flag.ours]()
    if flag.takes == "?" and value in ("off", "false", "0"):
        return []
    found = list[str]()
    # A brace of JSON is part of a word, so words are divided at flags and blanks before a value.
    for word in re.findall(r"\{\"[^\"]+\": \{\}\}|\S+", flag.ours):
        if word == "{}":
            found += given if flag.takes == "+" else [value]
        elif word == "{list}":
            found += [part for part in value.split(",") if part]
        elif word == "{kv}":
            found.append(_CACHE_TYPES.get(value, value))
        elif word == "{hf}":
            found.append(value.partition(":")[0])
        elif word == "{tp}":
            found.append(_value_after(words, ("--tensor-parallel-size", "-tp")) or "1")
        else:
            found.append(word.replace("{}", value, 1))
    return found


def _address_words(address: str) -> list[str]:
    """`OLLAMA_HOST` holds a host, a host and a port, or a URL."""
    host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
    return [*(["--host", host] if host else []), *(["--port", port] if port else [])]


def _value_after(words: Sequence[str], names: Sequence[str]) -> str:
    for at, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in names:
            return text if equals else "".join(words[at + 1 : at + 2])
    return ""


def _outcomes(line: _Line, environment: Environment) -> dict[str, str]:
    """What the start would say of each of our flags on this machine, by its spelling."""
    found = dict[str, str]()
    try:
        config = parse(line.words, environment)
    except BanyanError as error:
        line.leave_out("the start", str(error))
        return found
    device = outcome_device(config, environment)
    for said in split(line.words):
        name = said.spelled.removeprefix("--").replace("_", "-")
        if not name or name == CONFIG_FILE:
            continue
        words = said.words or ("true",)
        value = words[0] if len(words) == 1 else words
        outcome = outcome_of(find(name, abbreviate=True), value, device)
        line.is_whole = line.is_whole and outcome.verdict != REFUSED
        found[said.spelled] = f"{outcome.text} on {device}"
    return found


@cache
def flags_of(program: str) -> Mapping[str, TheirFlag]:
    """The flags of one program by their spellings."""
    found = dict[str, TheirFlag]()
    with Path(__file__).with_suffix(".tsv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["program"] == program:
                for spelled in row["theirs"].split():
                    found[spelled] = TheirFlag(row["takes"], row["ours"], row["note"])
    return found
