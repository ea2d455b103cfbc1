// What runs and what waits, request by request, and the button that ends one.

import { ask, poll } from "./api.js";
import { button, h, say } from "./dom.js";
import { count, seconds } from "./format.js";

export const title = "Requests";

const PERIOD_MS = 1000;
const PHASES = { queue: "Waiting", prefill: "Reading the prompt", decode: "Answering" };
const HEADS = ["Request", "Phase", "Prompt", "Cached", "Computed", "Output", "Waited", "Age",
  "Replica", "End it"];

export function show(place, signal) {
  const body = h("tbody");
  const summaryLine = h("p", { class: "soft" });
  const rows = new Map();
  const trouble = h("p", { class: "trouble", role: "alert", hidden: true });
  place.append(h("h1", {}, title), summaryLine, trouble,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" },
      h("table", { class: "live" }, h("caption", { class: "hidden" }, "Requests that live now"),
        h("thead", {}, h("tr", {}, HEADS.map((text) => h("th", { scope: "col" }, text)))), body)));
  const take = ({ requests, open }) => {
    trouble.hidden = true;
    summaryLine.textContent = summary(requests, open);
    update(body, rows, requests);
  };
  const fail = (error) => {
    trouble.hidden = false;
    trouble.textContent = error.message;
  };
  poll("requests", PERIOD_MS, signal, take, fail);
}

function summary(requests, open) {
  if (!open) return "Nothing runs now.";
  const of = (phase) => requests.filter((request) => request.phase === phase).length;
  const parts = Object.entries(PHASES).map(([phase, words]) => `${of(phase)} ${words.toLowerCase()}`);
  const early = open - requests.length;
  if (early > 0) parts.push(`${early} on the way to or from the engine, or not listed`);
  return `${open} open: ${parts.join(", ")}.`;
}

/** Rows stay the same elements while their request lives, so that the focus stays too. */
function update(body, rows, requests) {
  const live = new Set(requests.map((request) => request.rid));
  for (const [rid, row] of rows) {
    if (!live.has(rid)) {
      row.element.remove();
      rows.delete(rid);
    }
  }
  for (const request of requests) {
    if (!rows.has(request.rid)) {
      const row = new Row(request.rid);
      rows.set(request.rid, row);
      body.append(row.element);
    }
    rows.get(request.rid).show(request);
  }
}

class Row {
  constructor(rid) {
    const short = rid.length > 12 ? `${rid.slice(0, 12)}…` : rid;
    this.phase = h("span", { class: "phase" });
    this.cells = HEADS.slice(2, -1).map(() => h("td", { class: "number" }));
    this.press = button("Abort", () => this.end(rid), { label: `Abort request ${short}` });
    this.element = h("tr", {}, h("th", { scope: "row", title: rid }, h("code", {}, short)),
      h("td", {}, this.phase), this.cells, h("td", {}, this.press));
  }

  show(request) {
    this.phase.className = `phase ${request.phase}`;
    this.phase.textContent = PHASES[request.phase];
    const values = [
      count(request.prompt_tokens), count(request.cached_tokens), count(request.computed_tokens),
      count(request.output_tokens), seconds(request.queue_s), seconds(request.age_s),
      String(request.dp_rank),
    ];
    values.forEach((text, i) => { this.cells[i].textContent = text; });
  }

  async end(rid) {
    this.press.disabled = true;
    try {
      const { aborted } = await ask("abort_request", { body: { rid } });
      say(aborted ? "The request was ended." : "The request had ended already.");
    } catch (error) {
      say(error.message);
      this.press.disabled = false;
    }
  }
}
