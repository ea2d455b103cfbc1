// Keyboard shortcuts, and the panel that lists them.

import { button, h } from "./dom.js";

const LIST = [
  ["Enter", "send the message"],
  ["Shift + Enter", "begin a line"],
  ["Escape", "stop the answer"],
  ["Arrow up, in an empty message", "edit the last question"],
  ["/", "write a message"],
  ["Ctrl + K", "search conversations"],
  ["Alt + N", "new conversation"],
  ["Alt + 1 … 7", "open a page"],
  ["?", "this list"],
];

/** `actions`: key -> function, for keys "/", "ctrl+k", "alt+n", "alt+1" and so on. */
export function listen(actions, signal) {
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const isTyping = event.target.closest?.("input, textarea, select");
    const prefix = event.ctrlKey || event.metaKey ? "ctrl+" : event.altKey ? "alt+" : "";
    if (isTyping && !prefix) return;
    const name = prefix === "alt+" ? event.code.replace(/^(Key|Digit)/, "") : event.key;
    const action = actions[prefix + name.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }, { signal });
}

export function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-labelledby": "helptitle" },
    h("h2", { id: "helptitle" }, "Keyboard"),
    h("dl", {}, LIST.map(([keys, what]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)))),
    button("Close", () => dialog.close(), { class: "main", autofocus: true }));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
