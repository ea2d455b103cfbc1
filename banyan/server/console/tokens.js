// An answer token by token: how likely each was, and what could have stood in its place.

import { ask, stream } from "./api.js";
import { field, h, say } from "./dom.js";
import { share } from "./format.js";

export const title = "Token view";

const STEPS = [0.05, 0.2, 0.5, 0.9];  // below these a token is of class 0, 1, 2, 3; else 4

export function show(place, signal) {
  new TokenPage(place, signal);
}

class TokenPage {
  constructor(place, signal) {
    this.tokens = [];
    this.running = null;
    this.prompt = h("textarea", { rows: "3", value: "Why is the sky blue?", required: true });
    this.most = h("input", { type: "number", min: 1, max: 1000, value: 80 });
    this.heat = h("input", { type: "number", min: 0, max: 2, step: 0.05, value: 0.7 });
    this.top = h("input", { type: "number", min: 1, max: 20, value: 5 });
    this.press = h("button", { class: "main" }, "Show tokens");
    this.trouble = h("p", { class: "trouble", role: "alert", hidden: true });
    this.list = h("div", {
      class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", tabindex: "0",
      onkeydown: (event) => this.key(event), onfocus: () => this.pick(this.at ?? 0),
    });
    this.detail = h("section", { class: "detail", "aria-label": "Alternatives", "aria-live": "polite" },
      h("p", { class: "soft" }, "Point at a token, or go through them with the arrow keys."));
    this.facts = h("p", { class: "facts" });
    place.append(h("h1", {}, title),
      h("form", { class: "numbers", onsubmit: (event) => this.send(event) },
        h("div", { class: "wide" }, field("Question", this.prompt)),
        field("Most tokens", this.most), field("Temperature", this.heat),
        field("Alternatives", this.top), h("p", { class: "row" }, this.press)),
      this.trouble, legend(), h("div", { class: "split" }, this.list, this.detail), this.facts);
    signal.addEventListener("abort", () => this.running?.abort());
  }

  async send(event) {
    event.preventDefault();
    if (this.running) {
      this.running.abort();
      return;
    }
    const run = this.running = new AbortController();
    this.press.textContent = "Stop";
    this.tokens = [];
    this.at = null;
    this.list.replaceChildren();
    this.trouble.hidden = true;
    try {
      for await (const event of stream("v1/chat/completions", await this.body(), run.signal)) {
        this.add(event.choices[0]?.logprobs?.content ?? []);
      }
    } catch (error) {
      this.trouble.hidden = run.signal.aborted;
      this.trouble.textContent = error.message;
    }
    this.running = null;
    this.press.textContent = "Show tokens";
    say(`${this.tokens.length} tokens.`);
  }

  async body() {
    return {
      model: (await ask("v1/models")).data[0].id,
      messages: [{ role: "user", content: this.prompt.value }],
      max_tokens: Number(this.most.value),
      temperature: Number(this.heat.value),
      logprobs: true,
      top_logprobs: Number(this.top.value),
      stream: true,
    };
  }

  add(content) {
    for (const token of content) {
      const at = this.tokens.push(token) - 1;
      const chance = Math.exp(token.logprob);
      this.list.append(h("span", {
        class: `token chance${STEPS.filter((step) => chance >= step).length}`, role: "option",
        id: `token${at}`, "aria-selected": "false",
        "aria-label": `${visible(token.token)}, ${share(chance)}`,
        onmouseenter: () => this.pick(at), onclick: () => { this.list.focus(); this.pick(at); },
      }, shown(token.token)));
      if (token.token.includes("\n")) this.list.append(h("br", { role: "presentation" }));
    }
    const sum = this.tokens.reduce((total, token) => total + token.logprob, 0);
    const mean = Math.exp(-sum / Math.max(1, this.tokens.length));
    this.facts.textContent = this.tokens.length
      ? `${this.tokens.length} tokens · perplexity ${mean.toFixed(2)}` : "";
  }

  pick(at) {
    const token = this.tokens[at];
    if (!token) return;
    document.getElementById(`token${this.at}`)?.setAttribute("aria-selected", "false");
    this.at = at;
    document.getElementById(`token${at}`).setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", `token${at}`);
    const others = token.top_logprobs.map((other) => bar(other, other.token === token.token));
    this.detail.replaceChildren(
      h("h2", {}, h("code", {}, visible(token.token)), ` ${share(Math.exp(token.logprob))}`),
      h("p", { class: "soft" }, `Token ${at + 1}, log-probability ${token.logprob.toFixed(3)}`),
      h("ul", { class: "bars" }, others));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const ends = { Home: 0, End: this.tokens.length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    event.preventDefault();
    const most = this.tokens.length - 1;
    this.pick(ends ?? Math.max(0, Math.min(most, (this.at ?? -1) + step)));
    document.getElementById(`token${this.at}`)?.scrollIntoView({ block: "nearest" });
  }
}

function bar({ token, logprob }, isChosen) {
  const chance = Math.exp(logprob);
  return h("li", { class: isChosen ? "chosen" : null },
    h("code", {}, visible(token)),
    h("meter", { min: 0, max: 1, value: chance, "aria-label": visible(token) }),
    h("span", {}, share(chance)));
}

function legend() {
  const names = ["under 5 %", "under 20 %", "under 50 %", "under 90 %", "likelier"];
  return h("p", { class: "legend" }, "How likely the token was: ",
    names.map((name, i) => h("span", { class: `token chance${i}` }, name)));
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function shown(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}
