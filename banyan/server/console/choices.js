// What a conversation is asked with: model or adapter, preset, system prompt, sampling, tools.

import { ask } from "./api.js";
import { button, field, h } from "./dom.js";
import { isOwn, presetOf, presets, removePreset, savePreset, settingsOf } from "./presets.js";

/** The fields for `settings`; `change` gets those that a person changed. */
export function choices(settings, change) {
  const inputs = {};
  const preset = h("select", { onchange: () => take(settingsOf(preset.value)) });
  const remove = button("Delete preset", () => { removePreset(preset.value); draw(); });
  const draw = () => {
    const now = presetOf(settings);
    preset.replaceChildren(...(now ? [] : [h("option", { value: "" }, "Own values")]),
      ...Object.keys(presets()).map((name) => h("option", { value: name }, name)));
    preset.value = now;
    remove.hidden = !isOwn(now);
  };
  const take = (changed) => {
    Object.assign(settings, changed);
    change(changed);
    for (const [name, value] of Object.entries(changed)) if (inputs[name]) inputs[name].value = value;
    draw();
  };
  const save = () => {
    const name = prompt("Name of the preset")?.trim().slice(0, 60);
    if (!name) return;
    savePreset(name, settings);
    draw();
  };
  const bound = (name, element) => {
    inputs[name] = element;
    element.value = settings[name] ?? "";
    element.addEventListener("change", () => take({ [name]: element.value.trim() }));
    return element;
  };
  const text = (name, more) => bound(name, h("textarea", { rows: "2", ...more }));
  const number = (name, min, max, step) => bound(name,
    h("input", { type: "number", min, max, step, placeholder: "default" }));
  draw();
  return [
    h("div", { class: "numbers" }, field("Model or adapter", modelChoice(settings, bound)),
      field("Preset", preset)),
    field("System prompt", text("system")),
    h("div", { class: "numbers" },
      field("Temperature", number("temperature", 0, 2, 0.05)),
      field("Top p", number("top_p", 0.01, 1, 0.01)),
      field("Top k", number("top_k", 1, 1000, 1)),
      field("Most tokens", number("max_tokens", 1, null, 1)),
      field("Seed", number("seed", 0, null, 1))),
    field("Stop texts", bound("stop", h("input")), "With commas between them."),
    field("Tools", text("tools", { spellcheck: "false", class: "codelike" }),
      "A JSON list of functions; you enter what they returned."),
    h("p", { class: "row" }, button("Save as preset", save), remove),
  ];
}

/** A choice between the served model and its adapters; filled when the server answers. */
function modelChoice(settings, bound) {
  const select = h("select", {}, h("option", { value: "" }, "Served model"));
  const add = (id, words) => select.append(h("option", { value: id }, words));
  if (settings.model) add(settings.model, settings.model);
  bound("model", select);
  ask("v1/models").then(({ data }) => {
    select.replaceChildren(h("option", { value: "" }, data[0].id));
    for (const { id } of data.slice(1)) add(id, `${id} (adapter)`);
    if (settings.model && !data.some(({ id }) => id === settings.model)) {
      add(settings.model, `${settings.model} (not served now)`);
    }
    select.value = settings.model ?? "";
  }, () => {});
  return select;
}
