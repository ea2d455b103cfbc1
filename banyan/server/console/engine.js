// What the engines do, as plots of two minutes or an hour, and the requests that ended.

import { poll } from "./api.js";
import { field, h, table } from "./dom.js";
import { EndedView } from "./ended.js";
import { count, gib, rate, seconds, share } from "./format.js";
import { Plot } from "./plot.js";

export const title = "Engine";

const PERIOD_MS = 1000;
const WINDOW = 3;  // samples that a rate is taken over: counters come with a heartbeat a second
const SHORT = { name: "2 minutes", points: 120, window: WINDOW };
const HOUR = { name: "1 hour", points: 360, window: 1 };  // samples of the server, one each 10 s
const HOUR_MS = 10_000;

// Title, names of the lines, how a figure is read, its value from two samples, and the fixed top.
const PLOTS = [
  ["Output tokens per second", ["output"], rate, (a, b) => [per(a, b, "output_tokens")]],
  ["Prompt tokens per second", ["read", "of these cached"], rate,
    (a, b) => [per(a, b, "prompt_tokens"), per(a, b, "cached_tokens")]],
  ["Requests", ["running", "waiting"], count, (a, b) => [b.running, b.waiting]],
  ["Cache in use", ["by requests", "with kept prefixes"], share,
    (a, b) => [b.used / b.most, b.kept / b.most], 1],
  ["Prompt tokens from the cache", ["hit rate"], share, (a, b) => [hits(a, b)], 1],
  ["Steps per second", ["steps"], rate, (a, b) => [per(a, b, "steps")]],
];

const recent = [];  // samples of the last minutes, kept while other pages are shown

export function show(place, signal) {
  const plots = PLOTS.map(([name, lines, words]) => new Plot(name, lines, words));
  const replicas = h("div");
  const error = h("p", { class: "trouble", role: "alert", hidden: true });
  const ended = new EndedView();
  const choice = h("select", { onchange: () => draw() },
    h("option", {}, SHORT.name), h("option", {}, HOUR.name));
  let hour = [];
  place.append(h("h1", {}, title), h("div", { class: "finding" }, field("Time", choice)), error,
    h("div", { class: "plots" }, plots.map((plot) => plot.element)),
    h("h2", {}, "Replicas"), replicas, ended.element);
  const draw = () => {
    const isShort = choice.value === SHORT.name;
    const { points, window } = isShort ? SHORT : HOUR;
    const samples = isShort ? recent : hour;
    plots.forEach((plot, i) => plot.show(pointsOf(samples, points, window, PLOTS[i][3]), points, PLOTS[i][4]));
  };
  const fail = ({ message }) => {
    error.hidden = false;
    error.textContent = message;
  };
  const take = (answer) => {
    error.hidden = true;
    keep(answer.loads);
    if (choice.value === SHORT.name) draw();
    replicas.replaceChildren(replicaTable(answer.loads));
  };
  const takeHour = ({ history }) => {
    hour = history;
    if (choice.value === HOUR.name) draw();
  };
  if (recent.length) draw();
  poll("v1/loads?include=core,counters,memory", PERIOD_MS, signal, take, fail);
  poll("v1/loads?include=core,history", HOUR_MS, signal, takeHour, fail);
  poll("requests?ended=true", 3 * PERIOD_MS, signal, (found) => ended.show(found.ended),
    (failure) => ended.fail(failure.message));
}

/** One sample: the sums over all replicas. */
function keep(loads) {
  const sum = (of) => loads.reduce((total, load) => total + of(load), 0);
  recent.push({
    at: performance.now() / 1000,
    running: sum((load) => load.num_running_reqs),
    waiting: sum((load) => load.num_waiting_reqs),
    used: sum((load) => load.num_used_tokens),
    kept: sum((load) => load.num_total_tokens),
    most: sum((load) => load.max_total_num_tokens),
    ...Object.fromEntries(["output_tokens", "prompt_tokens", "cached_tokens", "steps"].map(
      (name) => [name, sum((load) => load.counters[name])])),
  });
  if (recent.length > SHORT.points + WINDOW) recent.shift();
}

function pointsOf(samples, points, window, value) {
  return samples.slice(-points).map((sample, i, some) => {
    const before = samples[samples.length - some.length + i - window] ?? samples[0];
    return value(before, sample);
  });
}

/** Growth of a counter per second; an engine that began anew has none. */
function per(before, now, name) {
  const passed = now.at - before.at;
  return passed > 0 && now[name] >= before[name] ? (now[name] - before[name]) / passed : null;
}

function hits(before, now) {
  const prompts = now.prompt_tokens - before.prompt_tokens;
  if (prompts > 0) return (now.cached_tokens - before.cached_tokens) / prompts;
  return now.prompt_tokens ? now.cached_tokens / now.prompt_tokens : null;
}

function replicaTable(loads) {
  const heads = ["Replica", "Running", "Waiting", "Cache", "Hit rate", "Output tokens", "Steps",
    "Retractions", "Failed", "Step under way", "Weights", "Cache memory"];
  const rows = loads.map((load) => [
    String(load.dp_rank), `${count(load.num_running_reqs)} of ${count(load.max_running_requests)}`,
    count(load.num_waiting_reqs), share(load.token_usage), share(load.cache_hit_rate),
    count(load.counters.output_tokens), count(load.counters.steps),
    count(load.counters.retractions), count(load.counters.failed),
    load.counters.step_age_s ? seconds(load.counters.step_age_s) : "–",
    gib(load.memory?.weight_gb), gib(load.memory?.kv_cache_gb),
  ]);
  return table("Replicas", heads, rows, { class: "narrow" });
}
