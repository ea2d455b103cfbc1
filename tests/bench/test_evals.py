"""Questions with checkable answers: what counts as right, and how two servers are compared."""

import asyncio
import json
from collections import Counter

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.bench.evals import (
    Asking,
    Question,
    ask_all,
    own_questions,
    read_questions,
    results,
    score_table,
)
from tests.bench.scripted import Script, scripted_server


def test_there_are_200_questions_each_of_its_own():
    questions = own_questions()

    assert len(questions) == len({q.text for q in questions}) == 200
    kinds = Counter(q.kind for q in questions)
    assert set(kinds) == {"fact", "arithmetic", "translation", "list", "format"}
    assert min(kinds.values()) >= 20
    assert not any(q.is_answered("") for q in questions)


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("What is the capital of France?", "It is Paris.", "L'Étoile, la Cité"),
        ("What is 7 + 8?", "7 + 8 = 15.", "7 + 8 = 150."),
        ("Name the four seasons.", "Spring,\nsummer,\nfall and winter", "Spring and summer"),
        ("Write the date 4 July 1776 in the form YYYY-MM-DD.", "1776-07-04", "04-07-1776"),
    ],
)
def test_an_answer_is_right_when_it_holds_what_was_asked_for(text, right, wrong):
    question = next(q for q in own_questions() if q.text == text)

    assert question.is_answered(right) is True
    assert question.is_answered(wrong) is False


def test_the_last_number_counts_where_a_file_gives_results(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        json.dumps({"question": "How much?", "answer": "3 * 500 = 1500\n#### 1,500"})
        + "\n"
        + json.dumps({"question": "And why?"})
    )

    first, second = read_questions(str(path))

    assert first.is_answered("First 3, so 1500.0") is True
    assert first.is_answered("1500, no, 1501") is False
    assert first.is_answered("many") is False
    assert second.is_answered("because") is None


@pytest.mark.parametrize("line", ["[]", "{", '{"answer": 3}', '"question"'])
def test_a_line_that_is_no_question_is_named(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "fine?"}\n' + line)

    with pytest.raises(ConfigError, match=r"line 2 is no JSON object with a question"):
        read_questions(str(path))


QUESTIONS = [Question("fact", "a", "yes"), Question("fact", "b", "yes"), Question("list", "c")]


def test_two_servers_are_distinguished_by_right_and_by_equal_answers():
    answers = [["yes it is", "no", "one two three"], ["yes it is", "yes", "one two four"]]

    table = score_table(QUESTIONS, answers).splitlines()

    assert table[1].split() == ["fact", "1", "2", "2"]
    assert table[3].split() == ["all", "1", "2", "2"]
    assert "equal answers: 1 of 3 (33.3%)" in table
    assert results(QUESTIONS, answers, ["x", "y"])["right"] == [
        {"fact": 1, "list": 0},
        {"fact": 2, "list": 0},
    ]


def ask(status: int) -> tuple[list[str], list[dict]]:
    def answer(route: str, body: dict) -> Script:
        said = "echo " + body["messages"][0]["content"]
        content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        return Script([content], status=status)

    async def run():
        async with scripted_server(answer) as server:
            asking = Asking("m", {"temperature": 0.0, "max_tokens": 9}, 2, 10.0)
            answers = await ask_all(server.url, QUESTIONS, asking, lambda done, count: None)
            return answers, server.bodies("/v1/chat/completions")

    return asyncio.run(run())


def test_every_question_is_asked_once_with_the_settings():
    answers, asked = ask(200)

    assert answers == ["echo a", "echo b", "echo c"]
    assert sorted(body["messages"][0]["content"] for body in asked) == ["a", "b", "c"]
    assert all(body["max_tokens"] == 9 and body["temperature"] == 0 for body in asked)


def test_a_server_that_refuses_ends_the_run_with_its_words():
    with pytest.raises(BanyanError, match=r"answered 400: .*echo"):
        ask(400)
