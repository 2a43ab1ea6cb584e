// A client for rill.v1 in the browser (and in any JavaScript runtime with WebSocket). No build step.
//
//   const rill = await Rill.connect();                     // this page's server, or give an address
//   const utterance = await rill.open({ voice: "ada", seed: 7 });
//   utterance.onaudio = (samples, position) => { ... };    // Float32Array, 24 kHz mono, in order
//   utterance.send("Good morning. ");
//   utterance.end();                                       // or flush(), or cancel()
//   const done = await utterance.finished;                 // { t: "done" | "cancelled", samples, ms, ... }
//
// A context's error rejects `open` or `finished` with a RillError: { code, retry, afterMs }. When the connection goes,
// every open utterance is rejected with the code "disconnected" and rill.onclose is called once.

import { decode } from "./vendor/msgpack/decode.mjs";
import { encode } from "./vendor/msgpack/encode.mjs";

export const RATE_HZ = 24000;
const PIECE_CHARS = 8000; // of one `text` message: at most 32 KB of UTF-8

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
      rill._greeted = { resolve: () => resolve(rill), reject };
    });
  }

  constructor(socket) {
    this.ready = null; // the server's greeting: { session, limits, rates, encs, voices, model }
    this.onclose = () => {};
    this.ongoaway = () => {};
    this._socket = socket;
    this._utterances = new Map();
    this._lists = [];
    this._next = 0;
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event) => this._take(decode(new Uint8Array(event.data)));
    socket.onclose = (event) => this._lose(event);
  }

  get isOpen() {
    return this._socket.readyState === WebSocket.OPEN;
  }

  /** options: voice, seed, lang, instruct, sampling. Resolves with an Utterance when the server has opened it. */
  open(options = {}) {
    const given = Object.entries(options).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const c = `u${this._next++}`;
    const utterance = new Utterance(this, c);
    this._utterances.set(c, utterance);
    this._send({ t: "open", c, fmt: { enc: "s16le", rate: RATE_HZ }, ...Object.fromEntries(given) });
    return utterance.opened;
  }

  voices() {
    this._send({ t: "voices" });
    return new Promise((resolve) => this._lists.push(resolve));
  }

  close() {
    this._socket.close(1000);
  }

  _send(message) {
    if (!this.isOpen) throw new RillError("disconnected", "not connected", { retry: true });
    this._socket.send(encode(message));
  }

  _take(message) {
    if (message.t === "ready") {
      this.ready = message;
      this._greeted?.resolve();
    } else if (message.t === "voices") {
      this._lists.shift()?.(message.list);
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
    this.onclose(event);
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
    this.finished.catch(() => {}); // whoever awaits it hears of it; nobody has to
  }

  send(text) {
    for (const piece of pieces(text)) this._rill._send({ t: "text", c: this.c, n: this._pieces++, s: piece });
  }

  flush() {
    this._rill._send({ t: "flush", c: this.c, f: this._flushes++ });
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
        this._fail(new RillError(message.code, message.msg, { retry: message.retry, afterMs: message.after_ms ?? null }));
        break;
    }
  }

  _fail(error) {
    this._isOver = true;
    this._opened.reject(error);
    this._finished.reject(error);
  }
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
