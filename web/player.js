// The page's loudspeaker: a ring of samples on the audio thread (worklet.js). The context is asked for the model's
// 24 kHz; where the browser gives another rate, the worklet converts.
import { RATE_HZ } from "./rill.js";

export class Player {
  constructor() {
    this.onreport = () => {};
    this.onfailure = () => {}; // no sound can be made here
    this.stream = 0; // the number of what is being played
    this._context = null;
    this._node = null;
    this._early = []; // messages for a worklet that is still being loaded
    this._report = null;
    this._stops = [];
  }

  /** A new stream, in place of what is playing. First from a click or a key: browsers start audio only then. */
  begin() {
    this.stream += 1;
    this._report = null;
    if (this._context === null) this._build().catch((error) => this.onfailure(error));
    this._context.resume();
    this._tell({ stream: this.stream, isWhole: false });
  }

  async _build() {
    this._context = new AudioContext({ sampleRate: RATE_HZ, latencyHint: "interactive" });
    await this._context.audioWorklet.addModule(new URL("./worklet.js", import.meta.url));
    this._node = new AudioWorkletNode(this._context, "rill-player", { outputChannelCount: [1] });
    this._node.port.onmessage = ({ data }) => this._take(data);
    this._node.connect(this._context.destination);
    for (const [message, transfer] of this._early) this._node.port.postMessage(message, transfer);
    this._early = [];
  }

  _tell(message, transfer = []) {
    if (this._node === null) this._early.push([message, transfer]);
    else this._node.port.postMessage(message, transfer);
  }

  _take(report) {
    if (report.isStopped) for (const resolve of this._stops.splice(0)) resolve();
    if (report.stream !== this.stream) return;
    this._report = report;
    this.onreport(report);
  }

  /** The samples are given away: the audio thread owns them from now on. */
  push(samples) {
    this._tell({ samples }, [samples.buffer]);
  }

  /** Whether all has come; until then, running dry counts as an underrun. */
  set isWhole(isWhole) {
    this._tell({ isWhole });
  }

  /** Resolves when the audio thread is silent. */
  stop() {
    if (this._node === null) {
      this._early = [];
      return Promise.resolve();
    }
    this._tell({ stop: true });
    return new Promise((resolve) => this._stops.push(resolve));
  }

  /** Samples of any rate, beside the stream. */
  play(samples, rateHz) {
    const buffer = new AudioBuffer({ length: samples.length, sampleRate: rateHz });
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this._context, { buffer });
    source.connect(this._context.destination);
    source.start();
  }

  /** What comes out of the loudspeaker now: samples of the stream. Between reports by the clock. */
  get position() {
    if (this._report === null) return 0;
    const { played, buffered, time } = this._report;
    const since = this._context.currentTime - time - (this._context.outputLatency || 0);
    return Math.max(0, played + Math.min(since * RATE_HZ, buffered));
  }
}
