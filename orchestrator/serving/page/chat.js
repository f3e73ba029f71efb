/* The chat: conversations of this browser, and the answer that is being written. */

import { $, button, element, generate, keep, kept, requestBody } from "./api.js";
import { renderMarkdown } from "./markdown.js";
import { Acceptance, emitter, explainTokens, rate, showAcceptance } from "./tokens.js";

const STORE = "paceline.chats";
const MOST_CHATS = 50;

let page;  // what page.js gives: settings, model(), notice(text, isError)
let chats = [], chat, running = null;

export function startChat(given) {
  page = given;
  chats = stored();
  open(chats[0] || newChat());
  addEventListener("storage", event => {  // of another tab
    if (event.key !== STORE) return;
    chats = stored().map(one => one.id === chat.id ? chat : one);
    if (!chats.includes(chat)) chats.unshift(chat);
    listChats();
  });
  $("new-chat").addEventListener("click", () => { open(newChat()); $("input").focus(); });
  $("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", stop);
  $("input").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    const last = chat.messages.findLastIndex(message => message.role === "user");
    if (event.key === "ArrowUp" && !$("input").value && last >= 0 && !running) { event.preventDefault(); edit(last); }
  });
  $("system").addEventListener("change", () => { chat.system = $("system").value; save(chat); });
  $("messages").addEventListener("click", event => {
    const copied = event.target.closest(".copy-code");
    if (copied) copy(copied.closest(".block").querySelector("code").textContent);
  });
}

export function stop() {
  if (running) running.abort();
}

/* ---- conversations */

function stored() {
  const found = kept(STORE, []);
  return Array.isArray(found) ? found : [];
}

/* One chat is changed, or taken away, among those that other tabs have kept too. Kept without the alternatives of
   tokens, which are long. The oldest go where the browser has no more room. */
function save(one, gone = false) {
  const all = stored(), place = all.findIndex(other => other.id === one.id);
  all.splice(Math.max(place, 0), place < 0 ? 0 : 1, ...(gone ? [] : [one]));
  const full = all.filter(other => other.messages.length || other.system).slice(0, MOST_CHATS);
  const short = full.map(other => ({ ...other, messages: other.messages.map(shortened) }));
  while (!keep(STORE, short) && short.length) short.pop();
  chats = chats.map(other => other.id === one.id ? one : other);
}

function shortened(message) {
  return message.tokens ? { ...message, tokens: message.tokens.map(({ top, ...token }) => token) } : message;
}

function newChat() {
  const empty = chats.find(one => !one.messages.length);
  if (empty) return empty;
  chats.unshift({ id: `${Date.now()}.${Math.random()}`, title: "New chat", system: chat ? chat.system : "", messages: [] });
  return chats[0];
}

function open(one) {
  $("history").classList.remove("shown");
  if (one === chat) return;
  stop();
  chat = one;
  $("system").value = chat.system;
  listChats();
  showMessages();
}

function listChats() {
  $("chats").replaceChildren(...chats.map(one => {
    const item = element("li"), opens = button(one.title, () => open(one));
    opens.className = "open";
    opens.setAttribute("aria-current", one === chat);
    item.append(opens, button("\u00d7", () => remove(one), `Delete ${one.title}`));
    return item;
  }));
}

function remove(one) {
  chats = chats.filter(other => other !== one);
  if (one === chat) open(chats[0] || newChat());
  save(one, true);
  listChats();
}

/* ---- messages */

function showMessages() {
  $("messages").replaceChildren(...chat.messages.map(shown));
  $("messages").scrollTop = $("messages").scrollHeight;
}

function shown(message, number) {
  const made = element("article", "", `message ${message.role}`), tools = element("div", "", "tools");
  made.append(element("h2", message.role === "user" ? "You" : message.model));
  if (message.role === "user") {
    made.append(element("div", message.content, "text"));
    tools.append(button("Edit", () => edit(number)));
  } else {
    fill(made, message);
    const last = number === chat.messages.length - 1;
    if (last) tools.append(button("Regenerate", () => { if (!running) { chat.messages.pop(); answer(); } }));
  }
  tools.append(button("Copy", () => copy(message.content)));
  made.append(tools);
  return made;
}

