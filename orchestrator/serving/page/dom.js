/* Nodes of the document, and what the browser keeps. */

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
