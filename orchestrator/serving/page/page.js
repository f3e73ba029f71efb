/* The page as a whole: settings of this browser, the theme, which view is shown, and which model is asked. */

import { json, setKey } from "./api.js";
import { recolour, startChat, stop } from "./chat.js";
import { startModels } from "./models.js";
import { offerLanes, startRace, stopRace } from "./race.js";

const $ = id => document.getElementById(id);
const STORE = "paceline.settings";
const FIELDS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "k"];
const BOXES = ["inspect", "colours"];
const THEMES = ["system", "light", "dark"];
const DEFAULTS = {
  ...Object.fromEntries(FIELDS.map(name => [name, ""])),
  ...{ inspect: true, colours: true, theme: "system", model: "" },
  race: "Explain how rainbows form, in three short paragraphs.",
};

const settings = { ...DEFAULTS, ...stored() };
let models = [];

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) || {};
  } catch {
    return {};
  }
}

function set(name, value) {
  settings[name] = value;
  try {
    localStorage.setItem(STORE, JSON.stringify(settings));
  } catch { /* the browser keeps nothing */ }
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
    $(name).addEventListener("change", () => set(name, $(name).validity.valid ? $(name).value : ""));
  }
  for (const name of BOXES) {
    $(name).checked = settings[name];
    $(name).addEventListener("change", () => { set(name, $(name).checked); recolour(); });
  }
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

const page = { settings, set, notice, model, loadModels };
bindSettings();
bindTheme();
bindViews();
startChat(page);
startRace(page);
startModels(page);
loadModels();
