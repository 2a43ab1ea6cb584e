// Samples to a WAV file: 16 bit, mono.

/** Floats in -1..1 -> 16 bit samples, clipped; the inverse of rill.js's `floats`. */
export function integers(samples) {
  return Int16Array.from(samples, (sample) => Math.round(32767 * Math.max(-32768 / 32767, Math.min(1, sample))));
}

/** Parts of Int16Array at rateHz -> the bytes of a file. */
export function wav(parts, rateHz) {
  const size = 2 * parts.reduce((sum, part) => sum + part.length, 0);
  const bytes = new Uint8Array(44 + size);
  const view = new DataView(bytes.buffer);
  const tag = (at, word) => bytes.set(new TextEncoder().encode(word), at);
  tag(0, "RIFF");
  view.setUint32(4, 36 + size, true);
  tag(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rateHz, true);
  view.setUint32(28, 2 * rateHz, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  tag(36, "data");
  view.setUint32(40, size, true);
  let at = 44;
  for (const part of parts) {
    part.forEach((sample, i) => view.setInt16(at + 2 * i, sample, true));
    at += 2 * part.length;
  }
  return bytes;
}

/** Hands the bytes to the browser's downloads. */
export function save(bytes, name) {
  const url = URL.createObjectURL(new Blob([bytes], { type: "audio/wav" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
