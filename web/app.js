// The page: text in, speech heard, with the figures of each utterance.
import { Player } from "./player.js";
import { RATE_HZ, Rill } from "./rill.js";

const element = (id) => document.getElementById(id);
const RETRY_MS = [250, 4000]; // first and longest wait before connecting again

const player = new Player();
let rill = null;
let current = null; // the utterance that is being made or played

// ---- connection

async function connect(waitMs = RETRY_MS[0]) {
  show("connecting", "connecting");
  try {
    rill = await Rill.connect();
  } catch {
    show("lost", "no server; trying again");
    setTimeout(connect, waitMs, Math.min(2 * waitMs, RETRY_MS[1]));
    return;
  }
  rill.onclose = () => {
    rill = null;
    show("lost", "connection lost; trying again");
    setTimeout(connect, RETRY_MS[0]);
  };
  rill.ongoaway = () => show("lost", "the server is restarting");
  await listVoices();
}

async function listVoices() {
  const voices = await rill.voices();
  if (voices.length === 0) {
    show("connecting", "the engine is starting");
    setTimeout(() => rill && listVoices(), 1000);
    return;
  }
  const chosen = element("voice").value;
  element("voice").replaceChildren(...voices.map(voiceOption));
  if (voices.some((voice) => voice.id === chosen)) element("voice").value = chosen;
  element("model").textContent = rill.ready.model;
  show("ready", "ready");
}

function voiceOption(voice) {
  return new Option(voice.lang ? `${voice.name} (${voice.lang})` : voice.name, voice.id);
}

function show(state, words) {
  element("status").dataset.state = state;
  element("status").textContent = words;
  element("speak").disabled = !["ready", "speaking"].includes(state);
  element("stop").disabled = current === null;
}

// ---- one utterance

async function speak() {
  const text = element("text").value;
  if (rill === null) return;
  stop();
  element("message").textContent = "";
  await player.start();
  const started = performance.now();
  const turn = { utterance: null, started, first: null, samples: 0, isDone: false };
  current = turn;
  clearFigures();
  show("speaking", "speaking");
  try {
    await run(turn, text);
  } catch (error) {
    if (current === turn) finish(turn, error);
  }
}

async function run(turn, text) {
  const seed = element("seed").value.trim();
  const utterance = await rill.open({ voice: element("voice").value, seed: seed === "" ? null : Number(seed) });
  turn.utterance = utterance;
  if (current !== turn) {
    utterance.cancel();
    return;
  }
  showSeed(utterance.settings.seed);
  utterance.onaudio = (samples) => hear(turn, samples);
  utterance.send(text);
  utterance.end();
  const result = await utterance.finished;
  turn.isDone = true;
  if (current !== turn) return;
  player.end();
  if (result.samples === 0) finish(turn, null, "There was nothing to say in that text.");
}

function hear(turn, samples) {
  if (current !== turn) return;
  const now = performance.now();
  turn.first ??= now;
  turn.samples += samples.length;
  const audioMs = (1000 * turn.samples) / RATE_HZ;
  setFigure("first", Math.round(turn.first - turn.started), "ms");
  setFigure("rtf", ((now - turn.started) / audioMs).toFixed(2));
  setFigure("length", (audioMs / 1000).toFixed(1), "s");
  player.push(samples);
}

function stop() {
  if (current === null) return;
  current.utterance?.cancel();
  player.stop();
  finish(current, null);
}

function finish(turn, error, words = "") {
  current = null;
  if (error) {
    player.stop();
    const hint = error.retry ? " Try again in a moment." : "";
    words = `${error.message}.${hint}`;
  }
  element("message").textContent = words;
  show(rill === null ? "lost" : "ready", rill === null ? "connection lost; trying again" : "ready");
}

player.onreport = ({ buffered, underruns, isOver }) => {
  if (current === null) return;
  setFigure("lead", (buffered / RATE_HZ).toFixed(1), "s");
  setFigure("underruns", underruns);
  if (isOver && current.isDone) finish(current, null);
};

// ---- figures

function setFigure(id, value, unit = "") {
  const parts = [String(value)];
  if (unit) parts.push(Object.assign(document.createElement("small"), { textContent: unit }));
  element(id).replaceChildren(...parts);
}

function clearFigures() {
  for (const id of ["first", "rtf", "lead", "underruns", "length"]) setFigure(id, "–");
}

function showSeed(seed) {
  element("used").textContent = seed;
  element("used").disabled = false;
}

function drawWave() {
  const canvas = element("wave");
  const pen = canvas.getContext("2d");
  const points = new Float32Array(2048);
  player.analyser?.getFloatTimeDomainData(points);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.lineWidth = 3;
  pen.beginPath();
  points.forEach((value, i) => pen.lineTo((i / points.length) * canvas.width, (0.5 - value * 0.48) * canvas.height));
  pen.stroke();
  requestAnimationFrame(drawWave);
}

// ---- keys and buttons

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  speak();
});
element("stop").addEventListener("click", stop);
element("used").addEventListener("click", () => (element("seed").value = element("used").textContent));
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    speak();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

drawWave();
connect();
