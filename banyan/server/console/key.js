// The API key: asked for when the server wants one, and kept until the tab is closed.

import { button, field, h } from "./dom.js";

const NAME = "banyan.key";
let asking = null;

export function key() {
  return sessionStorage.getItem(NAME) ?? "";
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
}

/** Ends when there is a key; one dialogue for all who wait. */
export function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => show(wasWrong, resolve)).finally(() => { asking = null; });
  return asking;
}

function show(wasWrong, done) {
  const input = h("input", { type: "password", autocomplete: "off", required: true });
  const take = (event) => {
    event.preventDefault();
    sessionStorage.setItem(NAME, input.value.trim());
    dialog.close();
  };
  const dialog = h("dialog", { class: "key", "aria-labelledby": "keytitle" },
    h("form", { onsubmit: take },
      h("h2", { id: "keytitle" }, "This server wants a key"),
      wasWrong && h("p", { class: "trouble", role: "alert" }, "The key was not accepted."),
      field("API key", input, "Kept in this tab until it is closed, and sent to this server only."),
      h("p", { class: "row" }, h("button", { class: "main" }, "Use this key"),
        wasWrong && button("Forget it", () => { forgetKey(); input.value = ""; input.focus(); }))));
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.addEventListener("close", () => { dialog.remove(); done(); });
  document.body.append(dialog);
  dialog.showModal();
}
