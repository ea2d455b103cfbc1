// The list of conversations: search, rename, export, import, delete.

import { button, h, iconButton, say } from "./dom.js";
import * as store from "./store.js";
import { download, readFile } from "./transfer.js";

export class Sidebar {
  constructor(conversations, onBegin) {
    this.conversations = conversations;
    this.found = null;  // ids that the search found; null = no search
    this.list = h("ul", { class: "talks" });
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations",
      oninput: () => this.find() });
    this.error = h("p", { class: "trouble", role: "alert", hidden: true });
    const picker = h("input", { type: "file", accept: ".json,application/json", hidden: true,
      onchange: () => { this.take(picker.files[0]); picker.value = ""; } });
    this.element = h("aside", { class: "others", id: "others", "aria-label": "Conversations" },
      iconButton("add", "New conversation", onBegin, { class: "main" }),
      this.search, this.error, this.list,
      h("p", { class: "row transfer" },
        iconButton("upload", "Import", () => picker.click(), { label: "Import conversations" }),
        iconButton("download", "Export all", () => this.exportAll(), { label: "Export all conversations" }),
        picker));
  }

  change() {
    const shown = this.conversations.list.filter(({ id }) => !this.found || this.found.has(id));
    this.list.replaceChildren(...shown.map((entry) => this.entry(entry)));
    if (this.found && !shown.length) this.list.append(h("li", { class: "soft" }, "Nothing found."));
  }

  async find() {
    const text = this.search.value;
    const found = text.trim() ? await this.conversations.find(text) : null;
    if (text !== this.search.value) return;  // typed on meanwhile
    this.found = found;
    this.change();
  }

  entry({ id, title }) {
    const isHere = id === this.conversations.current.id;
    const name = title || "Untitled";
    const pick = button(name, () => this.open(id), { class: "pick", "aria-current": isHere ? "true" : null });
    const item = h("li", {}, pick, h("span", { class: "tools" },
      iconButton("edit", "", () => this.rename(item, id, name), { label: `Rename ${name}`, class: "quiet" }),
      iconButton("download", "", () => this.export(id), { label: `Export ${name}`, class: "quiet" }),
      iconButton("trash", "", () => this.remove(id, name), { label: `Delete ${name}`, class: "quiet" })));
    return item;
  }

  open(id) {
    this.element.classList.remove("open");
    return this.conversations.open(id);
  }

  rename(item, id, name) {
    const input = h("input", { value: name, "aria-label": "Name of the conversation", maxlength: 200 });
    let isOver = false;
    const end = async (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept && input.value.trim()) await this.conversations.rename(id, input.value.trim());
      this.change();
      this.list.querySelector("[aria-current] ")?.focus();
    };
    input.addEventListener("keydown", ({ key }) => {
      if (key === "Enter" || key === "Escape") end(key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
  }

  async export(id) {
    const conversation = await store.get(id);
    download(conversation.title, [conversation]);
  }

  async exportAll() {
    download("conversations", await store.each((one) => one));
  }

  async take(file) {
    this.error.hidden = true;
    try {
      const found = await readFile(file);
      await this.conversations.import(found);
      say(`${found.length} conversations were imported.`);
    } catch (error) {
      this.error.hidden = false;
      this.error.textContent = error.message;
    }
  }

  remove(id, name) {
    if (confirm(`Delete “${name}”?`)) this.conversations.remove(id);
  }
}
