// One chat completion: the request for the next message, and the stream that fills it.

import { ask, stream } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/**
 * Ask for the message that follows `before`; it grows with the stream.
 * `isContinued`: the last of `before` is this message itself, which goes on where it ended.
 */
export async function complete(message, before, settings, isContinued, signal, onGrow) {
  const body = await bodyOf(before, settings);
  if (isContinued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const began = performance.now();
  let first = 0;
  for await (const event of stream("v1/chat/completions", body, signal)) {
    const [choice] = event.choices;
    const hasMore = choice && take(message, choice);
    const now = performance.now();
    message.model ??= event.model;
    if (hasMore && !first) {
      first = now;
      message.seen.first = (first - began) / 1000;
      message.seen.before = event.usage?.completion_tokens ?? 1;
    }
    if (event.usage) measure(message.seen, event.usage, (now - first) / 1000);
    if (hasMore) onGrow();
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

function measure(seen, usage, seconds) {
  seen.prompt = usage.prompt_tokens;
  seen.tokens = usage.completion_tokens;
  seen.cached = usage.prompt_tokens_details?.cached_tokens;
  const later = seen.tokens - (seen.before ?? 0);
  if (later > 0 && seconds > 0) seen.rate = later / seconds;
}

async function bodyOf(messages, settings) {
  const body = {
    model: settings.model || await servedModel(),
    messages: messages.map(asSent),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split(",").map((text) => text.trim());
  if (settings.tools) body.tools = toolsOf(settings.tools);
  return body;
}

function asSent({ role, content, calls, pictures, tool_call_id }) {
  if (role === "tool") return { role, content, tool_call_id };
  if (pictures?.length) {
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return { role, content: [...parts, ...(content ? [{ type: "text", text: content }] : [])] };
  }
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
  } catch { /* the error below names the form */ }
  throw new Error('Tools are a JSON list: [{"type": "function", "function": {"name": …}}]');
}

export async function servedModel() {
  return (await ask("v1/models")).data[0].id;
}
