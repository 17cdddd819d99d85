"""Masks and positions for padded and for packed rows.

A mask is boolean, [B, 1, T, T], True where the query (row) may look at the key (column). The model
takes a mask and positions [B, T]: `model(tokens, positions, mask)`. Then neither padding nor other
documents in the row change the result of a document. Plain causal rows need no mask or positions.

Shapes: B batch, T tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal mask [B, 1, T, T] for packed rows: attention stays inside its document.

    A document is a run of equal ids in `document_ids` [B, T]; give padding an id of its own.
    """
    runs = _new_document(document_ids).cumsum(1)
    return (runs[:, :, None] == runs[:, None, :]).tril()[:, None]


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions [B, T] that restart at 0 with every document of `document_mask`."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    start = (index * _new_document(document_ids)).cummax(1).values
    return index - start


def _new_document(document_ids: Tensor) -> Tensor:
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(changes, (1, 0), value=False).long()
