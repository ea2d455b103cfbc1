// Conversations: kept in this browser, and answered by the server. Knows no screen: whoever shows
// them listens to "change" (another conversation, other messages) and "grow" (the answer goes on).

import { ask, stream } from "./api.js";

const LIST = "banyan.talks";
const ONE = "banyan.talk.";
const CHOICES = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** What a conversation is asked with where nothing else is said. */
const PLAIN = { system: "", tools: "", stop: "" };

export class Talks extends EventTarget {
  constructor() {
    super();
    this.list = read(LIST, []);
    this.talk = this.list.length ? read(ONE + this.list[0].id, null) : null;
    this.talk ??= this.fresh({});
    this.running = null;
    this.trouble = "";
    // A page that is left in the middle of an answer keeps what has come of it.
    addEventListener("pagehide", () => {
      if (!this.running) return;
      this.talk.messages.at(-1).seen.reason = "stopped";
      this.save();
    });
  }

  /** Another conversation; its settings are those of the one before. */
  begin() {
    this.open(this.fresh(this.talk.settings));
  }

  choose(id) {
    this.open(read(ONE + id, null) ?? this.fresh({}));
  }

  remove(id) {
    localStorage.removeItem(ONE + id);
    this.list = this.list.filter((entry) => entry.id !== id);
    localStorage.setItem(LIST, JSON.stringify(this.list));
    if (this.talk.id === id) {
      this.stop();
      this.list.length ? this.choose(this.list[0].id) : this.open(this.fresh({}));
    } else this.changed();
  }

  set(name, value) {
    this.talk.settings[name] = value;
    if (this.talk.messages.length) this.save();
  }

  /** Ask; what came after place `at` (an edited message) is forgotten. */
  send(content, at = this.talk.messages.length) {
    this.talk.messages.splice(at, Infinity, { role: "user", content });
    return this.answer();
  }

  /** Answer the last question again. */
  again() {
    const last = this.talk.messages.findLastIndex((message) => message.role === "user");
    this.talk.messages.splice(last + 1);
    return this.answer();
  }

  /** Tell what the called tools have returned, by the ids of the calls. */
  tell(results) {
    for (const [id, content] of Object.entries(results)) {
      this.talk.messages.push({ role: "tool", tool_call_id: id, content });
    }
    return this.answer();
  }

  stop() {
    this.running?.abort();
  }

  async answer() {
    this.stop();
    const talk = this.talk;
    const run = this.running = new AbortController();
    const message = { role: "assistant", content: "", reasoning: "", calls: [], seen: {} };
    this.trouble = "";
    const before = [...talk.messages];
    talk.messages.push(message);
    this.save();
    this.changed();
    try {
      const body = await bodyOf(before, talk.settings);
      await this.read(body, message, run.signal);
    } catch (error) {
      if (run.signal.aborted) message.seen.reason = "stopped";
      else this.trouble = error.message;
    }
    const isEmpty = !message.content && !message.reasoning && !message.calls.length;
    if (isEmpty) talk.messages = talk.messages.filter((one) => one !== message);
    this.save(talk);
    if (this.running === run) this.running = null;
    this.changed();
  }

  async read(body, message, signal) {
    const began = performance.now();
    let first = 0;
    for await (const event of stream("v1/chat/completions", body, signal)) {
      const [choice] = event.choices;
      const hasMore = choice && take(message, choice);
      const now = performance.now();
      if (hasMore && !first) {
        first = now;
        message.seen.first = (first - began) / 1000;
        message.seen.before = event.usage?.completion_tokens ?? 1;
      }
      if (event.usage) count(message.seen, event.usage, (now - first) / 1000);
      if (hasMore) this.dispatchEvent(new Event("grow"));
    }
  }

  fresh(settings) {
    const id = crypto.randomUUID?.() ?? String(Date.now());
    return { id, settings: { ...PLAIN, ...settings }, messages: [] };
  }

  open(talk) {
    this.stop();
    this.talk = talk;
    this.trouble = "";
    this.changed();
  }

  save(talk = this.talk) {
    const first = talk.messages.find((message) => message.role === "user")?.content ?? "";
    const entry = { id: talk.id, title: first.slice(0, 80) };
    if (this.list.every((one) => one.id !== talk.id)) this.list.unshift(entry);
    try {
      localStorage.setItem(ONE + talk.id, JSON.stringify(talk));
      localStorage.setItem(LIST, JSON.stringify(this.list));
    } catch {
      this.trouble = "This browser has no room for more: delete conversations.";
    }
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** Add what a piece of the stream brings; whether that is anything to see. */
function take(message, { delta, finish_reason: reason }) {
  if (reason) message.seen.reason = reason;
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = message.calls[part.index] ??= { id: part.id, name: "", arguments: "" };
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

function count(seen, usage, seconds) {
  seen.prompt = usage.prompt_tokens;
  seen.tokens = usage.completion_tokens;
  seen.cached = usage.prompt_tokens_details?.cached_tokens;
  const later = seen.tokens - (seen.before ?? 0);
  if (later > 0 && seconds > 0) seen.rate = later / seconds;
}

/** The request that asks for the next message. */
async function bodyOf(messages, settings) {
  const body = {
    model: await servedModel(),
    messages: messages.map(asSent),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of CHOICES) if (settings[name]) body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split(",").map((text) => text.trim());
  if (settings.tools) body.tools = toolsOf(settings.tools);
  return body;
}

function asSent({ role, content, calls, tool_call_id }) {
  if (role === "tool") return { role, content, tool_call_id };
  if (!calls?.length) return { role, content };
  const tool_calls = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role, content: content || null, tool_calls };
}

function toolsOf(text) {
  try {
    const found = JSON.parse(text);
    if (Array.isArray(found)) return found;
  } catch { /* told below */ }
  throw new Error('Tools are a JSON list: [{"type": "function", "function": {"name": …}}]');
}

async function servedModel() {
  return (await ask("v1/models")).data[0].id;
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
