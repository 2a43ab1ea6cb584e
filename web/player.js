// The page's loudspeaker: a ring of samples on the audio thread. The context runs at the model's 24 kHz; the browser
// resamples to the device.
import { RATE_HZ } from "./rill.js";

export class Player {
  constructor() {
    this.onreport = () => {};
    this.analyser = null;
    this._context = null;
    this._node = null;
  }

  /** Must first be called from a click or a key: browsers start audio only then. */
  async start() {
    this._starting ??= this._build();
    await this._starting;
    await this._context.resume();
    this._node.port.postMessage({ clear: true });
  }

  async _build() {
    this._context = new AudioContext({ sampleRate: RATE_HZ, latencyHint: "interactive" });
    await this._context.audioWorklet.addModule(new URL("./worklet.js", import.meta.url));
    this._node = new AudioWorkletNode(this._context, "rill-player", { outputChannelCount: [1] });
    this._node.port.onmessage = ({ data }) => this.onreport(data);
    this.analyser = new AnalyserNode(this._context, { fftSize: 2048 });
    this._node.connect(this.analyser).connect(this._context.destination);
  }

  push(samples) {
    this._node.port.postMessage({ samples }, [samples.buffer]);
  }

  end() {
    this._node.port.postMessage({ end: true });
  }

  stop() {
    this._node?.port.postMessage({ clear: true });
  }
}
