// The page on which people talk with the model.

import { choices } from "./choices.js";
import { Conversations } from "./conversations.js";
import { h, iconButton, say } from "./dom.js";
import { icon } from "./icons.js";
import { MessageView } from "./message.js";
import { PictureInput } from "./pictures.js";
import { listen } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";

export const title = "Chat";

const SUGGESTIONS = [
  ["Explain", "Explain how photosynthesis works to a child of ten."],
  ["Program", "Write a Python function that finds the longest palindrome in a text."],
  ["Calculate", "What is the sum of the first n odd numbers? Show why."],
  ["Compare", "Compare trains and planes for a journey of 500 km in a table."],
];
const CAN_CONTINUE = ["interrupted", "stopped", "length"];

const conversations = new Conversations();  // an answer goes on while other pages are shown

export function show(place, signal) {
  const view = new ChatView(place, signal);
  const on = (name, act) => conversations.addEventListener(name, act, { signal });
  on("change", () => view.change());
  on("grow", () => view.grow());
  signal.addEventListener("abort", () => view.close());
  view.change();
  if (matchMedia("(min-width: 52rem)").matches) view.input.focus();
}

class ChatView {
  constructor(place, signal) {
    this.last = null;
    this.frame = 0;
    this.timer = 0;
    const begin = () => {
      this.sidebar.element.classList.remove("open");
      conversations.begin();
      this.input.focus();
    };
    this.sidebar = new Sidebar(conversations, begin);
    this.thread = h("ol", { class: "thread" });
    this.error = h("p", { class: "trouble", role: "alert", hidden: true });
    this.settings = h("div", { class: "choices" });
    this.pictures = new PictureInput((text) => this.fail(text));
    this.input = h("textarea", {
      rows: "1", id: "ask", placeholder: "Ask something", onkeydown: (event) => this.key(event),
      oninput: () => this.fit(),
    });
    this.press = h("button", { class: "main" });
    const form = h("form", { class: "ask", onsubmit: (event) => this.send(event) }, this.pictures.row,
      h("label", { for: "ask", class: "hidden" }, "Your message"), this.pictures.press,
      this.pictures.picker, this.input, this.press);
    this.scroll = h("div", { class: "talk", tabindex: "0", role: "region",
      "aria-label": "Conversation" }, this.thread, this.error);
    const middle = h("section", { class: "middle", "aria-label": "This conversation" },
      iconButton("list", "Conversations", () => this.sidebar.element.classList.toggle("open"),
        { class: "quiet opener" }),
      this.scroll,
      h("details", { class: "adjust" }, h("summary", {}, "Model, system prompt and sampling"),
        this.settings),
      form);
    this.pictures.listen(middle);
    place.append(h("h1", { class: "hidden" }, "Chat"), this.sidebar.element, middle);
    listen({
      "/": () => this.input.focus(),
      "alt+n": begin,
      escape: () => conversations.stop(),
      "ctrl+k": () => { this.sidebar.element.classList.add("open"); this.sidebar.search.focus(); },
    }, signal);
  }

  close() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
  }

  /** Everything anew: another conversation, or other messages. */
  change() {
    const { current, messages, running, error } = conversations;
    this.sidebar.change();
    const views = messages.map((message, at) => new MessageView(message,
      conversations.versionsOf(message), this.actions(message, at === messages.length - 1)));
    this.last = views.at(-1);
    this.thread.replaceChildren(...(views.length ? views.map((view) => view.element) : [this.start()]));
    this.error.hidden = !error;
    this.error.textContent = error;
    if (this.shown !== current.id) {
      this.settings.replaceChildren(...choices({ ...current.settings }, (some) => conversations.set(some)));
    }
    const wasRunning = this.shown === current.id && this.isRunning;
    this.shown = current.id;
    this.isRunning = Boolean(running);
    this.press.replaceChildren(icon(running ? "stop" : "send"), h("span", {}, running ? "Stop" : "Send"));
    this.press.setAttribute("aria-label", running ? "Stop" : "Send");
    if (running) this.last?.wait(true);
    else if (wasRunning) {
      const isStopped = messages.at(-1)?.seen?.reason === "stopped";
      say(error || (isStopped ? "The answer was stopped." : "The answer is complete."));
    }
    this.scroll.scrollTop = views.length ? this.scroll.scrollHeight : 0;
  }

  /** The answer became longer. A text that takes long to draw is drawn less often. */
  grow() {
    if (this.frame || this.timer) return;
    this.frame = requestAnimationFrame((began) => {
      this.frame = 0;
      const { scrollTop, scrollHeight, clientHeight } = this.scroll;
      this.last?.grow();
      if (scrollHeight - scrollTop - clientHeight < 80) this.scroll.scrollTop = this.scroll.scrollHeight;
      const took = performance.now() - began;
      if (took > 25) this.timer = setTimeout(() => { this.timer = 0; this.grow(); }, 3 * took);
    });
  }

  /** A conversation without messages: a few questions to begin with. */
  start() {
    const suggest = ([name, text]) => h("button", { type: "button", class: "suggestion",
      onclick: () => conversations.send(text) }, h("strong", {}, name), h("span", {}, text));
    return h("li", { class: "hint" }, h("p", {}, "What would you like to know?"),
      h("div", { class: "suggestions" }, SUGGESTIONS.map(suggest)),
      h("p", {}, "Conversations stay in this browser. Press ? for the keyboard shortcuts."));
  }

  actions(message, isLast) {
    if (conversations.running) return {};
    const choose = (version) => conversations.choose(version);
    if (message.role === "user") return { choose, edit: (text) => conversations.edit(message, text) };
    if (message.role !== "assistant") return { choose };
    const again = () => conversations.again(message);
    if (!isLast) return { choose };
    const canContinue = message.content && !message.calls.length
      && CAN_CONTINUE.includes(message.seen.reason);
    return { choose, again, proceed: canContinue && (() => conversations.answer(message)),
      giveResults: (results) => conversations.returnResults(results) };
  }

  send(event) {
    event.preventDefault();
    if (conversations.running) {
      conversations.stop();
      return;
    }
    const text = this.input.value.trim();
    if (!text && !this.pictures.pictures.length) return;
    this.input.value = "";
    this.fit();
    conversations.send(text, this.pictures.take());
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.send(event);
    if (event.key === "Escape") conversations.stop();
    if (event.key === "ArrowUp" && !this.input.value) {
      const edit = [...this.thread.querySelectorAll('[aria-label="Edit this message"]')].at(-1);
      if (edit) event.preventDefault();
      edit?.click();
    }
  }

  fail(text) {
    this.error.hidden = false;
    this.error.textContent = text;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }
}
