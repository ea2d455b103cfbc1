// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] displayed. Their source becomes
// the text of an element of class "math", which the caller draws. Each search for an end that fails
// is remembered, so that a text takes time in proportion to its length.

const DISPLAYED = [["$$", "$$"], ["\\[", "\\]"]];
const INLINE = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];

export function addMath(markdown) {
  markdown.block.ruler.before("fence", "math", block,
    { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.inline.ruler.before("escape", "math", inline);
  const { escapeHtml } = markdown.utils;
  markdown.renderer.rules.math_block = (tokens, at) =>
    `<div class="math display">${escapeHtml(tokens[at].content)}</div>`;
  markdown.renderer.rules.math_inline = (tokens, at) =>
    `<span class="math${tokens[at].info}">${escapeHtml(tokens[at].content)}</span>`;
}

/** A formula that begins a line and ends one; it has no empty line. */
function block(state, from, to, isProbe) {
  const { src, bMarks, eMarks, tShift } = state;
  const start = bMarks[from] + tShift[from];
  const found = DISPLAYED.find(([open]) => src.startsWith(open, start));
  if (!found || state.sCount[from] - state.blkIndent >= 4) return false;
  const [open, close] = found;
  const absent = state.env[close] ??= { from: 0, until: 0 };
  if (from >= absent.from && from < absent.until) return false;
  const isEnd = (first, last) => src.slice(first, last).trimEnd().endsWith(close);
  let line = from;
  let first = start + open.length;
  const inLine = src.indexOf(close, first);
  if (inLine >= 0 && inLine < eMarks[from] && !isEnd(first, eMarks[from])) return false;
  while (!isEnd(first, eMarks[line])) {
    line += 1;
    if (line >= to || state.isEmpty(line) || state.sCount[line] < state.blkIndent) {
      state.env[close] = { from, until: line };
      return false;
    }
    first = bMarks[line] + tShift[line];
  }
  if (isProbe) return true;
  const token = state.push("math_block", "div", 0);
  token.block = true;
  const inside = state.getLines(from, line + 1, tShift[from], false).trim();
  token.content = inside.slice(open.length, -close.length).trim();
  token.map = [from, line + 1];
  state.line = line + 1;
  return true;
}

function inline(state, isProbe) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const found = INLINE.find(([open]) => src.startsWith(open, pos));
  if (!found) return false;
  const [open, close] = found;
  const first = pos + open.length;
  const end = endOf(state, close, first);
  if (end <= first || end + close.length > state.posMax) return false;
  if (open === "$" && !isFormula(src, first, end)) return false;
  if (!isProbe) {
    const token = state.push("math_inline", "span", 0);
    token.content = src.slice(first, end).trim();
    token.info = open === "$$" || open === "\\[" ? " display" : "";
  }
  state.pos = end + close.length;
  return true;
}

function endOf(state, close, from) {
  const absent = state.cache.noEnd ??= new Set();
  if (absent.has(close)) return -1;
  let end = state.src.indexOf(close, from);
  while (end > 0 && close[0] === "$" && state.src[end - 1] === "\\") {
    end = state.src.indexOf(close, end + 1);
  }
  if (end < 0) absent.add(close);
  return end;
}

/** Money is no formula: "$5 and $6" has a space before its second sign, or a figure after it. */
function isFormula(src, first, end) {
  return !/\s/.test(src[first]) && !/\s/.test(src[end - 1]) && !/[0-9]/.test(src[end + 1] ?? "");
}
