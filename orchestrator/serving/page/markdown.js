/* Markdown to nodes of the document. Text enters as text nodes and no HTML is ever parsed, so nothing in an answer can
   run. `emit(parent, start, end)` adds a range of the source, which lets tokens keep their colours. */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function renderMarkdown(parent, source, emit) {
  const lines = [];
  let start = 0;
  for (const text of source.split("\n")) {
    lines.push([start, start + text.length]);
    start += text.length + 1;
  }
  blocks({ source, emit }, parent, lines);
}

/* lines: [start, end] of each, without what quotes and lists put before it. */
function blocks(page, parent, lines) {
  let at = 0;
  while (at < lines.length) {
    const text = textOf(page, lines[at]);
    if (!text.trim()) at += 1;
    else if (FENCE.test(text)) at = fence(page, parent, lines, at);
    else if (HEADING.test(text)) at = heading(page, parent, lines, at);
    else if (RULE.test(text)) { add(parent, "hr"); at += 1; }
    else if (QUOTE.test(text)) at = quote(page, parent, lines, at);
    else if (ITEM.test(text)) at = list(page, parent, lines, at);
    else if (isTable(page, lines, at)) at = table(page, parent, lines, at);
    else at = paragraph(page, parent, lines, at);
  }
}

function textOf(page, [start, end]) {
  return page.source.slice(start, end);
}

function add(parent, tag, kind) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

function fence(page, parent, lines, at) {
  const [, marks, language] = FENCE.exec(textOf(page, lines[at]));
  const block = add(parent, "div", "block"), bar = add(block, "div", "bar");
  add(bar, "span").textContent = language || "code";
  const copy = add(bar, "button", "copy-code");
  copy.textContent = "Copy";
  copy.type = "button";
  const code = add(add(block, "pre"), "code");
  for (at += 1; at < lines.length; at += 1) {
    const text = textOf(page, lines[at]).trim();
    if (text.startsWith(marks) && !text.replaceAll(marks[0], "")) return at + 1;
    page.emit(code, lines[at][0], Math.min(lines[at][1] + 1, page.source.length));
  }
  return at;
}

function heading(page, parent, lines, at) {
  const [start, end] = lines[at], [marks, signs] = HEADING.exec(textOf(page, lines[at]));
  inline(page, add(parent, `h${signs.length}`), [[start + marks.length, end]]);
  return at + 1;
}

function quote(page, parent, lines, at) {
  const inner = [];
  for (; at < lines.length; at += 1) {
    const found = QUOTE.exec(textOf(page, lines[at]));
    if (!found) break;
    inner.push([lines[at][0] + found[0].length, lines[at][1]]);
  }
  blocks(page, add(parent, "blockquote"), inner);
  return at;
}

function list(page, parent, lines, at) {
  const first = ITEM.exec(textOf(page, lines[at]))[1], ordered = /\d/.test(first);
  const made = add(parent, ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(first, 10);
  while (at < lines.length) {
    const found = ITEM.exec(textOf(page, lines[at]));
    if (!found || /\d/.test(found[1]) !== ordered) break;
    const indent = found[0].length, inner = [[lines[at][0] + indent, lines[at][1]]];
    for (at += 1; at < lines.length; at += 1) {
      const text = textOf(page, lines[at]), depth = text.search(/\S/);
      const before = depth < 0 ? text.length : Math.min(depth, indent);
      const outside = depth >= 0 && before < Math.min(indent, 2);
      if (outside && (!textOf(page, lines[at - 1]).trim() || starts(text))) break;
      inner.push([lines[at][0] + before, lines[at][1]]);
    }
    while (inner.length > 1 && !textOf(page, inner.at(-1)).trim()) inner.pop();
    (inner.length > 1 ? blocks : inline)(page, add(made, "li"), inner);
  }
  return at;
}

function starts(text) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some(pattern => pattern.test(text));
}

function isTable(page, lines, at) {
  if (at + 1 >= lines.length || !textOf(page, lines[at]).includes("|")) return false;
  const rule = textOf(page, lines[at + 1]);
  return rule.includes("|") && TABLE_RULE.test(rule);
}

function table(page, parent, lines, at) {
  const made = add(parent, "table");
  row(page, made, lines[at], "th");
  for (at += 2; at < lines.length && textOf(page, lines[at]).includes("|"); at += 1) row(page, made, lines[at], "td");
  return at;
}

