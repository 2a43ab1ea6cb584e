"""The small checkpoint's text tokenizer: byte-level BPE of 2048 entries in Qwen2's files, official specials after it.

    python -m engine.training.tokenizer --corpus corpus.txt.xz --out DIR

``DIR`` gets ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``; `engine.frontend.Tokenizer` reads them and
adds the special tokens, whose ids start at 2048.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from engine.frontend import QWEN_SPECIALS, SPECIAL_TOKENS, Tokenizer, qwen2_pipeline
from engine.training.corpus import read_corpus
from engine.training.data import is_held_out

VOCABULARY = 2048


def train_bpe(texts: list[str], folder: Path) -> None:
    """Learn the merges of ``texts`` and write the tokenizer files."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = qwen2_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2, ensure_ascii=False) + "\n")


def _config() -> dict[str, Any]:
    """What Qwen2's own folder says of itself; the reference sets end and padding to ``<|endoftext|>``."""
    added = {
        str(VOCABULARY + position): {"content": token, "special": True}
        for position, token in enumerate((*QWEN_SPECIALS, *SPECIAL_TOKENS))
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "added_tokens_decoder": added,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    texts = [text for text in read_corpus(args.corpus) if not is_held_out(text)]
    train_bpe(texts, args.out)
    tokenizer = Tokenizer(args.out)
    sample = texts[:2000]
    per_word = sum(map(tokenizer.count, sample)) / sum(len(text.split()) for text in sample)
    print(f"{tokenizer.size} entries with specials, {per_word:.2f} tokens a word")


if __name__ == "__main__":
    main()
