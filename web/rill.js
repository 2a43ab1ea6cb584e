// A client for rill.v1 in the browser (and in any JavaScript runtime with WebSocket). No build step.
//
//   const rill = await Rill.connect();                     // this page's server, or give an address
//   const utterance = await rill.open({ voice: "ada", seed: 7 });
//   utterance.onaudio = (samples, position) => { ... };    // Float32Array, 24 kHz mono, in order
//   utterance.send("Good morning. ");
//   utterance.end();                                       // or flush(), or cancel()
//   const done = await utterance.finished;                 // { t: "done" | "cancelled", samples, ms, ... }
//
// `begin` is `open` without the wait: text may be sent at once. A voice of your own:
//
//   const mia = await rill.putVoice(wavBytes, "The words spoken in it.", { name: "Mia" });   // or FLAC, Ogg, MP3
//   const utterance = rill.begin({ voice: mia.voice });
//
// A context's error rejects `open` or `finished` with a RillError: { code, retry, afterMs }. When the connection goes,
// every open utterance is rejected with the code "disconnected" and rill.onclose is called once.

import { decode } from "./vendor/msgpack/decode.mjs";
import { encode } from "./vendor/msgpack/encode.mjs";

export const RATE_HZ = 24000;
const PIECE_CHARS = 8000; // of one `text` message: at most 32 KB of UTF-8
const GREETING_MS = 10_000; // the longest wait for it
const PART_BYTES = 48 * 1024; // of a recording, in one `voice_put`

export class RillError extends Error {
  constructor(code, message, { retry = false, afterMs = null } = {}) {
    super(message);
    this.name = "RillError";
    this.code = code;
    this.retry = retry;
    this.afterMs = afterMs;
  }
}

export function speechUrl(page = globalThis.location) {
  return `${page.protocol === "https:" ? "wss:" : "ws:"}//${page.host}/v1/speech`;
}

export class Rill {
  /** Resolves once the server has greeted. */
  static connect(url = speechUrl()) {
    return new Promise((resolve, reject) => {
      const rill = new Rill(new WebSocket(url, "rill.v1"));
      const timer = setTimeout(() => rill.abandon(), GREETING_MS);
      const settle = (how) => (value) => {
        clearTimeout(timer);
        how(value);
      };
      rill._greeted = { resolve: settle(() => resolve(rill)), reject: settle(reject) };
    });
  }

  constructor(socket) {
    this.ready = null; // the server's greeting: { session, limits, rates, encs, voices, model }
    this.onclose = () => {};
    this.ongoaway = () => {};
    this._socket = socket;
    this._utterances = new Map();
    this._lists = [];
    this._pings = [];
    this._uploads = new Map();
    this._drops = new Map();
    this._next = 0;
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event) => this._take(decode(new Uint8Array(event.data)));
    socket.onclose = (event) => this._lose(event);
  }

  get isOpen() {
    return this._socket.readyState === WebSocket.OPEN;
  }

  /** Resolves with an Utterance when the server has opened it. Options: see `begin`. */
  open(options = {}) {
    return this.begin(options).opened;
  }

  /** options: voice, seed, lang, instruct, sampling. The Utterance at once; text may be sent before it is opened. */
  begin(options = {}) {
    const given = Object.entries(options).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const c = `u${this._next++}`;
    const utterance = new Utterance(this, c);
    this._utterances.set(c, utterance);
    this._send({ t: "open", c, fmt: { enc: "s16le", rate: RATE_HZ }, ...Object.fromEntries(given) });
    return utterance;
  }

  voices() {
    this._send({ t: "voices" });
    return new Promise((resolve, reject) => this._lists.push({ resolve, reject }));
  }

  /** Registers the voice of a recording of 3 to 30 s -> { voice, name, ms }; `voice` is the id to speak with. */
  putVoice(recording, transcript, { name, lang = "" }) {
    const v = `v${this._next++}`;
    for (let n = 0, start = 0; n === 0 || start < recording.length; n++, start += PART_BYTES) {
      const words = n > 0 ? {} : lang ? { name, transcript, lang } : { name, transcript };
      const d = recording.subarray(start, start + PART_BYTES);
      this._send({ t: "voice_put", v, n, d, last: start + PART_BYTES >= recording.length, ...words });
    }
    return new Promise((resolve, reject) => this._uploads.set(v, { resolve, reject }));
  }

  /** Forgets a voice that was registered with this key -> the voices that are left. */
  dropVoice(voice) {
    this._send({ t: "voice_drop", voice });
    return new Promise((resolve, reject) => this._drops.set(voice, { resolve, reject }));
  }

  /** Resolves when the server answers. A browser notices a server that fell silent by this alone. */
  ping() {
    this._send({ t: "ping", x: 0 });
    return new Promise((resolve, reject) => this._pings.push({ resolve, reject }));
  }

  close() {
    this._socket.close(1000);
  }

  /** Takes the connection for lost at once: a socket whose server fell silent is long in closing. */
  abandon() {
    this._socket.onclose = null;
    this._socket.close();
    this._lose({ code: 1006 });
  }

  _send(message) {
    if (!this.isOpen) throw new RillError("disconnected", "not connected", { retry: true });
    this._socket.send(encode(message));
  }

  _take(message) {
    if (message.t === "ready") {
      this.ready = message;
      this._greeted?.resolve();
    } else if (message.t === "voices" && message.v === undefined) {
      this._lists.shift()?.resolve(message.list);
    } else if (message.t === "voices") {
      this._settle(this._drops, message.v)?.resolve(message.list);
    } else if (message.t === "voice") {
      this._settle(this._uploads, message.v)?.resolve(message);
    } else if (message.t === "error" && message.v !== undefined) {
      (this._settle(this._uploads, message.v) ?? this._settle(this._drops, message.v))?.reject(errorOf(message));
    } else if (message.t === "pong") {
      this._pings.shift()?.resolve();
    } else if (message.t === "goaway") {
      this.ongoaway(message);
    } else if (message.c !== undefined) {
      this._utterances.get(message.c)?._take(message);
      if (["done", "cancelled", "error"].includes(message.t)) this._utterances.delete(message.c);
    } // types of later versions are ignored
  }

  _lose(event) {
    const error = new RillError("disconnected", `connection closed (${event.code})`, { retry: true });
    this._greeted?.reject(error);
    for (const utterance of this._utterances.values()) utterance._fail(error);
    this._utterances.clear();
    for (const waiting of [this._lists, this._pings, [...this._uploads.values()], [...this._drops.values()]])
      for (const { reject } of waiting) reject(error);
    this.onclose(event);
  }

  _settle(waiting, v) {
    const found = waiting.get(v);
    waiting.delete(v);
    return found;
  }
}

