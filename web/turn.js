// One utterance as the page knows it: what was asked, what came, what was heard, and when. Times are in ms since it was
// sent; positions in samples.
import { RATE_HZ } from "./rill.js";
import { integers, wav } from "./wav.js";

export const STEP = RATE_HZ / 100; // samples to one peak of the outline
const MOST_LEADS = 1500; // drawn; of a longer utterance every other one goes
const PACED_S = 4.5; // with so much in hand the server waits for the listener, which is no measure of its speed

export class Turn {
  /** request: { voice, voiceName, seed, lang, instruct, parts }, each part of the text spoken before the next. */
  constructor(request) {
    this.request = request;
    this.seed = request.seed;
    this.parts = [...request.parts];
    this.state = "waiting"; // then "speaking", and in the end "whole", "stopped" or "failed"
    this.sentAt = performance.now();
    this.marks = {}; // of `opened`, `first`, `received`, `heard`, `silent`, `released`, where they have happened
    this.leads = []; // [ms, seconds of audio in hand]
    this.underruns = []; // ms of each
    this.samples = 0;
    this.outline = []; // peaks, one for each STEP
    this.realTime = null; // time to make a second of audio, in seconds
    this.heardSamples = null; // of one that was stopped
    this.heardUpto = null; // characters of the text, where it was cut short
    this._audio = [];
    this._isMeasured = false;
  }

  get text() {
    return this.parts.join("");
  }

  get seconds() {
    return this.samples / RATE_HZ;
  }

  get isOver() {
    return ["whole", "stopped", "failed"].includes(this.state);
  }

  get ms() {
    return performance.now() - this.sentAt;
  }

  mark(name) {
    this.marks[name] ??= this.ms;
  }

  take(samples) {
    this.mark("first");
    for (let i = 0; i < samples.length; i++) {
      const step = Math.floor((this.samples + i) / STEP);
      this.outline[step] = Math.max(this.outline[step] ?? 0, Math.abs(samples[i]));
    }
    this.samples += samples.length;
    this._audio.push(integers(samples));
    if (!this._isMeasured) this.realTime = this.ms / 1000 / this.seconds;
  }

  /** All that was asked for so far has come. */
  receiveAll() {
    this.mark("received");
    this._isMeasured = true;
  }

  /** The loudspeaker's report: what is in hand, and how often it ran dry. */
  follow(buffered, underruns) {
    const lead = buffered / RATE_HZ;
    if (this.marks.first !== undefined) this.leads.push([this.ms, lead]);
    if (this.leads.length > MOST_LEADS) this.leads = this.leads.filter((_, i) => i % 2 === 0);
    if (underruns > this.underruns.length) this.underruns.push(this.ms);
    if (lead > PACED_S) this._isMeasured = true;
  }

  /** The samples again, for a loudspeaker that keeps what it is given. */
  floats() {
    return this._audio.map((part) => Float32Array.from(part, (sample) => sample / 32767));
  }

  file() {
    return wav(this._audio, RATE_HZ);
  }
}
