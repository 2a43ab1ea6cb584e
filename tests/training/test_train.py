"""The training stages: what a batch holds, that a step learns, that a stage resumes and leaves loadable files."""

import logging
import lzma
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.conditioning import prompt_mel
from engine.flow import Flow
from engine.frontend import Tokenizer
from engine.hift import Hift
from engine.talker import Talker
from engine.text_stream import TextStream
from engine.training import train_flow, train_hift, train_talker
from engine.training.data import FIRST_KOKORO, SHIPPED, Shards, Utterance, write_npz, write_shard, write_tokens
from engine.training.pace import Alarm, Budget, Ema, Stage, guarded, resume, save_half
from engine.training.resident import EDGES, Streams, Waves, heard_pitch
from engine.training.run import Job
from engine.training.text_ids import PRONUNCIATIONS, TOKENIZER_FOLDER, TextIds
from engine.training.tokenizer import train_bpe

CPU = torch.device("cpu")
SENTENCE = "the small train came late to town and nobody on it had seen a red door or an open window before"
WORDS = SENTENCE.split()
LOG = logging.getLogger("test")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of tone bursts with texts and random tokens, two speakers, a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    said = []
    for number in range(40):
        units = int(rng.integers(60, 120))
        f0 = np.repeat(rng.uniform(100, 250, units), 2)
        f0[:10] = 0
        phase = np.cumsum(np.repeat(f0, 300) / 24000 * 2 * np.pi)
        wave = 0.2 * np.sin(phase) * (np.repeat(f0, 300) > 0) + 0.01 * rng.standard_normal(600 * units)
        text = " ".join(rng.choice(WORDS, int(rng.integers(1, 9)))).capitalize() + "."
        phones = np.zeros(units, np.int16)
        said.append(Utterance((wave * 32767).astype(np.int16), text, phones, f0.astype(np.float16), number % 2, None))
    write_shard(folder, 0, said)
    write_tokens(folder, 0, [rng.integers(0, 6561, len(u.wave) // 960).astype(np.int16) for u in said])
    write_npz(folder / "speakers.npz", {"vectors": rng.standard_normal((2, 3, 192)).astype(np.float32)})
    train_bpe([u.text for u in said], folder / TOKENIZER_FOLDER)
    return folder


def stage_of(data: Path, seconds: float) -> Stage:
    now = time.time()
    return Stage(data=data, device=CPU, budget=Budget(now, now + seconds), is_toy=True, log=LOG, compile=False)


# --- pace ------------------------------------------------------------------------------------------------------------


def test_rate_follows_the_clock_and_not_the_steps() -> None:
    now = [0.0]
    budget = Budget(0.0, 100.0, clock=lambda: now[0])
    assert budget.rate(0, peak=1.0, floor=0.0, warm_steps=10) == pytest.approx(0.1)
    assert budget.rate(10_000, peak=1.0, floor=0.0) == pytest.approx(1.0)
    now[0] = 50.0
    assert budget.rate(10_000, peak=1.0, floor=0.0) == pytest.approx(0.5)
    now[0] = 200.0
    assert budget.is_over and budget.rate(1, peak=1.0, floor=0.25, warm_steps=1) == pytest.approx(0.25)


def test_average_is_put_in_and_taken_out_again() -> None:
    layer = torch.nn.Linear(3, 3)
    ema = Ema(layer, 0.9)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    ema.update()
    live = layer.weight.detach().clone()
    with ema.applied():
        assert not torch.equal(layer.weight, live) and not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, live)


def test_a_file_with_nan_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_half(path, {"a": torch.ones(2)})
    with pytest.raises(FloatingPointError, match="x.safetensors"):
        save_half(path, {"a": torch.tensor([1.0, float("nan")])})
    kept = torch.nn.ParameterDict({"a": torch.zeros(2)})
    assert resume(kept, path, LOG) and torch.equal(kept["a"].detach(), torch.ones(2))


def test_weights_of_another_shape_are_not_resumed(tmp_path: Path) -> None:
    save_half(tmp_path / "x.safetensors", {"a": torch.ones(3)})
    assert not resume(torch.nn.ParameterDict({"a": torch.zeros(2)}), tmp_path / "x.safetensors", LOG)


def test_guarded_work_is_cut_off_and_logged() -> None:
    assert guarded(lambda: 7, 5, LOG, "quick") == 7
    assert guarded(lambda: time.sleep(5), 1, LOG, "slow") is None
    assert issubclass(Alarm, Exception)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_crops_carry_the_mel_and_the_pitch_of_their_wave(data: Path) -> None:
    waves = Waves(CPU, frames=60, judged=50, hours=0.1)
    waves.take(Shards(data))
    torch.manual_seed(0)
    crops = waves.crops(16)
    inner = prompt_mel(crops.wave).transpose(1, 2)
    torch.testing.assert_close(crops.mel[:, :, 3:-3], inner[:, :, 3:-3], atol=1e-3, rtol=0)
    assert set(crops.first_frame.tolist()) <= {0, 5, 10}
    voiced = crops.f0[crops.f0 > 0]
    assert len(voiced) and voiced.min() > 90


def test_the_pitch_of_a_crop_is_the_one_that_is_heard() -> None:
    turns = torch.arange(720 * 2 + 480 * 10)[None] * torch.tensor([[203.0], [118.0], [0.0]]) / 24_000
    wave = sum(torch.sin(2 * torch.pi * k * turns) / k for k in range(1, 11)) * 0.1
    wave[2] = torch.randn(wave.shape[1], generator=torch.Generator().manual_seed(0))
    asked = torch.tensor([[196.0], [120.0], [150.0]]).repeat(1, 10)
    asked[0, 4] = 0
    found = heard_pitch(wave, asked)
    want = torch.tensor([[203.0], [118.0]]).repeat(1, 10)
    want[0, 4] = 0
    torch.testing.assert_close(found[:2], want, atol=0.6, rtol=0)
    assert torch.equal(found[2], asked[2])


def test_streams_pair_each_token_with_its_two_frames(data: Path) -> None:
    shards = Shards(data)
    streams = Streams(CPU, 2)
    assert streams.take(shards) == 1 and streams.take(shards) == 0
    said = shards.utterance(shards.train[0])
    assert said.tokens is not None
    start, end = streams._table[streams._table[:, 4] == said.speaker][0, :2].tolist()
    tokens, mel = streams._pool
    assert torch.equal(tokens[start:end], torch.from_numpy(np.array(said.tokens[: end - start])).long())
    wave = torch.from_numpy(np.array(said.wave)).float()[None] / 32768
    true = prompt_mel(wave)[0, : 2 * (end - start)]
    torch.testing.assert_close(mel[2 * start : 2 * end].float(), true, atol=0.01, rtol=0)
    cut = streams.spans(8, 30, lookahead=3, to_end=False)
    assert cut.tokens.shape == (8, 33) and cut.mel.shape == (8, 60, 80)


def pool_of(data: Path) -> tuple[train_talker.Pool, Talker]:
    texts = TextIds(data)
    talker = Talker(train_talker.shape_of(texts.vocabulary))
    pool = train_talker.Pool(texts, talker.shape.speech_vocab, CPU)
    shards = Shards(data)
    said = shards.utterance(shards.train[0])
    assert said.tokens is not None
    pool.fix_prompt(said.speaker, said.text, np.array(said.tokens))
    pool.take(shards)
    return pool, talker


def test_rows_are_what_serving_feeds(data: Path) -> None:
    pool, talker = pool_of(data)
    special, offset = talker.shape.special, talker.shape.speech_vocab
    seen = set()
    for batch in pool.epoch(np.random.default_rng(0), 2048):
        rows = train_talker.assemble(pool.ids, batch)
        columns = (rows.ids, rows.targets, batch.lengths, batch.free_prompt, batch.woven)
        for ids, targets, lengths, free, is_woven in zip(*columns, strict=True):
            if is_woven:
                continue
            _, prefix, prompt, text, _, speech, target = lengths.tolist()
            words = 1 + prefix + prompt
            made = talker.prefill_rows(
                ids[1:words] - offset, ids[words : words + text] - offset, ids[words + text + 1 :][:speech]
            )
            is_text = ids >= offset
            fed = torch.where(
                is_text[:, None],
                talker.text_rows((ids - offset).clamp(min=0)),
                talker.speech_rows(torch.where(is_text, 0, ids)),
            )
            assert torch.equal(fed[: len(made)], made)
            assert ids[words + text] == special.task
            assert targets[len(made) + target - 1] == special.eos
            assert ids[1 : 1 + prefix].sub(offset).tolist() == pool.texts.prefix
            seen.add((bool(speech), bool(free)))
    assert seen == {(True, True), (True, False), (False, False)}  # a pair, the served prompt, no prompt


def test_no_row_is_prompted_with_itself(data: Path) -> None:
    pool, _ = pool_of(data)
    pool.speaker[0] = max(pool.speaker) + 1  # it has no other utterance
    pool._arrays()
    paired = 0
    for epoch in range(8):
        for batch in pool.epoch(np.random.default_rng(epoch), 2048):
            prompted = batch.lengths[:, train_talker.PROMPT_SPEECH].bool() & batch.free_prompt
            paired += int(prompted.sum())
            same = batch.starts[:, train_talker.PROMPT_SPEECH] == batch.starts[:, train_talker.SPEECH]
            assert not (same & prompted).any()
    assert paired > 0


def test_woven_rows_are_what_a_stream_of_text_feeds(data: Path) -> None:
    pool, talker = pool_of(data)
    special, offset = talker.shape.special, talker.shape.speech_vocab
    num_woven = 0
    for batch in pool.epoch(np.random.default_rng(0), 2048):
        rows = train_talker.assemble(pool.ids, batch)
        counted = torch.zeros(rows.ids.numel(), dtype=torch.bool).index_fill(0, rows.counted, True).view(rows.ids.shape)
        for row in np.flatnonzero(batch.woven):
            parts = [
                pool.ids[start : start + length].tolist()
                for start, length in zip(batch.starts[row], batch.lengths[row], strict=True)
            ]
            _, prefix, prompt, text, _, known, spoken = parts
            num_woven += 1
            head = [i - offset for i in prefix + prompt]
            stream = TextStream(talker.shape, head, known, head[len(prefix) - 1])
            stream.push([i - offset for i in text])
            stream.end()
            fed, asked, rest = [], [], [*spoken, special.eos]
            while (turn := stream.next_turn()) is not None:
                fed += turn.rows
                for _ in range(turn.num_codes or len(rest)):
                    asked.append(len(fed) - 1)
                    assert rows.targets[row, len(fed) - 1] == rest[0]
                    fed.append(rest.pop(0))
                if turn.num_codes is not None:
                    asked.append(len(fed) - 1)
                    assert rows.targets[row, len(fed) - 1] == special.fill
            assert rows.ids[row, : len(fed) - 1].tolist() == fed[:-1] and not rest
            if not batch.free_prompt[row]:
                assert counted[row].nonzero().squeeze(1).tolist() == asked
    assert num_woven > 5


def test_a_spelled_word_is_one_of_the_callers_overrides(data: Path) -> None:
    with lzma.open(data / PRONUNCIATIONS, "wt") as file:
        file.write("red R EH1 D\n")
    texts = TextIds(data)
    (data / PRONUNCIATIONS).unlink()
    tokenizer = Tokenizer(data / TOKENIZER_FOLDER)
    expected = tokenizer.encode("A [R][EH1][D] door.", allow_controls=True)
    assert texts.spelled(["A red door", "A door"], seed=0) == [expected, tokenizer.encode("A door.")]


def test_the_loss_looks_at_speech_and_its_end_only(data: Path) -> None:
    pool, talker = pool_of(data)
    for batch in pool.epoch(np.random.default_rng(1), 2048):
        rows = train_talker.assemble(pool.ids, batch)
        looked = rows.targets.flatten()[rows.counted]
        assert int((looked == talker.shape.special.eos).sum()) == len(batch.starts)
        assert set(looked[looked >= talker.shape.num_codes].tolist()) <= {
            talker.shape.special.eos,
            talker.shape.special.fill,
        }


def test_places_that_count_are_found_without_counting_them(data: Path) -> None:
    pool, _ = pool_of(data)
    kinds = set()
    for batch in pool.epoch(np.random.default_rng(2), 2048):
        segment, _, is_fill = train_talker.laid(batch.lengths, batch.woven, batch.width)
        learnt = train_talker.is_learnt(segment, is_fill, batch.free_prompt).flatten()
        counted = train_talker.assemble(pool.ids, batch).counted
        assert torch.equal(counted, learnt.nonzero().squeeze(1))
        kinds |= set(zip(batch.free_prompt.tolist(), batch.woven.tolist(), strict=True))
    assert len(kinds) == 4


def test_each_group_of_voices_is_drawn_by_its_share(data: Path) -> None:
    pool, _ = pool_of(data)
    pool._speaker = np.repeat([0, FIRST_KOKORO, FIRST_KOKORO + len(SHIPPED)], [900, 30, 70])
    drawn = np.digitize(pool._speaker[pool._targets(np.random.default_rng(0))], EDGES)
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, train_talker.SHARES, atol=0.002)
    pool._speaker = np.zeros(50, np.int64)
    assert sorted(pool._targets(np.random.default_rng(0)).tolist()) == list(range(50))


def test_a_disguise_moves_the_chosen_rows_alone() -> None:
    torch.manual_seed(0)
    rows = 400
    mel = torch.full((rows, 80, 4), -8.0)
    embedding = torch.nn.functional.normalize(torch.randn(rows, 192), dim=1)
    chosen = torch.arange(rows) < rows // 2
    other, vague = train_flow.disguised(mel, embedding, chosen)
    assert torch.equal(other[~chosen], mel[~chosen]) and torch.equal(vague[~chosen], embedding[~chosen])
    tint = (other - mel)[chosen].std(1)
    assert tint.min() > 0 and tint.mean() > 0.2 and torch.equal(other[:, :, 0], other[:, :, 3])
    stray = (vague - embedding)[chosen].norm(dim=1)
    is_misnamed = (vague @ embedding.T).argmax(1)[chosen] != torch.arange(rows // 2)
    assert stray.min() > 0 and stray[~is_misnamed].max() <= train_flow.VAGUE
    assert float(is_misnamed.float().mean()) == pytest.approx(train_flow.MISNAMED, abs=0.1)


def test_warping_moves_a_tone_to_its_new_frequency() -> None:
    centres = train_flow.mel_centres(CPU)
    mel = torch.full((3, 80, 1), -9.0)
    mel[:, 40] = 0.0
    moved = train_flow.warped_mel(mel, torch.tensor([1.0, 1.2, 0.85]))
    assert torch.equal(moved[0], mel[0])
    found = centres[moved[:, :, 0].argmax(1)] / centres[40]
    torch.testing.assert_close(found, torch.tensor([1.0, 1.2, 0.85]), rtol=0.04, atol=0.0)


# --- learning --------------------------------------------------------------------------------------------------------


def test_talker_learns_a_batch(data: Path) -> None:
    torch.manual_seed(0)
    pool, talker = pool_of(data)
    train_talker.initialise(talker)
    assert talker.llm_decoder.weight is talker.speech_embedding.weight
    rows = train_talker.assemble(pool.ids, pool.epoch(np.random.default_rng(0), 512)[0])
    opt = torch.optim.AdamW(talker.parameters(), lr=2e-3)
    losses = []
    for _ in range(6):
        loss, _ = train_talker.loss_of(talker, rows, corrupted=0.0, smoothing=0.03)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


def test_flow_learns_a_batch_under_both_masks(data: Path) -> None:
    torch.manual_seed(0)
    flow = Flow(train_flow.SHAPE)
    train_flow.initialise(flow)
    streams = Streams(CPU, 2)
    streams.take(Shards(data))
    batch = streams.spans(2, 30, lookahead=3, to_end=False)
    opt = torch.optim.AdamW(flow.parameters(), lr=1e-3)
    losses = []
    for step in range(10):
        loss = train_flow.loss_of(flow, batch, torch.randn(2, 3, 192), causal=step % 2 == 0, to_end=False)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_dense_convolution_equals_the_grouped_one() -> None:
    conv = torch.nn.Conv1d(32, 32, 5, groups=16)
    x = torch.randn(2, 32, 20)
    grouped = conv(x)
    train_flow.densify(conv)
    torch.testing.assert_close(conv(x), grouped)


def test_the_crops_of_a_captured_step_take_the_values_of_others(data: Path) -> None:
    waves = Waves(CPU, frames=32, judged=24, hours=0.1)
    waves.take(Shards(data))
    first, second = waves.crops(2), waves.crops(2)
    fixed = first.clone()
    places = [value.data_ptr() for value in fixed.tensors()]
    fixed.copy_(second)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fixed.tensors(), second.tensors(), strict=True))
    assert [value.data_ptr() for value in fixed.tensors()] == places
    assert not torch.equal(first.wave, second.wave)


