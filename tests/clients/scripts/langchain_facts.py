"""What langchain-openai makes of the server's answers."""

import functools
import operator

from facts import (
    CITY,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    SPOKEN_CALL,
    URL,
    VECTORS_URL,
    WEATHER,
    Facts,
    refusal,
)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

facts = Facts()
WHERE = {"base_url": URL, "api_key": KEY, "model": MODEL, "max_retries": 0}
chat_model = ChatOpenAI(**WHERE, temperature=0, max_tokens=24, stream_usage=True)
long_model = ChatOpenAI(**WHERE, temperature=0, max_tokens=80, stream_usage=True)


class City(BaseModel):
    """A city of the world."""

    model_config = ConfigDict(extra="forbid")  # a small model would go on with more fields
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def shape(message: AIMessage) -> dict[str, object]:
    return {
        "text": message.text,
        "calls": [[c["name"], c["args"], c["id"]] for c in message.tool_calls],
        "broken": len(message.invalid_tool_calls),
        "finish": message.response_metadata.get("finish_reason"),
        "usage": usage(message),
    }


def usage(message: AIMessage) -> list[int]:
    found = message.usage_metadata or {}
    return [found.get(f"{name}_tokens", -1) for name in ("input", "output", "total")]


def streamed(model: object, asked: object = QUESTION) -> dict[str, object]:
    return shape(functools.reduce(operator.add, model.stream(asked)))


@facts.fact
def chat():
    return shape(chat_model.invoke(QUESTION))


@facts.fact
def chat_stream():
    return streamed(chat_model)


@facts.fact
def completion():
    model = OpenAI(**WHERE, temperature=0, max_tokens=8)
    return [model.invoke("The sun rises in the"), "".join(model.stream("The sun rises in the"))]


@facts.fact
def named_call():
    return shape(long_model.bind_tools([WEATHER], tool_choice="get_weather").invoke(QUESTION))


@facts.fact
def required_call():
    return shape(long_model.bind_tools([WEATHER], tool_choice="any").invoke(QUESTION))


@facts.fact
def spoken_call():
    bound = long_model.bind_tools([WEATHER]).bind(extra_body={"regex": SPOKEN_CALL})
    return shape(bound.invoke(QUESTION))


@facts.fact
def named_call_stream():
    return streamed(long_model.bind_tools([WEATHER], tool_choice="get_weather"))


@facts.fact
def spoken_call_stream():
    return streamed(long_model.bind_tools([WEATHER]).bind(extra_body={"regex": SPOKEN_CALL}))


@facts.fact
def call_and_result():
    """The turn after a call: the client gives back what it was given."""
    call = long_model.bind_tools([WEATHER], tool_choice="get_weather").invoke(QUESTION)
    result = ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])
    asked = [SystemMessage("Be brief."), HumanMessage("Is it sunny in Paris?"), call, result]
    return shape(chat_model.bind_tools([WEATHER], tool_choice="none").invoke(asked))


def structured(method: str) -> dict[str, object]:
    model = long_model.with_structured_output(City, method=method, include_raw=True)
    found = model.invoke("Describe Paris as JSON with its name and population.")
    city = found["parsed"]
    return {"city": city and city.model_dump(), "error": str(found["parsing_error"])}


@facts.fact
def schema():
    return structured("json_schema")


@facts.fact
def schema_by_call():
    return structured("function_calling")


@facts.fact
def schema_as_dict():
    described = {"title": "city", "description": "A city", **CITY}
    model = long_model.with_structured_output(described, method="json_schema", strict=True)
    return model.invoke("Describe Paris.")


@facts.fact
def schema_stream():
    model = long_model.with_structured_output(City, method="json_schema")
    return [part.model_dump() for part in model.stream("Describe Paris.")][-1]


@facts.fact
def json_mode():
    model = long_model.bind(response_format={"type": "json_object"}, max_tokens=200)
    return shape(model.invoke('Repeat this: {"city": "Paris"}'))


@facts.fact
def logprobs():
    message = chat_model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = message.response_metadata["logprobs"]["content"]
    return [[t["token"], t["logprob"], len(t["top_logprobs"])] for t in content]


@facts.fact
def choices():
    model = ChatOpenAI(**WHERE, temperature=1.0, max_tokens=12, n=2, seed=5)
    return [g.message.content for g in model.generate([[HumanMessage("Hello")]]).generations[0]]


@facts.fact
def stop():
    return shape(chat_model.invoke(QUESTION, stop=["Paris"]))


@facts.fact
def refusals():
    def ask(**fields: object):
        return refusal(lambda: ChatOpenAI(**{**WHERE, **fields}).invoke(QUESTION))

    return {
        "field": ask(temperature=-1),
        "model": ask(model="demo:no-such-adapter"),
        "key": ask(api_key="wrong"),
        "length": refusal(lambda: chat_model.invoke("word " * 9000)),
    }


@facts.fact
def vectors():
    model = OpenAIEmbeddings(
        base_url=VECTORS_URL,
        api_key=KEY,
        model="default",
        check_embedding_ctx_length=False,  # else it sends token ids of a vocabulary of its own
    )
    return [
        len(v) for v in (*model.embed_documents(["a banyan", "a tree"]), model.embed_query("x"))
    ]


@facts.fact
async def side_by_side():
    return [m.content for m in await chat_model.abatch([QUESTION] * 3)]


@facts.fact
async def left_early():
    model = ChatOpenAI(**WHERE, max_tokens=LONG, extra_body={"ignore_eos": True})
    stream, seen = model.astream(QUESTION), 0
    async for _ in stream:
        seen += 1
        if seen == 3:
            break
    await stream.aclose()
    return seen


@facts.fact
def response():
    model = ChatOpenAI(**WHERE, temperature=0, max_tokens=24, use_responses_api=True)
    return {**shape(model.invoke(QUESTION)), "streamed": streamed(model)["text"]}


@facts.fact
def response_call():
    model = ChatOpenAI(**WHERE, temperature=0, max_tokens=80, use_responses_api=True)
    return shape(model.bind_tools([WEATHER], tool_choice="get_weather").invoke(QUESTION))


facts.report()
