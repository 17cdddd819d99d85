"""Packing documents into a row changes no number of theirs."""

import pytest
import torch

from minipar.model.llama import token_loss
from minipar.model.masks import document_mask, document_positions
from tests.model.oracle import CONFIGS, randomised, some_tokens

LENGTHS = (9, 14, 5)


@pytest.fixture
def model():
    return randomised(CONFIGS["gqa"])


def test_masks_by_hand():
    ids = torch.tensor([[4, 4, 7, 7, 7, 4]])
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 0, 1],  # the same id again is a new document
        ]
    ).bool()
    assert torch.equal(document_mask(ids), expected[None, None])
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0]]


def test_packed_documents_equal_separate_ones(model):
    """Logits and gradients. Without the mask they differ, without the positions a little."""
    documents = [some_tokens(model.config, 1, n) for n in LENGTHS]
    packed = torch.cat(documents, dim=1)
    ids = torch.cat([torch.full((1, n), i) for i, n in enumerate(LENGTHS)], dim=1)
    mask, positions = document_mask(ids), document_positions(ids)

    logits = model(packed, positions, mask)
    separate = torch.cat([model(document) for document in documents], dim=1)
    torch.testing.assert_close(logits, separate, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model(packed), separate, rtol=1e-3, atol=1e-3)

    targets = some_tokens(model.config, 1, sum(LENGTHS)).flip(1)
    model.zero_grad()
    ours = torch.autograd.grad(token_loss(logits, targets), tuple(model.parameters()))
    theirs = torch.autograd.grad(token_loss(separate, targets), tuple(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
