// The text and how to say it. While it is said, what is typed behind it goes to the same utterance, word by word.
import { byId, button, make, notice } from "./elements.js";

const PAUSE_MS = 1000; // without a key: what has been typed is meant
const KEPT = "rill-text"; // the text survives a reload, too

const EXAMPLES = {
  "A river": "The river is low in summer, and the stones along its bed are warm. Listen: it still talks all night.",
  "On the phone":
    "Good morning, this is the clinic. Your visit is on Thursday at nine. Would you like to keep that time?",
  Directions:
    "Walk down to the old bridge, cross the water, and turn left at the mill. The house with the green door is ours.",
  "A story":
    "The lamp went out, and the whole house was still. Then, from the far end of the hall, somebody began to sing. " +
    "It was an old song about the sea, and the boy knew every word of it. He sat on the stairs and sang along, " +
    "very softly, until the light came back.",
};

export class Composer {
  /** onspeak takes a request for Speaker.speak. */
  constructor(speaker, onspeak) {
    this._speaker = speaker;
    this._onspeak = onspeak;
    this._text = byId("text");
    this._timer = null;
    this._behind = null; // what is shown behind the text
    this._text.value = localStorage.getItem(KEPT) ?? EXAMPLES["A river"];
    byId("examples").append(...Object.entries(EXAMPLES).map(([name, text]) => this._example(name, text)));
    this._text.addEventListener("input", (event) => this._change(event));
    this._text.addEventListener("keydown", (event) => this._press(event));
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._enter();
    });
    this.show();
  }

  _example(name, text) {
    const choose = () => {
      this._text.focus();
      this._text.select();
      document.execCommand("insertText", false, text); // the one way that leaves the browser's undo as it was
    };
    return button(name, choose, { className: "plain" });
  }

  /** What the form asks for. */
  request() {
    const voice = byId("voice");
    const seed = byId("seed").value.trim();
    const isSteered = !document.body.classList.contains("unsteered");
    return {
      voice: voice.value,
      voiceName: voice.selectedOptions[0]?.textContent ?? "",
      seed: seed === "" ? null : Number(seed),
      lang: isSteered ? byId("lang").value.trim() : "",
      instruct: isSteered ? byId("instruct").value.trim() : "",
      parts: [this._text.value],
    };
  }

  /** Behind the text: what is with the server, and what of it was never heard. */
  show() {
    const turn = this._speaker.turn;
    const text = this._text.value;
    const isItsText = turn !== null && text.startsWith(turn.text);
    const behind = JSON.stringify([text, isItsText && [turn.text.length, this._speaker.isOpen, turn.heardUpto]]);
    if (behind === this._behind) return;
    this._behind = behind;
    const mark = (from, upto, className) => make("mark", { className }, text.slice(from, upto));
    let marks = [];
    if (isItsText && this._speaker.isOpen) marks = [mark(0, turn.text.length, "")];
    else if (isItsText && turn.heardUpto !== null) {
      const heard = Array.from(turn.text).slice(0, turn.heardUpto).join("").length;
      marks = [mark(0, heard, ""), mark(heard, turn.text.length, "unheard")];
    }
    const rest = text.slice(marks.length ? turn.text.length : 0);
    byId("mirror").replaceChildren(...marks, `${rest}\u200b`); // an empty last line has a height, too
  }

  // ---- keys

  _press(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this._enter();
  }

  /** Enter and the button: more of what is being said, or from the start. */
  _enter() {
    if (this._rest || (this._rest !== null && this._speaker.hasUnsaid)) this._send(this._rest);
    else if (!byId("speak").disabled) this._onspeak(this.request());
  }

  _change(event) {
    localStorage.setItem(KEPT, this._text.value);
    clearTimeout(this._timer);
    if (this._rest && !event.isComposing) {
      this._speaker.expect();
      const words = this._rest.match(/^[^]*\s/)?.[0];
      if (words) this._speaker.append(words);
      this._timer = setTimeout(() => this._rest !== null && this._send(this._rest), PAUSE_MS);
    }
    this.show();
  }

  /** What stands behind the text that is being said; null when nothing can be added to it. */
  get _rest() {
    const { turn, isOpen } = this._speaker;
    const isAdded = isOpen && this._text.value.startsWith(turn.text);
    return isAdded ? this._text.value.slice(turn.text.length) : null;
  }

  _send(words) {
    clearTimeout(this._timer);
    if (words) this._speaker.append(words);
    this._speaker.flush();
    this.show();
  }
}

/** What went wrong with an utterance, in plain words. */
export function plainly(error) {
  const known = {
    disconnected: "The connection was lost. Your text is still here.",
    engine_restart: "The speech engine is being restarted. Your text is still here.",
    draining: "The server is being restarted. Your text is still here.",
    overloaded: "The server is busy with other speakers. Try again in a moment.",
    queue_timeout: "The server is busy with other speakers. Try again in a moment.",
    context_limit: "Too many utterances are open at once. Stop one of them.",
    quota: "This key has had its share for now. Try again in a minute.",
    unknown_voice: "This server doesn't know that voice any more.",
    text_too_long: "That is more text than the server takes at once. Speak it in parts.",
    no_audio: "This browser gives no sound here. It plays over https, or from a server on the same machine.",
  };
  return known[error.code] ?? `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
}

export function showError(turn, again) {
  const heard = turn.samples ? ` ${turn.seconds.toFixed(1)} seconds of it had come.` : "";
  notice(byId("notice"), plainly(turn.error) + heard, button("Speak it again", again));
}
