/* What the page asks the server, its nodes, and what the browser keeps. The API key is a variable of this module and is
   written nowhere. */

let key = "";

export function setKey(value) {
  key = value;
}

/* JSON of a route; with a body it is a POST. An error has the server's words and its status. */
export async function json(path, body) {
  return (await request(path, body)).json();
}

/* The state of every model, by its name: the route answers 503 while one of them is not ready. */
export async function health() {
  return (await (await fetch("health")).json()).models;
}

async function request(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, options);
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* a proxy's page, say */ }
  return Object.assign(new Error(message), { status: response.status });
}

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const COMPLETION_TOKENS = 256;  // of a model without a chat template, whose endpoint has a default of 16

/* The body of a request. settings: fields of the drawer and a drafter, as text; "" leaves the server's default. */
export function requestBody(model, messages, system, settings) {
  const numbers = NUMBERS.filter(name => settings[name] !== "").map(name => [name, Number(settings[name])]);
  const speculative = { metrics: "detailed", ...(settings.k === "" ? {} : { k: Number(settings.k) }) };
  if (settings.drafter) speculative.drafter = settings.drafter;
  const body = { seed: newSeed(), ...Object.fromEntries(numbers), speculative };
  if (!model.paceline.chat) {
    const prompt = messages.map(message => message.content).join("");
    return { max_tokens: COMPLETION_TOKENS, ...body, prompt, ...(settings.inspect ? { logprobs: 5 } : {}) };
  }
  const turns = messages.map(({ role, content }) => ({ role, content }));
  if (system) turns.unshift({ role: "system", content: system });
  return { ...body, messages: turns, ...(settings.inspect ? { logprobs: true, top_logprobs: 5 } : {}) };
}

/* Drawn here, so that it can be shown and used again. */
export function newSeed() {
  return Math.floor(Math.random() * 2 ** 31);
}

/* Parts of an answer: text, reasoning, tokens, metrics of the last one, and when each arrived. */
export async function* generate(model, body, signal) {
  const path = model.paceline.chat ? "v1/chat/completions" : "v1/completions";
  const stream = { model: model.id, stream: true, stream_options: { include_usage: true }, return_token_origins: true };
  const response = await request(path, { ...stream, ...body }, signal);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0] || {}, delta = choice.delta || {};
    yield {
      text: choice.text || delta.content || "",
      reasoning: delta.reasoning || "",
      tokens: (choice.token_origins || []).map((one, place) => ({ ...one, ...alternatives(choice.logprobs, place) })),
      metrics: event.metrics && event.metrics.speculative_decoding,
    };
  }
}

/* The probability of a token and the likeliest ones at its place, as both endpoints write them. */
function alternatives(logprobs, place) {
  if (!logprobs) return {};
  if (!logprobs.content) {
    const top = (logprobs.top_logprobs || [])[place] || {};
    return { name: logprobs.tokens[place], logprob: logprobs.token_logprobs[place], top: Object.entries(top) };
  }
  const one = logprobs.content[place];
  return { name: one.token, logprob: one.logprob, top: one.top_logprobs.map(other => [other.token, other.logprob]) };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

/* ---- nodes of the document, and what the browser keeps */

export const $ = id => document.getElementById(id);

export function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

export function button(text, act, label) {
  const made = element("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

/* A value that was kept, or another one where there is none. */
export function kept(name, other) {
  try {
    return JSON.parse(localStorage.getItem(name)) || other;
  } catch {
    return other;
  }
}

/* Whether the browser has kept a value. */
export function keep(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
