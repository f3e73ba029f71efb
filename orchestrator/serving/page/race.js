/* The race: one prompt and one seed, first plainly and then with each chosen drafter, one after the other, so that no
   run slows another; then all are replayed in time, next to each other. */

import { $, element, generate, newSeed, requestBody } from "./api.js";
import { Acceptance, rate } from "./tokens.js";

const WARM_TOKENS = 8;  // of a run before each lane, so that none pays for graphs and caches alone
const TOKENS = "160";

let page, lanes = [], running = null, frame = 0;

export function startRace(given) {
  page = given;
  $("race-prompt").value = page.settings.race;
  $("race-prompt").addEventListener("change", () => page.set("race", $("race-prompt").value));
  $("race-form").addEventListener("submit", event => { event.preventDefault(); start(); });
  $("race-stop").addEventListener("click", stopRace);
  $("race-replay").addEventListener("click", () => replay(false));
}

export function stopRace() {
  if (running) running.abort();
}

/* One box for each model that drafts, for each drafter that the chosen one has a choice of, and for fewer drafted
   tokens of it. */
export function offerLanes(models, chosen) {
  const offered = models.filter(model => model.paceline.num_spec_tokens).map(model => ({ model }));
  const about = chosen ? chosen.paceline : { drafters: [], num_spec_tokens: 0 };
  about.drafters.forEach(drafter => offered.push({ model: chosen, drafter }));
  for (let k = 1; k < about.num_spec_tokens; k += 1) offered.push({ model: chosen, k });
  $("lanes-offered").replaceChildren(element("legend", "Plain decoding against"), ...offered.map(given => {
    const label = element("label"), box = element("input");
    Object.assign(box, { type: "checkbox", checked: given.k === undefined });
    box.lane = { ...given, name: laneName(given) };
    label.append(box, ` ${box.lane.name}`);
    return label;
  }));
  if (!offered.length) $("lanes-offered").append("No model of this server drafts.");
}

function laneName({ model, k, drafter }) {
  if (drafter) return `${model.id}, ${drafter} alone`;
  if (k) return `${model.id}, at most ${k}`;
  return `${model.id} (${model.paceline.methods.join(", then ")}, up to ${model.paceline.num_spec_tokens})`;
}

async function start() {
  const model = page.model(), prompt = $("race-prompt").value;
  const boxes = [...$("lanes-offered").querySelectorAll("input:checked")];
  if (running || !model || !prompt.trim()) return;
  const seed = page.settings.seed || String(newSeed());
  lanes = [{ model, k: 0, name: `${model.id}, plain` }, ...boxes.map(box => ({ ...box.lane }))];
  lanes.forEach(lane => Object.assign(lane, { text: "", parts: [], tokens: 0, seconds: 0 }));
  running = new AbortController();
  busy(true);
  showLanes();
  try {
    for (const [number, lane] of lanes.entries()) {
      $("race-state").textContent = `Run ${number + 1} of ${lanes.length}: ${lane.name}`;
      await measure(lane, prompt, seed, running.signal);
    }
    $("race-state").textContent = `Seed ${seed}`;
    replay(matchMedia("(prefers-reduced-motion: reduce)").matches);
  } catch (error) {
    $("race-state").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  running = null;
  busy(false);
}

async function measure(lane, prompt, seed, signal) {
  const k = lane.k === undefined ? "" : String(lane.k), { settings } = page;
  const own = { seed, inspect: false, k, drafter: lane.drafter };
  const fields = { ...settings, max_tokens: settings.max_tokens || TOKENS, ...own };
  const body = requestBody(lane.model, [{ role: "user", content: prompt }], $("system").value, fields);
  for await (const part of generate(lane.model, { ...body, max_tokens: WARM_TOKENS }, signal)) void part;
  const acceptance = new Acceptance(k || lane.model.paceline.num_spec_tokens), begin = performance.now();
  for await (const part of generate(lane.model, body, signal)) {
    if (!part.tokens.length) continue;
    part.tokens.forEach(token => acceptance.add(token));
    lane.seconds = (performance.now() - begin) / 1000;
    lane.tokens += part.tokens.length;
    lane.parts.push({ seconds: lane.seconds, tokens: part.tokens });
    lane.text += part.tokens.map(token => token.text).join("");
    lane.box.speed.textContent = `${lane.tokens} tokens so far`;
  }
  lane.perRound = acceptance.perRound;
}

function showLanes() {
  cancelAnimationFrame(frame);
  $("verdict").textContent = "";
  $("lanes").replaceChildren(...lanes.map(lane => {
    const made = element("section", "", "lane"), progress = element("progress");
    progress.setAttribute("aria-label", `Progress of ${lane.name}`);
    lane.box = { made, progress, speed: element("div", "waits", "speed"), note: element("div", "", "quiet") };
    lane.box.text = element("div", "", "text");
    lane.box.text.tabIndex = 0;
    lane.box.text.setAttribute("role", "group");
    lane.box.text.setAttribute("aria-label", `Text of ${lane.name}`);
    made.append(element("h2", lane.name), lane.box.speed, progress, lane.box.note, lane.box.text);
    return made;
  }));
}

/* All lanes on one clock. atOnce: only the end. */
function replay(atOnce) {
  showLanes();
  const longest = Math.max(...lanes.map(lane => lane.seconds)), begin = performance.now();
  lanes.forEach(lane => Object.assign(lane, { shown: 0, at: 0 }));
  const step = () => {
    const now = atOnce ? longest : (performance.now() - begin) / 1000;
    lanes.forEach(lane => advance(lane, now));
    if (now < longest) frame = requestAnimationFrame(step);
    else verdict();
  };
  step();
}

function advance(lane, now) {
  const { text, speed, progress, note } = lane.box;
  for (; lane.at < lane.parts.length && lane.parts[lane.at].seconds <= now; lane.at += 1) {
    for (const token of lane.parts[lane.at].tokens) text.append(element("span", token.text, `token ${token.origin}`));
    lane.shown += lane.parts[lane.at].tokens.length;
    text.scrollTop = text.scrollHeight;
  }
  progress.max = lane.tokens;
  progress.value = lane.shown;
  speed.textContent = rate(lane.shown, Math.min(now, lane.seconds));
  note.textContent = `${lane.shown} tokens in ${Math.min(now, lane.seconds).toFixed(2)} s`;
}

function verdict() {
  const [plain, ...others] = lanes, fastest = lanes.reduce((best, lane) => (lane.seconds < best.seconds ? lane : best));
  for (const lane of lanes) {
    const speedup = (plain.seconds / lane.seconds) * (lane.tokens / plain.tokens);
    lane.box.note.textContent += `, ${lane.perRound.toFixed(2)} tokens per round, ${speedup.toFixed(2)} x plain`;
    lane.box.made.classList.toggle("first", lane === fastest);
  }
  const different = others.filter(lane => lane.text !== plain.text);
  const names = different.map(lane => lane.name).join("; ");
  const texts = different.length ? `The text of ${names} differs` : "All texts are equal";
  $("verdict").textContent = others.length ? `${texts}. First: ${fastest.name}.` : `Only one lane ran: ${plain.name}.`;
}

function busy(is) {
  $("race-start").hidden = is;
  $("race-stop").hidden = !is;
  $("race-replay").hidden = is || !lanes.length || !lanes.every(lane => lane.tokens);
}
