// Keeps one connection to the server: connects, notices silence, connects again, and says how it stands.
//
// state: "connecting"  the first try, or another
//        "starting"    connected, but the engine has no voices to offer yet
//        "ready"       speak
//        "leaving"     the server is being restarted; what is open may finish
//        "lost"        will try again
//        "locked"      the server asks for a key
import { Rill, speechUrl } from "./rill.js";

const RETRY_MS = [500, 8000]; // first and longest wait before another try
const PING_MS = 5000;
const SILENCE_MS = 10_000;
const VOICES_MS = 1000; // between questions while the engine starts

export class Connection extends EventTarget {
  constructor() {
    super();
    this.state = "connecting";
    this.rill = null;
    this.voices = [];
    this.isKeyRefused = false; // the one that was given last
    this._waitMs = RETRY_MS[0];
    this._timer = null;
    this._ticket = new URLSearchParams(location.search).get("ticket"); // of a page behind somebody's own server
    for (const type of ["online", "focus"]) addEventListener(type, () => this.state === "lost" && this.connect());
    setInterval(() => this._probe(), PING_MS);
  }

  async connect() {
    clearTimeout(this._timer);
    this._show("connecting");
    try {
      this._adopt(await Rill.connect(await this._url()));
    } catch {
      await this._despair();
    }
  }

  /** With a key of this server; it is kept for this tab alone. */
  unlock(key) {
    sessionStorage.setItem("rill-key", key);
    return this.connect();
  }

  /** A second connection beside this one, for its taker to close. */
  async another() {
    return Rill.connect(await this._url());
  }

  async listVoices() {
    const rill = this.rill;
    const voices = await rill.voices().catch(() => []);
    if (rill !== this.rill) return;
    this.voices = voices;
    this._show(voices.length ? "ready" : "starting");
    if (!voices.length) setTimeout(() => rill === this.rill && this.listVoices(), VOICES_MS);
  }

  _show(state) {
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }

  _adopt(rill) {
    this.rill = rill;
    this._waitMs = RETRY_MS[0];
    rill.onclose = () => rill === this.rill && this._lose();
    rill.ongoaway = () => {
      if (rill !== this.rill) return;
      this.rill = null; // it finishes what it has; others go to the next server
      this._show("leaving");
      this._timer = setTimeout(() => this.connect(), RETRY_MS[0]);
    };
    this.listVoices();
  }

  _lose() {
    this.rill = null;
    this._timer = setTimeout(() => this.connect(), this._waitMs * (0.75 + 0.5 * Math.random()));
    this._waitMs = Math.min(2 * this._waitMs, RETRY_MS[1]);
    this._show("lost");
  }

  async _url() {
    const key = sessionStorage.getItem("rill-key");
    let ticket = this._ticket;
    this._ticket = null; // it opens one connection
    if (key !== null) {
      const answer = await fetch("ticket", { headers: { Authorization: `Bearer ${key}` } });
      this.isKeyRefused = answer.status === 401;
      if (this.isKeyRefused) sessionStorage.removeItem("rill-key");
      if (answer.ok) ticket = (await answer.json()).ticket;
    }
    return ticket ? `${speechUrl()}?ticket=${encodeURIComponent(ticket)}` : speechUrl();
  }

  /** A browser doesn't say why a WebSocket was refused; the door beside it does. */
  async _despair() {
    const answer = await fetch("ticket").catch(() => null);
    if (answer?.status === 401) this._show("locked");
    else this._lose();
  }

  /** A server that fell silent is left, though its socket still looks open. */
  async _probe() {
    const rill = this.rill;
    if (rill === null || !rill.isOpen) return;
    const timer = setTimeout(() => rill.abandon(), SILENCE_MS);
    await rill.ping().catch(() => {});
    clearTimeout(timer);
  }
}
