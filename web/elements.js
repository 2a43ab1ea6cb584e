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

/** A figure with its unit in small: 312 ms. */
export function figure(element, value, unit = "") {
  element.replaceChildren(String(value), ...(unit ? [make("small", {}, unit)] : []));
}

/** What is wrong, with what can be done about it; nothing takes it away again. */
export function notice(element, words = "", ...actions) {
  element.replaceChildren(...(words ? [make("p", {}, words), ...actions] : []));
  element.hidden = !words;
}

export const seconds = (s) => `${s.toFixed(1)} s`;
export const milliseconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
