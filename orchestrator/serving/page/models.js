/* The panel of models: what is loaded, loading and unloading, and which cores each process has. */

import { json } from "./api.js";
import { button, element } from "./tokens.js";

const $ = id => document.getElementById(id);
const COLOURS = 8;  // classes in page.css
const PERIOD_MS = 2000;

let page, timer = 0, failed = "";
const acting = new Map();  // names of models that are being loaded or unloaded here, with what is done

export function startModels(given) {
  page = given;
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
  const cards = await page.loadModels();
  $("models-state").textContent = failed || reason;
  $("model-list").replaceChildren(...(states || cards.map(card => ({ name: card.id }))).map(state => {
    const card = cards.find(one => one.id === state.name);
    return described(state, card);
  }));
  $("cores").replaceChildren(...cores(cards));
  if ($("models").open) timer = setTimeout(refresh, PERIOD_MS);
}

function described(state, card) {
  const made = element("li"), name = state.name, what = acting.get(name) || state.state || "loaded";
  made.append(element("strong", name), element("p", `State: ${what}${state.pinned ? ", pinned" : ""}`));
  if (state.running) made.append(element("p", `${state.running} requests run`, "quiet"));
  if (card) {
    const about = card.paceline, drafts = about.num_spec_tokens;
    const drafting = drafts ? `${about.methods.join(", then ")}, up to ${drafts} tokens a round` : "no drafter";
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
