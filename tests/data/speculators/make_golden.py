"""Writes the checkpoints and tensors beside this file with the PyPI package `speculators`.

Run it in an environment of its own, with what SOURCE.txt names installed:

    TORCHDYNAMO_DISABLE=1 python make_golden.py FOLDER

Per variant there is a checkpoint as `save_pretrained` writes it, and beside it a file of a target's
features and the tokens behind them, and per step of drafting what the model feeds back and its
logits over its own vocabulary. Step s of row i takes the state of step s - 1 and token i + s, and
attends to the first step's rows up to i and its own row's later steps: drafting on from row i.
"""

# mypy: ignore-errors
# The package that it uses is not among ours.

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_TOKENS, NUM_STEPS = 32, 96, 40, 11, 3
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
VARIANTS = {
    "llama": (LlamaConfig(**SIZES, rms_norm_eps=1e-5), {}),
    "qwen3": (
        Qwen3Config(**SIZES, attention_bias=True, rope_theta=500.0),
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
    "norm_before_fc": (
        LlamaConfig(**SIZES),
        {
            "norm_before_residual": True,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 4],
        },
    ),
}


def draft_ids() -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(DRAFT_VOCAB), t2d


@torch.no_grad()
def make(folder: Path, layer_config, options: dict) -> None:
    proposal = GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=DRAFT_VOCAB,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and not name.endswith("bias"):
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(0.0, 0.3)
    model.d2t, model.t2d = (torch.nn.Buffer(each) for each in draft_ids())
    states, logits = [], []
    feeds_back = model.norm if config.norm_output else model.layers[-1]
    feeds_back.register_forward_hook(lambda _m, _i, out: states.append(out[0].clone()))
    model.lm_head.register_forward_hook(lambda _m, _i, out: logits.append(out[0].clone()))
    features = torch.randn(1, NUM_TOKENS, model.fc.in_features)
    ids = torch.randint(VOCAB, (1, NUM_TOKENS))
    documents = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    model(features, ids, documents, ttt_steps=NUM_STEPS)
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's own source
    golden = {"features": features[0], "ids": ids[0]}
    golden |= {"states": torch.stack(states), "logits": torch.stack(logits)}
    save_file(
        {name: value.contiguous() for name, value in golden.items()},
        folder.with_suffix(".safetensors"),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, (layer_config, options) in VARIANTS.items():
        make(Path(sys.argv[1]) / name, layer_config, options)
