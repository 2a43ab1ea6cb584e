// Elements of the page, found and made.

export const byId = (id) => document.getElementById(id);

/** An element with properties, classes and children: make("button", { type: "button", onclick }, "Save"). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(words, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, words);
}

/** A figure with its unit in small: 312 ms. Without a value, a dash. */
export function figure(element, value = null, unit = "") {
  element.classList.toggle("none", value === null);
  if (value === null) element.textContent = "–";
  else element.replaceChildren(String(value), ...(unit ? [make("small", {}, unit)] : []));
}

/** What is wrong, with what can be done about it; nothing takes it away again. */
export function notice(element, words = "", ...actions) {
  if (element.firstElementChild?.textContent === words) return; // it has been read out, and may have the focus
  element.replaceChildren(...(words ? [make("p", {}, words), ...actions] : []));
  element.hidden = !words;
}

/** Words for a live region: the same ones are not said again. */
export function tell(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export const seconds = (s) => `${s.toFixed(1)} s`;
export const milliseconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
