"""Flags of a verb's own, taken out of a command line whose other words are read elsewhere."""

from banyan.base.errors import ConfigError


def take(words: list[str], flag: str) -> tuple[list[str], str]:
    """The words without `flag` and its value, and that value; "" where it is not given."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        if equals:
            return words[:at] + words[at + 1 :], value
        if at + 1 == len(words) or words[at + 1].startswith("--"):
            raise ConfigError(f"{flag} needs a value")
        return words[:at] + words[at + 2 :], words[at + 1]
    return words, ""
