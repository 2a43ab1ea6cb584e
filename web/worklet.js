// Plays what it is given, in order and without a gap, at whatever rate the device runs. Runs on the audio thread.
//   in:  { stream } a new stream begins, { samples: Float32Array } append, { isWhole } is no more expected to come,
//        { stop: true } fade out within milliseconds and drop the rest
//   out: { stream, played, buffered, underruns, isOver, isStopped, time } twenty times a second and at each change;
//        played, buffered: samples at 24 kHz; time: of this block, on the context's clock
const SOURCE_HZ = 24000;
const REPORT_S = 0.05;
const FADE_S = 0.005; // shorter clicks
const REFILL = 0.15 * SOURCE_HZ; // after running dry, play on with this much
const REACH = 16; // samples to each side that make one of another rate

/** Samples by their position in the stream, as many of the latest as fit. It grows rather than lose one. */
class Ring {
  constructor(capacity = 1 << 18) {
    this.data = new Float32Array(capacity);
    this.mask = capacity - 1;
    this.end = 0;
  }

  append(samples, needed) {
    while (this.end + samples.length - needed > this.data.length) this.grow();
    const start = this.end & this.mask;
    const head = Math.min(samples.length, this.data.length - start);
    this.data.set(samples.subarray(0, head), start);
    this.data.set(samples.subarray(head), 0);
    this.end += samples.length;
  }

  at(position) {
    return position < 0 || position >= this.end ? 0 : this.data[position & this.mask];
  }

  grow() {
    const larger = new Ring(2 * this.data.length);
    for (let i = Math.max(0, this.end - this.data.length); i < this.end; i++)
      larger.data[i & larger.mask] = this.data[i & this.mask];
    this.data = larger.data;
    this.mask = larger.mask;
  }
}

/** Between two rates by windowed sinc. Their ratio is rational, so the weights of every phase fit one small table. */
class Resampler {
  constructor(rateHz) {
    const divisor = gcd(SOURCE_HZ, rateHz);
    this.up = rateHz / divisor;
    this.down = SOURCE_HZ / divisor;
    const cutoff = Math.min(1, rateHz / SOURCE_HZ) * (this.up === this.down ? 1 : 0.95);
    this.weights = Array.from({ length: this.up }, (_, phase) => weights(phase / this.up, cutoff));
  }

  /** The sample at `count` output samples from the start of the stream. */
  at(ring, count) {
    const position = Math.floor((count * this.down) / this.up);
    const weights = this.weights[(count * this.down) % this.up];
    let sum = 0;
    for (let tap = 0; tap < 2 * REACH; tap++) sum += weights[tap] * ring.at(position + tap - REACH + 1);
    return sum;
  }
}

function weights(phase, cutoff) {
  const taps = Float64Array.from({ length: 2 * REACH }, (_, tap) => {
    const x = tap - REACH + 1 - phase;
    const window = 0.5 + 0.5 * Math.cos((Math.PI * x) / REACH);
    return window * cutoff * sinc(cutoff * x);
  });
  const sum = taps.reduce((a, b) => a + b);
  return taps.map((tap) => tap / sum);
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const gcd = (a, b) => (b === 0 ? a : gcd(b, a % b));

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = sampleRate === SOURCE_HZ ? null : new Resampler(sampleRate);
    this.fadeFrames = Math.round(FADE_S * sampleRate);
    this.begin(null);
    this.port.onmessage = ({ data }) => this.take(data);
  }

  begin(stream) {
    this.stream = stream;
    this.ring = new Ring();
    this.count = 0; // device samples of this stream so far
    this.underruns = 0;
    this.isWhole = false;
    this.isDry = true;
    this.refill = 0; // samples to wait for
    this.fade = null; // device samples left of it
    this.unreported = 0;
  }

  take(message) {
    if (message.stream !== undefined) {
      if (this.fade !== null) this.report(true); // a new stream ends the fade of the last one
      this.begin(message.stream);
    }
    if (message.samples && this.fade === null) this.ring.append(message.samples, this.played - REACH);
    if (message.isWhole !== undefined) this.isWhole = message.isWhole;
    if (message.stop) this.fade ??= this.buffered > 0 && !this.isDry ? this.fadeFrames : 0;
  }

  /** Of the stream, at its own rate. */
  get played() {
    return this.resampler ? Math.min(Math.ceil((this.count * SOURCE_HZ) / sampleRate), this.ring.end) : this.count;
  }

  get buffered() {
    return this.ring.end - this.played;
  }

  process(_inputs, [[output]]) {
    if (this.isDry && this.buffered > 0 && (this.buffered >= this.refill || this.isWhole)) this.isDry = false;
    const filled = this.isDry ? 0 : this.fill(output);
    if (this.fade !== null) this.dim(output);
    this.unreported += output.length;
    const ranDry = !this.isDry && filled < output.length;
    if (ranDry) this.runDry();
    const hasFaded = this.fade === 0;
    if (ranDry || hasFaded || this.unreported >= REPORT_S * sampleRate) this.report(hasFaded);
    if (hasFaded) this.begin(null);
    return true;
  }

  runDry() {
    this.isDry = true;
    if (this.isWhole) return;
    this.underruns += 1;
    this.refill = REFILL;
  }

  fill(output) {
    const reach = this.resampler && !this.isWhole ? REACH : 0; // what comes next bears on the last samples
    const end = Math.floor(((this.ring.end - reach) * sampleRate) / SOURCE_HZ);
    const filled = Math.max(0, Math.min(output.length, end - this.count));
    for (let i = 0; i < filled; i++)
      output[i] = this.resampler ? this.resampler.at(this.ring, this.count + i) : this.ring.at(this.count + i);
    this.count += filled;
    return filled;
  }

  dim(output) {
    for (let i = 0; i < output.length; i++) {
      output[i] *= this.fade / this.fadeFrames;
      this.fade = Math.max(0, this.fade - 1);
    }
  }

  report(isStopped) {
    this.unreported = 0;
    const { stream, played, buffered, underruns } = this;
    const isOver = this.isWhole && (buffered === 0 || this.isDry);
    this.port.postMessage({ stream, played, buffered, underruns, isOver, isStopped, time: currentTime });
  }
}

registerProcessor("rill-player", Player);
