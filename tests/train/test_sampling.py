"""What a model has written is told apart from what it was given."""

import torch

from minipar.model.llama import PRESETS, Llama
from minipar.train import sampling
from minipar.train.tokenizer import ByteTokenizer


def test_a_prompt_that_ends_within_a_character_is_not_told_twice(monkeypatch):
    """As the first 32 bytes of a text may. Mutant: what begins otherwise is taken to be all new."""
    text = "漢字".encode()

    def generate(model, row, count, *_, generator):
        return torch.cat([row, torch.tensor([list(text[row.shape[1] :])])], 1)

    monkeypatch.setattr(sampling, "generate", generate)
    with torch.device("meta"):
        model = Llama(PRESETS["tiny"])
    model.to_empty(device="cpu")
    prompt = torch.tensor(list(text[:4]))
    assert sampling.write(model, ByteTokenizer(), prompt, 2, seed=0) == ("漢", "字")
