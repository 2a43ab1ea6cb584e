// Many utterances at once, on a connection of their own, and what the server says of itself meanwhile.
import { byId, figure, make } from "./elements.js";
import { RATE_HZ } from "./rill.js";

const POLL_MS = [1000, 4000]; // while it runs or isn't connected yet, and else
const DRAW_MS = 100;
const FULL_S = 6; // a bar's whole height
const TEXT =
  "The morning train was late, and the platform was full of people with bags and paper cups. " +
  "A child counted the pigeons on the roof. An old man read the same page of his book again and again. " +
  "Then the rails began to sing, and everybody stood up at once. ";

/** One listener who plays what comes as it comes, without a sound. */
class Listener {
  constructor() {
    this.samples = 0;
    this.startedAt = null;
    this.underruns = 0;
    this.state = "waiting"; // "speaking", "dry", "whole", "failed"
  }

  hear(samples) {
    const now = performance.now();
    if (this.startedAt === null || this.lead(now) < 0) {
      if (this.startedAt !== null) this.underruns += 1;
      this.startedAt = now - (1000 * this.samples) / RATE_HZ; // it went on where it had stopped
    }
    this.samples += samples.length;
  }

  /** Seconds in hand; below 0: dry. */
  lead(now) {
    return this.startedAt === null ? 0 : this.samples / RATE_HZ - (now - this.startedAt) / 1000;
  }

  look(now, bar) {
    const lead = this.lead(now);
    const isDry = this.startedAt !== null && this.state === "waiting" && lead < 0;
    bar.className = this.state === "whole" ? "whole" : isDry ? "dry" : this.startedAt === null ? "waiting" : "";
    bar.style.transform = lead > 0 ? `scaleY(${Math.min(1, lead / FULL_S)})` : "";
  }
}

export class Load {
  constructor(connection) {
    this._connection = connection;
    this._rill = null;
    this._listeners = [];
    this._timer = null;
    byId("streams").addEventListener("input", () => this.show());
    byId("run").addEventListener("click", () => (this._rill ? this._stop() : this._start()));
    this._poll();
  }

  show() {
    const { state, rill } = this._connection;
    byId("run").disabled = state !== "ready" && this._rill === null;
    if (rill) byId("streams").max = Math.min(rill.ready.limits.contexts, 32);
    byId("count").value = byId("streams").value;
    if (!byId("bars").classList.contains("running")) this._lay();
  }

  /** A bar for each stream. */
  _lay() {
    const bars = Array.from({ length: Number(byId("streams").value) }, () => make("div", { className: "waiting" }));
    byId("bars").replaceChildren(...bars);
  }

  async _start() {
    byId("run").textContent = "Stop";
    try {
      this._rill = await this._connection.another();
    } catch {
      byId("summary").textContent = "The server takes no other connection now.";
      byId("run").textContent = "Start";
      return;
    }
    this._startedAt = performance.now();
    this._listeners = Array.from({ length: Number(byId("streams").value) }, () => new Listener());
    this._lay();
    byId("bars").classList.add("running");
    for (const listener of this._listeners) this._speak(listener);
    this._timer = setInterval(() => this._draw(), DRAW_MS);
    this._poll();
  }

  async _speak(listener) {
    const utterance = this._rill.begin({ voice: byId("voice").value });
    utterance.onaudio = (samples) => listener.hear(samples);
    utterance.send(TEXT);
    utterance.end();
    try {
      await utterance.finished;
      listener.state = "whole";
    } catch (error) {
      listener.state = "failed";
      listener.code = error.code;
    }
  }

  _draw() {
    const now = performance.now();
    this._listeners.forEach((listener, i) => listener.look(now, byId("bars").children[i]));
    const made = this._listeners.reduce((sum, one) => sum + one.samples, 0) / RATE_HZ;
    const live = this._listeners.filter((one) => one.state === "waiting");
    const waiting = live.filter((one) => one.startedAt === null).length;
    const underruns = this._listeners.reduce((sum, one) => sum + one.underruns, 0);
    const failed = this._listeners.filter((one) => one.state === "failed").length;
    if (live.length) this._rate = made / ((now - this._startedAt) / 1000);
    const words = [`${made.toFixed(0)} s of speech`, `${this._rate.toFixed(1)} s made each second`];
    if (waiting) words.push(`${waiting} not heard yet`);
    words.push(underruns ? `ran dry ${underruns} times` : "nobody ran dry");
    if (failed) words.push(`${failed} refused`);
    byId("summary").textContent = `${words.join(" · ")}.`;
    if (this._listeners.every((one) => one.state === "failed" || (one.state === "whole" && one.lead(now) <= 0)))
      this._stop();
  }

  _stop() {
    clearInterval(this._timer);
    this._rill.close();
    this._rill = null;
    byId("run").textContent = "Start";
    byId("run").disabled = this._connection.state !== "ready";
  }

  // ---- the server

  async _poll() {
    clearTimeout(this._pollTimer);
    if (!document.hidden && this._connection.rill) await this._ask().catch(() => {}); // the connection says more of it
    this._pollTimer = setTimeout(() => this._poll(), POLL_MS[this._rill || !this._connection.rill ? 0 : 1]);
  }

  async _ask() {
    const [readiness, metrics] = await Promise.all([fetch("readyz"), fetch("metrics")]);
    const ready = await readiness.json();
    const shown = [["Server", ready.why]];
    if (metrics.ok) shown.push(...figures(series(await metrics.text())));
    else shown.push(["Lanes in use", `${ready.lanes_used}`, `of ${ready.lanes}`]);
    byId("server").replaceChildren(
      ...shown.map(([name, value, unit]) => {
        const cell = make("dd");
        figure(cell, value, unit);
        return make("div", {}, make("dt", {}, name), cell);
      }),
    );
  }
}

/** Prometheus text -> values by series, labels included in the name. */
function series(text) {
  const lines = text.split("\n").filter((line) => line && !line.startsWith("#"));
  return new Map(
    lines.map((line) => [line.slice(0, line.lastIndexOf(" ")), Number(line.slice(line.lastIndexOf(" ")))]),
  );
}

function figures(values) {
  const get = (name) => values.get(name) ?? 0;
  return [
    ["Lanes in use", get("rill_engine_lanes_used"), `of ${get("rill_engine_lanes")}`],
    ["Waiting", get("rill_engine_waiting")],
    ["Connections", get("rill_sessions")],
    ["First audio, median", median(values, "rill_first_audio_seconds"), ""],
    ["Step", get("rill_engine_step_ms").toFixed(0), "ms"],
    ["Cache", (get("rill_engine_cache_bytes") / 2 ** 20).toFixed(0), "MiB"],
    ["Ran dry", get("rill_underruns_total"), "times"],
  ];
}

/** "< 0.3 s": the bucket in which half of all since the start have come. */
function median(values, name) {
  const half = (values.get(`${name}_count`) ?? 0) / 2;
  if (half === 0) return "–";
  for (const [key, count] of values) {
    const bound = key.startsWith(`${name}_bucket`) && count >= half && key.match(/le="([^"]+)"/)?.[1];
    if (bound) return bound === "+Inf" ? "slow" : `< ${Number(bound)} s`;
  }
  return "–";
}
