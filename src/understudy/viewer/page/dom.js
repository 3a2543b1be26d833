// Elements, numbers, requests. Text from a run becomes text nodes alone: nothing here parses HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value" || name === "checked" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Control characters, terminal escapes and marks that turn the direction of text, as visible signs.
export function visible(text) {
  return String(text).replace(HIDDEN, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// Text of a run in a box of its own direction.
export function quoted(text, props = {}) {
  return h("bdi", { dir: "auto", ...props }, visible(text));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

export const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export const ask = (name, query = {}) => answer(name, query);
let answer = fromServer;
export function answerWith(other) { answer = other; }

async function fromServer(name, query) {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") params.append(key, one);
  }
  const reply = await fetch(`api/${name}?${params}`);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

let pictureAddress = (run, hash) => `media/${hash}?run=${run}`;
export function picturesFrom(other) { pictureAddress = other; }

// Pictures of a row, by their hashes.
export function pictures(run, hashes, props = {}) {
  if (!hashes?.length) return null;
  const shown = hashes.map((hash, nth) => {
    const name = `picture ${nth + 1} of ${hashes.length}, ${hash.slice(0, 12)}…`;
    const address = pictureAddress(run, hash);
    const missing = () => h("span", { class: "quiet" }, `${name} is not here`);
    if (!address) return missing();
    const image = h("img", { src: address, alt: name, title: name, loading: "lazy", onerror: () => image.replaceWith(missing()) });
    return image;
  });
  return h("div", { class: "pictures", ...props }, shown);
}

export function say(text) {
  document.getElementById("announcement").textContent = text;
}

export function table(head, rows, caption) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { "data-label": head[i] }, cell)))))));
}

export function href(view, query) {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value !== null && value !== undefined && value !== "") params.set(key, value);
  return `#/${view}?${params}`;
}

export function copyButton(text) {
  return h("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); say("copied"); } catch { say("select the text to copy it"); }
  } }, "copy");
}
