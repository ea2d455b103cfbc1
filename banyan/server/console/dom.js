// Elements without markup: everything on the screen is made here, so that no text can become code.

import { icon } from "./icons.js";

let fields = 0;
const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Properties that begin with "on" are listeners, `class` and others are attributes;
 * false, null and undefined leave an attribute out, true sets it empty.
 */
export function h(tag, properties = {}, ...children) {
  return furnish(document.createElement(tag), properties, children);
}

/** The same for drawings. */
export function svg(tag, properties = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), properties, children);
}

function furnish(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false && child !== ""));
  return element;
}

/** A button with words on it; `label` says more to those who do not see where it stands. */
export function button(words, onclick, { label, ...more } = {}) {
  return h("button", { type: "button", onclick, "aria-label": label, ...more }, words);
}

/** A button with an icon before its words; without words it needs a `label`. */
export function iconButton(kind, words, onclick, { label, ...more } = {}) {
  return h("button", { type: "button", onclick, "aria-label": label, title: words ? null : label, ...more },
    icon(kind), words && h("span", {}, words));
}

/** A labelled field of a form. */
export function field(label, control, note) {
  fields += 1;
  const id = `field${fields}`;
  control.id = id;
  const more = note && h("small", { id: `${id}n` }, note);
  if (note) control.setAttribute("aria-describedby", `${id}n`);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, more);
}

/** A table from its heads and rows of cells. */
export function table(caption, heads, rows, properties = {}) {
  const head = h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)));
  const cell = (content) => h("td", {}, content);
  const body = rows.map((cells) =>
    h("tr", {}, h("th", { scope: "row" }, cells[0]), cells.slice(1).map(cell)));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", properties, h("caption", { class: "hidden" }, caption),
      h("thead", {}, head), h("tbody", {}, body)));
}

/** Announce a text to screen readers. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Copy, and say on the button that it is done. */
export async function copy(text, pressed) {
  const words = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not allowed";
  }
  say(pressed.textContent);
  setTimeout(() => { pressed.textContent = words; }, 1500);
}
