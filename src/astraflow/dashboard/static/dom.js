// Elements from plain values. Text is only ever set as text, so whatever a model wrote stays text.

const SVG = "http://www.w3.org/2000/svg";

function dress(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return node;
}

export function h(tag, properties, ...children) {
  return dress(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return dress(document.createElementNS(SVG, tag), properties, children);
}

// New children; what has the focus keeps it when it comes again under the same data-key.
export function fill(node, ...children) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  node.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (key !== undefined) node.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

export function table(label, heads, rows, empty = "none") {
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0, "data-key": `table ${label}` },
    h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}

export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 1 : digits });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, 1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.1 && value > 0) return `${number(value * 1000, 1)} ms`;
  if (value < 60) return `${number(value, 1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}
