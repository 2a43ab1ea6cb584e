"""Train the talker on text and speech tokens.

Each sample is what serving feeds: `sos, prompt text, text, task, prompt speech`, then the speech to predict and `eos`.
Most samples carry another utterance of the same speaker as their prompt; some carry the very prompt of a shipped voice;
the rest have only the instruction prefix. Half of the samples that have three ids of speech for one of text are woven
as a stream of text is served: `sos, prefix`, then 5 ids of text and 15 of speech in turn, each fifteenth followed by
the target `fill`, which is never fed; the rest of the text, `task` and the rest of the speech end it.

B rows, L positions, M speech positions that count.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from engine.talker import Talker, TalkerShape
from engine.training import text_ids
from engine.training.data import FIRST_HELD_OUT, Shards
from engine.training.pace import (
    SAVE_EVERY_S,
    Ema,
    Stage,
    Ticker,
    decayed,
    fuse_layers,
    optimiser,
    resume,
    run_stage,
    save_half,
    set_rate,
    stage_from_arguments,
)
from engine.training.resident import EDGES

SMOOTHING = 0.03
CORRUPTED = 0.12
DROPOUT = 0.1
SEGMENTS = 7
PROMPT_TEXT, TEXT, TASK, PROMPT_SPEECH, SPEECH = 2, 3, 4, 5, 6
TEXT_BLOCK, SPEECH_BLOCK = 5, 15
WOVEN, SPELLED = 0.5, 0.15
SHARES = (0.58, 0.17, 0.25)
"""Of the targets, for hibari's voices, Kokoro's that ship, and all others."""
FEW = 64
"""Batches of an epoch from which on those that are less than a quarter full are left out."""
VARIANTS = 5  # of each text: whole, three times broken, a word as phonemes
LENGTHS = (96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
PAIRED, FIXED = 0.5, 0.3
"""Shares: a random prompt of the same speaker; the prompt that is served; else no speech prompt."""


def shape_of(vocabulary: int) -> TalkerShape:
    """Size M of the study."""
    return TalkerShape(hidden=256, intermediate=768, layers=6, heads=4, kv_heads=2, head_dim=64, text_vocab=vocabulary)


def initialise(talker: Talker) -> None:
    """Small normal weights; what writes to the residual stream is smaller still."""
    for name, p in talker.named_parameters():
        if p.dim() < 2:
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(p, std=0.02 / (2 * talker.shape.layers) ** 0.5 if writes else 0.02)
    talker.llm_decoder.weight = talker.speech_embedding.weight  # tied: one tensor under both official names


def drop_out(talker: Talker) -> None:
    """Dropout on what each half layer adds, by hooks: the engine's layers have none."""

    def hook(module: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        return F.dropout(out, DROPOUT, training=module.training)

    for layer in talker.decoder.layers:
        layer.self_attn.o_proj.register_forward_hook(hook)
        layer.mlp.down_proj.register_forward_hook(hook)


@dataclass(frozen=True, slots=True)
class Batch:
    """Views of an epoch's tables on the device: starts, lengths [B, 7]: each row's segments in the pool; free_prompt
    [B]: whether prompt speech counts too; woven [B]: whether text and speech are interleaved. The host knows the width
    and how many places count."""

    starts: Tensor
    lengths: Tensor
    free_prompt: Tensor
    woven: Tensor
    width: int
    num_counted: int


class Pool:
    """All ids in one device array; text ids lie above the speech vocabulary. Grows as shards are tokenised."""

    def __init__(self, texts: text_ids.TextIds, speech_vocab: int, device: torch.device) -> None:
        self.texts, self.offset, self.device = texts, speech_vocab, device
        special = [speech_vocab - 200 + i for i in (0, 2, 1, 3)]  # sos, task, eos, fill
        self._parts: list[NDArray[np.int64]] = [np.array(special), np.array(texts.prefix) + speech_vocab]
        self._size = 4 + len(texts.prefix)
        self.prefix = (4, len(texts.prefix))
        self.speech: list[tuple[int, int]] = []
        self.clean: list[tuple[int, int]] = []
        self.broken: list[list[tuple[int, int]]] = []
        self.speaker: list[int] = []
        self.fixed: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        self._taken: set[int] = set()
        self.ids = torch.zeros(0)
        self._arrays()

    def _put(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        self._parts.append(ids)
        self._size += len(ids)
        return self._size - len(ids), len(ids)

    def fix_prompt(self, speaker: int, transcript: str, tokens: NDArray[np.int16]) -> None:
        """Add the prompt of a shipped voice: the text as served, and its speech."""
        text = self._put(np.array(self.texts.clean([transcript])[0]) + self.offset)
        self.fixed.setdefault(speaker, []).append((text, self._put(tokens.astype(np.int64))))

    def take(self, shards: Shards) -> int:
        """Add the utterances tokenised since; returns how many."""
        fresh = [i for i in shards.train if i not in self._taken and shards.is_tokenised(i)]
        self._taken.update(fresh)
        said = [u for u in shards.utterances(fresh) if u.tokens is not None and len(u.tokens) >= 5]
        if not said:
            return 0
        clean = self.texts.clean([u.text for u in said])
        broken = [self.texts.broken([u.text for u in said]) for _ in range(3)]
        broken.append(self.texts.spelled([u.text for u in said], seed=self._size))
        for row, u in enumerate(said):
            assert u.tokens is not None, "filtered above"
            self.clean.append(self._put(np.array(clean[row]) + self.offset))
            self.broken.append([self._put(np.array(version[row]) + self.offset) for version in broken])
            self.speech.append(self._put(np.array(u.tokens, np.int64)))
            self.speaker.append(u.speaker)
        self._arrays()
        return len(said)

    def _arrays(self) -> None:
        joined = np.concatenate(self._parts)
        self._parts = [joined]
        self.ids = torch.from_numpy(joined).to(self.device)
        self._clean = np.array(self.clean, np.int64).reshape(-1, 2)
        broken = np.array(self.broken, np.int64).reshape(-1, VARIANTS - 1, 2)
        self._texts = np.concatenate([self._clean[:, None], broken], 1)
        self._speech = np.array(self.speech, np.int64).reshape(-1, 2)
        self._speaker = np.array(self.speaker, np.int64)

    def epoch(self, rng: np.random.Generator, tokens_a_batch: int) -> list[Batch]:
        """As many targets as there are utterances, drawn by share, in batches of about `tokens_a_batch` places each."""
        targets = self._targets(rng)
        count = len(targets)
        segments = np.zeros((count, SEGMENTS, 2), np.int64)
        segments[:, 0] = (0, 1)
        segments[:, 1] = self.prefix
        chance = rng.random(count)
        version = np.where(chance < 0.5, 0, rng.integers(1, VARIANTS - 1, count))
        version[chance > 1 - SPELLED] = VARIANTS - 1
        segments[:, 3] = self._texts[targets, version]
        segments[:, 4] = (1, 1)
        segments[:, 6] = self._speech[targets]
        form = rng.random(count)
        free = self._pair(segments, targets, form < PAIRED, rng)
        free &= ~self._fix(segments, targets, (form >= PAIRED) & (form < PAIRED + FIXED), rng)
        total = segments[:, :, 1].sum(1) + 1
        lengths = segments[:, :, 1]
        text, speech = lengths[:, [PROMPT_TEXT, TEXT]].sum(1), lengths[:, [PROMPT_SPEECH, SPEECH]].sum(1)
        is_able = (speech * TEXT_BLOCK > text * SPEECH_BLOCK) & (text >= TEXT_BLOCK)
        woven = is_able & (rng.random(count) < WOVEN)
        return self._batches(segments, free, woven, total, rng, tokens_a_batch)

    def _targets(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Each group of voices as often as its share says: all of it in turn, then all of it again."""
        group = np.digitize(self._speaker, EDGES)
        members = [np.flatnonzero(group == number) for number in range(len(SHARES))]
        held = sum(share for share, rows in zip(SHARES, members, strict=True) if len(rows))
        drawn = []
        for share, rows in zip(SHARES, members, strict=True):
            count = round(share / held * len(group)) if len(rows) else 0
            laps = [rng.permutation(rows) for _ in range(-(-count // max(1, len(rows))))]
            drawn += [lap[: count - number * len(rows)] for number, lap in enumerate(laps)]
        return rng.permutation(np.concatenate(drawn))

    def _pair(self, segments: NDArray[np.int64], targets: NDArray[np.int64], chosen: NDArray[np.bool_],
              rng: np.random.Generator) -> NDArray[np.bool_]:  # fmt: skip
        """Give the chosen rows another utterance of their speaker, 1.2 to 8 s, as a prompt; returns those that got one.
        A row prompted with itself would only learn to copy."""
        lengths = self._speech[:, 1]
        done = np.zeros(len(targets), np.bool_)
        for speaker in np.unique(self._speaker):
            able = np.flatnonzero((self._speaker == speaker) & (lengths >= 30) & (lengths <= 200))
            rows = np.flatnonzero(chosen & (self._speaker[targets] == speaker))
            if not len(able):
                continue
            which = rng.integers(len(able), size=len(rows))
            which[able[which] == targets[rows]] += 1
            prompts = able[which % len(able)]
            rows, prompts = rows[prompts != targets[rows]], prompts[prompts != targets[rows]]
            segments[rows, 2] = self._clean[prompts]
            segments[rows, 5] = self._speech[prompts]
            done[rows] = True
        return done

    def _fix(self, segments: NDArray[np.int64], targets: NDArray[np.int64], chosen: NDArray[np.bool_],
             rng: np.random.Generator) -> NDArray[np.bool_]:  # fmt: skip
        """Give the chosen rows the served prompt of their speaker, where it has one; returns those rows."""
        done = np.zeros(len(targets), np.bool_)
        for speaker, prompts in self.fixed.items():
            rows = np.flatnonzero(chosen & (self._speaker[targets] == speaker))
            which = rng.integers(len(prompts), size=len(rows))
            table = np.array(prompts, np.int64)  # [prompts, 2, 2]
            segments[rows, 2] = table[which, 0]
            segments[rows, 5] = table[which, 1]
            done[rows] = True
        return done

    def _batches(self, segments: NDArray[np.int64], free: NDArray[np.bool_], woven: NDArray[np.bool_],
                 total: NDArray[np.int64], rng: np.random.Generator, tokens_a_batch: int) -> list[Batch]:  # fmt: skip
        cuts: list[tuple[NDArray[np.int64], int]] = []
        for low, width in zip((0, *LENGTHS), LENGTHS, strict=False):
            rows = rng.permutation(np.flatnonzero((total > low) & (total <= width)))
            size = max(1, tokens_a_batch // width)
            cuts += [(rows[i : i + size], width) for i in range(0, len(rows), size)]
        if len(cuts) >= FEW:
            cuts = [(rows, width) for rows, width in cuts if len(rows) * width * 4 > tokens_a_batch]
        cuts = [cuts[i] for i in rng.permutation(len(cuts))]
        order = np.concatenate([rows for rows, _ in cuts])
        tables = (segments[order, :, 0], segments[order, :, 1], free[order], woven[order])
        starts, lengths, frees, wovens = (torch.from_numpy(table).to(self.device) for table in tables)
        counted = num_counted(tables[1], tables[2], tables[3])
        batches, at = [], 0
        for rows, width in cuts:
            here = slice(at, at + len(rows))
            at = here.stop
            batches.append(
                Batch(starts[here], lengths[here], frees[here], wovens[here], width, int(counted[here].sum()))
            )
        return batches


def num_counted(lengths: NDArray[np.int64], free: NDArray[np.bool_], woven: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many targets of each row count: its speech, eos, the fills amid or after it, and with `free` its prompt's."""
    known, spoken = lengths[:, PROMPT_SPEECH], lengths[:, SPEECH]
    text = lengths[:, PROMPT_TEXT : TEXT + 1].sum(1)
    blocks = np.minimum(text // TEXT_BLOCK, (known + spoken) // SPEECH_BLOCK) * woven
    given = np.minimum(blocks, known // SPEECH_BLOCK)  # blocks that end within the prompt
    counted: NDArray[np.int64] = spoken + 1 + blocks - np.where(free, 0, given) + np.where(free, known, 0)
    return counted


@dataclass(frozen=True, slots=True)
class Rows:
    """ids [B, L] in the joint id space; targets [B, L] the speech id after each place."""

    ids: Tensor
    targets: Tensor
    is_speech: Tensor
    counted: Tensor  # places, in the flattened [B * L], that the loss looks at


def laid(lengths: Tensor, woven: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """What stands at each place: its segment (7: beyond the end) and its number in that, [B, width + 1]; whether `fill`
    is the target there."""
    ends = lengths.cumsum(1)  # [B, 7]
    at = torch.arange(width + 1, device=lengths.device).expand(len(lengths), -1).contiguous()
    plain = torch.searchsorted(ends, at, right=True)
    offset = at - (ends - lengths).gather(1, plain.clamp(max=SEGMENTS - 1))
    text, speech = lengths[:, PROMPT_TEXT : TEXT + 1].sum(1), lengths[:, PROMPT_SPEECH:].sum(1)
    blocks = torch.minimum(text // TEXT_BLOCK, speech // SPEECH_BLOCK)[:, None]
    size = TEXT_BLOCK + SPEECH_BLOCK
    after = at - ends[:, 1:2]  # the prefix
    block, within = after // size, after % size
    in_block = block < blocks
    rest, left = after - size * blocks, text[:, None] - TEXT_BLOCK * blocks
    is_text = torch.where(in_block, within < TEXT_BLOCK, rest < left)
    spoken = torch.where(in_block, SPEECH_BLOCK * block + within - TEXT_BLOCK, SPEECH_BLOCK * blocks + rest - left - 1)
    number = torch.where(
        is_text, torch.where(in_block, TEXT_BLOCK * block + within, TEXT_BLOCK * blocks + rest), spoken
    )
    first = torch.where(is_text, lengths[:, PROMPT_TEXT, None], lengths[:, PROMPT_SPEECH, None])
    segment = torch.where(is_text, PROMPT_TEXT, PROMPT_SPEECH) + (number >= first)
    number = number - first * (number >= first)
    segment = torch.where(~in_block & (rest == left), TASK, segment)
    number = torch.where(segment == TASK, 0, number)
    segment = torch.where(~is_text & (spoken >= speech[:, None]), SEGMENTS, segment)
    is_woven = woven[:, None] & (after >= 0)
    is_fill = is_woven & in_block & (within == size - 1)
    return torch.where(is_woven, segment, plain), torch.where(is_woven, number, offset), is_fill[:, :-1]


def assemble(pool: Tensor, batch: Batch) -> Rows:
    """Gather the segments of each row (sos, prefix, prompt text, text, task, prompt speech, speech), woven or in turn.

    The target of a place is the id after it, or fill; eos comes after the speech. Pool places 0..3: sos, task, eos,
    fill.
    """
    segment, number, is_fill = laid(batch.lengths, batch.woven, batch.width)
    place = batch.starts.gather(1, segment.clamp(max=SEGMENTS - 1)) + number
    ids = pool[torch.where(segment < SEGMENTS, place, 2)]
    is_speech = (segment == SPEECH) | (segment == PROMPT_SPEECH)
    return Rows(
        ids=ids[:, :-1],
        targets=torch.where(is_fill, pool[3], ids[:, 1:]),
        is_speech=is_speech[:, :-1],
        counted=places(is_learnt(segment, is_fill, batch.free_prompt), batch.num_counted),
    )


def is_learnt(segment: Tensor, is_fill: Tensor, free: Tensor) -> Tensor:
    """Whether the target of a place is speech to learn, its eos or fill: [B, width]."""
    here, after = segment[:, :-1], segment[:, 1:]
    learnt = (after == SPEECH) | (free[:, None] & (after == PROMPT_SPEECH))
    return learnt | (is_fill & ((here == SPEECH) | free[:, None])) | ((here < SEGMENTS) & (after == SEGMENTS))


def places(mask: Tensor, count: int) -> Tensor:
    """Where the flattened mask is true, `count` times; no step waits for the device, as it would to count them."""
    flat = mask.flatten()
    rank = torch.where(flat, flat.cumsum(0) - 1, count).clamp(max=count)
    held = torch.zeros(count + 1, dtype=torch.long, device=flat.device)
    return held.scatter_(0, rank, torch.arange(len(flat), device=flat.device))[:count]


def smoothed(logits: Tensor, target: Tensor, num_codes: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """logits [M, V], target [M] -> smoothed cross entropy and accuracy."""
    logits = logits.float()
    total = logits.logsumexp(-1)
    right = logits.gather(1, target[:, None]).squeeze(1)
    even = (logits[:, :num_codes].sum(-1) + logits[:, num_codes + 1]) / (num_codes + 1)
    loss = total - (1 - smoothing) * right - smoothing * even
    return loss.mean(), (logits.argmax(-1) == target).float().mean()


Judge = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def loss_of(
    talker: Talker, rows: Rows, *, corrupted: float, smoothing: float, judge: Judge = smoothed
) -> tuple[Tensor, Tensor]:
    """Smoothed cross entropy and accuracy over the speech that counts.

    A share of the speech inputs, drawn per row from 0..corrupted, is replaced by random codes. Smoothing spreads over
    the codes and eos only, so that the unused control ids are learnt to be impossible.
    """
    num_codes = talker.shape.num_codes
    speech_vocab = talker.shape.speech_vocab
    ids = rows.ids
    rate = torch.rand(len(ids), 1, device=ids.device) * corrupted
    hit = (torch.rand(ids.shape, device=ids.device) < rate) & rows.is_speech
    ids = torch.where(hit, torch.randint_like(ids, num_codes), ids)
    is_text = ids >= speech_vocab
    text = talker.text_rows((ids - speech_vocab).clamp(min=0))
    speech = talker.speech_rows(torch.where(is_text, 0, ids))
    x = torch.where(is_text[..., None], text, speech)
    hidden = talker.hidden(F.dropout(x, DROPOUT, training=talker.training))
    logits = talker.logits(hidden.flatten(0, 1)[rows.counted])
    return judge(logits, rows.targets.flatten()[rows.counted], num_codes, smoothing)


def export(talker: Talker) -> dict[str, Tensor]:
    """State with the tied tensor under one name only, so that the file travels in 16 MiB."""
    return {name: value for name, value in talker.state_dict().items() if name != "llm_decoder.weight"}


def held_out(pool: Pool, shards: Shards, limit: int) -> dict[str, Pool]:
    """The held-out utterances as pools of their own: those of voices that are trained, and those of no other."""
    rows: dict[str, list[int]] = {"trained voices": [], "new voices": []}
    for i in filter(shards.is_tokenised, shards.held_out):
        rows["new voices" if shards.utterance(i).speaker >= FIRST_HELD_OUT else "trained voices"].append(i)
    apart = {}
    for name, some in rows.items():
        view = Shards(shards.folder)
        view.train = some[:limit]
        held = Pool(pool.texts, pool.offset, pool.device)
        if held.take(view):
            apart[name] = held
    return apart


@torch.no_grad()
def evaluate(talker: Talker, ema: Ema, apart: dict[str, Pool], stage: Stage, tokens: int) -> None:
    """Log the unsmoothed cross entropy and accuracy of the averaged weights on the held-out sentences."""
    talker.eval()
    with ema.applied(), stage.autocast():
        for name, pool in apart.items():
            batches = pool.epoch(np.random.default_rng(0), tokens)[:8]
            results = [loss_of(talker, assemble(pool.ids, b), corrupted=0.0, smoothing=0.0) for b in batches]
            entropy, accuracy = torch.stack([torch.stack(result) for result in results]).mean(0).tolist()
            stage.log.info("held out, %s: cross entropy %.4f accuracy %.4f", name, entropy, accuracy)
    talker.train()


def fix_prompts(pool: Pool, stage: Stage) -> None:
    """Give the pool the prompts of the shipped voices, tokenised as serving does it."""
    for speaker, name, transcript, tokens in text_ids.shipped_prompts(stage.data):
        pool.fix_prompt(speaker, transcript, tokens)
        stage.log.info("prompt of %s (speaker %d): %d tokens", name, speaker, len(tokens))


def rehearse(talker: Talker, stage: Stage, judge: Judge) -> None:
    """Compile before the data are there: a step each on random ids of two shapes."""
    for rows, width in ((340, 192), (128, 512)) if stage.compile else ():
        codes = torch.randint(talker.shape.num_codes, (rows, width + 1), device=stage.device)
        is_speech = torch.rand(rows, width, device=stage.device) < 0.7
        words = talker.shape.speech_vocab + codes[:, :-1] % talker.shape.text_vocab
        made = Rows(
            ids=torch.where(is_speech, codes[:, :-1], words), targets=codes[:, 1:], is_speech=is_speech,
            counted=is_speech.flatten().nonzero().squeeze(1),
        )  # fmt: skip
        with stage.autocast():
            loss, _ = loss_of(talker, made, corrupted=CORRUPTED, smoothing=SMOOTHING, judge=judge)
        loss.backward()
        talker.zero_grad(set_to_none=True)
        talker.eval()
        with stage.autocast(), torch.no_grad():
            loss_of(talker, made, corrupted=0.0, smoothing=0.0)
        talker.train()
        stage.log.info("rehearsed %d rows of %d", rows, width)


def train(stage: Stage) -> None:
    """Train until the deadline; EMA to out/llm.safetensors."""
    texts = text_ids.TextIds(stage.data)
    talker = Talker(shape_of(texts.vocabulary)).to(stage.device)
    initialise(talker)
    drop_out(talker)
    fuse_layers(stage, talker.decoder.layers)
    judge = torch.compile(smoothed, dynamic=True) if stage.compile else smoothed
    rehearse(talker, stage, judge)
    stage.wait()
    resume(talker, stage.out / "llm.safetensors", stage.log)
    ema = Ema(talker, 0.999)
    opt = optimiser(decayed(talker, 0.05), (0.9, 0.98), 0.05, stage.device)  # type: ignore[arg-type]
    shards = Shards(stage.data)
    pool = Pool(texts, talker.shape.speech_vocab, stage.device)
    fix_prompts(pool, stage)
    stage.log.info("took %d utterances, %d ids, %d shapes of text", pool.take(shards), len(pool.ids), texts.vocabulary)
    apart = held_out(pool, shards, 400)
    rng = np.random.default_rng(stage.seed + int(1e6 * stage.budget.spent))
    tokens = 2048 if stage.is_toy else 65536
    if not pool.fixed:
        stage.log.info("no prompts of shipped voices yet")
    ticker = Ticker(stage.log, stage.budget)
    saved = refreshed = stage.budget.clock()
    while not stage.budget.is_over:
        for batch in pool.epoch(rng, tokens):
            set_rate(opt, stage.budget.rate(ticker.total_steps, peak=2e-3, floor=2e-5))
            with stage.autocast():
                loss, accuracy = loss_of(talker, assemble(pool.ids, batch), corrupted=CORRUPTED, smoothing=SMOOTHING,
                                         judge=judge)  # fmt: skip
            opt.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(talker.parameters(), 1.0)
            opt.step()
            ema.update()
            logged = ticker.add(loss=loss, accuracy=accuracy, norm=norm)
            now = stage.budget.clock()
            if logged and now - saved > SAVE_EVERY_S:
                save(talker, ema, stage)
                saved = now
                evaluate(talker, ema, apart, stage, tokens)
            if stage.budget.is_over:
                break
        if stage.budget.clock() - refreshed > 45 and stage.budget.spent < 0.75:
            refreshed = stage.budget.clock()
            shards.refresh()
            if not pool.fixed:
                fix_prompts(pool, stage)
            if more := pool.take(shards):
                stage.log.info("took %d more utterances", more)
    save(talker, ema, stage)
    evaluate(talker, ema, apart, stage, tokens)


def save(talker: Talker, ema: Ema, stage: Stage) -> None:
    with ema.applied():
        save_half(stage.out / "llm.safetensors", export(talker))


if __name__ == "__main__":
    stage = stage_from_arguments("train_talker")
    sys.exit(run_stage(stage, train))
