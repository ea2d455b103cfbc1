"""Ask a model about a picture: a red disc on blue, which this program draws.

Start a server with a model that reads pictures, then run the program:

    banyan serve Qwen/Qwen2.5-VL-3B-Instruct
    python examples/vision.py
"""

import base64
import io
import json
import os
import urllib.request

from PIL import Image, ImageDraw

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def main() -> None:
    picture = Image.new("RGB", (96, 96), "blue")
    ImageDraw.Draw(picture).ellipse((20, 20, 76, 76), fill="red")
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Which shape and which colours do you see?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 32, "temperature": 0}
    headers, data = {"Content-Type": "application/json"}, json.dumps(body).encode()
    request = urllib.request.Request(URL + "/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    print(found["choices"][0]["message"]["content"])
    print(found["usage"]["prompt_tokens"], "prompt tokens")


if __name__ == "__main__":
    main()
