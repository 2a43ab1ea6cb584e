"""Make the whole voice in one go on one GPU: data, both encoders, and the three models side by side.

    python -m engine.training.run --minutes 22 --data /tmp/data                     starts a daemon and returns
    python -m engine.training.run --watch 500 --data /tmp/data --out $OUT           waits, prints a table, copies files

A job starts when the files it needs are there, and once more if it fails. All of them end by one absolute deadline.
"""

import argparse
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.training.data import Shards
from engine.training.kokoro import FIRST_SHARD, UNPACKED
from engine.training.pace import logger

MODELS = ("llm.safetensors", "flow.safetensors", "hift.safetensors", "judges.safetensors")
ARTEFACTS = (*MODELS, "speech_tokenizer_v3.onnx", "campplus.onnx")
FILE_LIMIT = 15_500_000
GRACE_S = 25.0
LOG_GPU_S = 30.0
READY_SHARDS, READY_PACKS = 48, 10
"""Of hibari and of Kokoro, about seven hours and half an hour."""
TRIES = 2


@dataclass
class Job:
    """One process: what it runs, when it may start, and how it went."""

    name: str
    command: list[str]
    is_ready: Callable[[], bool]
    tries: int = 0
    process: subprocess.Popen[bytes] | None = None
    result: int | None = None
    quiet: int = 0  # niceness
    environment: dict[str, str] = field(default_factory=dict)
    product: Path | None = None  # there already: nothing to do; there after a failure: not worth another try
    begun: float = 0.0  # share of its schedule that an earlier run went through

    @property
    def is_scheduled(self) -> bool:
        return self.name.startswith("train_")

    @property
    def is_over(self) -> bool:
        is_made = self.product is not None and self.product.exists()
        if self.result is None:
            return is_made and self.tries == 0
        return self.result == 0 or self.tries >= TRIES or is_made

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def start(self, log: logging.Logger, folder: Path) -> None:
        self.tries += 1
        if "--deadline" in self.command and "--start" not in self.command and self.is_scheduled:
            now, deadline = time.time(), float(self.command[self.command.index("--deadline") + 1])
            start = now - self.begun / (1 - self.begun) * (deadline - now)
            self.command += ["--start", f"{start:.1f}"]  # a restart goes on with the schedule of the first try
        out = (folder / f"{self.name}.out").open("ab")
        self.process = subprocess.Popen(
            ["nice", "-n", str(self.quiet), *self.command], stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}, start_new_session=True,
        )  # fmt: skip
        out.close()
        log.info("start %s (try %d, pid %d)", self.name, self.tries, self.process.pid)

    def poll(self, log: logging.Logger) -> None:
        if self.process is None or (status := self.process.poll()) is None:
            return
        log.info("%s ended with %d", self.name, status)
        self.process, self.result = None, status

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where, on what, from when to when; all times in seconds since the epoch."""

    data: Path
    device: str
    is_toy: bool
    start: float
    deadline: float
    workers: int
    hibari: Path
    corpus: Path
    hours: float
    tokenizer_s: float
    begun: float
    is_seeded: bool = False  # earlier weights come to out/ a little later: no training begins without them
    packs: Path | None = None
    prepare_s: float = 0.0
    hift_s: float | None = None
    skipped: frozenset[str] = frozenset()

    @property
    def minutes(self) -> float:
        return (self.deadline - self.start) / 60

    @property
    def ready(self) -> Path:
        """The file that says that the flow and the talker have data."""
        return self.data / "ready"

    def has_seed(self, name: str) -> bool:
        return not self.is_seeded or (self.data / "out" / f"{name}.safetensors").exists()

    def stage(self, module: str, *more: str, seconds: float | None = None) -> list[str]:
        deadline = self.deadline if seconds is None else min(self.deadline, self.start + seconds)
        command = [sys.executable, "-m", f"engine.training.{module}", "--data", str(self.data), "--device", self.device]
        return [*command, "--deadline", f"{deadline:.1f}", *more, *(["--toy"] if self.is_toy else [])]

    def waiting_stage(self, module: str) -> list[str]:
        """A stage that compiles while its data are made; its schedule begins when they should be there."""
        first = self.start + self.prepare_s
        start = first - self.begun / (1 - self.begun) * (self.deadline - first)
        return self.stage(module, "--await", str(self.ready), "--start", f"{start:.1f}")


def jobs_of(plan: Plan) -> list[Job]:
    """All jobs in the order they are looked at.

    The GPU is shared: the vocoder has it alone at first, then with the two encoders, then with the flow and the talker.
    """
    data = plan.data
    encoder_s = 20.0 if plan.is_toy else plan.tokenizer_s
    python = [sys.executable, "-m"]
    where = ["--data", str(data), "--device", plan.device]
    few = ["--toy"] if plan.is_toy else []

    def num_shards(least: int) -> bool:
        return len(list(data.glob("shard-[0-4]*.npz"))) >= (1 if plan.is_toy else least)  # of hibari

    def has_speech(least: int) -> bool:
        return is_unpacked(plan) and num_shards(least)

    packs = plan.packs or Path("packs")
    text_tokenizer = data / "CosyVoice-BlankEN" / "tokenizer_config.json"
    corpus = ["--corpus", str(plan.corpus)]
    kept = ["--vectors"] if (data / "campplus.onnx").exists() else []
    one_thread, two_threads = ({"OMP_NUM_THREADS": str(count)} for count in (1, 2))
    jobs = [
        Job("teacher", [*python, "engine.training.teacher", "--hibari", str(plan.hibari), *corpus, "--data", str(data),
                        "--workers", str(plan.workers), "--hours", str(plan.hours)],
            lambda: True, quiet=10, environment=one_thread, product=data / "shard-00000.npz"),
        Job("bpe", [*python, "engine.training.tokenizer", *corpus, "--out", str(data / "CosyVoice-BlankEN")],
            lambda: True, product=data / "CosyVoice-BlankEN" / "vocab.json"),
        Job("unpack", [*python, "engine.training.kokoro", "unpack", "--packs", str(packs), "--data", str(data),
                       "--processes", str(max(1, plan.workers // 2))],
            lambda: any(packs.glob("pack-*.npz")), environment=one_thread, product=data / UNPACKED),
        Job("kokoro", [*python, "engine.training.kokoro", "read", "--kokoro", str(packs), "--hibari", str(plan.hibari),
                       *corpus, "--out", str(data), "--processes", str(max(1, plan.workers * 5 // 6)),
                       "--leave", "62000", "--first", "10000",
                       "--until", f"{plan.start + 0.6 * (plan.deadline - plan.start):.0f}"],
            (packs / "model").exists, quiet=15, environment=one_thread,
            product=data / f"shard-{FIRST_SHARD + 10_000}.npz"),
        Job("train_hift", plan.stage("train_hift", seconds=plan.hift_s),
            lambda: num_shards(6) and plan.has_seed("hift"),
            begun=plan.begun, environment=two_threads),
        Job("speech_tokenizer", [*python, "engine.training.speech_tokenizer", "train", *where,
                                 "--budget", str(encoder_s), *few],
            lambda: has_speech(24), product=data / "speech_tokenizer.pt"),
        Job("speaker_encoder", [*python, "engine.training.speaker_encoder", *where,
                                "--budget", str(min(0.7 * encoder_s, 90.0)), *few, *kept],
            lambda: has_speech(24), product=data / "speakers.npz"),
        Job("tokenise", [*python, "engine.training.speech_tokenizer", "tokenise", *where, "--follow", "--idle", "240"],
            (data / "speech_tokenizer.pt").exists),
        Job("train_flow", plan.waiting_stage("train_flow"), lambda: True, environment=two_threads),
        Job("train_talker", plan.waiting_stage("train_talker"), text_tokenizer.exists, environment=two_threads),
    ]  # fmt: skip
    absent = plan.skipped | (frozenset() if plan.packs else {"unpack", "kokoro"})
    return [job for job in jobs if job.name not in absent]


def is_unpacked(plan: Plan) -> bool:
    return plan.packs is None or (plan.data / UNPACKED).exists()


def may_train(plan: Plan) -> bool:
    """Whether the flow and the talker have what they need: earlier weights, speakers, some tokens of both teachers."""
    numbers = [int(path.stem.removeprefix("tokens-")) for path in plan.data.glob("tokens-*.npz")]
    num_kokoro = sum(number >= FIRST_SHARD for number in numbers)
    made = [plan.data / name for name in ("speech_tokenizer_v3.onnx", "speakers.npz")]
    is_some = len(numbers) - num_kokoro >= (1 if plan.is_toy else READY_SHARDS)
    is_mixed = plan.packs is None or num_kokoro >= (1 if plan.is_toy else READY_PACKS)
    is_ready = plan.has_seed("flow") and plan.has_seed("llm") and all(path.exists() for path in made)
    return is_some and is_mixed and is_ready


def supervise(plan: Plan) -> None:
    """Start, restart and stop the jobs until all are over or the deadline has passed."""
    log = logger("run", plan.data)
    folder = plan.data / "log"
    (plan.data / "out").mkdir(parents=True, exist_ok=True)
    plan.ready.unlink(missing_ok=True)
    jobs = jobs_of(plan)
    log.info("plan of %.1f minutes, %d workers, %s", plan.minutes, plan.workers, plan.device)
    logged = time.time()
    while time.time() < plan.deadline + GRACE_S and not all(job.is_over for job in jobs):
        for job in jobs:
            job.poll(log)
            if not job.is_running and not job.is_over and time.time() < plan.deadline - 5 and job.is_ready():
                job.start(log, folder)
        if not plan.ready.exists() and may_train(plan):
            plan.ready.touch()
        write_status(folder, plan, jobs)
        if time.time() > logged + LOG_GPU_S:
            logged = time.time()
            log.info("%s; load %.1f; %s", gpu_line(), os.getloadavg()[0], hours_line(plan.data))
        time.sleep(0.5)
        if time.time() > plan.deadline and not any(job.is_running and job.is_scheduled for job in jobs):
            break
    for job in jobs:
        job.stop()
    write_status(folder, plan, jobs)
    (folder / "done").write_text("done\n")
    log.info("over")


def write_status(folder: Path, plan: Plan, jobs: list[Job]) -> None:
    rows = {job.name: {"tries": job.tries, "running": job.is_running, "result": job.result} for job in jobs}
    part = folder / "status.part"
    part.write_text(json.dumps({"start": plan.start, "deadline": plan.deadline, "jobs": rows}))
    part.replace(folder / "status.json")


# --- watching --------------------------------------------------------------------------------------------------------


def watch(data: Path, out: Path | None, seconds: float, *, with_tokens: bool) -> None:
    """Wait, print a compact table, and leave the artefacts in `out`."""
    until = time.time() + seconds
    while time.time() < until and not (data / "log" / "done").exists():
        time.sleep(1.0)
    print_table(data)
    if out is not None:
        copy_artefacts(data, out, with_tokens=with_tokens)


def print_table(data: Path) -> None:
    if not (data / "log" / "status.json").exists():
        print("not started yet", *tail(data / "log" / "daemon.out", 15), sep="\n")
        return
    status = json.loads((data / "log" / "status.json").read_text())
    now = time.time()
    print(f"t = {now - status['start']:.0f} s of {status['deadline'] - status['start']:.0f}; {hours_line(data)}")
    for name, row in status["jobs"].items():
        state = "running" if row["running"] else f"result {row['result']}"
        print(f"== {name}: {state}, tries {row['tries']}")
        for source in (f"{name}.log", f"{name}.out"):
            lines = tail(data / "log" / source, 3)
            if lines:
                print("\n".join(f"   {line[:220]}" for line in lines))
                break
        if row["result"] not in (None, 0):
            print("\n".join(f" ! {line[:220]}" for line in tail(data / "log" / f"{name}.out", 15)))
    print(gpu_line())


def tail(path: Path, count: int) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(errors="replace").splitlines()[-count:]


def hours_line(data: Path) -> str:
    num_shards = len(list(data.glob("shard-*.npz")))
    num_tokens = len(list(data.glob("tokens-*.npz")))
    return f"{num_shards} shards, {num_tokens} tokenised"


def gpu_line() -> str:
    if not shutil.which("nvidia-smi"):
        return "no GPU tool here"
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader"]
    return "gpu: " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def copy_artefacts(data: Path, out: Path, *, with_tokens: bool) -> None:
    """At most 8 files under 16 MiB: models, encoders, one archive of the small things, and the tokens if asked."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ARTEFACTS:
        for folder in (data / "out", data):
            if (folder / name).exists():
                shutil.copy(folder / name, out / name)
    with tarfile.open(out / "rest.tar.gz", "w:gz") as archive:
        for name in ("CosyVoice-BlankEN", "prompts", "speakers.npz", "log"):
            if (data / name).exists():
                archive.add(data / name, arcname=name)
        for path in sorted((data / "out").glob("*")):
            if path.name not in ARTEFACTS and path.is_file() and path.suffix != ".part":
                archive.add(path, arcname=f"out/{path.name}")
        held = pack_held_out(data)
        entry = tarfile.TarInfo("held_out.npz")
        entry.size = len(held)
        archive.addfile(entry, io.BytesIO(held))
    if with_tokens:
        (out / "tokens.npz").write_bytes(pack_tokens(data))
    for path in sorted(out.iterdir()):
        print(f"   {path.name} {path.stat().st_size / 2**20:.2f} MiB")


