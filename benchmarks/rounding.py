"""What rounded activations change and cost: `python -m benchmarks.rounding [--cost]`.

Along the greedy answers of the exact path, a float32 forward in plain torch rounds the inputs of
projections by one scheme after another, and is compared with itself without rounding: KL, tokens
that would be chosen otherwise, answers without any such token. Where the package cyllama is
installed, llama.cpp says what it gives at the same positions of the same file.

--cost instead times whole steps of two engines in turn: one with the usual kernels and one with
kernels that keep no input apart. It prints medians of the ratios of pairs with their range; on a
busy machine use the processor time.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import banyan
from banyan.base.log import start_logging
from banyan.bench.evals import own_questions
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepInputs
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.ops.state_api import StateRows

BLOCK = 32
Round = Callable[[Tensor], Tensor]
"""[tokens, inputs] fp32 -> the same, rounded."""


# Schemes


def per_block(x: Tensor, bits: int = 8, size: int = BLOCK) -> Tensor:
    """One scale for `size` inputs: their largest magnitude becomes the largest number."""
    blocks = x.unflatten(-1, (-1, size))
    most = (1 << (bits - 1)) - 1
    scales = blocks.abs().amax(-1, keepdim=True) / most
    return ((blocks / scales.where(scales > 0, 1)).round() * scales).flatten(-2)


def with_zero_point(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, BLOCK))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scales = (high - low) / 255
    return (((blocks - low) / scales.where(scales > 0, 1)).round() * scales + low).flatten(-2)


def with_apart(x: Tensor, inputs: int) -> Tensor:
    """The largest magnitudes of a row stay as they are, one for every `inputs` and one at least."""
    top = x.abs().topk(max(1, x.shape[-1] // inputs), dim=-1).indices
    kept = torch.zeros_like(x).scatter(-1, top, x.gather(-1, top))
    return per_block(x - kept) + kept


def twice(x: Tensor) -> Tensor:
    first = per_block(x)
    return first + per_block(x - first)


SCHEMES: dict[str, Round] = {
    "8 bits per block of 32": per_block,
    "scales per 16 inputs": lambda x: per_block(x, size=16),
    "a zero point next to the scale": with_zero_point,
    "9 bits per block of 32": lambda x: per_block(x, bits=9),
    "one input of 72 kept apart": lambda x: with_apart(x, 72),
    "one input of 144 kept apart": lambda x: with_apart(x, 144),
    "one input of 288 kept apart": lambda x: with_apart(x, 288),
    "one input of 512 kept apart, the default": lambda x: with_apart(x, 512),
    "8 + 8 bits": twice,
}
KINDS = {
    "q, k, v": "attention.qkv",
    "attention's output": "attention.out",
    "gate and up": "mlp.gate_up",
    "down": "mlp.down",
    "the head": "head",
}
"""Kind of projection -> what its module's name ends with."""


# The model in plain torch


@dataclass
class Rounded:
    """A projection whose inputs are rounded first. Which scheme may change from run to run."""

    exact: Callable[..., Tensor]
    kind: str
    scheme: list[tuple[str, Round]]
    """At most one (kind or "" for all, its function), shared by all projections."""

    def __call__(self, x: Tensor, *bias: Tensor | None) -> Tensor:
        for kind, scheme in self.scheme:
            if kind in ("", self.kind):
                x = scheme(x)
        return self.exact(x, *bias)


@dataclass(frozen=True)
class Causal:
    """Attention of one whole sequence, without pages."""

    cache: torch.dtype

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "models with attention sinks are not measured here"
        q, k, v = (
            x.transpose(0, 1) for x in (q, k.to(self.cache).float(), v.to(self.cache).float())
        )
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True
        )
        return out.transpose(0, 1)

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        raise NotImplementedError("models with latent attention are not measured here")


def _no_states(layer: int) -> tuple[Mapping[str, Tensor], StateRows]:
    raise NotImplementedError("models that keep states are not measured here")


class Exact:
    """The model in float32, with a place where inputs of projections may be rounded."""

    def __init__(self, model_config: ModelConfig) -> None:
        ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), model_config.head_dim)
        self._model: Model = load_model(model_config, Build(ops))
        self._scheme: list[tuple[str, Round]] = []
        for name, module in self._model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, ColumnLinear | RowLinear) or name == "head":
                assert weight is not None
                module.weight = Rounded(weight, _kind_of(name), self._scheme)

    @torch.inference_mode()
    def log_probs(
        self,
        prompt: list[int],
        answer: list[int],
        scheme: Round | None = None,
        kind: str = "",
        cache: torch.dtype = torch.float32,
    ) -> Tensor:
        """Of every token that may stand where the answer's tokens stand: [answer, vocab]."""
        self._scheme[:] = [(kind, scheme)] if scheme else []
        ids = torch.tensor(prompt + answer[:-1])
        step = StepInputs(ids, torch.arange(len(ids)), Causal(cache), _no_states)
        hidden = self._model.forward(step)
        return self._model.logits(hidden[len(prompt) - 1 :]).double().log_softmax(-1)


def _kind_of(name: str) -> str:
    return next(kind for kind, end in KINDS.items() if name.endswith(end))


# Agreement


@dataclass
class Tally:
    """Sums over answers, against the exact path."""

    tokens: int = 0
    nats: float = 0.0
    flips: int = 0
    answers: int = 0
    same: int = 0

    def add(self, exact: Tensor, other: Tensor) -> None:
        """exact, other: [tokens, vocab] log-probabilities."""
        flips = int((exact.argmax(-1) != other.argmax(-1)).sum())
        self.nats += float((exact.exp() * (exact - other)).sum())
        self.tokens += len(exact)
        self.flips += flips
        self.answers += 1
        self.same += not flips

    def row(self, name: str) -> list[str]:
        kl, flips = self.nats / self.tokens, self.flips / self.tokens
        return [name, f"{kl:.1e}", f"{flips:.2%}", f"{self.same / self.answers:.0%}"]


Task = tuple[list[int], list[int]]
"""Ids of a prompt and of its exact greedy answer."""


def exact_answers(path: str, questions: int, tokens: int) -> list[Task]:
    texts = [question.text for question in own_questions()]
    every = max(1, len(texts) // questions)  # their kinds follow one another
    exact = {"cpu_activations": "fp32", "kv_cache_dtype": "fp32", "log_level": "warning"}
    with banyan.Engine(model_path=path, **exact) as engine:
        assert engine.tokenizer is not None
        prompts = [
            engine.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
            for text in texts[::every][:questions]
        ]
        asked = {"temperature": 0, "max_new_tokens": tokens}
        answers = engine.generate(input_ids=prompts, sampling_params=asked)
    found = [list(answer["output_ids"]) for answer in answers]
    return list(zip(prompts, found, strict=True))


def compare(model_config: ModelConfig, tasks: Sequence[Task]) -> None:
    """Prints a line for each scheme as soon as it is known."""
    model = Exact(model_config)
    whole = [model.log_probs(*task) for task in tasks]
    chosen = sum(
        int((exact.argmax(-1) != torch.tensor(answer)).sum())
        for exact, (_, answer) in zip(whole, tasks, strict=True)
    )
    tokens = sum(len(answer) for _, answer in tasks)
    print(f"{len(tasks)} answers, {tokens} tokens; torch would choose {chosen} of them otherwise\n")

    def show(name: str, *cells: str) -> None:
        print(f"{name:<42}" + "".join(f"{cell:>14}" for cell in cells), flush=True)

    def tally(name: str, run: Callable[[Task], Tensor]) -> None:
        found = Tally()
        for exact, task in zip(whole, tasks, strict=True):
            found.add(exact, run(task))
        show(*found.row(name))

    show("rounded", "KL, nats", "flips", "same answers")
    for name, scheme in SCHEMES.items():
        tally(name, lambda task, scheme=scheme: model.log_probs(*task, scheme))
    for kind in KINDS:
        tally(f"only {kind}", lambda task, kind=kind: model.log_probs(*task, per_block, kind))
    tally("nothing, K and V in fp16", lambda task: model.log_probs(*task, cache=torch.float16))
    with ExitStack() as stack:
        if (llama := _llama(model_config.path, stack)) is not None:
            tally("llama.cpp", llama)


def _llama(path: str, stack: ExitStack) -> Callable[[Task], Tensor] | None:
    """llama.cpp's answer to the same question; None where it is not installed."""
    try:
        from cyllama.llama import llama_cpp
    except ImportError:
        print("llama.cpp is left out: pip install cyllama", file=sys.stderr)
        return None

    class Model(llama_cpp.LlamaModel):
        """What 0.2.18 asks of a model and does not define."""

        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    llama_cpp.disable_logging()
    model = Model(path_model=path, verbose=False)
    settings = llama_cpp.LlamaContextParams()
    settings.n_ctx = settings.n_batch = 2048
    context = llama_cpp.LlamaContext(model=model, params=settings, verbose=False)
    stack.callback(context.close)

    def log_probs(task: Task) -> Tensor:
        prompt, answer = task
        context.kv_cache_clear()
        rows: list[Sequence[float]] = []
        for first, tokens in [(0, prompt), *enumerate(([a] for a in answer[:-1]), len(prompt))]:
            batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
            for at, token in enumerate(tokens):
                batch.add(token, first + at, [0], at == len(tokens) - 1)
            context.decode(batch)
            rows.append(context.get_logits())  # of the one that asks for them
        return torch.tensor(rows, dtype=torch.float64).log_softmax(-1)

    return log_probs


@dataclass(frozen=True)
class Load:
    """Requests that begin together."""

    rows: int
    input_len: int
    output_len: int


LOADS = {
    "decode, 1 row": Load(1, 16, 96),
    "decode, 8 rows": Load(8, 16, 48),
    "decode, 32 rows": Load(32, 16, 24),
    "prefill, 1,024 tokens": Load(1, 1024, 1),
}


def cost(path: str, rounds: int) -> None:
    """Prints a line for each load as soon as it is known."""
    _show("default / none kept apart", "processor time", "time")
    with ExitStack() as stack:
        other = stack.enter_context(_home_without_apart())
        plain = stack.enter_context(_timed(path, other))
        default = stack.enter_context(_timed(path, ""))
        draw = random.Random(1)
        for name, load in LOADS.items():
            ratios: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                shared = draw.choices(range(1000, 40000), k=load.input_len)
                prompts = [[1 + at, *shared[1:]] for at in range(load.rows)]
                turn = (plain, default) if number % 2 else (default, plain)
                found = {run: run(prompts, load.output_len) for run in turn}
                if number:  # the first one touches the cache's pages
                    mine, theirs = found[default], found[plain]
                    ratios.append((mine[0] / theirs[0], mine[1] / theirs[1]))
            _show(name, *(_spread(column) for column in zip(*ratios, strict=True)))


def _show(name: str, *cells: str) -> None:
    print(f"{name:<28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]"


@contextmanager
def _home_without_apart() -> Iterator[str]:
    """A home of its own for kernels that are compiled so that no input is kept apart."""
    home = tempfile.mkdtemp(prefix="banyan-rounding-")
    try:
        yield home
    finally:
        shutil.rmtree(home)


@contextmanager
def _timed(path: str, home: str) -> Iterator[Callable[[list[list[int]], int], tuple[float, float]]]:
    """An engine; what it takes for prompts: (processor seconds, seconds)."""
    mine, before = os.environ["HOME"], set(psutil.Process().children(recursive=True))
    if home:
        os.environ["HOME"] = home
    compiler = "g++ -DBN_BLOCKS_PER_APART=0" if home else "g++"
    try:
        engine = banyan.Engine(model_path=path, log_level="warning", cpu_compiler=compiler)
    finally:
        os.environ["HOME"] = mine
    processes = set(psutil.Process().children(recursive=True)) - before

    def run(prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        asked = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        spent, began = _spent(processes), time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=asked)
        seconds = time.perf_counter() - began
        return _spent(processes) - spent, seconds

    try:
        yield run
    finally:
        engine.shutdown()


def _spent(processes: set[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="rounding", description=__doc__)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--cost", action="store_true", help="time steps instead")
    parser.add_argument("--rounds", type=int, default=5, help="of --cost, for each load")
    parser.add_argument("--questions", type=int, default=50, help="of the 200 of banyan bench eval")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most")
    options = parser.parse_args()
    start_logging("rounding", "warning")
    if options.cost:
        cost(options.model_path, options.rounds)
        return 0
    torch.set_num_threads(1)  # on a busy machine two would wait for each other at every product
    environment = read_environment()
    _, model_config = prepare(parse(["--model-path", options.model_path], environment), environment)
    compare(model_config, exact_answers(options.model_path, options.questions, options.tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
