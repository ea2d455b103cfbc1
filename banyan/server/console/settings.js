// Every setting of the server, and who has set it.

import { ask } from "./api.js";
import { field, h, table } from "./dom.js";

export const title = "Settings";

const DEFAULT = "default";

export async function show(place, signal) {
  const body = h("div");
  const words = h("input", { type: "search", placeholder: "page-size", oninput: () => draw() });
  const only = h("input", { type: "checkbox", onchange: () => draw() });
  const number = h("p", { class: "soft", role: "status" });
  let rows = [];
  const draw = () => {
    const wanted = words.value.trim().toLowerCase();
    const some = rows.filter(([name, value, origin]) =>
      (!only.checked || origin !== DEFAULT)
      && `${name} ${value} ${origin}`.toLowerCase().includes(wanted));
    number.textContent = `${some.length} of ${rows.length} settings.`;
    body.replaceChildren(table("Settings", ["Setting", "Value", "Set by"], some.map(cells),
      { class: "settings" }));
  };
  place.append(h("h1", {}, title),
    h("p", {}, "The configuration that this server has come to, as ", h("code", {}, "banyan config"),
      " shows it before a start. Settings are made when the server is started."),
    h("form", { class: "finding", onsubmit: (event) => event.preventDefault() },
      field("Find", words),
      h("label", { class: "check" }, only, "Only what differs from the defaults")),
    number, body);
  try {
    rows = rowsOf(await ask("server_info", { signal }));
    draw();
  } catch (error) {
    if (!signal.aborted) body.append(h("p", { class: "trouble", role: "alert" }, error.message));
  }
}

function rowsOf(info) {
  return Object.entries(info.origins).map(([name, origin]) =>
    [`--${name.replaceAll("_", "-")}`, written(info[name]), origin]);
}

function cells([name, value, origin]) {
  const who = h("span", { class: origin === DEFAULT ? "soft" : "given" }, origin);
  return [h("code", {}, name), h("code", {}, value), who];
}

function written(value) {
  if (value == null) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
