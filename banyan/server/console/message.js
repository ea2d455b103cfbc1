// One message of a conversation on the screen.

import { button, copy, field, h } from "./dom.js";
import { Markdown } from "./markdown.js";
import { count, rate, seconds } from "./words.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** Shows one message; `grow` after it has become longer. */
export class MessageView {
  /**
   * `does` has what can be done with it: edit(text), again(), tell(results); each may be absent.
   */
  constructor(message, does = {}) {
    this.message = message;
    this.does = does;
    this.body = h("div", { class: "body" });
    this.text = new Markdown(h("div", { class: "text" }));
    this.thought = h("div", { class: "thought" });
    this.thinking = h("details", { class: "thinking", hidden: true },
      h("summary", {}, "Reasoning"), this.thought);
    this.calls = h("div", { class: "calls" });
    this.facts = h("p", { class: "facts" });
    this.actions = h("p", { class: "actions" });
    this.body.append(this.thinking, this.text.place, this.calls);
    this.element = h("li", { class: `message ${message.role}` },
      h("h2", {}, NAMES[message.role]), this.body,
      h("div", { class: "under" }, this.facts, this.actions));
    this.grow();
    this.offer();
  }

  grow() {
    const { role, content, reasoning, calls = [], seen } = this.message;
    if (role === "assistant") this.text.show(content);
    else this.text.place.textContent = content;
    this.text.place.classList.toggle("typed", role !== "assistant");
    if (reasoning) {
      this.thinking.hidden = false;
      this.thought.textContent = reasoning;
    }
    if (calls.length) this.calls.replaceChildren(...calls.map(callOf));
    if (seen) this.facts.textContent = factsOf(seen);
  }

  /** Say whether more is coming. */
  wait(isWaiting) {
    this.element.classList.toggle("waiting", isWaiting);
    this.element.setAttribute("aria-busy", String(isWaiting));
    this.actions.hidden = isWaiting;
  }

  offer() {
    const { role, content, calls } = this.message;
    const { edit, again, tell } = this.does;
    const name = NAMES[role].toLowerCase();
    if (content) {
      const pressed = button("Copy", () => copy(content, pressed), { label: `Copy what the ${name} said` });
      this.actions.append(pressed);
    }
    if (edit) this.actions.append(button("Edit", () => this.edit(edit), { label: "Edit this message" }));
    if (again) this.actions.append(button("Answer again", again));
    if (tell && calls?.length) this.body.append(resultsForm(calls, tell));
  }

  edit(done) {
    const input = h("textarea", { rows: "4", value: this.message.content });
    const send = (event) => { event.preventDefault(); done(input.value); };
    const back = () => form.replaceWith(this.text.place);
    const form = h("form", { onsubmit: send }, field("Your message", input),
      h("p", { class: "row" }, h("button", { class: "main" }, "Send"), button("Cancel", back)));
    this.text.place.replaceWith(form);
    input.focus();
  }
}

function callOf({ name, arguments: given }) {
  return h("details", { class: "call", open: true },
    h("summary", {}, "Calls ", h("code", {}, name)), h("pre", { tabindex: "0" }, given));
}

function resultsForm(calls, tell) {
  const inputs = calls.map(() => h("textarea", { rows: "2", required: true }));
  const send = (event) => {
    event.preventDefault();
    tell(Object.fromEntries(calls.map((call, i) => [call.id, inputs[i].value])));
  };
  return h("form", { class: "results", onsubmit: send },
    calls.map((call, i) => field(`What ${call.name} returned`, inputs[i])),
    h("button", { class: "main" }, "Go on"));
}

function factsOf({ first, rate: speed, tokens, prompt, cached, reason }) {
  const facts = [];
  if (first != null) facts.push(`first token ${seconds(first)}`);
  if (speed) facts.push(`${rate(speed)} tokens/s`);
  if (tokens) facts.push(`${count(tokens)} tokens`);
  if (prompt) facts.push(`prompt ${count(prompt)}${cached ? `, ${count(cached)} cached` : ""}`);
  if (reason && reason !== "stop") facts.push(reason.replace("_", " "));
  return facts.join(" · ");
}
