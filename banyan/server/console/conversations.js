// All conversations, and the answers that are on their way. Views listen to "change" (another
// conversation, other messages) and "grow" (the shown answer became longer).

import { complete } from "./completion.js";
import * as store from "./store.js";
import { add, cut, newId, pathOf, showBranch, versionsOf } from "./tree.js";

const PLAIN = { model: "", system: "", tools: "", stop: "" };
const KEEP_MS = 1000;
const LAST = "banyan.last";

export class Conversations extends EventTarget {
  constructor() {
    super();
    this.list = [];  // { id, title, changed }, newest first
    this.current = fresh({});
    this.runs = new Map();  // conversation id -> { conversation, message, abort }
    this.error = "";
    this.loaded = this.load();
    addEventListener("pagehide", () => this.runs.forEach(keep));
  }

  async load() {
    try {
      await store.restorePartials();
      this.list = (await store.each(summary)).sort((a, b) => b.changed - a.changed);
    } catch (error) {
      this.error = `Conversations cannot be kept in this browser: ${error.message}`;
    }
    const last = localStorage.getItem(LAST);
    const entry = this.list.find(({ id }) => id === last) ?? this.list[0];
    if (entry && !this.current.messages.length) await this.open(entry.id);
    else this.changed();
  }

  get messages() {
    return pathOf(this.current);
  }

  get running() {
    return this.runs.get(this.current.id);
  }

  versionsOf(message) {
    return versionsOf(this.current, message);
  }

  /** A new conversation with the settings of the last. */
  begin() {
    this.show(fresh(this.current.settings));
  }

  async open(id) {
    this.show(this.runs.get(id)?.conversation ?? await store.get(id) ?? fresh({}));
  }

  show(conversation) {
    this.current = conversation;
    this.error = "";
    localStorage.setItem(LAST, conversation.id);
    this.changed();
  }

  async remove(id) {
    this.runs.get(id)?.abort.abort();
    this.list = this.list.filter((entry) => entry.id !== id);
    await store.remove(id);
    if (this.current.id !== id) this.changed();
    else if (this.list.length) await this.open(this.list[0].id);
    else this.show(fresh({}));
  }

  async rename(id, title) {
    const open = this.current.id === id ? this.current : this.runs.get(id)?.conversation;
    const conversation = open ?? await store.get(id);
    conversation.title = title;
    conversation.isNamed = true;
    await this.save(conversation);
    this.changed();
  }

  /** Ids of the conversations whose title or messages contain a text. */
  async find(text) {
    const wanted = text.trim().toLowerCase();
    const has = (words) => words.toLowerCase().includes(wanted);
    return new Set(await store.each((one) =>
      has(one.title) || one.messages.some(({ content }) => has(content)) ? one.id : null));
  }

  async import(conversations) {
    for (const one of conversations) {
      const isKnown = this.list.some(({ id }) => id === one.id);
      await this.save(isKnown ? { ...one, id: newId() } : one);
    }
    if (conversations.length) await this.open(this.list[0].id);
  }

  set(settings) {
    Object.assign(this.current.settings, settings);
    if (this.current.messages.length) this.save(this.current);
  }

  send(content, pictures = []) {
    add(this.current, this.current.leaf, { role: "user", content, pictures });
    return this.answer();
  }

  /** Ask an edited question: a new branch. */
  edit({ parent, pictures }, content) {
    add(this.current, parent, { role: "user", content, pictures });
    return this.answer();
  }

  /** Answer again: a new branch. */
  again({ parent }) {
    this.current.leaf = parent;
    return this.answer();
  }

  returnResults(results) {
    for (const [id, content] of Object.entries(results)) {
      add(this.current, this.current.leaf, { role: "tool", tool_call_id: id, content });
    }
    return this.answer();
  }

  choose(message) {
    showBranch(this.current, message);
    this.save(this.current);
    this.changed();
  }

  stop() {
    this.running?.abort.abort();
  }

  /** Let the model answer the shown branch, or go on with `continued`, its last message. */
  async answer(continued = null) {
    this.stop();
    const conversation = this.current;
    const before = pathOf(conversation);
    const message = continued ?? add(conversation, conversation.leaf,
      { role: "assistant", content: "", reasoning: "", calls: [], seen: {} });
    const run = { conversation, message, abort: new AbortController() };
    this.runs.set(conversation.id, run);
    this.error = "";
    delete message.seen.reason;
    const saved = this.save(asInterrupted(run));
    this.changed();
    await saved;
    let kept = performance.now();
    const onGrow = () => {
      if (performance.now() - kept > KEEP_MS) {
        keep(run);
        kept = performance.now();
      }
      if (this.current === conversation) this.dispatchEvent(new Event("grow"));
    };
    let error = "";
    const { signal } = run.abort;
    try {
      await complete(message, before, conversation.settings, continued !== null, signal, onGrow);
    } catch (failure) {
      message.seen.reason = signal.aborted ? "stopped" : "interrupted";
      if (!signal.aborted) error = failure.message;
    }
    if (!message.content && !message.reasoning && !message.calls.length) cut(conversation, message);
    if (this.runs.get(conversation.id) === run) this.runs.delete(conversation.id);
    if (this.list.some(({ id }) => id === conversation.id)) await this.save(conversation);
    store.dropPartial(conversation.id);
    if (this.current === conversation) this.error ||= error;
    this.changed();
  }

  async save(conversation) {
    if (!conversation.isNamed) conversation.title = titleOf(conversation);
    conversation.changed = Date.now();
    this.list = [summary(conversation), ...this.list.filter(({ id }) => id !== conversation.id)];
    try {
      await store.put(conversation);
    } catch (error) {
      this.error = `The conversation was not saved: ${error.message}. Delete others to make room.`;
    }
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function fresh(settings) {
  return { id: newId(), title: "", isNamed: false, changed: 0, settings: { ...PLAIN, ...settings },
    messages: [], leaf: null };
}

function summary({ id, title, changed }) {
  return { id, title, changed };
}

function titleOf({ messages }) {
  const first = messages.find(({ role }) => role === "user");
  return (first?.content || (first?.pictures?.length ? "A picture" : "")).slice(0, 80);
}

function keep({ conversation, message }) {
  store.keepPartial(conversation.id, { ...message, seen: { ...message.seen, reason: "interrupted" } });
}

/** The conversation as it has to look if its answer is never completed. */
function asInterrupted({ conversation, message }) {
  const messages = conversation.messages.map((one) =>
    one === message ? { ...one, seen: { ...one.seen, reason: "interrupted" } } : one);
  return { ...conversation, messages };
}
