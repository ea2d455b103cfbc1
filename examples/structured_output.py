"""Get an answer that always fits a JSON schema.

Start a server, then run the program:

    banyan serve
    pip install openai && python examples/structured_output.py
"""

import json
import os

from openai import OpenAI

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BANYAN_API_KEY", "none"))
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Describe the city of Rome."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    city = json.loads(answer.choices[0].message.content)
    print(city["name"], city["population"])


if __name__ == "__main__":
    main()
