// The AI SDK with its package for OpenAI-compatible servers: a tool that runs, then a text, whole and streamed.

import { createRequire } from "node:module";

const require = createRequire(process.env.CLIENT_FOLDER + "/");
const { generateText, streamText, stepCountIs, tool, jsonSchema } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({ name: "banyan", baseURL: process.env.URL + "/v1", apiKey: "x", includeUsage: true });
const ran = [];
const shell = tool({
  description: "Runs a command",
  inputSchema: jsonSchema({ type: "object", properties: { cmd: { type: "string" } }, required: ["cmd"] }),
  execute: async ({ cmd }) => (ran.push(cmd), "MADE-IT"),
});
const asked = { model: provider("tiny"), prompt: "Say hi", tools: { exec_command: shell }, stopWhen: stepCountIs(4), maxRetries: 0 };
const whole = await generateText(asked);
const stream = streamText({ ...asked, onError: ({ error }) => { throw error; } });
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const usage = await stream.totalUsage;
console.log(JSON.stringify({ ran, whole: whole.text, streamed, tokens: [whole.totalUsage.outputTokens, usage.outputTokens] }));
