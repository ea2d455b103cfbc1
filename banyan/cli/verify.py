"""`banyan verify MODEL`: the served model against transformers, token by token."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from banyan.base.errors import ConfigError, ModelError
from banyan.base.install import install_command
from banyan.base.log import start_logging
from banyan.bench.fidelity import PROMPTS, Agreement, ReferenceScores, ServedScores, agrees, compare
from banyan.bench.options import CACERT, option, split_options
from banyan.cli.client import Client, private_server
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.model_config.model_config import ModelConfig

APART = 1
_PACKAGES = ("transformers", "gguf", "accelerate")
"""What the reference needs; the last two for GGUF files."""
MOST_TOKENS = 500
"""Of an answer."""

_ABOUT = """Asks a server a few prompts greedily, reckons the same tokens with transformers in
float32 from the same files, and compares: log-probabilities, and which token is the likeliest.
MODEL and every other flag are the server's, which is started for this; with --url one that runs is
asked, and MODEL names the files of the reference. Ends with 1 when they are further apart than
--mean or --margin."""


@dataclass(frozen=True)
class VerifyOptions:
    """What is asked of `banyan verify`."""

    url: str = option("", "a server that runs, in place of one that is started")
    cacert: str = option("", CACERT)
    prompts: tuple[str, ...] = option((), "texts to begin with; else a few of our own")
    output_len: int = option(24, "tokens of each answer")
    mean: float = option(0.1, "mean difference of log-probabilities that is agreement")
    margin: float = option(0.5, "how much likelier the reference's own choice may be")


def verify(argv: Sequence[str]) -> int:
    options, rest = split_options(VerifyOptions, argv, "banyan verify", _ABOUT)
    _check(options)
    environment = read_environment()
    config = parse(rest, environment)
    start_logging("verify", "warning")
    config, model_config = prepare(config, environment)
    _check_packages(model_config)
    key = environment.flags.get("api-key", "")
    running = Client(options.url, key, options.cacert) if options.url else None
    asked = nullcontext(running) if running else private_server(rest)
    with asked as client:
        answered = [_ask(client, text, options) for text in options.prompts or PROMPTS]
    reference = open_reference(model_config)
    found: list[Agreement] = []
    print(f"{'TOKENS':>7} {'MEAN':>8} {'WORST':>8} {'CHOICES':>9} {'MARGIN':>8}  PROMPT")
    for text, scored in answered:
        one = compare(scored, reference(scored.tokens))
        found.append(one)
        print(_line(text, one))
    for line in _verdict(found, options):
        print(line)
    return 0 if agrees(found, options.mean, options.margin) else APART


def _check(options: VerifyOptions) -> None:
    if not 1 <= options.output_len <= MOST_TOKENS:
        raise ConfigError(
            f"--output-len must be from 1 to {MOST_TOKENS}, and is {options.output_len}"
        )
    if not (options.mean >= 0 and options.margin >= 0):  # nor without a value, as nan is
        raise ConfigError("--mean and --margin must be numbers that are not below 0")


def _check_packages(model_config: ModelConfig) -> None:
    """Raise ConfigError if the reference lacks a package: nothing has been started yet."""
    needed = _PACKAGES if model_config.format == "gguf" else _PACKAGES[:1]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(
            f"the reference needs packages that are not here: {', '.join(missing)}",
            hint=f"run: {install_command('verify')}",
        )


def _ask(client: Client, text: str, options: VerifyOptions) -> tuple[str, ServedScores]:
    body = {
        "text": text,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": options.output_len,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    facts = msgspec.json.decode(client.post("/generate", body), type=_Answer).meta_info
    prompt, output = facts.input_token_logprobs, facts.output_token_logprobs
    tokens = [token for _, token, _ in (*prompt, *output)]
    known = [logprob for logprob, _, _ in (*prompt[1:], *output)]
    return text, ServedScores(
        tokens, len(prompt), [float("nan") if n is None else n for n in known]
    )


class _Facts(msgspec.Struct):
    """Each token: its log-probability (None for the very first), its id, its text."""

    input_token_logprobs: list[tuple[float | None, int, str | None]]
    output_token_logprobs: list[tuple[float | None, int, str | None]]


class _Answer(msgspec.Struct):
    meta_info: _Facts


class Reference:
    """The same model by transformers, in float32, on the CPU."""

    def __init__(self, model_config: ModelConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        path, is_file = Path(model_config.path), model_config.format == "gguf"
        folder = path.parent if is_file else path
        more = {"gguf_file": path.name} if is_file else {"use_safetensors": True}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **more
            )
        except ImportError as error:
            raise ConfigError(f"the reference needs a package: {_first_line(error)}") from error
        except (KeyError, NotImplementedError, OSError, ValueError) as error:
            raise ModelError(
                f"transformers does not read {model_config.path}: {_first_line(error)}"
            ) from error
        self._torch = torch
        self._model = model.eval()

    def __call__(self, tokens: Sequence[int]) -> ReferenceScores:
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0, :-1].float()
        scores = logits.log_softmax(-1)  # [tokens - 1, vocabulary]
        own = scores.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]
        best = scores.max(-1)
        return ReferenceScores(own.tolist(), best.indices.tolist(), best.values.tolist())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def open_reference(model_config: ModelConfig) -> Reference:
    """
    Raises:
        ConfigError: a package is missing.
        ModelError: transformers cannot read the files.
    """
    return Reference(model_config)


def _line(text: str, one: Agreement) -> str:
    same = f"{one.num_output - len(one.flips)}/{one.num_output}"
    shown = text if len(text) <= 44 else text[:43] + "…"
    return (
        f"{one.num_tokens:>7} {one.mean:>8.4f} {one.worst:>8.4f} {same:>9} {one.margin:>8.4f}"
        f"  {shown!r}"
    )


def _verdict(found: Sequence[Agreement], options: VerifyOptions) -> Iterator[str]:
    tokens = sum(one.num_tokens for one in found)
    mean = sum(one.mean * one.num_tokens for one in found) / tokens
    margin, output = max(one.margin for one in found), sum(one.num_output for one in found)
    same = output - sum(len(one.flips) for one in found)
    is_near = agrees(found, options.mean, options.margin)
    yield (
        f"\n{'agrees' if is_near else 'DIFFERS'}: log-probabilities are {mean:.4f} apart in the "
        f"mean (at most {options.mean:g}), {same} of {output} tokens are the reference's choice, "
        f"and where not, its own is likelier by {margin:.4f} (at most {options.margin:g})"
    )
    if not is_near:
        yield (
            "what to try: --cpu-activations fp32 --kv-cache-dtype fp32 rounds nothing; --kernels "
            "reference computes with plain torch; without --quantization nothing is rounded at load"
        )
