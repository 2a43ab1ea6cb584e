// The sound as it passes: left of the line what was heard, right of it what is in hand. When it is over, all of it.
import { RATE_HZ } from "./rill.js";
import { STEP } from "./turn.js";

const BAR = 3; // CSS pixels, and the distance from one to the next
const PITCH = 5;
const BAR_STEPS = 4; // of the outline: 40 ms
const HEARD = 0.45; // of the width
const STEP_S = STEP / RATE_HZ;

export class Wave {
  constructor(canvas) {
    this._canvas = canvas;
    this._pen = canvas.getContext("2d");
    this._last = [null, 0, false];
    new ResizeObserver(() => this._fit()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._fit());
  }

  /** Size and colours are the style sheet's. */
  _fit() {
    const { clientWidth, clientHeight } = this._canvas;
    Object.assign(this._canvas, { width: clientWidth * devicePixelRatio, height: clientHeight * devicePixelRatio });
    this._pen.scale(devicePixelRatio, devicePixelRatio);
    const style = getComputedStyle(this._canvas);
    this._accent = style.color;
    this._ahead = style.getPropertyValue("--ahead");
    this._line = style.getPropertyValue("--line");
    this.draw(...this._last);
  }

  /** The turn, or null; the position that is heard, in samples; whether it is sounding. */
  draw(turn, position, isSounding) {
    this._last = [turn, position, isSounding];
    const { clientWidth: width, clientHeight: height } = this._canvas;
    this._pen.clearRect(0, 0, width, height);
    if (isSounding) this._pass(turn, position, width, height);
    else this._whole(turn, width, height);
  }

  _pass(turn, position, width, height) {
    const middle = width * HEARD;
    const now = position / RATE_HZ / (BAR_STEPS * STEP_S); // in bars
    const first = Math.ceil(now - middle / PITCH);
    for (let bar = first; bar < now + (width - middle) / PITCH; bar++) {
      const x = middle + (bar - now) * PITCH;
      this._bar(x, height, level(turn.outline, bar * BAR_STEPS, BAR_STEPS), bar < now ? this._accent : this._ahead);
    }
    this._pen.fillStyle = this._accent;
    this._pen.fillRect(middle - 0.75, 0, 1.5, height);
  }

  _whole(turn, width, height) {
    const outline = turn?.outline ?? [];
    const count = Math.floor(width / PITCH);
    const steps = Math.max(BAR_STEPS, outline.length / count);
    const heard = (turn?.heardSamples ?? Infinity) / STEP;
    for (let bar = 0; bar < count; bar++) {
      const colour = bar * steps < heard ? this._accent : this._ahead;
      this._bar(bar * PITCH + (width - count * PITCH) / 2, height, level(outline, bar * steps, steps), colour);
    }
  }

  /** Silence is a bed of dots. */
  _bar(x, height, peak, colour) {
    const half = Math.max(BAR / 2, (height / 2 - 4) * Math.min(1, 1.5 * peak) ** 0.75); // speech seldom fills the scale
    this._pen.fillStyle = peak > 0 ? colour : this._line;
    this._pen.beginPath();
    this._pen.roundRect(x, height / 2 - half, BAR, 2 * half, BAR / 2);
    this._pen.fill();
  }
}

function level(outline, from, count) {
  let peak = 0;
  for (let step = Math.max(0, Math.floor(from)); step < from + count && step < outline.length; step++)
    peak = Math.max(peak, outline[step] ?? 0);
  return peak;
}

/** A still picture of samples that are no turn's, such as a recording's. */
export function outlineOf(samples, count = 800) {
  const size = samples.length / count;
  return Array.from({ length: count }, (_, i) => {
    let peak = 0;
    for (let at = Math.floor(i * size); at < (i + 1) * size && at < samples.length; at++)
      peak = Math.max(peak, Math.abs(samples[at]));
    return peak;
  });
}
