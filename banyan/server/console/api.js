// The server's routes: requests with the key of whoever looks, and streams of events.

import { askForKey, key } from "./key.js";

/** An answer that is no success; the message is the server's own. */
export class Refusal extends Error {
  constructor(status, body) {
    const message = body?.error?.message ?? body?.message ?? body?.error ?? `status ${status}`;
    super(typeof message === "string" ? message : JSON.stringify(message));
    this.status = status;
  }
}

/** The answer's body: an object where it is JSON, else a text. */
export async function ask(path, options = {}) {
  const answer = await send(path, options);
  const text = await answer.text();
  return answer.headers.get("content-type")?.startsWith("application/json")
    ? JSON.parse(text) : text;
}

/** What a POST with this body streams, event by event; ends when the signal is aborted. */
export async function* stream(path, body, signal) {
  const answer = await send(path, { body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The stream ended before the answer did.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refusal(event.error.code ?? 500, event);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The answer, whatever its status; asks for a key when one is wanted and tries again. */
export async function reach(path, { body, method, signal } = {}) {
  for (;;) {
    const headers = {};
    if (body !== undefined) headers["content-type"] = "application/json";
    if (key()) headers.authorization = `Bearer ${key()}`;
    const answer = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
    });
    if (answer.status !== 401) return answer;
    await askForKey(Boolean(key()));
  }
}

async function send(path, options) {
  const answer = await reach(path, options);
  if (answer.ok) return answer;
  throw new Refusal(answer.status, await answer.json().catch(() => null));
}

/**
 * Ask again and again, `period` ms apart, while the page is seen and until `signal` is aborted.
 * `take` gets the answer, `fail` what went wrong.
 */
export async function poll(path, period, signal, take, fail) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) take(await ask(path, { signal }));
    } catch (error) {
      if (signal.aborted) return;
      fail(error);
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, period);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}
