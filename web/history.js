// What was heard in this session, to be heard, said or saved again. Kept in memory alone.
import { nextSeed } from "./barge.js";
import { button, byId, make, milliseconds, seconds } from "./elements.js";
import { save } from "./wav.js";

const KEPT_S = 20 * 60; // of speech: some 60 MB

export class History {
  constructor(speaker, onagain) {
    this._speaker = speaker;
    this._onagain = onagain;
    this._items = new Map(); // by turn, the oldest first
  }

  /** A turn that is over, for the first time or again. */
  take(turn) {
    if (turn.samples === 0 || this._items.has(turn)) return;
    this._items.set(turn, this._item(turn));
    byId("history").prepend(this._items.get(turn));
    byId("nothing").hidden = true;
    while (this._items.size > 1 && this._seconds > KEPT_S) this._forgetOldest();
  }

  get _seconds() {
    return [...this._items.keys()].reduce((sum, turn) => sum + turn.seconds, 0);
  }

  _forgetOldest() {
    const [turn, item] = this._items.entries().next().value;
    item.remove();
    this._items.delete(turn);
  }

  _item(turn) {
    const { voiceName, voice } = turn.request;
    const first = turn.marks.first === undefined ? [] : [`first audio ${milliseconds(turn.marks.first)}`];
    const how = [
      voiceName,
      `seed ${turn.seed}`,
      seconds(turn.seconds),
      ...first,
      ...(turn.state === "whole" ? [] : [turn.state]),
    ];
    const name = `rill-${voice}-${turn.seed}.wav`.replace(/[^\w.-]/g, "_");
    const act = (words, title, onclick) =>
      button(words, onclick, { className: "plain", title, ariaLabel: `${words}: ${turn.text.slice(0, 40)}` });
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
