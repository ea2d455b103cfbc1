"""What instructor makes of the server's answers."""

import itertools

import instructor
import openai
from facts import KEY, MODEL, URL, Facts, refusal, usage_of
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field

facts = Facts()
ASKED = [{"role": "user", "content": "Describe Paris: its name and its population."}]
COMMON = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 80, "max_retries": 1}


class City(BaseModel):
    """A city of the world."""

    model_config = ConfigDict(extra="forbid")  # a small model would go on with more fields
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


class Country(BaseModel):
    """A country with its capital."""

    model_config = ConfigDict(extra="forbid")
    capital: City


def client(mode: Mode, **fields: object) -> instructor.Instructor:
    official = openai.OpenAI(base_url=URL, **{"api_key": KEY, "max_retries": 0} | fields)
    return instructor.from_openai(official, mode=mode)


def made(mode: Mode, kind: type[BaseModel] = City, **fields: object) -> dict[str, object]:
    found, answer = client(mode).chat.completions.create_with_completion(
        response_model=kind, **COMMON | fields
    )
    usage = answer.usage
    return {"value": found.model_dump(), "usage": usage_of(usage)}


@facts.fact
def tools():
    return made(Mode.TOOLS)


@facts.fact
def strict_tools():
    return made(Mode.TOOLS_STRICT)


@facts.fact
def schema():
    return made(Mode.JSON_SCHEMA)


@facts.fact
def nested_schema():
    return made(Mode.JSON_SCHEMA, Country)


@facts.fact
def nested_tools():
    return made(Mode.TOOLS, Country)


def parts(mode: Mode) -> list[dict[str, object]]:
    stream = client(mode).chat.completions.create_partial(response_model=City, **COMMON)
    return [part.model_dump() for part in stream]


@facts.fact
def partial_tools():
    return parts(Mode.TOOLS)


@facts.fact
def partial_schema():
    return parts(Mode.JSON_SCHEMA)


@facts.fact
def several():
    stream = client(Mode.TOOLS).chat.completions.create_iterable(
        response_model=City, **COMMON | {"max_tokens": 300}
    )
    return [city.model_dump() for city in itertools.islice(stream, 2)]


@facts.fact
async def asynchronous():
    official = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    asked = instructor.from_openai(official, mode=Mode.TOOLS)
    found = await asked.chat.completions.create(response_model=City, **COMMON)
    return found.model_dump()


@facts.fact
def refusals():
    def ask(where: dict[str, object], **fields: object):
        asked = client(Mode.TOOLS, **where).chat.completions
        return refusal(lambda: asked.create(response_model=City, **COMMON | fields))

    return {
        "field": ask({}, temperature=-1),
        "model": ask({}, model="demo:no-such-adapter"),
        "key": ask({"api_key": "wrong"}),
        "cut": ask({}, max_tokens=3),
    }


facts.report()
