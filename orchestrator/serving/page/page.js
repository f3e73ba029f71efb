/* The page as a whole: settings of this browser, the theme, which view is shown, which model is asked, and the panel of
   models: what is loaded, loading and unloading, and which cores each process has. */

import { $, button, element, health, json, keep, kept, setKey } from "./api.js";
import { startChat, stop } from "./chat.js";
import { offerLanes, startRace, stopRace } from "./race.js";

const STORE = "paceline.settings";
const FIELDS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "k"];
const BOXES = ["inspect", "colours"];
const THEMES = ["system", "light", "dark"];
const DEFAULTS = {
  ...Object.fromEntries(FIELDS.map(name => [name, ""])),
  ...{ inspect: true, colours: true, theme: "system", model: "" },
  race: "Explain how rainbows form, in three short paragraphs.",
};

const settings = { ...DEFAULTS, ...kept(STORE, {}) };
let models = [];

function set(name, value) {
  settings[name] = value;
  keep(STORE, settings);
}

function notice(text, isError = false) {
  $("notice").textContent = text;
  $("notice").className = isError ? "error" : "hidden";
}

function model() {
  return models.find(one => one.id === $("model").value);
}

/* The models that answer now. */
async function loadModels() {
  const before = models.map(one => one.id).join("\n"), chosen = $("model").value || settings.model;
  try {
    models = (await json("v1/models")).data;
  } catch (error) {
    models = [];
    notice(error.message, true);
    if (error.status === 401) notice("This server needs an API key; give it under Parameters.", true);
  }
  if (models.map(one => one.id).join("\n") !== before) {
    $("model").replaceChildren(...models.map(one => new Option(one.id)));
    if (models.some(one => one.id === chosen)) $("model").value = chosen;
    if (models.length) notice("");
    offerLanes(models, model());
  }
  return models;
}

function bindSettings() {
  for (const name of FIELDS) {
    $(name).value = settings[name];
    $(name).addEventListener("change", () => set(name, $(name).reportValidity() ? $(name).value : ""));
  }
  const colour = () => document.body.classList.toggle("coloured", settings.colours);
  for (const name of BOXES) {
    $(name).checked = settings[name];
    $(name).addEventListener("change", () => { set(name, $(name).checked); colour(); });
  }
  colour();
  $("key").addEventListener("change", () => { setKey($("key").value); loadModels(); });
  $("model").addEventListener("change", () => { set("model", $("model").value); offerLanes(models, model()); });
  $("open-parameters").addEventListener("click", () => $("parameters").showModal());
}

function bindTheme() {
  const show = () => {
    document.documentElement.dataset.theme = settings.theme;
    $("theme").textContent = `Theme: ${settings.theme}`;
  };
  $("theme").addEventListener("click", () => {
    set("theme", THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length]);
    show();
  });
  show();
}

function bindViews() {
  const show = view => {
    for (const name of ["chat", "race"]) {
      $(name).hidden = name !== view;
      $(`view-${name}`).setAttribute("aria-pressed", name === view);
    }
    $("history").hidden = view !== "chat";
  };
  for (const name of ["chat", "race"]) $(`view-${name}`).addEventListener("click", () => show(name));
  $("open-history").addEventListener("click", () => {
    const shown = $("history").classList.toggle("shown");
    $("open-history").setAttribute("aria-expanded", shown);
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    stop();
    stopRace();
  });
}

/* ---- the panel of models */

const COLOURS = 8;  // classes in page.css
const PERIOD_MS = 2000;
const WORDS = { loading: "loading: weights are read, graphs are compiled" };

let timer = 0, failed = "";
const acting = new Map();  // names of models that are being loaded or unloaded here, with what is done

function bindModels() {
  $("open-models").addEventListener("click", () => { $("models").showModal(); failed = ""; refresh(); });
  $("models").addEventListener("close", () => clearTimeout(timer));
}

async function refresh() {
  clearTimeout(timer);
  let states = null, reason = "";
  try {
    states = (await json("admin/models")).models;
  } catch (error) {
    reason = error.status === 404 ? "This server has no routes to load and unload models." : error.message;
  }
  const cards = await loadModels(), words = await health().catch(() => ({}));
  const known = states || Object.keys(words).map(name => ({ name }));
  $("models-state").textContent = failed || reason;
  $("model-list").replaceChildren(...known.map(state => {
    const what = acting.get(state.name) || words[state.name] || state.state;
    return described(state, what, cards.find(one => one.id === state.name));
  }));
  $("cores").replaceChildren(...cores(cards));
  if ($("models").open) timer = setTimeout(refresh, PERIOD_MS);
}

function described(state, what, card) {
  const made = element("li"), { name } = state;
  made.append(element("strong", name), element("p", `State: ${WORDS[what] || what}${state.pinned ? ", pinned" : ""}`));
  if (state.running) made.append(element("p", `${state.running} requests run`, "quiet"));
  if (card) {
    const about = card.paceline, drafts = about.num_spec_tokens;
    const methods = about.drafters.length ? `the best of ${about.drafters.join(", ")}` : about.methods.join(", then ");
    const drafting = drafts ? `${methods}, up to ${drafts} tokens per round` : "no drafter";
    made.append(element("p", `${drafting}; ${card.max_model_len} positions`, "quiet"));
  }
  if (state.state && !acting.has(name)) {
    const load = button("Load", () => act("load", name, "loading"), `Load ${name}`);
    const unload = button("Unload", () => act("unload", name, "unloading"), `Unload ${name}`);
    load.disabled = state.state !== "unloaded";
    unload.disabled = state.state !== "loaded" || state.pinned;
    made.append(load, " ", unload);
  }
  return made;
}

async function act(action, model, what) {
  acting.set(model, what);
  failed = "";
  refresh();
  try {
    await json(`admin/models/${action}`, { model });
  } catch (error) {
    failed = error.message;
  }
  acting.delete(model);
  refresh();
}

/* A row of cores for each machine, by its name, and the meaning of the colours. */
function cores(cards) {
  const placed = cards.flatMap(card => card.paceline.placement), nodes = new Map(), names = [];
  for (const one of placed) {
    const name = `${one.name} (${one.role})`;
    if (!names.includes(name)) names.push(name);
    if (!nodes.has(one.node)) nodes.set(one.node, { host: one.host, cores: new Map() });
    one.cores.forEach(core => nodes.get(one.node).cores.set(core, name));
  }
  if (!placed.length) return [element("p", "The server does not say where its models run.", "quiet")];
  const hosts = [...nodes.values()].map(node => node.host);
  const rows = [...nodes].flatMap(([id, node]) => {
    const alone = node.host && hosts.filter(host => host === node.host).length === 1;
    const row = element("ul", "", "cores");
    for (let core = 0; core <= Math.max(...node.cores.keys()); core += 1) {
      const name = node.cores.get(core), cell = element("li", String(core));
      if (name) cell.className = `taken colour-${names.indexOf(name) % COLOURS}`;
      cell.title = name || "free";
      cell.setAttribute("aria-label", `Core ${core}: ${cell.title}`);
      row.append(cell);
    }
    return [element("div", alone ? node.host : `${node.host} ${id.slice(0, 8)}`.trim(), "node"), row];
  });
  const key = element("ul", "", "key");
  for (const [number, name] of names.entries()) {
    const item = element("li");
    item.append(element("i", "", `colour-${number % COLOURS}`), name);
    key.append(item);
  }
  return [...rows, key];
}

const page = { settings, set, notice, model, loadModels };
bindSettings();
bindTheme();
bindViews();
startChat(page);
startRace(page);
bindModels();
loadModels();
