// Markdown to elements: markdown-it parses, DOMPurify sanitizes, KaTeX draws formulas, highlight.js
// colours code. KaTeX and highlight.js are loaded when a text needs them.

import MarkdownIt from "./vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs";
import "./vendor/dompurify-3.5.0/purify.min.js";

import { button, copy, h } from "./dom.js";
import { addMath } from "./math.js";

const SANITIZED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr",
    "input", "li", "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead",
    "tr", "ul"],
  ALLOWED_ATTR: ["checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LINK = /^(https?:\/\/|mailto:)/i;
const MAX_FORMULA = 10_000;
const MAX_HIGHLIGHTED = 50_000;  // characters of one code block; longer ones have no colours

const markdown = new MarkdownIt({ html: false, breaks: true, linkify: true, maxNesting: 30 });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.validateLink = (url) => LINK.test(url.trim());
addMath(markdown);
markdown.core.ruler.push("console", adapt);
// A picture is a link: loading it would show a stranger that the answer was read.
markdown.renderer.rules.image = (tokens, at) => {
  const { attrs, content } = tokens[at];
  const { escapeHtml } = markdown.utils;
  const address = attrs.find(([name]) => name === "src")[1];
  return `<a href="${escapeHtml(address)}">${escapeHtml(content || "picture")}</a>`;
};

/** Shows a text that grows. Blocks that did not change since the last call stay as they are. */
export class Markdown {
  constructor(place) {
    this.place = place;
    this.shown = [];
  }

  show(text) {
    const blocks = blocksOf(text);
    const changed = blocks.findIndex((html, at) => html !== this.shown[at]);
    const first = changed < 0 ? blocks.length : changed;
    while (this.place.children.length > first) this.place.lastChild.remove();
    for (const html of blocks.slice(first)) this.place.append(elementOf(html));
    this.shown = blocks;
  }
}

/** The HTML of each block at the top level. */
function blocksOf(text) {
  const environment = {};
  const tokens = markdown.parse(text, environment);
  const blocks = [];
  let first = 0;
  tokens.forEach((token, at) => {
    if (token.level || token.nesting > 0) return;
    blocks.push(markdown.renderer.render(tokens.slice(first, at + 1), markdown.options, environment));
    first = at + 1;
  });
  return blocks;
}

function elementOf(html) {
  const block = h("div", { class: "block" }, DOMPurify.sanitize(html, SANITIZED));
  block.querySelectorAll("a").forEach(protect);
  block.querySelectorAll("table").forEach((table) => wrap(table, { class: "scroll", tabindex: "0" }));
  block.querySelectorAll("input").forEach((box) => box.setAttribute("aria-label", "Task"));
  block.querySelectorAll("pre > code").forEach(showCode);
  block.querySelectorAll(".math").forEach(showFormula);
  return block;
}

function protect(link) {
  if (!LINK.test(link.href)) link.replaceWith(...link.childNodes);
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  link.title ||= link.href;
}

function wrap(element, properties) {
  const around = h("div", properties);
  element.replaceWith(around);
  around.append(element);
}

/** Changes of the parsed text: smaller headings, task lists, column alignment by class. */
function adapt({ tokens, Token }) {
  tokens.forEach((token, at) => {
    if (token.type === "heading_open" || token.type === "heading_close") {
      token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;
    }
    const style = token.attrGet("style")?.match(/^text-align:(\w+)$/);
    if (style) token.attrs = [["class", `to-${style[1]}`]];
    if (token.type === "inline" && tokens[at - 2]?.type === "list_item_open") {
      makeTask(token, tokens[at - 2], Token);
    }
  });
}

function makeTask(inline, item, Token) {
  const [text] = inline.children;
  const mark = text?.type === "text" && text.content.match(/^\[([ xX])\]\s+/);
  if (!mark) return;
  text.content = text.content.slice(mark[0].length);
  const box = new Token("task", "input", 0);
  box.attrs = [["type", "checkbox"], ["disabled", ""]];
  if (mark[1] !== " ") box.attrs.push(["checked", ""]);
  inline.children.unshift(box);
  item.attrJoin("class", "task");
}

function showCode(code) {
  const language = code.className.match(/^language-([\w+#.-]+)$/)?.[1] ?? "";
  const text = code.textContent.replace(/\n$/, "");
  code.className = "";
  code.textContent = text;
  const pressed = button("Copy", () => copy(text, pressed), { label: "Copy this code" });
  const figure = h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "code"), pressed));
  const pre = code.parentElement;
  pre.tabIndex = 0;
  pre.replaceWith(figure);
  figure.append(pre);
  if (language && text.length <= MAX_HIGHLIGHTED) {
    highlighter.with((hljs) => {
      if (!hljs.getLanguage(language)) return;
      const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
      code.replaceChildren(DOMPurify.sanitize(value, SANITIZED));
    });
  }
}

function showFormula(element) {
  const source = element.textContent;
  if (source.length > MAX_FORMULA) return;
  formulas.with((katex) => {
    try {
      katex.render(source, element, {
        displayMode: element.classList.contains("display"),
        maxExpand: 300, maxSize: 50, strict: "ignore", throwOnError: true, trust: false,
      });
    } catch {
      element.textContent = source;  // incomplete while it streams, or no formula
    }
  });
}

/** A library that is loaded at its first use. */
class Library {
  constructor(load) {
    this.load = load;
    this.found = null;
    this.loading = null;
  }

  /** Calls `use` with the library: at once if it is here. Text stays plain if it cannot be loaded. */
  with(use) {
    if (this.found) {
      use(this.found);
      return;
    }
    this.loading ??= this.load().then((found) => { this.found = found; });
    this.loading.then(() => use(this.found), () => { this.loading = null; });
  }
}

const highlighter = new Library(
  async () => (await import("./vendor/highlight.js-11.12.0/highlight.min.js")).default);

const formulas = new Library(async () => {
  const sheet = new URL("./vendor/katex-0.19.1/katex.min.css", import.meta.url);
  document.head.append(h("link", { rel: "stylesheet", href: sheet.href }));
  await import("./vendor/katex-0.19.1/katex.min.js");
  return globalThis.katex;
});
