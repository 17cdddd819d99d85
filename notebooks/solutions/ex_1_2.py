"""Count the parameters of a Llama from its configuration.

A table of V rows for the embedding, one more for the head unless they are tied. In each layer four
projections (two of them narrower with grouped-query attention), three matrices of the MLP and two
norms. One norm at the end.
"""

from types import SimpleNamespace

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.llama import Llama, LlamaConfig

LEVEL, MINUTES = "easy", 10
GOOD = "exact to the last parameter, for any shape: grouped heads, tied or untied embeddings"
PRAISE = "You can now say how large a model is before anybody has built it."
SIZES = (1,)


def given(size, random):
    """A list of shapes: too few fields of a `LlamaConfig` for a model that counts itself."""

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    shapes = []
    for tied in (True, False, True, False):
        groups, share = draw(1, 5), draw(2, 4)
        shape = SimpleNamespace(
            vocab_size=draw(100, 500),
            hidden_size=draw(16, 100),
            intermediate_size=draw(50, 300),
            num_layers=draw(2, 7),
            num_heads=groups * share,
            num_kv_heads=groups,
            head_dim=2 * draw(2, 9),
            tie_embeddings=tied,
        )
        shapes.append(shape)
    return [(shapes,)] * size


def run(answer, axis, shapes):
    return [answer(shape) for shape in shapes]


def check_result(case: Case) -> None:
    for shape, got in zip(case.given[0][0], case.results[0], strict=True):
        with torch.device("meta"):
            model = Llama(LlamaConfig(**vars(shape)))
        want = sum(parameter.numel() for parameter in model.parameters())
        if got != want:
            gap = f", {got - want:+,}" if isinstance(got, int) else ""
            raise CheckFailed(f"expected {want:,} parameters, got {got!r}{gap}, for\n    {shape}")


def solution(config):
    width, head_dim = config.hidden_size, config.head_dim
    queries = width * config.num_heads * head_dim
    keys = width * config.num_kv_heads * head_dim
    attention = 2 * queries + 2 * keys  # q and o, k and v
    mlp = 3 * width * config.intermediate_size
    layer = attention + mlp + 2 * width
    tables = 1 if config.tie_embeddings else 2
    return tables * config.vocab_size * width + config.num_layers * layer + width


@fails(
    "result",
    "The count is 0.",
)
def wrong_says_nothing(config):
    return 0


@fails(
    "run",
    "The library's own count is not there: add up the matrices yourself.",
)
def wrong_asks_the_library(config):
    return config.num_parameters


@fails(
    "result",
    "Keys and values have num_kv_heads heads, not num_heads.",
)
def wrong_gives_every_head_its_own_keys(config):
    extra = 2 * config.hidden_size * (config.num_heads - config.num_kv_heads) * config.head_dim
    return solution(config) + config.num_layers * extra


@fails(
    "result",
    "Tied embeddings are one table, counted once.",
)
def wrong_counts_tied_tables_twice(config):
    again = config.vocab_size * config.hidden_size if config.tie_embeddings else 0
    return solution(config) + again


@fails(
    "result",
    "Norms are missing: two per layer and one at the end, D weights each.",
)
def wrong_forgets_the_norms(config):
    return solution(config) - (2 * config.num_layers + 1) * config.hidden_size


@fails(
    "result",
    "A head is head_dim wide, which need not be D / H.",
)
def wrong_takes_the_width_for_all_heads(config):
    heads = config.num_heads + config.num_kv_heads
    error = config.hidden_size // config.num_heads - config.head_dim
    return solution(config) + config.num_layers * 2 * config.hidden_size * heads * error


@fails(
    "result",
    "A head is head_dim wide, which need not be D / H.",
)
def wrong_divides_the_width_by_the_heads(config):
    width = config.hidden_size
    keys = width * config.num_kv_heads * (width // config.num_heads)
    mlp = 3 * width * config.intermediate_size
    layer = 2 * width * width + 2 * keys + mlp + 2 * width
    tables = 1 if config.tie_embeddings else 2
    return tables * config.vocab_size * width + config.num_layers * layer + width


@fails(
    "run",
    "A model was built to be counted: the shape alone is enough.",
)
def wrong_builds_the_model(config):
    return sum(p.numel() for p in Llama(config).parameters())


@fails(
    "result",
    "The MLP has three matrices of D x F: gate, up and down.",
)
def wrong_forgets_a_matrix_of_the_mlp(config):
    return solution(config) - config.num_layers * config.hidden_size * config.intermediate_size


@fails(
    "result",
    "The output projection is missing: attention has four matrices, q, k, v and o.",
)
def wrong_forgets_the_output_projection(config):
    heads = config.num_heads * config.head_dim
    return solution(config) - config.num_layers * config.hidden_size * heads
