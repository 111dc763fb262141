"""A toy target with a tokenizer and a chat template, whose text can be learned in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import damp, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 40
NUM_LAYERS = 4
SPECIAL = ["<pad>", "<s>", "<end>", "<user>", "<bot>"]
CHAT_TEMPLATE = (
    "<s> {% for m in messages %}"
    "{% if m['role'] == 'user' %}<user> {% else %}<bot> {% endif %}{{ m['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def save_toy_target(folder: Path, *, sharpness: float = 5.0, **changes: Any) -> Any:
    """Layers that add little, and a head that knows which word follows each: all words in a ring,
    from which sampled texts stray now and then."""
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": NUM_LAYERS, **changes}
    model = random_model("llama", 3, **sizes)
    damp(model, 0, 0.01)
    first = len(SPECIAL)
    ring = first + torch.randperm(VOCAB_SIZE - first, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.mul_(0.1)
        head[ring.roll(-1)] = embedding[ring]
        head.mul_(sharpness / head[ring].norm(dim=-1).mean())
        head[:first] = 0.0
    model.save_pretrained(folder)
    save_toy_tokenizer(folder)
    return model


def save_toy_tokenizer(folder: Path) -> None:
    words = SPECIAL + [f"w{number}" for number in range(VOCAB_SIZE - len(SPECIAL))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