/* The answer of a message, into its article; again for every part that arrives. */
function fill(made, message) {
  const old = made.querySelector(".written"), written = element("div", "", "written");
  const raw = message.tokens.map(token => token.text).join("");
  if (message.reasoning) {
    const details = element("details", "", "reasoning"), text = element("div");
    details.open = old ? old.querySelector("details")?.open ?? true : !message.content;
    emitter(message.reasoning, message.tokens, raw.indexOf(message.reasoning))(text, 0, message.reasoning.length);
    details.append(element("summary", "Reasoning"), text);
    written.append(details);
  }
  const text = element("div", "", message.markdown ? "answer" : "answer raw");
  text.setAttribute("aria-label", "Answer; the arrow keys choose a token");
  text.setAttribute("role", "group");
  text.classList.toggle("waiting", Boolean(message.busy));
  const emit = emitter(message.content, message.tokens, raw.lastIndexOf(message.content));
  if (message.markdown) renderMarkdown(text, message.content, emit);
  else emit(text, 0, message.content.length);
  explainTokens(text, message.tokens);
  written.append(text);
  if (message.stopped) written.append(element("p", "Stopped.", "quiet"));
  if (message.error) written.append(element("p", message.error, "error"));
  if (message.figures) written.append(element("p", message.figures, "quiet figures"));
  if (old) old.replaceWith(written);
  else made.append(written);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    page.notice("Copied.");
  } catch {
    page.notice("This browser does not let the page copy; select the text.", true);
  }
}

/* A question becomes a field; sending it drops what came after. */
function edit(number) {
  if (running) return;
  const made = $("messages").children[number], field = element("textarea"), row = element("div", "", "row");
  field.value = chat.messages[number].content;
  field.rows = 4;
  field.setAttribute("aria-label", "Edit the message");
  const done = () => {
    chat.messages.splice(number);
    ask(field.value);
  };
  field.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
    if (event.key === "Escape") { event.stopPropagation(); showMessages(); $("input").focus(); }
  });
  row.append(button("Send", done), button("Cancel", showMessages));
  made.replaceChildren(field, row);
  field.focus();
}

/* ---- an answer */

function send() {
  const text = $("input").value;
  if (running || !text.trim()) return;
  $("input").value = "";
  ask(text);
}

function ask(content) {
  if (!page.model()) {
    page.notice("No model is ready.", true);
    $("input").value = content;
    return;
  }
  chat.messages.push({ role: "user", content });
  if (chat.messages.length === 1) chat.title = content.trim().split("\n")[0].slice(0, 60);
  listChats();
  answer();
}

async function answer() {
  const model = page.model(), own = chat, settings = page.settings;
  const body = requestBody(model, own.messages, own.system, settings);
  const message = { role: "assistant", content: "", reasoning: "", tokens: [], busy: true };
  Object.assign(message, { model: model.id, markdown: model.paceline.chat });
  own.messages.push(message);
  showMessages();
  const made = $("messages").lastChild, { k = model.paceline.num_spec_tokens } = body.speculative;
  const acceptance = new Acceptance(k), begin = performance.now();
  let drawing = 0, end = begin;
  const draw = () => {
    drawing = 0;
    const list = $("messages"), follows = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    message.figures = figures(acceptance, (end - begin) / 1000, body.seed);
    fill(made, message);
    if (follows) list.scrollTop = list.scrollHeight;
    showAcceptance($("bars"), acceptance);
    $("figures").textContent = message.figures;
  };
  running = new AbortController();
  busy(true);
  try {
    for await (const part of generate(model, body, running.signal)) {
      message.content += part.text;
      message.reasoning += part.reasoning;
      message.tokens.push(...part.tokens);
      part.tokens.forEach(token => acceptance.add(token));
      if (part.tokens.length) end = performance.now();
      if (part.metrics) acceptance.settle(part.metrics);
      drawing ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  cancelAnimationFrame(drawing);
  delete message.busy;
  running = null;
  draw();
  busy(false);
  save(own);
  if (own === chat) showMessages();
}

function figures(acceptance, seconds, seed) {
  const { tokens, rounds, perRound } = acceptance;
  const speed = tokens ? `${rate(tokens, seconds)}, ${perRound.toFixed(2)} tokens per round` : "no tokens yet";
  return `${tokens} tokens, ${rounds} rounds, ${speed}, seed ${seed}`;
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  page.notice(is ? "The model answers." : "The answer is complete.");
}
