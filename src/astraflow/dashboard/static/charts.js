// Curves as SVG. The server thins them out; here they are drawn, and read by pointer or arrow keys.

import { get } from "./api.js";
import { fill, h, number, s, seconds } from "./dom.js";

const HEIGHT = 190, LEFT = 56, RIGHT = 26, TOP = 8, BOTTOM = 22;
const FIRST = 0, TIME = 1, MEAN = 2, LOW = 3, HIGH = 4, STEP = 5;

export function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((value) => value >= rough);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-9; value += size) found.push(Math.abs(value) < size * 1e-9 ? 0 : value);
  return found;
}

// What came after what is there: a whole curve replaces it, otherwise points from the first new one on.
export function join(old, news) {
  if (news.whole || !old) return news.points;
  const from = news.points[0][FIRST];
  let keep = old.length;
  while (keep > 0 && old[keep - 1][FIRST] >= from) keep -= 1;
  return [...old.slice(0, keep), ...news.points];
}

function bounds(curves) {
  const box = { t0: Infinity, t1: -Infinity, y0: Infinity, y1: -Infinity };
  for (const { points } of curves) {
    for (const point of points) {
      box.t0 = Math.min(box.t0, point[TIME]); box.t1 = Math.max(box.t1, point[TIME]);
      box.y0 = Math.min(box.y0, point[LOW]); box.y1 = Math.max(box.y1, point[HIGH]);
    }
  }
  box.y0 = Math.min(box.y0, 0);
  if (box.y0 === box.y1) box.y1 = 1;
  if (box.t0 === box.t1) box.t1 += 1;
  return box;
}

function nearest(points, time) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][TIME] < time) low = middle + 1; else high = middle;
  }
  return low > 0 && time - points[low - 1][TIME] < points[low][TIME] - time ? points[low - 1] : points[low];
}

class Picture {
  constructor(chart) {
    this.chart = chart;
    this.curves = new Map();
    this.cursor = null;
    this.svg = s("svg", { role: "img", tabindex: 0, height: HEIGHT, "aria-label": chart.title });
    this.legend = h("ul", { class: "legend" });
    this.read = h("p", { class: "read" });
    this.node = h("figure", {}, h("figcaption", {}, h("h2", {}, chart.title), chart.unit ? h("span", { class: "quiet" }, chart.unit) : null),
      this.svg, this.read, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.point((event.offsetX - LEFT) / this.inner()));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -0.02, ArrowRight: 0.02, Home: -1, End: 1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.point(Math.min(1, Math.max(0, (this.cursor ?? (by > 0 ? 0 : 1)) + by)));
    });
  }

  inner() { return Math.max(this.width - LEFT - RIGHT, 10); }

  point(share) {
    this.cursor = share;
    this.draw();
  }

  take(news) {
    this.curves.set(news.label, join(this.curves.get(news.label), news));
  }

  draw() {
    this.width = Math.max(this.node.clientWidth, 260);
    this.svg.setAttribute("width", this.width);
    const curves = [...this.curves].map(([label, points], index) => ({ label, points, style: `c${index % 8}${index >= 8 ? " dashed" : ""}` }));
    const last = curves.map(({ label, points }) => `${label} ${number(points.at(-1)[MEAN])}`);
    this.svg.setAttribute("aria-label", `${this.chart.title}: ${last.join(", ") || "nothing yet"}`);
    fill(this.legend, curves.map(({ label, style }, index) => h("li", { class: style }, h("span", { class: "swatch", "aria-hidden": "true" }), last[index])));
    this.svg.replaceChildren();
    if (!curves.length) { this.read.textContent = "nothing yet"; return; }
    const box = bounds(curves);
    const x = (time) => LEFT + ((time - box.t0) / (box.t1 - box.t0)) * this.inner();
    const y = (value) => TOP + (1 - (value - box.y0) / (box.y1 - box.y0)) * (HEIGHT - TOP - BOTTOM);
    for (const value of ticks(box.y0, box.y1, 4)) {
      this.svg.append(s("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    for (const value of ticks(box.t0, box.t1, Math.max(2, Math.floor(this.width / 130)))) {
      this.svg.append(s("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, seconds(value)));
    }
    for (const { points, style } of curves) this.curve(points, style, x, y);
    this.mark(curves, box, x, y);
  }

  curve(points, style, x, y) {
    const place = (point, row) => `${x(point[TIME]).toFixed(1)},${y(point[row]).toFixed(1)}`;
    if (points.some((point) => point[HIGH] > point[LOW])) {
      const outline = [...points.map((point) => place(point, HIGH)), ...points.toReversed().map((point) => place(point, LOW))];
      this.svg.append(s("polygon", { class: `band ${style}`, points: outline.join(" ") }));
    }
    this.svg.append(s("polyline", { class: `line ${style}`, points: points.map((point) => place(point, MEAN)).join(" ") }));
    if (points.length === 1) this.svg.append(s("circle", { class: `dot ${style}`, cx: x(points[0][TIME]), cy: y(points[0][MEAN]), r: 3 }));
  }

  mark(curves, box, x, y) {
    if (this.cursor === null) { this.read.textContent = ""; return; }
    const time = box.t0 + this.cursor * (box.t1 - box.t0);
    this.svg.append(s("line", { class: "cursor", x1: x(time), x2: x(time), y1: TOP, y2: HEIGHT - BOTTOM }));
    const read = curves.map(({ label, points, style }) => {
      const point = nearest(points, time);
      this.svg.append(s("circle", { class: `dot ${style}`, cx: x(point[TIME]), cy: y(point[MEAN]), r: 3 }));
      const range = point[HIGH] > point[LOW] ? ` (${number(point[LOW])} … ${number(point[HIGH])})` : "";
      return `${label} ${number(point[MEAN])}${range} at step ${point[STEP]}`;
    });
    this.read.textContent = `${seconds(time)}: ${read.join("; ")}`;
  }
}

export function showCharts(root, parameters, page) {
  const pictures = new Map();
  const note = h("p", { class: "quiet" });
  const grid = h("div", { class: "charts" });
  root.append(grid, note);
  let row = 0;
  new ResizeObserver(() => pictures.forEach((picture) => picture.draw())).observe(grid);
  return {
    every_ms: 2000,
    async look() {
      let more = true;
      while (more && root.isConnected) {
        const news = await get("series", { since: row });
        if (news.row < row) pictures.forEach((picture) => picture.curves.clear());
        ({ row, more } = news);
        for (const chart of news.charts) {
          if (!pictures.has(chart.key)) {
            pictures.set(chart.key, new Picture(chart));
            grid.append(pictures.get(chart.key).node);
          }
        }
        for (const curve of news.curves) pictures.get(curve.chart).take(curve);
        const left = [...news.left_out.map((name) => `not shown: ${name}`), ...(news.broken_lines ? [`${news.broken_lines} broken lines`] : [])];
        note.textContent = left.join("; ");
        page.say(more ? `reading metrics.jsonl: ${number(row)} rows` : `${number(row)} rows of metrics.jsonl`);
        pictures.forEach((picture) => picture.draw());
      }
    },
  };
}
