// Markdown to elements, block by block. What a model writes becomes text nodes and a fixed set of
// elements: no markup of its own, no pictures, and links only to web pages and mail. Each pass goes
// forwards, so that no answer takes longer than its length; what nests deeper than MOST is text.

import { button, copy, h } from "./dom.js";

const MOST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const COLUMN = /^:?-+:?$/;

/** Shows a text that grows: only what has changed since the last call is made anew. */
export class Markdown {
  constructor(place) {
    this.place = place;
    this.sources = [];
  }

  show(text) {
    const blocks = blocksOf(text);
    const same = blocks.findIndex((block, i) => block.source !== this.sources[i]);
    const first = same < 0 ? blocks.length : same;
    while (this.place.children.length > first) this.place.lastChild.remove();
    this.place.append(...blocks.slice(first).map((block) => elementOf(block, 0)));
    this.sources = blocks.map((block) => block.source);
  }
}

/** The blocks of a text: their kind, their source, and the lines inside. */
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const first = at;
    const block = blockAt(lines, at);
    at = block.end;
    if (block.kind) blocks.push({ ...block, source: `${block.kind}\n${lines.slice(first, at).join("\n")}` });
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return { end: at + 1 };
  const fence = line.match(FENCE);
  if (fence) return fencedAt(lines, at, fence);
  const heading = line.match(HEADING);
  if (heading) {
    return { kind: "heading", level: heading[1].length, text: heading[2], end: at + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (one) => QUOTE.test(one));
    return { kind: "quote", inside: lines.slice(at, end).map((one) => one.match(QUOTE)[1]), end };
  }
  if (ITEM.test(line)) return listAt(lines, at);
  if (line.includes("|") && isRuler(lines[at + 1])) {
    const end = endOf(lines, at, (one) => one.includes("|"));
    return { kind: "table", head: cells(line), rows: lines.slice(at + 2, end).map(cells), end };
  }
  const end = endOf(lines, at + 1, (one) => one.trim() && !starts(one));
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function endOf(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at])) at += 1;
  return at;
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function fencedAt(lines, at, [, mark, language]) {
  const closes = (one) => one.trim().startsWith(mark) && !one.trim().slice(mark.length).trim();
  const end = endOf(lines, at + 1, (one) => !closes(one));
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: end + 1 };
}

function listAt(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = lines[end].match(ITEM);
    if (item && item[1].length <= indent.length + 1) {
      if (/\d/.test(item[2]) !== /\d/.test(mark)) break;
      items.push([item[3]]);
    } else if (lines[end].trim() || (lines[end + 1] ?? "").startsWith("  ")) {
      if (!lines[end].startsWith(" ") && lines[end].trim()) break;
      items.at(-1).push(lines[end].replace(/^ {1,4}/, ""));
    } else if (!ITEM.test(lines[end + 1] ?? "")) break;
    end += 1;
  }
  return { kind: "list", start: /\d/.test(mark) ? parseInt(mark, 10) : null, items, end };
}

/** Whether this is the line under the head of a table. */
function isRuler(line = "") {
  return line.includes("-") && cells(line).every((cell) => COLUMN.test(cell));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function elementOf(block, depth) {
  switch (block.kind) {
    case "heading": return h(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text, 0));
    case "rule": return h("hr");
    case "code": return code(block);
    case "quote": return h("blockquote", {}, nested(block.inside, depth));
    case "table": return columns(block);
    case "list": {
      const items = block.items.map((lines) => h("li", {}, nested(lines, depth)));
      return block.start == null ? h("ul", {}, items) : h("ol", { start: block.start }, items);
    }
    default: return h("p", {}, inline(block.text, 0));
  }
}

function nested(lines, depth) {
  if (depth >= MOST) return [h("p", {}, lines.join("\n"))];
  const blocks = blocksOf(lines.join("\n"));
  if (blocks.length && blocks[0].kind === "paragraph") {
    const [first, ...others] = blocks;
    return [...inline(first.text, 0), ...others.map((block) => elementOf(block, depth + 1))];
  }
  return blocks.map((block) => elementOf(block, depth + 1));
}

function code({ language, text }) {
  const pressed = button("Copy", () => copy(text, pressed), { label: "Copy this code" });
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "code"), pressed),
    h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function columns({ head, rows }) {
  const row = (kind, texts) => h("tr", {}, texts.map((text) => h(kind, {}, inline(text, 0))));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {},
    h("thead", {}, row("th", head)),
    h("tbody", {}, rows.map((texts) => row("td", texts)))));
}

const SPANS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** The nodes of a line: emphasis, code, links, breaks; all else is text. */
function inline(text, depth) {
  const nodes = [];
  const absent = new Set();
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) nodes.push(plain); plain = ""; };
  const put = (node, end) => { flush(); nodes.push(node); at = end; };
  // Where a mark comes next; one that does not is never looked for again.
  const next = (mark, from) => {
    if (absent.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) absent.add(mark);
    return found;
  };
  while (at < text.length) {
    const here = text[at];
    if (here === "\\" && /[\\`*_~[\]()#>|!.-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (here === "`") {
      const mark = text.slice(at).match(/^`{1,8}/)[0];
      const end = next(mark, at + mark.length);
      if (end < 0) { plain += mark; at += mark.length; }
      else put(h("code", {}, text.slice(at + mark.length, end).trim()), end + mark.length);
    } else if (here === "\n") {
      put(h("br"), at + 1);
    } else if (here === "[") {
      const link = linkAt(text, at);
      if (link) put(link.node, link.end);
      else { plain += here; at += 1; }
    } else {
      const span = depth < MOST && spanAt(text, at, next);
      if (span) put(h(span.tag, {}, inline(text.slice(span.from, span.to), depth + 1)), span.end);
      else { plain += here; at += 1; }
    }
  }
  flush();
  return nodes;
}

function spanAt(text, at, next) {
  for (const [mark, tag] of SPANS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (!/\S/.test(text[from] ?? " ")) return null;
    if (mark.startsWith("_") && /\w/.test(text[at - 1] ?? " ")) return null;
    const to = next(mark, from + 1);
    if (to < 0 || /\s/.test(text[to - 1])) continue;
    return { tag, from, to, end: to + mark.length };
  }
  return null;
}

const LONGEST_LINK = 2000;

function linkAt(text, at) {
  const [, words, target] = text.slice(at, at + LONGEST_LINK).match(/^\[([^\]]*)\]\(([^)\s]*)[^)]*\)/) ?? [];
  const where = target && addressOf(target);
  if (!where) return null;
  const end = text.indexOf(")", at + words.length + 3 + target.length) + 1;
  const more = { href: where, title: where, target: "_blank", rel: "noopener noreferrer nofollow" };
  return { node: h("a", more, words), end };
}

function addressOf(text) {
  if (!/^(https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}
