"""`banyan completion SHELL`: a script that completes verbs, flags and short names of models."""

from collections.abc import Sequence
from dataclasses import fields

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.bench.options import BatchOptions, EvalOptions, ServingOptions, ThroughputOptions
from banyan.config.flags.flag import Flag
from banyan.config.flags.table import known_flags
from banyan.hub.catalogue import entries
from banyan.router.flags import GROUPS as ROUTER_GROUPS

USAGE = """banyan completion bash|zsh|fish

Prints a script for the shell:
  bash   echo 'eval "$(banyan completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(banyan completion zsh)"' >> ~/.zshrc
  fish   banyan completion fish > ~/.config/fish/completions/banyan.fish
"""
_SERVED = ("serve", "config", "batch", "plan", "simulate", "verify", "chat", "run")
"""Verbs that take the server's flags."""
_BASH = """_banyan() {
  local word="${COMP_WORDS[COMP_CWORD]}" flags="--help" others="VERBS"
  if [ "$COMP_CWORD" -gt 1 ]; then
    others="MODELS"
    case "${COMP_WORDS[1]}" in
      SERVED) flags="SERVER" ;;
      router|lb) flags="ROUTER"; others="" ;;
      bench) flags="BENCH"; others="KINDS" ;;
      completion) others="bash zsh fish" ;;
    esac
  fi
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$others" -- "$word")) ;;
  esac
}
complete -o default -F _banyan banyan
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def completion(argv: Sequence[str]) -> int:
    """Print the script for a shell; returns the exit code."""
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    shells = {"bash": _bash, "zsh": lambda: _ZSH + _bash(), "fish": _fish}
    if len(words) != 1 or words[0] not in shells:
        given = f", not {printable(' '.join(words), 60)!r}" if words else ""
        raise ConfigError(
            f"banyan completion takes one shell{given}", hint=f"choose: {', '.join(shells)}"
        )
    print(shells[words[0]](), end="")
    return 0


def _bash() -> str:
    script = _BASH.replace("SERVED", "|".join(_SERVED))
    for place, words in _words().items():
        script = script.replace(f'"{place}"', f'"{" ".join(words)}"')
    return script


def _fish() -> str:
    words = _words()
    models = " ".join(words["MODELS"])
    lines = [f"complete -c banyan -n __fish_use_subcommand -f -a '{' '.join(words['VERBS'])}'"]
    for verbs, place, names in (
        (" ".join(_SERVED), "SERVER", models),
        ("pull rm", "", models),
        ("router lb", "ROUTER", ""),
        ("bench", "BENCH", " ".join(words["KINDS"])),
        ("completion", "", "bash zsh fish"),
    ):
        within = f"complete -c banyan -n '__fish_seen_subcommand_from {verbs}'"
        lines += [f"{within} -a '{names}'"] if names else []
        lines += [f"{within} -l {flag[2:]}" for flag in words.get(place, ())]
    return "\n".join(lines) + "\n"


def _words() -> dict[str, list[str]]:
    """The lists of words in a script, by their place in it."""
    from banyan.cli.bench import KINDS
    from banyan.cli.main import VERBS

    kinds = (ServingOptions, BatchOptions, ThroughputOptions, EvalOptions)
    bench = {f"--{each.name.replace('_', '-')}" for kind in kinds for each in fields(kind)}
    return {
        "VERBS": list(VERBS),
        "KINDS": list(KINDS),
        "MODELS": ["demo", *(entry.name for entry in entries())],
        "SERVER": [f"--{flag.name}" for flag in known_flags() if isinstance(flag, Flag)],
        "ROUTER": [f"--{flag.name}" for _, flags in ROUTER_GROUPS for flag in flags],
        "BENCH": sorted(bench),
    }
