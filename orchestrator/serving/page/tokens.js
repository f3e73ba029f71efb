/* Tokens: who wrote each, what else was likely, and how many of those drafted were accepted. */

import { $, element } from "./api.js";

/* Adds ranges of a text, token by token. base: where the text begins in that of all tokens; -1: tokens are not told. */
export function emitter(text, tokens, base) {
  if (base < 0 || !tokens.length) return (parent, start, end) => parent.append(text.slice(start, end));
  const ends = [];
  let length = -base;
  for (const token of tokens) ends.push(length += token.text.length);
  return (parent, start, end) => {
    let number = firstAbove(ends, start);
    while (start < end) {
      const stop = Math.min(end, number < ends.length ? ends[number] : end), token = tokens[number];
      const piece = element("span", text.slice(start, stop), token ? `token ${token.origin}` : "");
      piece.dataset.token = number;
      parent.append(piece);
      start = stop;
      number += 1;
    }
  };
}

function firstAbove(ends, place) {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > place) high = middle;
    else low = middle + 1;
  }
  return low;
}

const ORIGINS = {
  draft: "Drafted, and accepted by the target.",
  corrected: "The target's token, in place of a drafted one.",
  target: "The target's own token.",
};

/* Shows what is known of a token, under the pointer or chosen with the arrow keys in a focused answer. */
export function explainTokens(answer, tokens) {
  const about = $("about");
  let chosen = null;
  const show = piece => {
    if (chosen) chosen.classList.remove("chosen");
    chosen = piece;
    const token = piece && tokens[piece.dataset.token];
    about.hidden = !token;
    if (!token) return;
    piece.classList.add("chosen");
    about.replaceChildren(...described(token));
    const box = piece.getBoundingClientRect(), own = about.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight;
    about.style.top = `${Math.max(0, below ? box.bottom + 6 : box.top - own.height - 6)}px`;
    about.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 8))}px`;
  };
  answer.tabIndex = 0;
  answer.setAttribute("aria-describedby", "about");
  answer.addEventListener("mouseover", event => show(event.target.closest(".token")));
  answer.addEventListener("mouseleave", () => show(null));
  answer.addEventListener("blur", () => show(null));
  answer.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!step || event.target !== answer) return;
    event.preventDefault();
    const pieces = [...answer.querySelectorAll(".token")], place = pieces.indexOf(chosen);
    const piece = pieces[place < 0 ? 0 : Math.max(0, Math.min(pieces.length - 1, place + step))];
    if (piece) piece.scrollIntoView({ block: "nearest" });
    show(piece || null);
  });
}

const visible = text => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"');
const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function described(token) {
  const lines = [element("p", ORIGINS[token.origin])];
  if (token.drafted) lines.push(element("p", `Drafted instead: ${token.drafted.map(visible).join(", ")}`, "instead"));
  if (!token.top) return lines;
  const table = element("table"), all = [...token.top];
  if (!all.some(([text]) => text === token.name)) all.push([token.name, token.logprob]);
  for (const [text, logprob] of all) {
    const row = table.insertRow();
    row.className = text === token.name ? "taken" : "";
    row.insertCell().textContent = visible(text);
    row.insertCell().textContent = percent(logprob);
  }
  return [...lines, table];
}

/* Rounds, as origins tell them: drafted tokens that were accepted, then one of the target. The first token is the
   prompt's. How many were drafted is exact at the end, when the server's counts arrive. */
export class Acceptance {
  constructor(longest) {
    this.longest = longest;
    this.tokens = this.rounds = this.run = 0;
    this.accepted = [];
    this.drafted = [];
  }

  add(token) {
    this.tokens += 1;
    if (this.tokens === 1) return;
    if (token.origin === "draft") {
      this.run += 1;
      return;
    }
    this.rounds += 1;
    const drafted = token.origin === "corrected" ? Math.max(this.longest, this.run + 1) : this.run;
    if (drafted) {
      this.accepted.push(this.run);
      this.drafted.push(drafted);
    }
    this.run = 0;
  }

  settle(metrics) {
    [this.accepted, this.drafted] = [metrics.per_step_accepted, metrics.per_step_drafted];
  }

  get perRound() {
    return this.rounds ? (this.tokens - 1) / this.rounds : 1;
  }

  /* Accepted and drafted tokens at each position of a draft. */
  get positions() {
    return Array.from({ length: Math.max(0, ...this.drafted) }, (_, place) => [
      this.accepted.filter(count => count > place).length,
      this.drafted.filter(count => count > place).length,
    ]);
  }
}

export function showAcceptance(bars, acceptance) {
  bars.replaceChildren(...acceptance.positions.map(([accepted, drafted], place) => {
    const share = accepted / drafted, made = element("div", "", "place"), fill = element("i");
    fill.style.height = `${Math.round(34 * share)}px`;
    made.title = `Position ${place + 1} of a draft: ${accepted} of ${drafted} accepted`;
    made.append(`${Math.round(100 * share)} %`, fill, `${place + 1}.`);
    return made;
  }));
}

export function rate(tokens, seconds) {
  return `${(tokens / Math.max(seconds, 0.001)).toFixed(1)} tokens/s`;
}
