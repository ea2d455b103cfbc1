// What the npm client `openai` makes of the server's answers: named facts, as JSON.
// Every chunk of a stream is checked here, strictly; what does not fit is raised.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(process.env.CLIENT_FOLDER + "/");
const OpenAI = require("openai");
const { zodResponseFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");

const { question, city, weather, spokenCall, long } = JSON.parse(readFileSync(0, "utf8"));
const key = process.env.CHAT_KEY;
const model = "demo";
const client = new OpenAI({ baseURL: process.env.CHAT_URL + "/v1", apiKey: key, maxRetries: 0 });
const chat = { model, messages: question, temperature: 0, max_tokens: 24 };
const named = { type: "function", function: { name: "get_weather" } };
const calling = { ...chat, max_tokens: 80, tools: [weather] };
const spoken = { ...calling, tool_choice: "auto", regex: spokenCall };
const asCity = { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } };
const City = z.object({ name: z.string().max(20), population: z.int().min(0).max(99999999) });

const REASONS = ["stop", "length", "tool_calls", "content_filter", "function_call"];
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;

function checkUsage(usage) {
  for (const name of ["prompt_tokens", "completion_tokens", "total_tokens"]) assert(isCount(usage[name]), name);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
}

function checkHead(body, object) {
  assert.equal(body.object, object);
  assert.equal(typeof body.id, "string");
  assert(isCount(body.created));
  assert.equal(body.model, model);
}

function checkTokens(content) {
  for (const token of content) {
    assert(token.logprob <= 0);
    assert.equal(typeof token.token, "string");
    assert(token.bytes === null || token.bytes.every((b) => isCount(b) && b < 256));
    for (const rival of token.top_logprobs ?? []) checkTokens([rival]);
  }
}

// A whole answer out of its chunks, every one of which must be in order.
class Chunks {
  constructor(count = 1) {
    this.choices = Array.from({ length: count }, () => ({ role: null, text: "", calls: [], end: null }));
    this.head = null;
    this.usage = null;
    this.tokens = [];
  }

  take(chunk) {
    checkHead(chunk, "chat.completion.chunk");
    const head = [chunk.id, chunk.created, chunk.model];
    this.head ??= head;
    assert.deepEqual(head, this.head, "id, time and model stay the same");
    assert.equal(this.usage, null, "usage comes last");
    if (chunk.choices.length === 0) {
      checkUsage(chunk.usage);
      this.usage = chunk.usage;
      return;
    }
    assert.equal(chunk.usage ?? null, null, "usage has a chunk of its own");
    for (const choice of chunk.choices) this.takeChoice(choice);
  }

  takeChoice({ index, delta, finish_reason, logprobs }) {
    const choice = this.choices[index];
    assert(choice, `choice ${index}`);
    assert.equal(choice.end, null, "nothing follows the end of a choice");
    if (choice.role === null) {
      assert.equal(delta.role, "assistant", "the first delta names the role");
      choice.role = delta.role;
    } else assert.equal(delta.role ?? null, null, "the role is named once");
    assert(delta.content == null || typeof delta.content === "string");
    choice.text += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.takeCall(choice, call);
    if (logprobs) {
      checkTokens(logprobs.content);
      this.tokens.push(...logprobs.content);
    }
    if (finish_reason !== null) {
      assert(REASONS.includes(finish_reason), finish_reason);
      choice.end = finish_reason;
    }
  }

  takeCall(choice, { index, id, type, function: said }) {
    if (index === choice.calls.length) {
      assert.match(id, /^call_/);
      assert.equal(type, "function");
      assert.equal(typeof said.name, "string");
      choice.calls.push({ id, name: said.name, arguments: said.arguments ?? "" });
      return;
    }
    assert.equal(index, choice.calls.length - 1, "calls come one after the other");
    assert(!id && !said.name, "id and name come once");
    choice.calls[index].arguments += said.arguments;
  }

