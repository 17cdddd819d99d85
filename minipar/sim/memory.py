"""The bytes that a rank must hold to train a model, in closed form.

Idea.   A training step holds the *model state*, which depends on the number of parameters alone,
        and *activations*, which depend on the batch. Data parallelism keeps a whole copy of the
        model state on every rank; each ZeRO stage shards one more part of it over n ranks.
Math.   P parameters, n ranks, and p, g and o bytes per parameter of each kind:

            ddp    (p + g + o) P            zero2  p P + (g + o) P / n
            zero1  (p + g) P + o P / n      zero3  (p + g + o) P / n  + the blocks in use, whole

Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5 and figure 1; Korthikanti et
        al. 2022 (arXiv 2205.05198), table 2, for activations.

Everything is in bytes, as floats: shards are not rounded up to whole elements. `footprint.py` adds
up these laws for the fullest rank of a plan; `minipar.lab.memory` measures the same categories.
"""

from typing import NamedTuple

from minipar.model.llama import LlamaConfig

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STATE = ("parameters", "gradients", "optimizer")


class Recipe(NamedTuple):
    """Bytes per parameter of each part of the model state."""

    parameters: float
    gradients: float
    optimizer: float


MIXED_ADAM = Recipe(2, 2, 12)
"""Half-precision weights and gradients; in fp32 a copy of the weights and Adam's two moments."""
MASTER_ADAM = Recipe(2, 4, 12)
"""The recipe of `minipar train --precision bf16` up to ZeRO 2: gradients are summed in fp32. Under
ZeRO 3 the shards are the masters (`FP32_ADAM`), and blocks in use are in bf16."""
FP32_ADAM = Recipe(4, 4, 8)
"""The recipe of `minipar train` otherwise, also under autocast, which casts in a forward only."""


def model_state(
    num_parameters: float,
    size: int = 1,
    strategy: str = "ddp",
    recipe: Recipe = FP32_ADAM,
    *,
    largest_block: float = 0,
) -> dict[str, float]:
    """Return the bytes of the model state that one of `size` ranks holds, by category.

    Args:
        num_parameters: of the whole model; tied ones count once.
        strategy: "ddp", "zero1", "zero2" or "zero3"; fsdp is zero3.
        largest_block: parameters of the largest block. zero3 gathers blocks before their use, two
            at a time, in the category "gathered".
    """
    sharded = STATE[len(STATE) - STRATEGIES.index(strategy) :]
    held = {
        part: getattr(recipe, part) * num_parameters / (size if part in sharded else 1)
        for part in STATE
    }
    if strategy == "zero3":
        held["gathered"] = 2 * recipe.parameters * largest_block
    return held


# ------------------------------------------------------------------------------------ activations
def llama_activations(
    config: LlamaConfig,
    num_tokens: float,
    *,
    tp: int = 1,
    sequence: bool = False,
    overlap: bool = False,
    experts: bool = False,
    bytes_per_number: float = 2,
    fused_norm: bool = True,
    fused_gate: bool = False,
) -> dict[str, float]:
    """Return the bytes that backward needs of one Llama layer, by part, for so many tokens.

    A layer of a GPT keeps T B D (34 + 5 H T / D) bytes, by table 2 of the paper. A Llama differs:
    no dropout, no stored T x T matrix (SDPA), G key/value heads for H query heads, and a gated
    hidden layer. In numbers per token, on a rank:

        norms      4 D                their inputs and results: what the matrices multiply
        attention  (2 H + 2 G) K / tp      q, k, v and the result; at least one head of k and v
        mlp        4 F / tp                gate, silu(gate), up and their product

    With `sequence`, norms keep their inputs as shards and their results gathered, 2 D/tp + 2 D;
    with `overlap` backward gathers the results again, 4 D/tp. The latter is what the paper computes
    for sequence parallelism. Without `fused_norm` a norm also keeps its input in float32. With
    `fused_gate`, as torch.compile does, backward computes silu(gate) again.

    A layer with experts has instead of the last, for k choices of a token, and k' = k + num_shared:

        mlp        2 k D + 4 k' F     rows and the experts' answers, which are weighed
        routing    4 E + 40 k + 4 bytes    scores, weights, choices and their order

    Experts are whole on each rank of `tp`; with `sequence`, each rank computes its own tokens; with
    `experts` ("expert tensor parallelism"), F is cut and all tokens are there.

    Left out: numbers per token and head (log-sum-exp) or per token and norm. Source: Korthikanti et
    al. 2022, section 4. Raises `ValueError` for `overlap` without `sequence`.
    """
    if overlap and not sequence:
        raise ValueError("overlap=True gathers what sequence=True has cut; set both")
    inputs = 2 * config.hidden_size * (1 if fused_norm else 1 + 4 / bytes_per_number)
    results = 2 * config.hidden_size
    heads = 2 * config.num_heads / tp + 2 * max(config.num_kv_heads / tp, 1)
    gate = 3 if fused_gate else 4
    numbers = {
        "norms": inputs / (tp if sequence else 1) + results / (tp if overlap else 1),
        "attention": heads * config.head_dim,
        "mlp": gate * config.intermediate_size / tp,
    }
    moe, routing = config.moe, {}
    if moe is not None:
        own = tp if sequence else 1  # parts into which tokens are cut where they are routed
        parts = tp if experts else own
        hidden = gate * (moe.top_k + moe.num_shared) * moe.expert_size
        rows = 2 * moe.top_k * config.hidden_size
        numbers["mlp"] = rows / (1 if experts else own) + hidden / parts
        # A router multiplies its own tokens; of what is gathered, shared experts keep a copy.
        numbers["norms"] = inputs / own + results / 2 * (1 / (tp if overlap else 1) + 1 / own)
        if own > 1 and experts and moe.num_shared:
            numbers["norms"] += config.hidden_size
        routing["routing"] = num_tokens * (4 * moe.num_experts + 40 * moe.top_k + 4) / own
    kept = {part: bytes_per_number * num_tokens * count for part, count in numbers.items()}
    return kept | routing
