"""`banyan bench eval`: short questions with checkable answers, one server or two side by side.

This measures a served model with its template, sampling defaults and kernels. With a second server
it also reports how often whole answers are equal.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

import orjson

from banyan.base.errors import BanyanError, ConfigError
from banyan.bench.http import HttpClient

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SOLUTION = "####"
"""Marks the result in the answers of GSM8K (arXiv 2110.14168)."""


@dataclass(frozen=True)
class Question:
    """A question with a checkable answer.

    Attributes:
        kind: "fact", "arithmetic" …
        pattern: regular expression that a right answer contains; "" = not checked.
        result: the last number of a right answer; "" = use the pattern.
    """

    kind: str
    text: str
    pattern: str = ""
    result: str = ""

    def is_answered(self, answer: str) -> bool | None:
        """Whether the answer is right; None if it cannot be checked."""
        if self.result:
            numbers = _NUMBER.findall(answer)
            return bool(numbers) and _plain(numbers[-1]) == _plain(self.result)
        return re.search(self.pattern, answer) is not None if self.pattern else None


@dataclass(frozen=True)
class Asking:
    """Settings of the requests.

    Attributes:
        settings: fields of every request ("temperature", "max_tokens" …).
        cacert: file of the certificates that are trusted; "" = the system's.
    """

    model: str
    settings: dict[str, object]
    concurrency: int
    timeout_s: float
    cacert: str = ""


def own_questions() -> list[Question]:
    """The 200 built-in questions."""
    lines = files("banyan.bench").joinpath("questions.tsv").read_text("utf-8").splitlines()
    return [Question(*line.split("\t")) for line in lines[1:]]


def read_questions(path: str) -> list[Question]:
    """Questions of a file: JSON lines with `question`, and `answer` as GSM8K writes it.

    Raises:
        ConfigError: no such file, or an invalid line.
    """
    found: list[Question] = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path!r}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            text, answer = entry["question"], entry.get("answer", "")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{path!r}, line {number} is no JSON object with a question"
            ) from None
        result = answer.rpartition(_SOLUTION)[2].strip() if _SOLUTION in answer else ""
        found.append(Question(Path(path).stem, text, result=result))
    return found


async def ask_all(
    url: str, questions: Sequence[Question], asking: Asking, show: Callable[[int, int], None]
) -> list[str]:
    """The answers of one server, in order.

    Raises:
        BanyanError: the server does not answer, or refuses.
    """
    server = HttpClient(url, cacert=asking.cacert)
    gate, done = asyncio.Semaphore(asking.concurrency), 0

    async def ask(question: Question) -> str:
        nonlocal done
        messages = [{"role": "user", "content": question.text}]
        body = {"model": asking.model, "messages": messages, **asking.settings}
        async with gate:
            reply = await server.request(
                "POST", "/v1/chat/completions", orjson.dumps(body), asking.timeout_s
            )
        if reply.status != 200:
            text = reply.body[:300].decode(errors="replace")
            raise BanyanError(f"{url} answered {reply.status}: {text}")
        done += 1
        show(done, len(questions))
        return orjson.loads(reply.body)["choices"][0]["message"]["content"] or ""

    try:
        return list(await asyncio.gather(*map(ask, questions)))
    finally:
        server.close()


def score_table(questions: Sequence[Question], answers: Sequence[Sequence[str]]) -> str:
    """Right answers by kind, one column per server, and the agreement of two servers."""
    kinds = list(dict.fromkeys(question.kind for question in questions))
    rows: list[list[str]] = []
    for kind in (*kinds, ""):
        mine = [i for i, q in enumerate(questions) if kind in ("", q.kind)]
        checked = [i for i in mine if questions[i].is_answered("") is not None]
        right = [
            str(sum(bool(questions[i].is_answered(given[i])) for i in checked)) for given in answers
        ]
        rows.append([kind or "all", *right, str(len(checked))])
    names = [f"server {i + 1}" for i in range(len(answers))]
    lines = columns([["right answers", *names, "of"], *rows])
    if len(answers) == 2:
        lines += ["", *_agreement(*answers)]
    return "\n".join(lines)


def _agreement(first: Sequence[str], second: Sequence[str]) -> list[str]:
    pairs = list(zip(first, second, strict=True))
    equal = sum(a == b for a, b in pairs)
    shared = sorted(_common_words(a, b) for a, b in pairs if a != b)
    lines = [f"equal answers: {equal} of {len(pairs)} ({equal / max(1, len(pairs)):.1%})"]
    if shared:
        middle = shared[len(shared) // 2]
        lines.append(f"the others part after {middle} words (median)")
    return lines


def results(
    questions: Sequence[Question], answers: Sequence[Sequence[str]], urls: Sequence[str]
) -> dict[str, object]:
    """The scores and all answers as a JSON object."""
    right = [Counter[str]() for _ in answers]
    for i, question in enumerate(questions):
        for counter, given in zip(right, answers, strict=True):
            counter[question.kind] += bool(question.is_answered(given[i]))
    return {
        "servers": list(urls),
        "right": [dict(counter) for counter in right],
        "questions": len(questions),
        "answers": [
            {"question": q.text, "answers": [given[i] for given in answers]}
            for i, q in enumerate(questions)
        ],
    }


def _common_words(a: str, b: str) -> int:
    pairs = zip(a.split(), b.split(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def columns(rows: list[list[str]]) -> list[str]:
    """Lines of a table; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _plain(number: str) -> str:
    plain = number.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
