"""Data sets: the prompts of a benchmark and the sources of their tokens.

One table; each entry is a function of the options and a lexicon. A lexicon draws token ids of a
tokenizer, plain English words if there is no tokenizer, or bare ids if only the size of the
vocabulary is known. The same seed gives the same prompts. Nothing is downloaded.
"""

import base64
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Protocol

from banyan.base.errors import ConfigError
from banyan.bench.options import DataOptions
from banyan.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One request of a benchmark.

    Attributes:
        text: "" when only ids are known.
        ids: None when only the text is known.
        length: tokens as intended; the server's own count is what the results use.
        arrival_s: when a trace sent it, from the start of the trace.
        images: data URLs of pictures, which `length` does not count.
    """

    text: str
    ids: list[int] | None
    length: int
    output_len: int
    arrival_s: float = 0.0
    images: tuple[str, ...] = ()


_TEXT = """time year people way day man thing woman life child world school state family student
    group country problem hand part place case week company system program question work number
    night point home water room mother area money story fact month lot right study book eye job
    word business issue side kind head house service friend father power hour game line end member
    law car city name team minute idea body back parent face level office door health person art
    war history party result change morning reason research girl guy moment air teacher force
    age policy process music market sense nation plan college interest death effect use class
    control care field role effort rate heart drug show leader light voice wife price report
    decision son view town road arm value building action season society tax player record paper
    space ground form event matter center couple site project activity star table need court oil
    cost industry figure street image phone data picture practice piece land product doctor wall
    worker news test movie north love support technology step baby computer type attention film
    tree source hair look window culture chance brother energy period course summer plant term
    letter condition choice rule south floor campaign material call economy hospital church risk
    fire future bank west sport board subject officer rest behavior fight top goal second bed
    order author blood agency nature color store sound"""

WORDS = tuple(_TEXT.split())
"""With a leading space, each is one token in common byte-pair vocabularies."""


class Lexicon(Protocol):
    """Draws words and spells them."""

    @property
    def has_text(self) -> bool: ...

    @property
    def has_ids(self) -> bool:
        """The words' numbers are token ids of the model."""
        ...

    def draw(self, random: Random, count: int) -> list[int]: ...
    def spell(self, words: Sequence[int]) -> str: ...
    def read(self, text: str) -> list[int]:
        """The words of `text`, for counting and cutting."""
        ...


class PlainWords:
    """English words; lengths in tokens are right to within a few."""

    has_text, has_ids = True, False

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(WORDS)}

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(range(len(WORDS)), k=count)

    def spell(self, words: Sequence[int]) -> str:
        return " ".join(WORDS[w] for w in words)

    def read(self, text: str) -> list[int]:
        """Foreign text is taken as four characters to a token."""
        known = [self._numbers.get(word) for word in text.split()]
        if None not in known:
            return [number for number in known if number is not None]
        return [0] * max(1, round(len(text) / 4))


class BareIds:
    """Token ids, when only the size of the vocabulary is known."""

    has_text, has_ids = False, True

    def __init__(self, vocab_size: int) -> None:
        # The first ids of most vocabularies are control tokens and bytes.
        self._ids = range(min(1000, vocab_size // 2), vocab_size)

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(self._ids, k=count)

    def spell(self, words: Sequence[int]) -> str:
        raise ConfigError(
            "these prompts need text, and only --vocab-size is known", hint="give --tokenizer"
        )

    def read(self, text: str) -> list[int]:
        return [0] * max(1, round(len(text) / 4))


class TokenWords:
    """Tokens of a tokenizer that are ordinary text.

    Args:
        any_id: draw from the whole vocabulary, not only from plain words.
    """

    has_text, has_ids = True, True

    def __init__(self, tokenizer: Tokenizer, any_id: bool = False) -> None:
        self._tokenizer = tokenizer
        plain = [] if any_id else [self._one_token(" " + word) for word in WORDS]
        plain = [id for id in plain if id is not None]
        if len(plain) < len(WORDS) // 2:
            special = tokenizer.special_ids
            plain = [i for i in range(tokenizer.vocab_size) if i not in special]
        self._ids: list[int] = [id for id in plain if id is not None]

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(self._ids, k=count)

    def spell(self, words: Sequence[int]) -> str:
        return self._tokenizer.decode(words, skip_special_tokens=False)

    def read(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _one_token(self, word: str) -> int | None:
        ids = self._tokenizer.encode(word, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None


MOONCAKE_BLOCK = 512
"""Tokens that one hash id of the Mooncake traces stands for."""

_SHORTEST = 4
"""ShareGPT turns below this many tokens are no workload."""

_AZURE_DIGITS = 26
"""Of a timestamp's digits, those that datetime reads (microseconds)."""


def load_prompts(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """The prompts that `options` name, in the order in which they are sent.

    Raises:
        ConfigError: an unknown data set, or a file that is missing or of another form.
    """
    if options.dataset_name not in DATASETS:
        raise ConfigError(
            f"--dataset-name {options.dataset_name!r} is unknown",
            hint=f"choose one of: {', '.join(DATASETS)}",
        )
    prompts = DATASETS[options.dataset_name](options, lexicon)
    if not prompts:
        raise ConfigError(f"--dataset-name {options.dataset_name} gave no prompts")
    if any(p.output_len < 1 or p.length < 1 for p in prompts):
        raise ConfigError("a prompt or an answer of 0 tokens was asked for")
    return prompts


def _random(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """Random words, or with --dataset-path the file's texts, cut or repeated to random lengths."""
    random = Random(options.seed)
    pairs = _lengths(options, random)
    if not options.dataset_path:
        return [prompt_of(lexicon, lexicon.draw(random, i), o) for i, o in pairs]
    texts = [question for question, _ in _conversations(options.dataset_path)]
    random.shuffle(texts)
    prompts = []
    for (input_len, output_len), text in zip(pairs, itertools.cycle(texts), strict=False):
        words = lexicon.read(text) or lexicon.draw(random, 1)
        repeated = itertools.islice(itertools.cycle(words), input_len)
        prompts.append(prompt_of(lexicon, list(repeated), output_len))
    return prompts


def _random_ids(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    random = Random(options.seed)
    pairs = _lengths(options, random)
    return [prompt_of(lexicon, lexicon.draw(random, i), o) for i, o in pairs]


_RESOLUTIONS = {"4k": (2160, 3840), "1080p": (1080, 1920), "720p": (720, 1280), "360p": (360, 640)}
"""Name -> height, width."""
_MOST_IMAGE_SIDE = 16_384


def _image(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """Random words, as of `random`, and pictures that nobody has sent before."""
    height, width = _resolution(options.image_resolution)
    if options.image_count < 1:
        raise ConfigError(f"--image-count {options.image_count} is less than one picture")
    random = Random(options.seed)
    prompts = []
    for prompt in _random(options, lexicon):
        most = options.image_count
        count = random.randint(1, most) if options.random_image_count else most
        images = tuple(_picture(options, random, height, width) for _ in range(count))
        prompts.append(replace(prompt, images=images))
    return prompts


def _resolution(text: str) -> tuple[int, int]:
    if text in _RESOLUTIONS:
        return _RESOLUTIONS[text]
    height, _, width = text.partition("x")
    sides = [int(side) for side in (height, width) if side.isascii() and side.isdigit()]
    if len(sides) != 2 or not all(1 <= side <= _MOST_IMAGE_SIDE for side in sides):
        raise ConfigError(
            f"--image-resolution {text[:40]!r} is no size",
            hint=f"choose one of {', '.join(_RESOLUTIONS)}, or HEIGHTxWIDTH like 448x640",
        )
    return sides[0], sides[1]


def _picture(options: DataOptions, random: Random, height: int, width: int) -> str:
    """A picture as data URL. Blank ones differ by their colour."""
    from PIL import Image  # only this data set draws

    if options.image_content == "blank":
        colour = (random.randrange(256), random.randrange(256), random.randrange(256))
        picture = Image.new("RGB", (width, height), colour)
    else:
        picture = Image.frombytes("RGB", (width, height), random.randbytes(3 * width * height))
    file = io.BytesIO()
    picture.save(file, options.image_format.upper())
    data = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{options.image_format};base64,{data}"


def _lengths(options: DataOptions, random: Random) -> list[tuple[int, int]]:
    """(input, output) lengths, uniform between `random_range_ratio` of the length and all of it."""
    inputs, outputs = options.random_input_len, options.random_output_len
    low = options.random_range_ratio
    count = options.num_prompts
    ins = [random.randint(max(1, int(inputs * low)), inputs) for _ in range(count)]
    outs = [random.randint(max(1, int(outputs * low)), outputs) for _ in range(count)]
    return list(zip(ins, outs, strict=True))


def _shared_prefix(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """Groups of prompts that begin with the same system prompt, shuffled."""
    random = Random(options.seed)

    def about(length: int) -> int:
        return random.randint(max(1, int(length * options.gsp_range_ratio)), length)

    prompts = []
    for _ in range(options.gsp_num_groups):
        system = lexicon.draw(random, about(options.gsp_system_prompt_len))
        for _ in range(options.gsp_prompts_per_group):
            words = system + lexicon.draw(random, about(options.gsp_question_len))
            prompts.append(prompt_of(lexicon, words, about(options.gsp_output_len)))
    if not options.gsp_ordered:
        random.shuffle(prompts)
    return prompts


def _sharegpt(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """First turns of conversations; the second turn's length is the answer's."""
    if not options.dataset_path:
        raise ConfigError(
            "--dataset-name sharegpt needs --dataset-path FILE.json",
            hint="nothing is downloaded; --dataset-name random needs no file",
        )
    pairs = list(_conversations(options.dataset_path))
    Random(options.seed).shuffle(pairs)
    prompts: list[Prompt] = []
    for question, reply in pairs[options.dataset_offset :]:
        if len(prompts) == options.num_prompts:
            break
        text = question + options.prompt_suffix
        ids = lexicon.read(text)
        output_len = options.sharegpt_output_len or len(lexicon.read(reply))
        limit = options.sharegpt_context_len
        is_too_long = limit is not None and len(ids) + output_len > limit
        if len(ids) >= _SHORTEST and output_len >= _SHORTEST and not is_too_long:
            prompts.append(Prompt(text, ids if lexicon.has_ids else None, len(ids), output_len))
    return prompts


def _conversations(path: str) -> Iterator[tuple[str, str]]:
    """(question, answer) of a ShareGPT-form file: a JSON list, or one JSON object a line."""
    raw = _read(path)
    try:
        rows = json.loads(raw) if raw.lstrip().startswith("[") else _json_lines(raw)
        for row in rows:
            turns = row.get("conversations") or row.get("conversation") or []
            if len(turns) >= 2:
                yield turns[0]["value"], turns[1]["value"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not in ShareGPT form: {type(error).__name__}: {error}",
            hint='it needs [{"conversations": [{"from": …, "value": …}, …]}, …]',
        ) from None


def _openai(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """One request body a line: messages (their last user text) or prompt; max_tokens."""
    prompts = []
    try:
        for row in _json_lines(_read(options.dataset_path))[options.dataset_offset :]:
            text = row.get("prompt") or row["messages"][-1]["content"]
            ids = lexicon.read(text + options.prompt_suffix)
            output_len = row.get("max_tokens") or options.random_output_len
            known = ids if lexicon.has_ids else None
            prompts.append(Prompt(text + options.prompt_suffix, known, len(ids), output_len))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{options.dataset_path} has a line that is no request: {error}",
            hint='each line needs {"messages": […]} or {"prompt": "…"}',
        ) from None
    return prompts[: options.num_prompts]


def _mooncake(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """A Mooncake trace: equal hash ids become equal runs of `trace_block_len` tokens."""
    block = options.trace_block_len
    prompts = []
    try:
        for row in _trace_rows(options):
            whole = block * row["input_length"] / MOONCAKE_BLOCK
            length = max(1, round(whole))
            words = [w for id in row["hash_ids"] for w in _block(lexicon, options.seed, id, block)]
            output_len = max(1, round(row["output_length"] * options.trace_output_scale))
            at_s = row["timestamp"] / 1e3
            prompts.append(prompt_of(lexicon, words[:length], output_len, at_s))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{options.dataset_path} is no Mooncake trace: {type(error).__name__}: {error}",
            hint="each line needs timestamp, input_length, output_length, hash_ids",
        ) from None
    return prompts


def _trace_rows(options: DataOptions) -> list[dict]:
    rows = _json_lines(_read(options.dataset_path))
    return rows[options.dataset_offset :][: options.num_prompts]


def _block(lexicon: Lexicon, seed: int, id: int, length: int) -> list[int]:
    return lexicon.draw(Random(f"{seed}/{id}"), length)


def _azure(options: DataOptions, lexicon: Lexicon) -> list[Prompt]:
    """An Azure LLM trace: lengths and times; no prompt shares anything."""
    random = Random(options.seed)
    scale = options.trace_block_len / MOONCAKE_BLOCK
    prompts: list[Prompt] = []
    began: datetime | None = None
    try:
        rows = csv.DictReader(_read(options.dataset_path).splitlines())
        first = options.dataset_offset
        for row in itertools.islice(rows, first, first + options.num_prompts):
            at = datetime.fromisoformat(row["TIMESTAMP"][:_AZURE_DIGITS])
            began = began or at
            length = max(1, round(int(row["ContextTokens"]) * scale))
            output_len = max(1, round(int(row["GeneratedTokens"]) * options.trace_output_scale))
            words = lexicon.draw(random, length)
            seconds = (at - began).total_seconds()
            prompts.append(prompt_of(lexicon, words, output_len, seconds))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{options.dataset_path} is no Azure trace: {type(error).__name__}: {error}",
            hint="its columns are TIMESTAMP, ContextTokens, GeneratedTokens",
        ) from None
    return prompts


def _read(path: str) -> str:
    if not path:
        raise ConfigError("this data set is read from a file", hint="give --dataset-path FILE")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from None


def _json_lines(raw: str) -> list[dict]:
    return [json.loads(line) for line in raw.splitlines() if line.strip()]


DATASETS: dict[str, Callable[[DataOptions, Lexicon], list[Prompt]]] = {
    "random": _random,
    "random-ids": _random_ids,
    "image": _image,
    "generated-shared-prefix": _shared_prefix,
    "sharegpt": _sharegpt,
    "custom": _sharegpt,
    "openai": _openai,
    "mooncake": _mooncake,
    "azure": _azure,
}

TRACES = ("mooncake", "azure")
"""Data sets whose prompts say when they were sent."""

SENT_AS_IDS = ("random-ids", *TRACES)
"""Data sets whose lengths are exact, so that their prompts go as token ids where they can."""


def prompt_of(
    lexicon: Lexicon, words: list[int], output_len: int, arrival_s: float = 0.0
) -> Prompt:
    text = lexicon.spell(words) if lexicon.has_text else ""
    return Prompt(text, words if lexicon.has_ids else None, len(words), output_len, arrival_s)
