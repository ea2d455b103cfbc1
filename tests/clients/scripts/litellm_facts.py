"""What litellm makes of the server's answers."""

import asyncio

import litellm
from facts import (
    CITY,
    KEY,
    LONG,
    MODEL,
    NAMED,
    QUESTION,
    SPOKEN_CALL,
    URL,
    VECTORS_URL,
    WEATHER,
    Facts,
    refusal,
    usage_of,
)

facts = Facts()
WHERE = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
CHAT = {**WHERE, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
AS_CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def call_of(answer: object) -> dict[str, object]:
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    return {
        "calls": [[c.type, c.id, c.function.name, c.function.arguments] for c in calls],
        "finish": choice.finish_reason,
        "content": choice.message.content,
    }


def streamed(**fields: object) -> dict[str, object]:
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=fields["messages"])
    return {
        "ids": len({chunk.id for chunk in chunks}),
        "ends": [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason],
        "text": "".join(c.choices[0].delta.content or "" for c in chunks),
        "usage": usage_of(whole.usage),
        **call_of(whole),
    }


@facts.fact
def chat():
    answer = litellm.completion(**CHAT)
    return {**call_of(answer), "usage": usage_of(answer.usage), "model": answer.model}


@facts.fact
def chat_stream():
    return streamed(**CHAT)


@facts.fact
def completion():
    answer = litellm.text_completion(
        **{**WHERE, "model": f"text-completion-openai/{MODEL}"},
        prompt="The sun rises in the",
        temperature=0,
        max_tokens=8,
    )
    return {"text": answer.choices[0].text, "usage": usage_of(answer.usage)}


@facts.fact
def completion_stream():
    chunks = litellm.text_completion(
        **{**WHERE, "model": f"text-completion-openai/{MODEL}"},
        prompt="The sun rises in the",
        temperature=0,
        max_tokens=8,
        stream=True,
    )
    return "".join(chunk.choices[0].text or "" for chunk in chunks)


@facts.fact
def named_call():
    return call_of(litellm.completion(**CHAT | {"max_tokens": 60}, **tools(NAMED)))


@facts.fact
def required_call():
    return call_of(litellm.completion(**CHAT | {"max_tokens": 60}, **tools("required")))


@facts.fact
def spoken_call():
    body = {"regex": SPOKEN_CALL}
    fields = CHAT | {"max_tokens": 60} | tools("auto")
    return call_of(litellm.completion(**fields, extra_body=body))


@facts.fact
def named_call_stream():
    return streamed(**CHAT | {"max_tokens": 60}, **tools(NAMED))


@facts.fact
def spoken_call_stream():
    fields = CHAT | {"max_tokens": 60} | tools("auto")
    return streamed(**fields, extra_body={"regex": SPOKEN_CALL})


def tools(choice: object) -> dict[str, object]:
    return {"tools": [WEATHER], "tool_choice": choice}


@facts.fact
def schema():
    return call_of(litellm.completion(**CHAT | {"max_tokens": 80}, response_format=AS_CITY))


@facts.fact
def schema_stream():
    return streamed(**CHAT | {"max_tokens": 80}, response_format=AS_CITY)


@facts.fact
def logprobs():
    answer = litellm.completion(**CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    return [[t.token, t.logprob, len(t.top_logprobs)] for t in content]


@facts.fact
def choices():
    answer = litellm.completion(**CHAT | {"temperature": 1.0, "seed": 5}, n=2)
    return {
        "indices": [c.index for c in answer.choices],
        "texts": [c.message.content for c in answer.choices],
        "usage": usage_of(answer.usage),
    }


@facts.fact
def stop():
    return call_of(litellm.completion(**CHAT, stop=["Paris"]))


@facts.fact
def refusals():
    def ask(**fields: object):
        return refusal(lambda: litellm.completion(**CHAT | fields))

    return {
        "field": ask(temperature=-1),
        "model": ask(model="openai/demo:no-such-adapter"),
        "key": ask(api_key="wrong"),
        "length": ask(messages=[{"role": "user", "content": "word " * 9000}]),
    }


@facts.fact
def vectors():
    answer = litellm.embedding(
        model="openai/default", api_base=VECTORS_URL, api_key=KEY, input=["a banyan", "a tree"]
    )
    return {
        "sizes": [len(e["embedding"]) for e in answer.data],
        "indices": [e["index"] for e in answer.data],
        "prompt_tokens": answer.usage.prompt_tokens,
    }


@facts.fact
async def side_by_side():
    answers = await asyncio.gather(*(litellm.acompletion(**CHAT) for _ in range(3)))
    return [answer.choices[0].message.content for answer in answers]


@facts.fact
async def left_early():
    fields = CHAT | {"max_tokens": LONG}
    stream = await litellm.acompletion(**fields, stream=True, extra_body={"ignore_eos": True})
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 3:
            break
    await stream.completion_stream.close()
    return seen


@facts.fact
def response():
    answer = litellm.responses(
        **WHERE, input="Name the capital of France.", temperature=0, max_output_tokens=24
    )
    usage = answer.usage
    return {
        "text": answer.output[0].content[0].text,
        "status": answer.status,
        "usage": [usage.input_tokens, usage.output_tokens, usage.total_tokens],
    }


facts.report()
