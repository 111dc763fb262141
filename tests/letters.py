"""A tokenizer that spells, for small models with texts of letters."""

from __future__ import annotations

import string

import transformers
from checkpoints import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models

_SPECIAL = ["<unk>", "<s>", "</s>"]


def letter_tokenizer(vocab_size: int = VOCAB_SIZE) -> transformers.PreTrainedTokenizerFast:
    """Ids 3 on are the letters, a blank, and pairs of letters up to the vocabulary's end."""
    letters = [*string.ascii_lowercase, " "]
    pairs = [(a, b) for b in "etaoinshrdlu" for a in string.ascii_lowercase]
    merges = pairs[: vocab_size - len(_SPECIAL) - len(letters)]
    pieces = [*_SPECIAL, *letters, *(a + b for a, b in merges)]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=_SPECIAL[0]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )
