"""The `banyan` command: finds the verb and shows errors in one line; verbs do the heavy imports."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import printable
from banyan.base.table import Table

VERBS: Table[Callable[[Sequence[str]], int]] = Table(
    "verb",
    {
        "serve": "banyan.cli.serve:serve",
        "router": "banyan.cli.router:router",
        "lb": "banyan.cli.router:lb",
        "chat": "banyan.cli.chat:chat",
        "run": "banyan.cli.chat:run",
        "models": "banyan.cli.models:models",
        "pull": "banyan.cli.models:pull",
        "list": "banyan.cli.models:held_here",
        "rm": "banyan.cli.models:remove_one",
        "lora": "banyan.cli.lora:lora",
        "quantize": "banyan.cli.quantize:quantize",
        "verify": "banyan.cli.verify:verify",
        "simulate": "banyan.cli.simulate:simulate",
        "plan": "banyan.cli.plan:plan",
        "replay": "banyan.cli.replay:replay",
        "explain": "banyan.cli.replay:explain",
        "cache": "banyan.cli.replay:cache",
        "batch": "banyan.cli.batch:batch",
        "bench": "banyan.cli.bench:main",
        "profile": "banyan.cli.client:profile",
        "config": "banyan.cli.config:config",
        "translate": "banyan.cli.translate:translate",
        "check": "banyan.cli.check:check",
        "recipe": "banyan.cli.check:recipe",
        "npu-selfcheck": "banyan.ascend.selfcheck:npu_selfcheck",
        "doctor": "banyan.cli.doctor:doctor",
        "completion": "banyan.cli.completion:completion",
        "version": "banyan.cli.doctor:version",
    },
)

HELP = """banyan VERB [flags]

  serve [MODEL]   serve a model over HTTP (default: the demo model)
  router          one address for many servers; lb: for prefill and decode servers
  chat [MODEL]    talk to a model in the terminal
  run MODEL TEXT  one answer in the terminal
  models          good small models by short name, and which of them fit this machine
  pull MODEL      fetch a model and do no more
  list            the models on this machine
  rm MODEL        delete one of them
  batch IN OUT    answer a file of requests (JSONL) without a server
  bench WHAT      measure a server or this machine's engine: serving, batch, throughput, eval
  plan MODEL      what it takes of this machine, and how much fits, before it is loaded
  lora inspect P  what an adapter brings, and whether it fits a model
  quantize IN OUT make a model of 4 or 8 bits from one of float weights
  verify MODEL    hold what is served against transformers, token by token
  simulate MODEL  what a layout of devices would give, before it is bought
  replay FILE     check a journal against this build, or send its requests once more
  explain REQUEST why it waited, what it hit in the cache, where its time went
  cache explain R what a request found in the prefix cache, and why no more
  profile [URL]   record what a running server's steps do, as a trace file
  config [MODEL]  show the resolved configuration, and where each value came from
  translate LINE  a start line of vLLM, llama-server, Ollama or TGI as one of this engine
  check [MODEL]   hold a launch on Ascend NPUs against the rules, without starting it
  recipe MODEL    variables and commands for each of several Ascend NPU machines
  npu-selfcheck   run the operators of an Ascend NPU and compare with plain torch
  doctor          show what this machine offers and what is missing
  completion SH   a script for bash, zsh or fish that completes verbs, flags and models
  version         the version; --json for more

banyan VERB --help shows the flags of a verb."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Errors that people can act on end in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if words[0] == "--version":
        words = ["version"]
    try:
        return VERBS.load(_verb(words[0]))(words[1:])
    except BanyanError as error:
        print(f"banyan: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`banyan … | head`): say nothing more, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _verb(word: str) -> str:
    if word not in VERBS:
        near = difflib.get_close_matches(word[:40], VERBS, n=1, cutoff=0.6)
        hint = f"did you mean banyan {near[0]}?" if near else "see banyan --help"
        raise ConfigError(f"unknown verb {printable(word, 60)!r}", hint=hint)
    return word
