// Plays what it is given, in order. Runs on the audio thread.
//   in:  { samples: Float32Array } append, { end: true } nothing more comes, { clear: true } drop all
//   out: { played, buffered, underruns, isOver } some ten times a second and at the end
const REPORT_FRAMES = 2400;

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.reset();
    this.port.onmessage = ({ data }) => this.take(data);
  }

  reset() {
    this.chunks = [];
    this.offset = 0; // into the first chunk
    this.buffered = 0;
    this.played = 0;
    this.underruns = 0;
    this.isEnded = false;
    this.isDry = true;
    this.unreported = 0;
  }

  take(message) {
    if (message.clear) this.reset();
    if (message.end) this.isEnded = true;
    if (message.samples) {
      this.chunks.push(message.samples);
      this.buffered += message.samples.length;
      this.isDry = false;
    }
  }

  process(_inputs, [[output]]) {
    const filled = this.fill(output);
    this.played += filled;
    this.unreported += output.length;
    const ranDry = filled < output.length && !this.isDry;
    if (ranDry) {
      this.isDry = true;
      if (!this.isEnded) this.underruns += 1;
    }
    if (ranDry || this.unreported >= REPORT_FRAMES) this.report();
    return true;
  }

  fill(output) {
    let filled = 0;
    while (filled < output.length && this.chunks.length > 0) {
      const chunk = this.chunks[0];
      const count = Math.min(output.length - filled, chunk.length - this.offset);
      output.set(chunk.subarray(this.offset, this.offset + count), filled);
      filled += count;
      this.offset += count;
      if (this.offset === chunk.length) {
        this.chunks.shift();
        this.offset = 0;
      }
    }
    this.buffered -= filled;
    return filled;
  }

  report() {
    this.unreported = 0;
    const { played, buffered, underruns } = this;
    this.port.postMessage({ played, buffered, underruns, isOver: this.isEnded && buffered === 0 });
  }
}

registerProcessor("rill-player", Player);
