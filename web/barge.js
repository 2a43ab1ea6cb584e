// Talking over the voice: by a button, or by speaking, if the microphone is allowed. Then: again, or on from there.
import { byId, figure, milliseconds, notice, tell } from "./elements.js";
import { RATE_HZ } from "./rill.js";
import { Detector, Ear, whyDeaf } from "./ear.js";

export class Barge {
  /** onagain takes the parts and the seed of what is to be said now. */
  constructor(speaker, onagain) {
    this._speaker = speaker;
    this._ear = null;
    byId("barge").addEventListener("click", (event) => {
      speaker.stop(event.timeStamp);
      byId("same").focus();
    });
    byId("ear").addEventListener("change", (event) => (event.target.checked ? this._listen() : this._rest()));
    const again = (id, choose) =>
      byId(id).addEventListener("click", () => {
        onagain(speaker.turn, ...choose(speaker.turn));
        byId("barge").focus();
      });
    again("same", (turn) => [turn.seed]);
    again("next", (turn) => [nextSeed(turn.seed)]);
    again("rest", (turn) => [turn.seed, [unheard(turn)]]);
  }

  show() {
    const { turn, isSounding } = this._speaker;
    byId("barge").disabled = !isSounding;
    byId("again").hidden = isSounding || turn === null || turn.seed === null;
    byId("rest").hidden = turn === null || !unheard(turn).trim();
    figure(byId("stopped"), turn?.marks.silent?.toFixed(0), "ms");
    tell(byId("heard"), turn === null ? "" : account(turn));
  }

  async _listen() {
    const detector = new Detector();
    this._ear = new Ear((samples, rateHz) => {
      const at = performance.now();
      const hasBegun = detector.take(samples, rateHz);
      byId("level").firstElementChild.style.transform =
        `scaleX(${Math.min(1, detector.level / (2 * detector.threshold))})`;
      if (hasBegun) this._speaker.stop(at);
    });
    try {
      await this._ear.open();
      byId("level").hidden = false;
    } catch (error) {
      byId("ear").checked = false;
      this._rest();
      notice(byId("notice"), whyDeaf(error));
    }
  }

  _rest() {
    this._ear?.close();
    this._ear = null;
    byId("level").hidden = true;
  }
}

export const nextSeed = (seed) => (seed + 1) % Number.MAX_SAFE_INTEGER;

/** What of the text was cut off: from the first clause that was not heard whole. */
function unheard(turn) {
  return turn.heardUpto === null ? "" : Array.from(turn.text).slice(turn.heardUpto).join("");
}

function account(turn) {
  const { silent, released } = turn.marks;
  if (silent === undefined) return "";
  const server = released === undefined ? "" : `; the server had let go of it after ${milliseconds(released)}`;
  const heard = (turn.heardSamples / RATE_HZ).toFixed(2);
  return `Silent ${milliseconds(silent)} after you asked${server}. It was heard for ${heard} s.`;
}
