// Speaks: one utterance at a time, from the server through the loudspeaker, and again from what was kept.
//
// The context stays open while it is heard, so that what is typed meanwhile can follow; it ends once the voice has
// said all there is. Each part of the text ends with a flush, and a repeat sends the same parts: the cuts fall as
// before, and with the same seed the samples are the same.
//
// events: "turn" another one is shown, "change" its state or figures did, "end" it is over
import { RATE_HZ, RillError } from "./rill.js";
import { Turn } from "./turn.js";

const TYPING_MS = 2500; // after the last key, more text may still come

export class Speaker extends EventTarget {
  constructor(connection, player) {
    super();
    this.turn = null; // what is shown: the last one, or one that is heard again
    this.isSounding = false;
    this._connection = connection;
    this._player = player;
    this._utterance = null;
    this._flushes = -1; // the number of the last flush, and of the last one whose audio has come
    this._flushed = -1;
    this._isFlushed = true; // nothing has been sent since
    this._isEnding = false;
    this._isNew = false; // not heard again from what was kept
    this._typedAt = -Infinity;
    player.onreport = (report) => this._follow(report);
    player.onfailure = () => this._fail(new RillError("no_audio", "no sound"));
  }

  /** Can text be added to what is being said? */
  get isOpen() {
    return this._utterance !== null && !this._isEnding;
  }

  /** Has text been sent that waits for the end of its sentence? */
  get hasUnsaid() {
    return !this._isFlushed;
  }

  get position() {
    return this.isSounding ? this._player.position : 0;
  }

  speak(request) {
    this.stop();
    const turn = this._show(new Turn(request), true);
    const { voice, seed, lang, instruct, parts } = request;
    try {
      if (this._connection.rill === null) throw new RillError("disconnected", "no connection", { retry: true });
      const utterance = this._connection.rill.begin({ voice, seed, lang, instruct });
      this._utterance = utterance;
      utterance.onaudio = (samples) => this._hear(turn, samples);
      utterance.onflushed = (number) => this._receive(turn, number);
      utterance.opened.then(
        () => this._open(turn, utterance),
        () => {},
      );
      utterance.finished.then(
        (result) => this._finish(turn, result),
        (error) => this._fail(error, turn),
      );
      this._flushes = this._flushed = -1;
      for (const part of parts) {
        utterance.send(part);
        this._flushes = utterance.flush();
      }
    } catch (error) {
      this._fail(error, turn);
    }
    return turn;
  }

  /** More text for what is being said. */
  append(words) {
    const parts = this.turn.parts;
    if (this._isFlushed) parts.push(words);
    else parts[parts.length - 1] += words;
    this._isFlushed = false;
    this._utterance.send(words);
  }

  /** Say what has been sent, though a sentence may not be complete. */
  flush() {
    if (this._isFlushed) return;
    this._isFlushed = true;
    this._flushes = this._utterance.flush();
    this._player.isWhole = false;
  }

  /** Somebody is typing: don't end yet. */
  expect() {
    this._typedAt = performance.now();
  }

  /** Silence, at once. `since`: when it was asked for, by performance.now(). */
  async stop(since = performance.now()) {
    const [turn, utterance] = [this.turn, this._utterance];
    if (!this.isSounding) return;
    const playedMs = (1000 * this._player.position) / RATE_HZ;
    this._utterance = null;
    this.isSounding = false;
    const silence = this._player.stop();
    if (utterance !== null) {
      utterance.cancel(playedMs);
      turn.state = "stopped";
      turn.heardSamples = (playedMs * RATE_HZ) / 1000;
    }
    this._changed("end");
    if (utterance === null) return;
    await silence;
    turn.marks.silent = performance.now() - since;
    this._changed("change");
    const answer = await utterance.finished.catch(() => null);
    if (answer?.t === "cancelled") {
      turn.marks.released = performance.now() - since;
      turn.heardUpto = answer.text_upto;
    }
    this._changed("change");
  }

  /** From what was kept, without the server. */
  replay(turn) {
    this.stop();
    this._show(turn, false);
    for (const samples of turn.floats()) this._player.push(samples);
    this._player.isWhole = true;
  }

  _show(turn, isNew) {
    this.turn = turn;
    this.isSounding = true;
    this._isFlushed = true;
    this._isEnding = false;
    this._isNew = isNew;
    this._utterance = null;
    this._player.begin();
    this._changed("turn");
    return turn;
  }

  _changed(type) {
    this.dispatchEvent(new Event(type));
  }

  _open(turn, utterance) {
    turn.mark("opened");
    turn.seed = utterance.settings.seed;
    this._changed("change");
  }

  _hear(turn, samples) {
    if (turn !== this.turn || turn.isOver) return;
    turn.state = "speaking";
    turn.take(samples);
    this._player.push(samples);
    this._changed("change");
  }

  _receive(turn, number) {
    if (turn !== this.turn || turn.isOver || number < this._flushes) return;
    this._flushed = number;
    turn.receiveAll();
    this._player.isWhole = true;
  }

  _follow({ buffered, underruns, isOver }) {
    if (!this.isSounding) return;
    if (this._isNew) this.turn.follow(buffered, underruns);
    this._changed("change");
    if (!isOver) return;
    if (this._utterance === null) this._silence();
    else if (this._isSaid && !this._isEnding) this._end();
  }

  _end() {
    this._isEnding = true;
    this._utterance.end();
  }

  /** Has the voice caught up with the text? */
  get _isSaid() {
    const isTyping = performance.now() - this._typedAt < TYPING_MS;
    return this._isFlushed && this._flushed === this._flushes && !isTyping;
  }

  _finish(turn, result) {
    if (turn !== this.turn || turn.isOver || result.t !== "done") return;
    turn.state = "whole";
    turn.mark("heard");
    this._silence();
  }

  _silence() {
    this._utterance = null;
    this.isSounding = false;
    this._changed("end");
  }

  /** What has come is still heard out. */
  _fail(error, turn = this.turn) {
    if (turn !== this.turn || turn === null || turn.isOver) return;
    turn.state = "failed";
    turn.error = error;
    this._utterance = null;
    this._player.isWhole = true;
    if (turn.samples === 0 || error.code === "no_audio") this._silence();
    else this._changed("change");
  }
}