  done() {
    for (const choice of this.choices) assert(choice.end, "every choice ends");
    return { choices: this.choices, usage: this.usage, tokens: this.tokens.map((t) => t.token) };
  }
}

async function streamed(fields) {
  const chunks = new Chunks(fields.n ?? 1);
  const stream = await client.chat.completions.create({
    ...fields, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) chunks.take(chunk);
  return chunks.done();
}

async function whole(fields) {
  const answer = await client.chat.completions.create(fields);
  checkHead(answer, "chat.completion");
  checkUsage(answer.usage);
  const choices = answer.choices.map((choice, at) => {
    assert.equal(choice.index, at);
    assert.equal(choice.message.role, "assistant");
    assert(REASONS.includes(choice.finish_reason));
    const calls = (choice.message.tool_calls ?? []).map(({ id, type, function: said }) => {
      assert.equal(type, "function");
      return { id, ...said };
    });
    return { role: "assistant", text: choice.message.content ?? "", calls, end: choice.finish_reason };
  });
  const tokens = (answer.choices[0].logprobs?.content ?? []).map((t) => t.token);
  return { choices, usage: answer.usage, tokens };
}

const both = async (fields) => ({ whole: await whole(fields), stream: await streamed(fields) });

async function refused(call) {
  try {
    await call();
  } catch (error) {
    const kinds = [];
    for (let at = error; at; at = Object.getPrototypeOf(at)) kinds.push(at.constructor.name);
    return { kinds, status: error.status ?? null, text: error.message };
  }
  return { kinds: [], status: null, text: "it was not refused" };
}

async function responseEvents(fields) {
  const events = [];
  let response = null;
  for await (const event of await client.responses.create({ ...fields, stream: true })) {
    assert.equal(event.sequence_number, events.length, "events are numbered without a gap");
    events.push(event);
    if (event.type === "response.completed") response = event.response;
  }
  const said = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta);
  const args = events.filter((e) => e.type === "response.function_call_arguments.delta").map((e) => e.delta);
  return { types: events.map((e) => e.type), text: said.join(""), arguments: args.join(""), response };
}

