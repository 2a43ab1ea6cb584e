// Passes on what the microphone hears, in blocks. Runs on the audio thread.
const BLOCK_S = 0.02;

class Ear extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(128 * Math.max(1, Math.round((BLOCK_S * sampleRate) / 128)));
    this.count = 0;
  }

  process([[input]]) {
    if (input === undefined) return true; // nothing is connected yet
    this.block.set(input, this.count);
    this.count += input.length;
    if (this.count === this.block.length) {
      this.port.postMessage(this.block.slice());
      this.count = 0;
    }
    return true;
  }
}

registerProcessor("rill-ear", Ear);
