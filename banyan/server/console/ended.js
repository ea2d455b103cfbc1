// The latest requests that ended: percentiles of their times, and the phases of each.

import { h, svg, table } from "./dom.js";
import { count, seconds, share } from "./format.js";

const SHOWN = 50;
const WIDTH = 200;
const PHASES = [["queue", "queue_s", "waiting"], ["prefill", "prefill_s", "prompt"],
  ["decode", "decode_s", "answer"]];
const PERCENTS = [50, 90, 95, 99];

// Name, and the seconds of a request; null where it has none.
const TIMES = [
  ["Time in the queue", ({ queue_s }) => queue_s],
  ["Time to the first token", ({ queue_s, prefill_s }) => prefill_s == null ? null : queue_s + prefill_s],
  ["Time per token after it", ({ decode_s, output_tokens }) =>
    output_tokens > 1 && decode_s != null ? decode_s / (output_tokens - 1) : null],
  ["Whole request", ({ seconds: whole }) => whole],
];

export class EndedView {
  constructor() {
    this.body = h("div");
    this.newest = null;
    this.element = h("section", {}, h("h2", {}, "Ended requests"), this.body);
  }

  show(ended) {
    const mark = `${ended.length} ${ended[0]?.rid} ${ended[0]?.ended}`;
    if (mark === this.newest) return;  // nothing new: keep what may be selected
    this.newest = mark;
    if (!ended.length) {
      this.body.replaceChildren(h("p", { class: "soft" }, "None yet."));
      return;
    }
    const ok = ended.filter(({ reason }) => reason === "stop" || reason === "length");
    const longest = Math.max(...ended.slice(0, SHOWN).map(({ seconds: whole }) => whole), 1e-9);
    this.body.replaceChildren(
      h("p", { class: "soft" },
        `The latest ${count(ended.length)}, of which ${count(ok.length)} are complete.`),
      percentiles(ok), legend(),
      table("Ended requests", ["Request", "Route", "Key", "Phases", "Queue", "Prompt", "Answer", "Tokens in",
        "Cached", "Tokens out", "Ended", "At"], ended.slice(0, SHOWN).map((one) => row(one, longest)),
      { class: "narrow" }));
  }

  fail(text) {
    this.newest = null;
    this.body.replaceChildren(h("p", { class: "soft" }, text));
  }
}

function percentiles(ended) {
  const rows = TIMES.map(([name, of]) => {
    const values = ended.map(of).filter((value) => value != null).sort((a, b) => a - b);
    return [name, ...PERCENTS.map((percent) => seconds(percentile(values, percent)))];
  });
  return table("Percentiles", ["Time", ...PERCENTS.map((percent) => `${percent} %`)], rows, { class: "narrow" });
}

/** The value that this share of the sorted values does not exceed. */
export function percentile(values, percent) {
  return values.length ? values[Math.ceil(values.length * percent / 100) - 1] : null;
}

function legend() {
  return h("p", { class: "phases" },
    PHASES.map(([name, , words]) => h("span", { class: name }, words)));
}

function row(one, longest) {
  const short = one.rid.length > 12 ? `${one.rid.slice(0, 12)}…` : one.rid;
  return [h("code", { title: one.rid }, short), one.route, one.key || "–", timeline(one, longest),
    seconds(one.queue_s), seconds(one.prefill_s), seconds(one.decode_s), count(one.prompt_tokens),
    share(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : null), count(one.output_tokens),
    one.reason, new Date(1000 * one.ended).toLocaleTimeString()];
}

/** One bar: as long as the request, in the colours of its phases. */
function timeline(one, longest) {
  let x = 0;
  const parts = PHASES.map(([name, field]) => {
    const width = WIDTH * (one[field] ?? 0) / longest;
    const part = svg("rect", { class: name, x, y: 0, width, height: 12 });
    x += width;
    return part;
  });
  const label = PHASES.map(([, field, words]) => `${words} ${seconds(one[field])}`).join(", ");
  return svg("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} 12`, preserveAspectRatio: "none",
    role: "img", "aria-label": label }, parts);
}