export class Utterance {
  constructor(rill, c) {
    this.c = c;
    this.settings = null; // { voice, seed, rate, enc } that are really used
    this.onaudio = () => {};
    this.ontaken = () => {};
    this.onflushed = () => {};
    this._rill = rill;
    this._pieces = 0;
    this._flushes = 0;
    this._isOver = false;
    this.opened = new Promise((resolve, reject) => (this._opened = { resolve, reject }));
    this.finished = new Promise((resolve, reject) => (this._finished = { resolve, reject }));
    for (const promise of [this.opened, this.finished]) promise.catch(() => {}); // nobody has to await them
  }

  send(text) {
    for (const piece of pieces(text)) this._rill._send({ t: "text", c: this.c, n: this._pieces++, s: piece });
  }

  /** Speak what is there, and go on. Its number, which `onflushed` gives when all of its audio has come. */
  flush() {
    this._rill._send({ t: "flush", c: this.c, f: this._flushes });
    return this._flushes++;
  }

  end() {
    this._rill._send({ t: "end", c: this.c });
  }

  /** Harmless when it is over. playedMs: how much was really heard. */
  cancel(playedMs) {
    if (this._isOver || !this._rill.isOpen) return;
    const played = playedMs === undefined ? {} : { played_ms: playedMs };
    this._rill._send({ t: "cancel", c: this.c, ...played });
  }

  /** Audio may be sent up to this position, from now on by credit alone. */
  credit(ms) {
    this._rill._send({ t: "credit", c: this.c, ms });
  }

  _take(message) {
    switch (message.t) {
      case "opened":
        this.settings = message;
        this._opened.resolve(this);
        break;
      case "audio":
        this.onaudio(floats(message.d), message.pos);
        break;
      case "taken":
        this.ontaken(message.n);
        break;
      case "flushed":
        this.onflushed(message.f, message.pos);
        break;
      case "done":
      case "cancelled":
        this._isOver = true;
        this._opened.reject(new RillError("cancelled", "cancelled before it was opened"));
        this._finished.resolve(message);
        break;
      case "error":
        this._fail(errorOf(message));
        break;
    }
  }

  _fail(error) {
    this._isOver = true;
    this._opened.reject(error);
    this._finished.reject(error);
  }
}

function errorOf(message) {
  return new RillError(message.code, message.msg, { retry: message.retry, afterMs: message.after_ms ?? null });
}

/** Text in parts that fit a message, never between the halves of a surrogate pair. */
export function pieces(text) {
  const characters = Array.from(text);
  const parts = [];
  for (let i = 0; i < characters.length; i += PIECE_CHARS) parts.push(characters.slice(i, i + PIECE_CHARS).join(""));
  return parts;
}

/** 16 bit little-endian samples -> floats in -1..1. */
export function floats(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength >> 1 }, (_, i) => view.getInt16(2 * i, true) / 32767);
}