def test_crops_held_out_are_of_other_utterances(data: Path) -> None:
    shards = Shards(data)
    kept, trained = (Waves(CPU, frames=32, judged=24, hours=0.1, are_held_out=flag) for flag in (True, False))
    kept.take(shards)
    trained.take(shards)
    assert (len(kept), len(trained)) == (len(shards.held_out), len(shards.train))
    assert not {int(start) for start, _ in kept._table} & {int(start) for start, _ in trained._table}


@pytest.mark.slow
def test_vocoder_steps_with_judges_have_finite_gradients(data: Path) -> None:
    torch.manual_seed(0)
    hift = Hift(train_hift.SHAPE)
    train_hift.initialise(hift)
    waves = Waves(CPU, frames=train_hift.FRAMES, judged=train_hift.JUDGED, hours=0.1)
    waves.take(Shards(data))
    trainer = train_hift.Trainer(stage_of(data, 1), hift, train_hift.Spectra(CPU))
    trainer.pace(1e-4, 0.5)
    for judged in (False, True):
        losses = train_hift.stepper(trainer, waves.crops(2), is_judged=judged)(waves.crops(2))
        assert all(torch.isfinite(value) for value in losses.values())
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in hift.parameters())


@pytest.mark.slow
def test_stages_write_files_that_resume(data: Path) -> None:
    for module, name in ((train_talker, "llm"), (train_flow, "flow"), (train_hift, "hift")):
        module.train(stage_of(data, 3))
        path = data / "out" / f"{name}.safetensors"
        assert path.stat().st_size < 16 * 2**20
        module.train(stage_of(data, 2))


# --- the supervisor --------------------------------------------------------------------------------------------------


def test_a_failed_job_has_one_more_try_unless_its_product_is_there(tmp_path: Path) -> None:
    job = Job("x", ["false"], lambda: True, product=tmp_path / "made")
    job.result, job.tries = 1, 1
    assert not job.is_over
    (tmp_path / "made").touch()
    assert job.is_over
    job = Job("x", ["false"], lambda: True)
    job.result, job.tries = 1, 2
    assert job.is_over
