"""Which words of a command line belong to which flag.

A flag takes as many words as its kind has, a list only those that it can take, and a switch a word
that says true or false. What is left over is the model. Where a word could be both, nothing is
guessed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.flags.flag import FLOAT, FLOATS, INT, INTS, LISTS, SWITCH, WORDS, Form
from banyan.config.flags.table import CONFIG_FILE, find

MODEL_HINT = "name the model in front, or with --model-path"


@dataclass(frozen=True)
class Said:
    """One flag as it was written, or a word that belongs to none.

    Attributes:
        spelled: with its dashes; "" for a word that belongs to none.
        words: what the flag is given, or that one word.
        may_hold_model: the last of its words might as well be the model.
    """

    spelled: str
    words: tuple[str, ...]
    may_hold_model: bool = False


def plain(spelled: str) -> str:
    """A flag's name as the tables write it."""
    return spelled.removeprefix("--").replace("_", "-")


def split(argv: Sequence[str]) -> Iterator[Said]:
    """The words of a command line by the flags that they belong to.

    Raises:
        ConfigError: an unknown flag, one without its value, or with two where it has one.
    """
    at = 0
    before: tuple[str, Form] | None = None
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            if word.startswith("-"):
                raise ConfigError(f"unknown flag {printable(word, 60)}", hint="see --help")
            if before is not None:
                _check_leftover(word, *before)
            yield Said("", (word,))
            continue
        spelled, equals, text = word.partition("=")
        name = plain(spelled)
        form = Form(CONFIG_FILE) if name == CONFIG_FILE else find(name, abbreviate=True)
        words = [text] if equals else _words_of(form, argv[at:])
        at += 0 if equals else len(words)
        if form.kind != SWITCH and not words:
            raise ConfigError(f"{spelled} needs a value")
        is_open = form.kind == WORDS and not (form.choices or form.pattern)
        might = is_open and len(words) > 1 and not words[-1].replace(".", "").isdigit()
        yield Said(spelled, tuple(words), might)
        before = (spelled, form) if not equals else None


def _words_of(form: Form, following: Sequence[str]) -> list[str]:
    """The following words that the flag takes."""
    words: list[str] = []
    for word in following:
        if word.startswith("--"):
            break
        is_more = form.kind == SWITCH or bool(words)
        if is_more and not form.takes(word):
            break
        words.append(word)
        if form.kind not in LISTS:
            break
    return words


def _check_leftover(word: str, spelled: str, form: Form) -> None:
    """Refuse a word that is no model, but one more value of the flag before it."""
    is_number = form.kind in (INT, FLOAT, INTS, FLOATS) and Form("", kind=FLOAT).takes(word)
    if is_number or (form.choices and form.takes(word)):
        raise ConfigError(
            f"{spelled} does not take {printable(word, 60)!r} as well",
            hint=f"if it is the model, {MODEL_HINT}",
        )
