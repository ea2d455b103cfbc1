// The frame: which page is shown, the look, and what the server says of itself.

import { ask, poll } from "./api.js";
import { button, h, say } from "./dom.js";
import { forgetKey, key } from "./key.js";
import * as chat from "./chat.js";
import * as engine from "./engine.js";
import * as models from "./models.js";
import * as requests from "./requests.js";
import * as routes from "./routes.js";
import * as settings from "./settings.js";
import * as tokens from "./tokens.js";

// A page is a module with a title and `show(place, signal)`, whose signal ends it.
const PAGES = { chat, requests, engine, tokens, models, settings, api: routes };
const LOOKS = ["auto", "light", "dark"];
const LOOK = "banyan.look";

const place = document.getElementById("page");
let leaving = new AbortController();

function open() {
  const name = location.hash.slice(2);
  const page = PAGES[name] ?? chat;
  leaving.abort();
  leaving = new AbortController();
  document.title = `${page.title} · Banyan`;
  for (const link of document.querySelectorAll("#pages a")) {
    const isHere = link.hash === `#/${PAGES[name] ? name : "chat"}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  place.className = `page at-${PAGES[name] ? name : "chat"}`;
  place.replaceChildren();
  page.show(place, leaving.signal);
}

function look(name) {
  document.documentElement.dataset.look = LOOKS.includes(name) ? name : "auto";
}

function nextLook(event) {
  const now = document.documentElement.dataset.look;
  const next = LOOKS[(LOOKS.indexOf(now) + 1) % LOOKS.length];
  localStorage.setItem(LOOK, next);
  look(next);
  event.target.textContent = `Look: ${next}`;
  say(`Look: ${next}`);
}

function furnish() {
  look(localStorage.getItem(LOOK));
  document.getElementById("pages").append(...Object.entries(PAGES).map(([name, page]) =>
    h("a", { href: `#/${name}` }, page.title)));
  const state = h("p", { class: "state" });
  document.getElementById("foot").append(state,
    button(`Look: ${document.documentElement.dataset.look}`, nextLook),
    button("Forget key", () => { forgetKey(); location.reload(); },
      { hidden: !key() }));
  watch(state);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    place.focus();
  });
  addEventListener("hashchange", () => { open(); place.focus(); });
  open();
}

/** Whether the server would take a request, in the corner. */
function watch(state) {
  const tell = (isReady, text) => {
    state.className = isReady ? "state ready" : "state trouble";
    state.textContent = text;
  };
  const ready = () => tell(true, "Ready");
  const not = (error) => tell(false, error.status ? error.message : "The server does not answer");
  poll("readyz", 5000, new AbortController().signal, ready, not);
}

furnish();
ask("v1/models").then(
  (list) => { document.getElementById("foot").prepend(h("p", { class: "model" }, list.data[0].id)); },
  () => {});
