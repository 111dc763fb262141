// Small helpers for elements and numbers.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; `data` are its data-* attributes. */
export function make(tag, { data = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

/** The same for SVG elements. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes);
  element.append(...children);
  return element;
}

function fill(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
}

/** A number with its noun: "1 draft", "3 drafts". */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

export function fixed(number, digits = 1) {
  return Number.isFinite(number) ? number.toFixed(digits) : "–";
}

export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(share * 100)}\u00a0%` : "–";
}

export function quoted(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return `“${shown.trim() === "" ? shown.replace(/ /g, "␣") : shown.trim()}”`;
}
