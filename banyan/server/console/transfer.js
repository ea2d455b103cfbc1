// Conversations as a JSON file: export and import. An import takes known fields of the right type
// only, so that a file from elsewhere cannot bring anything else.

import { h } from "./dom.js";
import { PICTURE_URL } from "./pictures.js";
import { newId } from "./tree.js";

const FORMAT = "banyan.conversations";
const VERSION = 1;
const MAX_BYTES = 100_000_000;
const MAX_CONVERSATIONS = 5000;
const MAX_MESSAGES = 10_000;
const ROLES = ["user", "assistant", "tool"];

export function download(name, conversations) {
  const text = JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const safe = name.replace(/[^\w-]+/g, "-").slice(0, 60) || "conversation";
  h("a", { href: url, download: `${safe}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** The conversations of a file; an error says what is wrong with it. */
export async function readFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 100 MB.`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  const isOurs = found?.format === FORMAT && Array.isArray(found.conversations);
  if (!isOurs) throw new Error(`${file.name} has no conversations of this console.`);
  if (found.version !== VERSION) {
    throw new Error(`${file.name} has version ${found.version}; this console reads ${VERSION}.`);
  }
  return found.conversations.slice(0, MAX_CONVERSATIONS).map(object).map(conversationOf);
}

function conversationOf(given) {
  const messages = list(given.messages).slice(0, MAX_MESSAGES).map(object).map(messageOf);
  const leaf = messages.some(({ id }) => id === given.leaf) ? given.leaf : messages.at(-1)?.id ?? null;
  const settings = Object.fromEntries(Object.entries(object(given.settings))
    .filter(([, value]) => typeof value === "string"));
  return { id: text(given.id) || newId(), title: text(given.title).slice(0, 200),
    isNamed: given.isNamed === true, changed: 0, settings, messages, leaf };
}

function messageOf(given) {
  const role = ROLES.includes(given.role) ? given.role : "user";
  const message = { id: text(given.id) || newId(), parent: text(given.parent) || null, role,
    content: text(given.content) };
  if (role === "user") {
    message.pictures = list(given.pictures).filter((one) => PICTURE_URL.test(text(one?.url)))
      .map(({ name, url }) => ({ name: text(name), url }));
  }
  if (role === "tool") message.tool_call_id = text(given.tool_call_id);
  if (role === "assistant") {
    message.model = text(given.model) || undefined;
    message.reasoning = text(given.reasoning);
    message.calls = list(given.calls).map((call) => ({ id: text(call?.id), name: text(call?.name),
      arguments: text(call?.arguments) }));
    message.seen = Object.fromEntries(Object.entries(object(given.seen)).filter(([name, value]) =>
      (name === "reason") === (typeof value === "string") && typeof value !== "object"));
  }
  return message;
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function object(value) {
  return value && typeof value === "object" ? value : {};
}
