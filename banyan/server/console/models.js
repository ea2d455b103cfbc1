// The model that is served, and the room it has.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { count, gib, seconds } from "./format.js";

export const title = "Models";

export async function show(place, signal) {
  const body = h("div");
  place.append(h("h1", {}, title), body);
  try {
    const [list, model, server] = await Promise.all(
      ["v1/models", "model_info", "server_info"].map((path) => ask(path, { signal })));
    body.append(...list.data.map((card) =>
      card.parent ? adapterOf(card) : cardOf(card, model, server)));
  } catch (error) {
    if (!signal.aborted) body.append(h("p", { class: "trouble", role: "alert" }, error.message));
  }
}

function adapterOf({ id, parent, root }) {
  return h("section", { class: "card" }, h("h2", {}, id),
    h("p", { class: "soft" }, "An adapter of ", h("code", {}, parent), ", from ", h("code", {}, root)));
}

function cardOf(card, model, server) {
  const memory = server.facts.memory ?? {};
  const yes = (name) => name ?? "none";
  const facts = {
    "From": model.model_path,
    "Architecture": (model.architectures ?? []).join(", "),
    "Context": `${count(card.max_model_len)} tokens`,
    "Reads": model.has_image_understanding ? "text and pictures" : "text",
    "Makes": model.is_generation ? "text" : "vectors and scores",
    "Weights": gib((memory.weight_bytes ?? 0) / 2 ** 30),
    "Number type": server.dtype,
    "Device": server.device,
    "Cache": `${count(server.max_total_num_tokens)} tokens in ${gib((memory.cache_bytes ?? 0) / 2 ** 30)}`,
    "Requests at once": count(server.max_running_requests),
    "Tool calls": yes(model.tool_call_parser),
    "Reasoning": yes(model.reasoning_parser),
    "Weight version": model.weight_version,
    "Start took": seconds(server.startup_time),
    "Served by": `Banyan ${server.version}`,
  };
  const rows = Object.entries(facts).filter(([, value]) => value);
  return h("section", { class: "card" }, h("h2", {}, card.id),
    h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}
