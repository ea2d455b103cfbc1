// One message of a conversation on the screen.

import { copy, field, h, iconButton, button } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { Markdown } from "./markdown.js";
import { pictureView } from "./pictures.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const COPIED = { user: "question", assistant: "answer", tool: "result" };

/** Shows one message; `grow` after it became longer. */
export class MessageView {
  /**
   * `actions` has what can be done with it: edit(text), again(), proceed(), giveResults(results),
   * choose(version); each may be absent. `versions` are the messages that could be in its place.
   */
  constructor(message, versions, actions = {}) {
    this.message = message;
    this.body = h("div", { class: "body" });
    this.text = new Markdown(h("div", { class: "text" }));
    this.thought = h("div", { class: "thought" });
    this.thinking = h("details", { class: "thinking", hidden: true },
      h("summary", {}, "Reasoning"), this.thought);
    this.calls = h("div", { class: "calls" });
    this.facts = h("p", { class: "facts" });
    this.actions = h("p", { class: "actions" });
    const pictures = (message.pictures ?? []).map((one) => h("li", {}, pictureView(one)));
    this.body.append(this.thinking, this.text.place, this.calls);
    if (pictures.length) {
      this.body.prepend(h("ul", { class: "pictures", "aria-label": "Pictures" }, pictures));
    }
    this.name = h("h2", {}, NAMES[message.role]);
    this.element = h("li", { class: `message ${message.role}` }, this.name, this.body,
      h("div", { class: "under" }, versionChoice(message, versions, actions.choose), this.facts,
        this.actions));
    this.grow();
    this.offer(actions);
  }

  grow() {
    const { role, content, reasoning, calls = [], seen, model } = this.message;
    if (role === "assistant") this.text.show(content);
    else this.text.place.textContent = content;
    this.text.place.classList.toggle("typed", role !== "assistant");
    this.text.place.hidden = role !== "assistant" && !content;
    if (model) this.name.textContent = model;
    if (reasoning) {
      this.thinking.hidden = false;
      this.thought.textContent = reasoning;
    }
    if (calls.length) this.calls.replaceChildren(...calls.map(callOf));
    if (seen) this.facts.textContent = factsOf(seen);
  }

  /** Show whether more is coming. */
  wait(isWaiting) {
    this.element.classList.toggle("waiting", isWaiting);
    this.element.setAttribute("aria-busy", String(isWaiting));
    this.actions.hidden = isWaiting;
  }

  offer({ edit, again, proceed, giveResults }) {
    const { role, content, calls } = this.message;
    const offer = (kind, words, act, label) => this.actions.append(iconButton(kind, words, act, { label }));
    if (content) {
      const act = ({ currentTarget }) => copy(content, currentTarget.lastChild);
      offer("copy", "Copy", act, `Copy the ${COPIED[role]}`);
    }
    if (edit) offer("edit", "Edit", () => this.edit(edit), "Edit this message");
    if (proceed) offer("continue", "Continue", proceed, "Continue this answer");
    if (again) offer("again", "Answer again", again);
    if (giveResults && calls?.length) this.body.append(resultsForm(calls, giveResults));
  }

  edit(done) {
    const input = h("textarea", { rows: "4", value: this.message.content });
    const send = (event) => { event.preventDefault(); done(input.value); };
    const back = () => form.replaceWith(this.text.place);
    const onkeydown = (event) => { if (event.key === "Escape") back(); };
    const form = h("form", { onsubmit: send, onkeydown }, field("Your message", input),
      h("p", { class: "row" }, h("button", { class: "main" }, "Send"), button("Cancel", back)));
    this.text.place.replaceWith(form);
    input.focus();
  }
}

/** Buttons that lead to the other versions of a message; nothing where there is one. */
function versionChoice(message, versions, choose) {
  if (versions.length < 2) return null;
  const at = versions.indexOf(message);
  const step = (kind, label, to) => iconButton(kind, "", () => choose(versions[to]),
    { label, disabled: !choose || !versions[to] });
  return h("p", { class: "versions" }, step("before", "Version before", at - 1),
    h("span", {}, `${at + 1} of ${versions.length}`), step("next", "Next version", at + 1));
}

function callOf({ name, arguments: given }) {
  return h("details", { class: "call", open: true },
    h("summary", {}, "Calls ", h("code", {}, name)), h("pre", { tabindex: "0" }, given));
}

function resultsForm(calls, giveResults) {
  const inputs = calls.map(() => h("textarea", { rows: "2", required: true }));
  const send = (event) => {
    event.preventDefault();
    giveResults(Object.fromEntries(calls.map((call, i) => [call.id, inputs[i].value])));
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
