// The frame: which page is shown, the theme, the size of the text, and whether the server is ready.

import { ask, poll } from "./api.js";
import { h, iconButton, button, say } from "./dom.js";
import { icon } from "./icons.js";
import { forgetKey, key } from "./key.js";
import { listen, showHelp } from "./shortcuts.js";
import * as chat from "./chat.js";
import * as engine from "./engine.js";
import * as models from "./models.js";
import * as requests from "./requests.js";
import * as routes from "./routes.js";
import * as settings from "./settings.js";
import * as tokens from "./tokens.js";

// A page is a module with a title and `show(place, signal)`, whose signal ends it.
const PAGES = { chat, requests, engine, tokens, models, settings, api: routes };

// Choices of the whole page: words, kept as, attribute of the root element, its values.
const THEME = ["Theme", "banyan.theme", "theme", ["auto", "light", "dark"]];
const TEXT = ["Text", "banyan.text", "text", ["normal", "large"]];

const place = document.getElementById("page");
const side = document.getElementById("side");
let leaving = new AbortController();

function open() {
  const name = PAGES[location.hash.slice(2)] ? location.hash.slice(2) : "chat";
  const page = PAGES[name];
  leaving.abort();
  leaving = new AbortController();
  document.title = `${page.title} · Banyan`;
  document.getElementById("here").textContent = page.title;
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  place.className = `page at-${name}`;
  place.replaceChildren();
  page.show(place, leaving.signal);
}

/** A button that goes through the values of a choice. */
function choice([words, kept, attribute, values]) {
  const root = document.documentElement.dataset;
  const stored = localStorage.getItem(kept);
  root[attribute] = values.includes(stored) ? stored : values[0];
  const pressed = button(`${words}: ${root[attribute]}`, () => {
    root[attribute] = values[(values.indexOf(root[attribute]) + 1) % values.length];
    localStorage.setItem(kept, root[attribute]);
    pressed.textContent = `${words}: ${root[attribute]}`;
    say(pressed.textContent);
  });
  return pressed;
}

/** On a narrow screen the pages are in a drawer that this button opens. */
function drawer() {
  const pressed = iconButton("menu", "", () => toggle(), { label: "Menu", class: "quiet", id: "menu",
    "aria-expanded": "false", "aria-controls": "drawer" });
  const toggle = (isOpen = !side.classList.contains("open")) => {
    side.classList.toggle("open", isOpen);
    pressed.setAttribute("aria-expanded", String(isOpen));
  };
  side.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !side.classList.contains("open")) return;
    toggle(false);
    pressed.focus();
  });
  addEventListener("hashchange", () => toggle(false));
  document.getElementById("pages").addEventListener("click", () => toggle(false));
  side.prepend(pressed);
}

function furnish() {
  document.getElementById("pages").append(...Object.entries(PAGES).map(([name, page]) =>
    h("a", { href: `#/${name}` }, icon(name), page.title)));
  const state = h("p", { class: "state" });
  document.getElementById("foot").append(state, choice(THEME), choice(TEXT),
    button("Keyboard", showHelp),
    button("Forget key", () => { forgetKey(); location.reload(); }, { hidden: !key() }));
  drawer();
  watch(state);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    place.focus();
  });
  const goTo = (name) => () => { location.hash = `#/${name}`; };
  listen({ "?": showHelp, ...Object.fromEntries(Object.keys(PAGES).map((name, at) =>
    [`alt+${at + 1}`, goTo(name)])) }, new AbortController().signal);
  addEventListener("hashchange", () => { open(); place.focus(); });
  open();
}

/** Shows whether the server accepts requests. */
function watch(state) {
  const show = (isReady, text) => {
    state.className = isReady ? "state ready" : "state trouble";
    state.textContent = text;
  };
  const ready = () => show(true, "Ready");
  const not = (error) => show(false, error.status ? error.message : "The server does not answer");
  poll("readyz", 5000, new AbortController().signal, ready, not);
}

furnish();
ask("v1/models").then(
  (list) => { document.getElementById("foot").prepend(h("p", { class: "model" }, list.data[0].id)); },
  () => {});
