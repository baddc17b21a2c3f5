"""The recipe `gpt2-sst2`: a small language model of GPT-2's architecture, trained from scratch on SST-2's sentences.

It is transformers' own GPT-2 (norms first, learned positions, gelu_new, the head tied to the embedding) with four
layers of width 256, and a byte-level BPE of 4,096 tokens that is trained on the same sentences. The folder is one that
transformers wrote, so it loads as GPT-2 does. A GPU takes a minute, two cores take an hour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.files import atomic_folder
from prooflens.models.pull import Progress

END = "<|endoftext|>"
"""What stands before and between sentences, as in GPT-2."""

VOCABULARY = 4096
CONTEXT = 64
"""Tokens of a block that is trained on, and the most that the model reads."""

BATCH = 64
EPOCHS = 12


def train_gpt2(
    sentences: list[str],
    held_out: list[str],
    seed: int,
    folder: Path,
    report: Progress,
    epochs: int | None = None,
    device: str | None = None,
) -> float:
    """Train the tokenizer and the model, write both, and return the share of held-out tokens that it predicts.

    Args:
        sentences: what is trained on.
        held_out: other sentences, on which it is measured.
        seed: seed of weights, dropout and order; the weights are the same on the same kind of device.
        folder: the folder to write.
        report: called with a stage and a share from 0 to 1.
        epochs: how often all sentences are seen; None for the recipe's.
        device: where to train; None for the CPU.

    Raises:
        ModelError: if transformers is missing.
    """
    try:
        from tokenizers import ByteLevelBPETokenizer
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ModelError("gpt2-sst2 needs transformers: pip install prooflens[hf]") from error
    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sentences, VOCABULARY, min_frequency=2, special_tokens=[END])
    end = tokenizer.token_to_id(END)
    where = torch.device(device or "cpu")
    blocks = _blocks(tokenizer, sentences, end).to(where)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=end,
        eos_token_id=end,
    )
    model: Any = GPT2LMHeadModel(config).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    rounds = epochs or EPOCHS
    steps = rounds * -(-len(blocks) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.5e-3, total_steps=steps + 1, pct_start=0.1
    )
    order = torch.Generator().manual_seed(seed)
    for epoch in range(rounds):
        for number, rows in enumerate(torch.randperm(len(blocks), generator=order).split(BATCH)):
            ids = blocks[rows.to(where)]
            logits = model(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            report(f"epoch {epoch + 1} of {rounds}", (epoch + number * BATCH / len(blocks)) / rounds)
    model.eval()
    right = total = 0
    with torch.no_grad():
        for ids in _blocks(tokenizer, held_out, end).to(where).split(BATCH):
            guess = model(input_ids=ids).logits[:, :-1].argmax(-1)
            right, total = right + int((guess == ids[:, 1:]).sum()), total + guess.numel()
    with atomic_folder(folder) as staging:
        model.cpu().save_pretrained(staging)
        tokenizer.save(str(staging / "tokenizer.json"))
    return right / max(1, total)


def _blocks(tokenizer: Any, sentences: list[str], end: int) -> Int[Tensor, "n S"]:
    """All sentences one behind the other, cut into blocks."""
    ids = [i for found in tokenizer.encode_batch(sentences) for i in (end, *found.ids)]
    whole = len(ids) // CONTEXT * CONTEXT
    if not whole:
        raise ModelError(
            f"SST-2 holds {len(ids)} tokens here, and a block has {CONTEXT}: give the whole files"
        )
    return torch.tensor(ids[:whole]).reshape(-1, CONTEXT)
