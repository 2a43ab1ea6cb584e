// A voice of one's own: a recording and its words go to the server, and a voice comes back.
import { button, byId, make, seconds } from "./elements.js";
import { Ear, whyDeaf } from "./ear.js";
import { integers, wav } from "./wav.js";
import { outlineOf, Wave } from "./wave.js";

const SHORTEST_S = 3; // what the server takes
const LONGEST_S = 30;
const FILE_HZ = 24000; // files of other rates and formats are converted by the browser
const KEPT = "rill-own-voices";
const READ_THIS =
  "I walk by the river every morning. The water is quiet there, and the path is easy to follow, even in the rain.";
const HELLO = "Hello. This is the voice that you have just given me.";

export class OwnVoice {
  /** hear takes a request for Speaker.speak; play takes samples and their rate. */
  constructor(connection, { hear, play }) {
    this._connection = connection;
    this._hear = hear;
    this._samples = null;
    this._rateHz = FILE_HZ;
    this._recording = null;
    this._wave = new Wave(byId("outline"));
    this._own = JSON.parse(localStorage.getItem(KEPT) ?? "[]"); // ids: a browser's, not an account's
    byId("record").addEventListener("click", () => (this._recording ? this._finish() : this._record()));
    byId("file").addEventListener("change", (event) => this._open(event.target.files[0]));
    byId("preview").addEventListener("click", () => play(this._samples, this._rateHz));
    byId("own").addEventListener("submit", (event) => {
      event.preventDefault();
      this._keep();
    });
    byId("words").addEventListener("input", () => this.show());
    this._takeDrops(byId("drop"));
  }

  /** The form and the list, as the connection and what has been given allow. */
  show() {
    byId("keep").disabled = this._samples === null || !byId("words").value.trim() || this._connection.state !== "ready";
    const listed = this._connection.voices.filter((voice) => this._own.includes(voice.id));
    byId("mine").replaceChildren(...listed.map((voice) => this._item(voice)));
  }

  _item(voice) {
    return make(
      "li",
      {},
      make("span", {}, voice.name),
      button("Hear it", () => this._speakWith(voice.id, voice.name), { className: "plain" }),
      button("Forget", () => this._drop(voice), { className: "plain" }),
    );
  }

  // ---- the recording

  async _record() {
    const taken = { parts: [], length: 0, rateHz: 0 };
    const ear = new Ear((samples, rateHz) => {
      taken.parts.push(samples);
      taken.length += samples.length;
      taken.rateHz = rateHz;
      byId("take").textContent = `${seconds(taken.length / rateHz)} of ${SHORTEST_S} to ${LONGEST_S} s`;
      if (taken.length >= LONGEST_S * rateHz) this._finish();
    });
    this._recording = { ear, taken };
    byId("words").value ||= READ_THIS;
    this._say("Read the words below aloud.");
    try {
      await ear.open({ isRaw: true });
      byId("record").textContent = "Finish";
      byId("record").classList.add("recording");
    } catch (error) {
      this._finish();
      this._say(whyDeaf(error), true);
    }
  }

  _finish() {
    const { ear, taken } = this._recording;
    this._recording = null;
    ear.close();
    byId("record").textContent = "Record";
    byId("record").classList.remove("recording");
    if (taken.length) this._take(joined(taken), taken.rateHz);
  }

  async _open(file) {
    if (!file) return;
    this._say("");
    try {
      const decoder = new OfflineAudioContext(1, 1, FILE_HZ);
      const audio = await decoder.decodeAudioData(await file.arrayBuffer());
      this._take(mono(audio), FILE_HZ);
      byId("name").value ||= file.name.replace(/\.[^.]*$/, "").slice(0, 40);
    } catch {
      this._say(`${file.name} can't be read as audio. WAV, MP3, FLAC, Ogg and M4A files can.`, true);
    }
    byId("file").value = "";
  }

  _takeDrops(area) {
    for (const type of ["dragenter", "dragover", "dragleave", "drop"])
      area.addEventListener(type, (event) => {
        event.preventDefault();
        area.classList.toggle("over", type === "dragenter" || type === "dragover");
        if (type === "drop") this._open(event.dataTransfer.files[0]);
      });
  }

  _take(samples, rateHz) {
    const length = samples.length / rateHz;
    const wrong = this._whyNot(samples, length);
    this._samples = wrong ? null : samples;
    this._rateHz = rateHz;
    byId("take").textContent = wrong ? `${seconds(length)}: can't be used` : `${seconds(length)} of recording`;
    byId("preview").hidden = byId("outline").hidden = Boolean(wrong);
    if (!wrong) this._wave.draw({ outline: outlineOf(samples) }, 0, false);
    this._say(wrong, true);
    this.show();
  }

  _whyNot(samples, length) {
    if (length < SHORTEST_S) return `That is ${seconds(length)}; a voice takes at least ${SHORTEST_S}.`;
    if (length > LONGEST_S) return `That is ${seconds(length)}; a voice takes at most ${LONGEST_S}. Cut it shorter.`;
    if (outlineOf(samples, 1)[0] < 0.01) return "Nothing can be heard in that recording.";
    return "";
  }

  // ---- the voice

  async _keep() {
    const name = byId("name").value.trim() || "Mine";
    byId("keep").disabled = true;
    this._say("Making the voice…");
    try {
      const file = wav([integers(this._samples)], this._rateHz);
      const kept = await this._connection.rill.putVoice(file, byId("words").value.trim(), { name });
      this._own = [...new Set([...this._own, kept.voice])];
      await this._remember();
      byId("voice").value = kept.voice;
      this._say(`${kept.name} can speak now.`);
    } catch (error) {
      this._say(this._plainly(error), true);
    }
    this.show();
  }

  async _drop(voice) {
    try {
      await this._connection.rill.dropVoice(voice.id);
      this._own = this._own.filter((id) => id !== voice.id);
      await this._remember();
      this._say(`${voice.name} is forgotten.`);
    } catch (error) {
      this._say(this._plainly(error), true);
    }
  }

  async _remember() {
    localStorage.setItem(KEPT, JSON.stringify(this._own));
    await this._connection.listVoices();
  }

  _speakWith(voice, voiceName) {
    this._hear({ voice, voiceName, seed: null, lang: "", instruct: "", parts: [HELLO] });
  }

  _say(words, isBad = false) {
    byId("said").textContent = words;
    byId("said").classList.toggle("bad", isBad);
  }

  _plainly(error) {
    if (error.code === "unsupported") return "This server takes no voices from its callers.";
    if (error.code === "disconnected") return "The connection was lost. The recording is still here; try again.";
    return `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
  }
}

function mono(audio) {
  const channels = Array.from({ length: audio.numberOfChannels }, (_, i) => audio.getChannelData(i));
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}

function joined({ parts, length }) {
  const whole = new Float32Array(length);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
