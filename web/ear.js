// The microphone: blocks of samples as they come, and whether somebody speaks in them.

/** `onblock(samples, rateHz)` some 50 times a second, until `close`. */
export class Ear {
  constructor(onblock) {
    this._onblock = onblock;
  }

  /** Asks the user. Rejects if there is no microphone or it isn't allowed. `isRaw`: as it is, for a recording. */
  async open({ isRaw = false } = {}) {
    if (!navigator.mediaDevices) throw new DOMException("not over this connection", "SecurityError");
    const audio = { echoCancellation: !isRaw, noiseSuppression: !isRaw, autoGainControl: false, channelCount: 1 };
    this._stream = await navigator.mediaDevices.getUserMedia({ audio });
    this._context = new AudioContext({ latencyHint: "interactive" }); // at the microphone's rate
    await this._context.audioWorklet.addModule(new URL("./ear-worklet.js", import.meta.url));
    const node = new AudioWorkletNode(this._context, "rill-ear", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => this._onblock(data, this._context.sampleRate);
    this._context.createMediaStreamSource(this._stream).connect(node);
  }

  close() {
    this._onblock = () => {}; // blocks that are on their way
    for (const track of this._stream?.getTracks() ?? []) track.stop();
    this._context?.close();
  }
}

const LOUDER = 4; // than the room: 12 dB
const LEAST = 0.008; // of full scale: -42 dB
const HOLD_S = 0.06; // a click is shorter

/** Hears speech by its energy over that of the room, which it follows: down at once, up slowly. */
export class Detector {
  constructor() {
    this._room = null;
    this._loud_s = 0;
  }

  /** One block -> whether somebody has begun to speak, once for each time. */
  take(samples, rateHz) {
    this.level = Math.sqrt(samples.reduce((sum, one) => sum + one * one, 0) / samples.length);
    this._room ??= this.level;
    this._room += (this.level < this._room ? 0.3 : 0.005) * (this.level - this._room);
    this.threshold = Math.max(LEAST, LOUDER * this._room);
    const before = this._loud_s;
    this._loud_s = this.level > this.threshold ? before + samples.length / rateHz : 0;
    return before < HOLD_S && this._loud_s >= HOLD_S;
  }
}

/** Why the microphone can't be used, in plain words. */
export function whyDeaf(error) {
  if (error.name === "NotAllowedError") return "The browser doesn't allow the microphone for this page.";
  if (error.name === "NotFoundError") return "No microphone was found.";
  if (error.name === "SecurityError")
    return "Browsers give a microphone only over https, or to a page from the same machine.";
  return "The microphone can't be used now.";
}