const facts = {
  models: async () => {
    const listed = [];
    for await (const one of client.models.list()) listed.push([one.id, one.object, isCount(one.created)]);
    return { listed, found: (await client.models.retrieve(model)).id };
  },
  chat: () => both(chat),
  logprobs: () => both({ ...chat, logprobs: true, top_logprobs: 2 }),
  choices: () => both({ ...chat, n: 2, seed: 5, temperature: 1 }),
  stop: () => both({ ...chat, stop: ["Paris"] }),
  length: () => both({ ...chat, max_tokens: 3 }),
  named_call: () => both({ ...calling, tool_choice: named }),
  required_call: () => both({ ...calling, tool_choice: "required" }),
  spoken_call: () => both(spoken),
  schema: () => both({ ...chat, max_tokens: 80, response_format: asCity }),
  completion: async () => {
    const fields = { model, prompt: "The sun rises in the", temperature: 0, max_tokens: 8 };
    const answer = await client.completions.create(fields);
    checkHead(answer, "text_completion");
    checkUsage(answer.usage);
    const ends = [];
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
      checkHead(chunk, "text_completion");
      for (const choice of chunk.choices) {
        assert.equal(ends.length, 0, "nothing follows the end");
        text += choice.text;
        if (choice.finish_reason) ends.push(choice.finish_reason);
      }
    }
    return { text: answer.choices[0].text, stream: text, ends, usage: answer.usage };
  },
  helper_stream: async () => {
    const runner = client.chat.completions.stream(chat);
    let text = "";
    runner.on("content", (delta) => (text += delta));
    const final = await runner.finalChatCompletion();
    return { text, final: final.choices[0].message.content, end: final.choices[0].finish_reason };
  },
  helper_parse: async () => {
    const format = zodResponseFormat(City, "city");
    const answer = await client.chat.completions.parse({ ...chat, max_tokens: 80, response_format: format });
    return answer.choices[0].message.parsed;
  },
  helper_tools: async () => {
    const tool = zodFunction({ name: "describe_city", parameters: City });
    const fields = { ...chat, max_tokens: 80, tools: [tool], tool_choice: "required" };
    const answer = await client.chat.completions.stream(fields).finalChatCompletion();
    return answer.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments);
  },
  helper_run_tools: async () => {
    const asked = [];
    const run = client.chat.completions.runTools({
      ...spoken,
      tools: [{
        type: "function",
        function: { ...weather.function, parse: JSON.parse, function: (args) => (asked.push(args), "sunny") },
      }],
    }, { maxChatCompletions: 1 });
    await run.done();
    return asked;
  },
  refusals: async () => {
    const other = new OpenAI({ baseURL: client.baseURL, apiKey: "wrong", maxRetries: 0 });
    const ask = (fields) => refused(() => client.chat.completions.create({ ...chat, ...fields }));
    return {
      field: await ask({ temperature: -1 }),
      model: await ask({ model: "demo:no-such-adapter" }),
      key: await refused(() => other.chat.completions.create(chat)),
      length: await ask({ messages: [{ role: "user", content: "word ".repeat(9000) }] }),
      stream: await ask({ temperature: -1, stream: true }),
    };
  },
  vectors: async () => {
    const other = new OpenAI({ baseURL: process.env.VECTORS_URL + "/v1", apiKey: key, maxRetries: 0 });
    const input = ["a banyan", "a tree"];
    const plain = await other.embeddings.create({ model: "default", input, encoding_format: "float" });
    const packed = await other.embeddings.create({ model: "default", input });
    for (const { data } of [plain, packed]) data.forEach((one, at) => assert.equal(one.index, at));
    const apart = plain.data.map((one, i) => Math.max(...one.embedding.map((x, j) => Math.abs(x - packed.data[i].embedding[j]))));
    return { sizes: packed.data.map((one) => one.embedding.length), apart: Math.max(...apart) };
  },
  side_by_side: async () => {
    const answers = await Promise.all([1, 2, 3].map(() => whole(chat)));
    return answers.map((answer) => answer.choices[0].text);
  },
  left_early: async () => {
    const stream = await client.chat.completions.create({ ...chat, max_tokens: long, ignore_eos: true, stream: true });
    let seen = 0;
    for await (const _ of stream) if (++seen === 3) stream.controller.abort();
    return seen;
  },
  response: async () => {
    const fields = { model, input: "Name the capital of France.", temperature: 0, max_output_tokens: 24 };
    const answer = await client.responses.create(fields);
    const stream = await responseEvents(fields);
    return {
      text: answer.output_text, status: answer.status, usage: answer.usage,
      stream: { text: stream.text, types: stream.types, status: stream.response.status, usage: stream.response.usage },
    };
  },
  response_call: async () => {
    const tool = { type: "function", strict: true, ...weather.function };
    const fields = { model, input: "Weather in Paris?", temperature: 0, max_output_tokens: 80, tools: [tool], tool_choice: "required" };
    const answer = await client.responses.create(fields);
    const stream = await responseEvents(fields);
    return { calls: answer.output, arguments: stream.arguments, streamed: stream.response.output };
  },
  response_helper: async () => {
    const runner = client.responses.stream({ model, input: "Name the capital of France.", temperature: 0, max_output_tokens: 24 });
    let text = "";
    runner.on("response.output_text.delta", (event) => (text += event.delta));
    const final = await runner.finalResponse();
    return { text, final: final.output_text };
  },
};

const found = {};
for (const [name, ask] of Object.entries(facts)) {
  try {
    found[name] = { value: await ask() };
  } catch (error) {
    found[name] = { raised: error.stack };
  }
}
process.stdout.write(JSON.stringify(found));
