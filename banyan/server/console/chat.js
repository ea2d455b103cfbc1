// The page on which people talk with the model.

import { button, field, h, say } from "./dom.js";
import { MessageView } from "./message.js";
import { Talks } from "./talks.js";

export const title = "Chat";

const talks = new Talks();  // an answer goes on while other pages are shown

export function show(place, signal) {
  const view = new ChatView(place);
  const on = (name, act) => talks.addEventListener(name, act, { signal });
  on("change", () => view.change());
  on("grow", () => view.grow());
  signal.addEventListener("abort", () => view.close());
  view.change();
  if (matchMedia("(min-width: 52rem)").matches) view.input.focus();
}

class ChatView {
  constructor(place) {
    this.last = null;
    this.frame = 0;
    this.list = h("ul", { class: "talks" });
    this.thread = h("ol", { class: "thread" });
    this.trouble = h("p", { class: "trouble", role: "alert", hidden: true });
    this.settings = h("div", { class: "choices" });
    this.input = h("textarea", {
      rows: "1", id: "ask", placeholder: "Ask something", onkeydown: (event) => this.key(event),
      oninput: () => this.fit(),
    });
    this.press = h("button", { class: "main" }, "Send");
    const form = h("form", { class: "ask", onsubmit: (event) => this.send(event) },
      h("label", { for: "ask", class: "hidden" }, "Your message"), this.input, this.press);
    this.scroll = h("div", { class: "talk", tabindex: "0", role: "region",
      "aria-label": "Conversation" }, this.thread, this.trouble);
    place.append(
      h("h1", { class: "hidden" }, "Chat"),
      h("aside", { class: "others", "aria-label": "Conversations" },
        button("New conversation", () => { talks.begin(); this.input.focus(); }, { class: "main" }),
        this.list),
      h("section", { class: "middle", "aria-label": "This conversation" }, this.scroll,
        h("details", { class: "adjust" }, h("summary", {}, "System prompt and sampling"),
          this.settings),
        form));
  }

  close() {
    cancelAnimationFrame(this.frame);
  }

  /** Everything anew: another conversation, or other messages. */
  change() {
    const { talk, list, running, trouble } = talks;
    this.list.replaceChildren(...list.map((entry) => this.entry(entry)));
    const views = talk.messages.map((message, at) => new MessageView(message, this.does(message, at)));
    this.last = views.at(-1);
    const hint = h("li", { class: "hint" }, h("p", {}, "What would you like to know?"),
      h("p", {}, "Conversations stay in this browser. Enter sends, Shift and Enter begins a line."));
    this.thread.replaceChildren(...(views.length ? views.map((view) => view.element) : [hint]));
    this.trouble.hidden = !trouble;
    this.trouble.textContent = trouble;
    if (this.shown !== talk.id) this.settings.replaceChildren(...choices(talk.settings));
    this.shown = talk.id;
    const wasRunning = this.press.textContent === "Stop";
    this.press.textContent = running ? "Stop" : "Send";
    if (running) this.last?.wait(true);
    else if (wasRunning) {
      const isStopped = talk.messages.at(-1)?.seen?.reason === "stopped";
      say(trouble || (isStopped ? "The answer was stopped." : "The answer is complete."));
    }
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** The answer has become longer: shown with the next picture. */
  grow() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const { scrollTop, scrollHeight, clientHeight } = this.scroll;
      this.last?.grow();
      if (scrollHeight - scrollTop - clientHeight < 80) this.scroll.scrollTop = this.scroll.scrollHeight;
    });
  }

  does(message, at) {
    if (talks.running) return {};
    const isLast = at === talks.talk.messages.length - 1;
    if (message.role === "user") return { edit: (text) => talks.send(text, at) };
    if (message.role === "assistant" && isLast) {
      return { again: () => talks.again(), tell: (results) => talks.tell(results) };
    }
    return {};
  }

  entry({ id, title: words }) {
    const isHere = id === talks.talk.id;
    const remove = () => { if (confirm(`Delete “${words}”?`)) talks.remove(id); };
    return h("li", {},
      button(words || "Untitled", () => talks.choose(id),
        { class: "pick", "aria-current": isHere ? "true" : null }),
      button("×", remove, { class: "quiet", label: `Delete ${words}` }));
  }

  send(event) {
    event.preventDefault();
    if (talks.running) {
      talks.stop();
      return;
    }
    const text = this.input.value.trim();
    if (!text) return;
    this.input.value = "";
    this.fit();
    talks.send(text);
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.send(event);
    if (event.key === "Escape") talks.stop();
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }
}

function choices(settings) {
  const change = (name) => (event) => talks.set(name, event.target.value.trim());
  const text = (name, more) => h("textarea",
    { rows: "2", value: settings[name] ?? "", onchange: change(name), ...more });
  const number = (name, least, most, step) => h("input", {
    type: "number", min: least, max: most, step, value: settings[name] ?? "",
    placeholder: "default", onchange: change(name),
  });
  return [
    field("System prompt", text("system")),
    h("div", { class: "numbers" },
      field("Temperature", number("temperature", 0, 2, 0.05)),
      field("Top p", number("top_p", 0.01, 1, 0.01)),
      field("Top k", number("top_k", 1, 1000, 1)),
      field("Most tokens", number("max_tokens", 1, null, 1)),
      field("Seed", number("seed", 0, null, 1))),
    field("Stop texts", h("input", { value: settings.stop ?? "", onchange: change("stop") }),
      "With commas between them."),
    field("Tools", text("tools", { spellcheck: "false", class: "codelike" }),
      "A JSON list of functions; you tell the model what they returned."),
  ];
}
