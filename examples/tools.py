"""Let the model call a function.

Start a server, then run the program. The demo model calls a tool only if it is required:

    banyan serve
    pip install openai && python examples/tools.py
"""

import json
import os

from openai import OpenAI

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


def weather(city: str) -> str:
    return f"It is sunny in {city}."


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BANYAN_API_KEY", "none"))
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice="required",
    )
    for call in answer.choices[0].message.tool_calls:
        print(call.function.name, weather(**json.loads(call.function.arguments)))


if __name__ == "__main__":
    main()
