"""Runs a small GPT2 of transformers, with its own switch for checkpoints, under the drop-in."""

import sys

import torch

import remat

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit(77)    # skipped

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0,
                    eos_token_id=0, use_cache=False)
model = GPT2LMHeadModel(config).train()
ids = torch.randint(64, (2, 32))


def gradients():
    torch.manual_seed(1)    # of dropout
    return torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))


plain = gradients()
with remat.installed():
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = remat.counters()["recomputes"]
    regions = gradients()
    recomputes = remat.counters()["recomputes"] - before
assert recomputes == 3, f"{recomputes} recomputes of 3 blocks"
assert all(map(torch.equal, plain, regions)), "gradients differ"
print(f"GPT2 with {recomputes} recomputes: gradients bit-equal: yes")
