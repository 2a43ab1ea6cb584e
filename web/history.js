// What was heard in this session, to be heard, said or saved again. Kept in memory alone.
import { nextSeed } from "./barge.js";
import { button, byId, make, milliseconds, seconds } from "./elements.js";
import { save } from "./wav.js";

const KEPT_S = 20 * 60; // of speech: some 60 MB

export class History {
  constructor(speaker, onagain) {
    this._speaker = speaker;
    this._onagain = onagain;
    this._turns = [];
    this._items = new Map();
  }

  /** A new turn, or one that has changed. */
  take(turn) {
    if (turn.samples === 0) return;
    const item = this._item(turn);
    if (this._items.has(turn)) this._items.get(turn).replaceWith(item);
    else {
      byId("history").prepend(item);
      this._turns.push(turn);
    }
    this._items.set(turn, item);
    byId("nothing").hidden = true;
    while (this._turns.length > 1 && this._turns.reduce((sum, one) => sum + one.seconds, 0) > KEPT_S) this._forget(this._turns.shift());
  }

  _forget(turn) {
    this._items.get(turn).remove();
    this._items.delete(turn);
  }

  _item(turn) {
    const { voiceName, voice } = turn.request;
    const first = turn.marks.first === undefined ? [] : [`first audio ${milliseconds(turn.marks.first)}`];
    const how = [voiceName, `seed ${turn.seed}`, seconds(turn.seconds), ...first, ...(turn.state === "whole" ? [] : [turn.state])];
    const name = `rill-${voice}-${turn.seed}.wav`.replace(/[^\w.-]/g, "_");
    const act = (words, title, onclick) => button(words, onclick, { className: "plain", title });
    return make(
      "li",
      {},
      make("p", { className: "what" }, turn.text),
      make("p", { className: "how" }, how.join(" · ")),
      make(
        "div",
        { className: "do" },
        act("Play", "Hear what was kept", () => this._speaker.replay(turn)),
        act("Same seed", "Say it again, the same to the sample", () => this._onagain(turn, turn.seed)),
        act("Next seed", "Say it again, otherwise", () => this._onagain(turn, nextSeed(turn.seed))),
        act("Save", "As a WAV file", () => save(turn.file(), name)),
      ),
    );
  }
}
