"""Use a server as a LangChain chat model.

Start a server, then run the program:

    banyan serve
    pip install langchain-openai && python examples/langchain_chain.py
"""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def main() -> None:
    key = os.environ.get("BANYAN_API_KEY", "none")
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key=key, model="demo", temperature=0)
    prompt = ChatPromptTemplate.from_template("What is the capital of {country}?")
    print((prompt | model).invoke({"country": "France"}).content)


if __name__ == "__main__":
    main()