function row(page, parent, line, tag) {
  const made = add(parent, "tr"), text = textOf(page, line).trimEnd();
  let start = line[0] + text.search(/\S/);
  if (page.source[start] === "|") start += 1;
  const end = line[0] + text.length - (text.endsWith("|") ? 1 : 0);
  while (start <= end) {
    const bar = page.source.indexOf("|", start), stop = bar < 0 || bar > end ? end : bar;
    inline(page, add(made, tag), [[start, stop]]);
    start = stop + 1;
  }
}

function paragraph(page, parent, lines, at) {
  const inner = [lines[at]];
  for (at += 1; at < lines.length; at += 1) {
    const text = textOf(page, lines[at]);
    if (!text.trim() || starts(text) || isTable(page, lines, at)) break;
    inner.push(lines[at]);
  }
  inline(page, add(parent, "p"), inner);
  return at;
}

/* The text of some lines, with the place of each of its characters in the source. */
function inline(page, parent, lines) {
  let text = "";
  const places = [];
  lines.forEach(([start, end], number) => {
    for (let place = start; place < end + (number < lines.length - 1 ? 1 : 0); place += 1) places.push(place);
    text += page.source.slice(start, end) + (number < lines.length - 1 ? "\n" : "");
  });
  span({ page, text, places }, parent, 0, text.length);
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const CODE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/y;
const LINK = /!?\[([^\]\n]*)\]\(\s*<?([^\s)>]+)>?(?:\s+"[^"\n]*")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>()"]*[^\s<>()".,;:!?'*_]/y;

function span(line, parent, from, to) {
  let plain = from, at = from;
  const flush = end => { if (end > plain) emitText(line, parent, plain, end); };
  while (at < to) {
    const next = special(line, at, to);
    if (!next) { at += 1; continue; }
    flush(at);
    next.add(parent);
    plain = at = next.end;
  }
  flush(to);
}

/* What begins at a place: where it ends, and how it is added. */
function special(line, at, to) {
  const { text } = line, sign = text[at];
  if (sign === "\n") return { end: at + 1, add: parent => parent.append(document.createElement("br")) };
  if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")) {
    return { end: at + 2, add: parent => emitText(line, parent, at + 1, at + 2) };
  }
  let found = sign === "`" && match(CODE, text, at, to);
  if (found) {
    const start = at + found[1].length, stop = start + found[2].length;
    return { end: at + found[0].length, add: parent => emitText(line, add(parent, "code"), start, stop) };
  }
  found = (sign === "[" || sign === "!") && match(LINK, text, at, to);
  if (found) {
    const start = text.indexOf("[", at) + 1, stop = start + found[1].length;
    return { end: at + found[0].length, add: parent => span(line, link(parent, found[2]), start, stop) };
  }
  found = sign === "h" && match(ADDRESS, text, at, to);
  if (found) {
    const end = at + found[0].length;
    return { end, add: parent => emitText(line, link(parent, found[0]), at, end) };
  }
  return emphasis(line, at, to);
}

function emphasis(line, at, to) {
  const { text } = line;
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || !/\S/.test(text[at + mark.length] || " ")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] || " ")) continue;
    let end = text.indexOf(mark, at + mark.length + 1);
    if (mark.length === 1) while (end > 0 && text[end + 1] === mark) end = text.indexOf(mark, end + 2);
    if (end < 0 || end >= to || !/\S/.test(text[end - 1])) continue;
    if (mark[0] === "_" && /\w/.test(text[end + mark.length] || " ")) continue;
    return { end: end + mark.length, add: parent => span(line, add(parent, tag), at + mark.length, end) };
  }
  return null;
}

function match(pattern, text, at, to) {
  pattern.lastIndex = at;
  const found = pattern.exec(text);
  return found && at + found[0].length <= to ? found : null;
}

/* Only addresses of the web and of mail are followed; another one is shown as text. */
function link(parent, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return add(parent, "span");
  const made = add(parent, "a");
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function emitText({ page, places }, parent, from, to) {
  let start = from;
  for (let at = from + 1; at <= to; at += 1) {
    if (at < to && places[at] === places[at - 1] + 1) continue;
    page.emit(parent, places[start], places[at - 1] + 1);
    start = at;
  }
}
