// The time line of an utterance: what happened when, and the speech in hand over time.
import { make, milliseconds } from "./elements.js";
import { RATE_HZ } from "./rill.js";

const SVG = "http://www.w3.org/2000/svg";
const LEAST_MS = 4000;
const LEAST_S = 2;
const TOP = 14; // pixels above the plot, for words
const BOTTOM = 18; // and below it
const EVENTS = [
  ["opened", "Opened"],
  ["first", "First audio"],
  ["received", "All received"],
  ["heard", "Heard out"],
];

export class Timeline {
  constructor(chart, events) {
    this._chart = chart;
    this._events = events;
    this._turn = null;
    new ResizeObserver(() => this._draw()).observe(chart);
  }

  show(turn) {
    this._turn = turn;
    this._draw();
    this._list(turn);
  }

  _list(turn) {
    const items = [entry("Sent", "0 ms")];
    for (const [name, words] of EVENTS)
      if (turn.marks[name] !== undefined) items.push(entry(words, milliseconds(turn.marks[name])));
    for (const ms of turn.underruns.slice(0, 3)) items.push(entry("Ran dry", milliseconds(ms), "bad"));
    if (turn.underruns.length > 3) items.push(entry("Ran dry", `${turn.underruns.length} times`, "bad"));
    if (turn.state === "stopped") items.push(entry("Stopped", `after ${(turn.heardSamples / RATE_HZ).toFixed(2)} s`));
    if (turn.state === "failed") items.push(entry("Failed", "", "bad"));
    this._events.replaceChildren(...items);
  }

  _draw() {
    const { clientWidth: width, clientHeight: height } = this._chart;
    const turn = this._turn;
    this._chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const leads = turn?.leads ?? [];
    const longest = Math.max(LEAST_MS, leads.at(-1)?.[0] ?? 0);
    const highest = Math.max(LEAST_S, ...leads.map(([, s]) => s)) * 1.05;
    const x = (ms) => (ms / longest) * width;
    const bottom = height - BOTTOM;
    const y = (s) => bottom - (s / highest) * (bottom - TOP);
    const parts = [...grid(width, y, highest)];
    if (leads.length) {
      const line = leads.map(([ms, s]) => `${x(ms).toFixed(1)},${y(s).toFixed(1)}`).join(" L");
      parts.push(
        svg("path", { class: "area", d: `M${x(leads[0][0])},${bottom} L${line} L${x(leads.at(-1)[0])},${bottom} Z` }),
      );
      parts.push(svg("path", { class: "lead", d: `M${line}` }));
    }
    for (const [name] of EVENTS) {
      const ms = turn?.marks[name];
      if (ms !== undefined) parts.push(svg("line", { class: "mark", x1: x(ms), x2: x(ms), y1: TOP, y2: bottom }));
    }
    for (const ms of turn?.underruns ?? [])
      parts.push(svg("line", { class: "dry", x1: x(ms), x2: x(ms), y1: bottom - 12, y2: bottom }));
    this._chart.replaceChildren(...parts, ...words(width, x, y, longest, highest));
  }
}

const levels = (highest) =>
  Array.from({ length: Math.ceil(highest) }, (_, s) => s).filter((s) => highest <= 5 || s % 2 === 0);

const grid = (width, y, highest) =>
  levels(highest).map((s) => svg("line", { class: "grid", x1: 0, x2: width, y1: y(s), y2: y(s) }));

function* words(width, x, y, longest, highest) {
  for (const s of levels(highest).slice(1)) yield text(`${s} s ahead`, { x: width, y: y(s) - 4, "text-anchor": "end" });
  const step = [1, 2, 5, 10, 30, 60, 120, 300].find((one) => longest / 1000 / one <= 10) ?? 600;
  for (let s = step; s * 1000 < longest * 0.98; s += step)
    yield text(`${s} s`, { x: x(s * 1000), y: y(0) + 14, "text-anchor": "middle" });
}

function entry(words, value, className = "") {
  return make("li", { className }, words, make("b", {}, value));
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function text(words, attributes) {
  const element = svg("text", attributes);
  element.textContent = words;
  return element;
}
