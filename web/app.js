// The page: its parts, and what passes between them.
import { Barge } from "./barge.js";
import { Composer, showError } from "./composer.js";
import { Connection } from "./connection.js";
import { button, byId, figure, make, notice, tell } from "./elements.js";
import { History } from "./history.js";
import { Load } from "./load.js";
import { OwnVoice } from "./own-voice.js";
import { Player } from "./player.js";
import { Speaker } from "./speaker.js";
import { Timeline } from "./timeline.js";
import { Wave } from "./wave.js";

const SHOW_MS = 60;
const UNSTEERED = "embedded"; // the model that follows no instructions and speaks one language

const connection = new Connection();
const player = new Player();
const speaker = new Speaker(connection, player);
const composer = new Composer(speaker, speak);
const barge = new Barge(speaker, again);
const history = new History(speaker, again);
const load = new Load(connection);
const ownVoice = new OwnVoice(connection, {
  hear: speak,
  play: (samples, rateHz) => {
    speaker.stop();
    player.play(samples, rateHz);
  },
});
const wave = new Wave(byId("wave"));
const timeline = new Timeline(byId("chart"), byId("events"));

function speak(request) {
  notice(byId("notice"));
  speaker.speak(request);
}

/** The same words with this seed, or other words in the same manner. */
function again(turn, seed, parts = turn.parts) {
  speak({ ...turn.request, seed, parts });
}

// ---- an utterance

speaker.addEventListener("turn", () => {
  requestAnimationFrame(draw);
  showTurn();
});
speaker.addEventListener("change", showSoon);
speaker.addEventListener("end", () => {
  const { turn } = speaker;
  showTurn();
  history.take(turn);
  if (turn.state === "whole" && turn.samples === 0) notice(byId("notice"), "There was nothing to say in that text.");
});

let isDue = false;

/** Not for each of many small messages. */
function showSoon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => {
    isDue = false;
    showTurn();
  }, SHOW_MS);
}

function showTurn() {
  const { turn } = speaker;
  showFigures(turn);
  timeline.show(turn);
  barge.show();
  composer.show();
  showState();
  if (turn.state === "failed" && byId("notice").hidden) showError(turn, () => again(turn, turn.seed));
}

function showFigures(turn) {
  const set = (id, value, unit, digits) => figure(byId(id), value?.toFixed(digits), unit);
  set("first", turn.marks.first, "ms", 0);
  set("factor", turn.realTime, "", 2);
  set("lead", turn.leads.at(-1)?.[1], "s", 1);
  set("length", turn.seconds || null, "s", 1);
  set("underruns", turn.marks.first === undefined ? null : turn.underruns.length, "", 0);
  byId("seed").placeholder = turn.seed ?? "drawn";
}

const isStill = matchMedia("(prefers-reduced-motion: reduce)");

function draw() {
  wave.draw(speaker.turn, speaker.position, speaker.isSounding);
  if (!speaker.isSounding) return;
  if (isStill.matches) setTimeout(draw, 250);
  else requestAnimationFrame(draw);
}

// ---- the connection

connection.addEventListener("change", () => {
  listVoices(connection.voices);
  document.body.classList.toggle("unsteered", (connection.rill?.ready.model ?? UNSTEERED) === UNSTEERED);
  showState();
  showLoss();
  ownVoice.show();
  load.show();
});

function listVoices(voices) {
  const select = byId("voice");
  const chosen = select.value;
  const asOption = ({ id, name, lang }) => new Option(lang ? `${name} (${lang})` : name, id);
  if (voices.length) select.replaceChildren(...voices.map(asOption));
  if (voices.some(({ id }) => id === chosen)) select.value = chosen;
}

const STATES = {
  connecting: "Connecting",
  starting: "The engine is starting",
  ready: "Ready",
  leaving: "The server is being restarted",
  lost: "No connection",
  locked: "A key is needed",
};

function showState() {
  const { turn, isSounding } = speaker;
  const isReady = connection.state === "ready";
  const state = isReady && isSounding ? "speaking" : connection.state;
  const words = !isSounding ? STATES[connection.state] : turn.samples ? "Speaking" : "Waiting for the first word";
  byId("status").dataset.state = state;
  tell(byId("status"), words);
  byId("speak").disabled = !isReady;
  byId("stop").disabled = !isSounding;
}

function showLoss() {
  if (connection.state === "lost") {
    const words = "The server can't be reached; trying again until it is. Nothing you have written is lost.";
    notice(
      byId("lost"),
      words,
      button("Try now", () => connection.connect()),
    );
  } else if (connection.state === "locked") askForKey();
  else if (connection.state !== "connecting") notice(byId("lost"));
}

function askForKey() {
  const field = make("input", { type: "password", autocomplete: "off", ariaLabel: "Key" });
  const words = connection.isKeyRefused
    ? "That key is not known here. Another one?"
    : "This server asks its callers for a key.";
  notice(
    byId("lost"),
    words,
    field,
    button("Connect", () => connection.unlock(field.value)),
  );
  field.focus();
}

// ---- keys

byId("stop").addEventListener("click", (event) => {
  speaker.stop(event.timeStamp);
  byId("speak").focus(); // a disabled button would keep it
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") speaker.stop(event.timeStamp);
});

document.body.classList.add("unsteered");
wave.draw(null, 0, false);
connection.connect();
