// All routes with their fields, from the server's own description, and a form that tries one.

import { ask, reach } from "./api.js";
import { button, field, h, table } from "./dom.js";
import { key } from "./key.js";

export const title = "API";

const LONGEST = 20000;  // characters of an answer that are shown

export async function show(place, signal) {
  const body = h("div");
  const words = h("input", { type: "search", placeholder: "chat", oninput: () => find(body, words.value) });
  place.append(h("h1", {}, title), h("p", {}, "For programs: the address ",
    h("code", {}, new URL(".", document.baseURI).href), " with the clients of OpenAI (",
    h("code", {}, "/v1"), "), Anthropic and Ollama. ", links()),
    h("div", { class: "finding" }, field("Find", words)), body);
  try {
    const { paths, components, tags } = await ask("openapi.json", { signal });
    for (const tag of tags) body.append(group(tag.name, paths, components.schemas));
  } catch (error) {
    if (!signal.aborted) body.append(h("p", { class: "trouble", role: "alert" }, error.message));
  }
}

/** Pages that a browser opens by itself, which it cannot where a key is needed. */
function links() {
  if (key()) return "The document for generators is /openapi.json.";
  return h("span", {}, h("a", { href: "docs" }, "All of this as a page"), ", ",
    h("a", { href: "openapi.json" }, "the document for generators"), ".");
}

function group(name, paths, schemas) {
  const found = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).filter(([, operation]) => operation.tags.includes(name))
      .map(([method, operation]) => entry(method.toUpperCase(), path, operation, schemas)));
  return h("section", { class: "routes" }, h("h2", {}, name), found);
}

function entry(method, path, operation, schemas) {
  const place = h("div", { class: "try" });
  const open = ({ target }) => {
    if (target.open && !place.children.length) place.append(...inside(method, path, operation, schemas));
  };
  return h("details", { ontoggle: open, "data-words": `${method} ${path} ${operation.summary}` },
    h("summary", {}, h("code", { class: "method" }, method), h("code", {}, path), " ",
      h("span", { class: "soft" }, operation.summary)), place);
}

function inside(method, path, operation, schemas) {
  const content = operation.requestBody?.content ?? {};
  const reference = Object.values(content)[0]?.schema.$ref ?? "";
  const schema = schemas[reference.split("/").at(-1)];
  const rows = Object.entries(schema?.properties ?? {}).map(([name, one]) =>
    [h("code", {}, name), typeOf(one) + (schema.required?.includes(name) ? ", required" : "")]);
  const fields = rows.length ? [table(`Fields of ${path}`, ["Field", "Type"], rows)] : [];
  const isJson = !reference || "application/json" in content;
  return [...fields, isJson ? tryForm(method, path, schema) : h("p", { class: "soft" }, "Takes a form.")];
}

function tryForm(method, path, schema) {
  const where = h("input", { value: path.slice(1), spellcheck: "false", class: "codelike" });
  const body = schema && h("textarea", { rows: "4", spellcheck: "false", class: "codelike",
    value: JSON.stringify(sampleOf(schema), null, 1) });
  const answerText = h("pre", { tabindex: "0", hidden: true, "aria-live": "polite" });
  const send = async (event) => {
    event.preventDefault();
    answerText.hidden = false;
    answerText.textContent = "…";
    try {
      const sent = body && body.value.trim() ? JSON.parse(body.value) : undefined;
      const answer = await reach(where.value, { method, body: sent });
      answerText.textContent = `${answer.status} ${answer.statusText}\n${(await answer.text()).slice(0, LONGEST)}`;
    } catch (error) {
      answerText.textContent = error.message;
    }
  };
  return h("form", { onsubmit: send }, field("Path", where), body && field("Body", body),
    h("p", { class: "row" }, h("button", {}, `Send ${method}`),
      button("Clear", () => { answerText.hidden = true; })), answerText);
}

/** What the required fields might hold. */
function sampleOf(schema) {
  const samples = { messages: [{ role: "user", content: "Hello" }], prompt: "Once upon a time",
    input: "Hello", model: "" };
  return Object.fromEntries((schema.required ?? []).map((name) => [name, samples[name] ?? null]));
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].filter((one) => one !== "null").join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return typeof schema.type === "string" ? schema.type : "anything";
}

function find(body, text) {
  const wanted = text.trim().toLowerCase();
  for (const section of body.children) {
    const entries = [...section.querySelectorAll("details")];
    for (const one of entries) one.hidden = !one.dataset.words.toLowerCase().includes(wanted);
    section.hidden = entries.every((one) => one.hidden);
  }
}