def pack_held_out(data: Path, limit: int = 30) -> bytes:
    """Some held-out utterances with waves and tokens, for copy synthesis elsewhere."""
    shards = Shards(data)
    chosen = [i for i in shards.held_out if shards.is_tokenised(i)][:limit]
    return packed({
        f"{kind}-{position}": value
        for position, said in enumerate(shards.utterances(chosen))
        for kind, value in (
            ("wave", np.array(said.wave)),
            ("tokens", np.array(said.tokens)),
            ("text", np.frombuffer(said.text.encode(), np.uint8)),
            ("speaker", np.array(said.speaker)),
        )
    })  # fmt: skip


def pack_tokens(data: Path) -> bytes:
    """Text, speaker and tokens of as many utterances as fit the file limit: enough to train a talker elsewhere."""
    shards = Shards(data)
    chosen = [i for i in range(len(shards)) if shards.is_tokenised(i)]
    for share in (1.0, 0.85, 0.7, 0.5, 0.3):
        said = list(shards.utterances(chosen[: int(len(chosen) * share)]))
        if not said:
            return packed({})
        content = packed({
            "ids": np.concatenate([u.tokens for u in said if u.tokens is not None]),
            "offsets": np.cumsum([0, *(len(u.tokens) for u in said if u.tokens is not None)]),
            "speaker": np.array([u.speaker for u in said], np.int16),
            "text": np.frombuffer("\n".join(u.text for u in said).encode(), np.uint8),
        })  # fmt: skip
        if len(content) <= FILE_LIMIT:
            return content
    return packed({})


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    held = io.BytesIO()
    np.savez_compressed(held, **arrays)
    return held.getvalue()


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.training.run", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=22.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--hibari", type=Path, default=Path(".carry/hibari"), help="the unpacked teacher package")
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus.txt.xz"))
    parser.add_argument("--hours", type=float, default=100.0, help="speech to make, at most")
    parser.add_argument("--tokenizer-s", type=float, default=240.0, help="training time of the speech tokenizer")
    parser.add_argument("--begun", type=float, default=0.0, help="share of the schedule that out/ went through")
    parser.add_argument("--seeded", action="store_true", help="let no training begin before its weights are in out/")
    parser.add_argument("--packs", type=Path, help="Kokoro's, until a file `complete`; its model, with a file `model`")
    parser.add_argument("--prepare-s", type=float, default=0.0, help="when the flow and the talker should have data")
    parser.add_argument("--hift-s", type=float, help="when the vocoder ends, seconds from the start")
    parser.add_argument("--skip", action="append", default=[], metavar="JOB", help="leave a job out, say train_hift")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--foreground", action="store_true", help="do not become a daemon")
    parser.add_argument("--watch", type=float, help="wait this many seconds, report, copy")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", action="store_true", help="with --watch: copy text and tokens too")
    given = parser.parse_args(arguments)
    given.data.mkdir(parents=True, exist_ok=True)
    if given.watch is not None:
        watch(given.data, given.out, given.watch, with_tokens=given.tokens)
        return
    if not given.foreground:
        detach(given.data)
        return
    now = time.time()
    supervise(Plan(
        data=given.data, device=given.device, is_toy=given.toy, start=now, deadline=now + 60 * given.minutes,
        workers=given.workers, hibari=given.hibari, corpus=given.corpus, hours=given.hours,
        tokenizer_s=given.tokenizer_s, begun=given.begun, is_seeded=given.seeded, packs=given.packs,
        prepare_s=given.prepare_s, hift_s=given.hift_s, skipped=frozenset(given.skip),
    ))  # fmt: skip


def detach(data: Path) -> None:
    """Start this command again in a session of its own, and leave."""
    folder = data / "log"
    folder.mkdir(exist_ok=True)
    (folder / "done").unlink(missing_ok=True)
    with (folder / "daemon.out").open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "engine.training.run", *sys.argv[1:], "--foreground"],
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    print(f"training started, pid {child.pid}, logs in {folder}")


if __name__ == "__main__":
    main()
