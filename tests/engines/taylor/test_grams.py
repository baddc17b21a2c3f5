"""Inner products of keys and values that are kept for further query tokens, and tokens that are worked on alone."""

import pytest
import torch

from prooflens import Ball, load
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.mixing import MixShape
from prooflens.engines.taylor.moved_mixing import MovedMixShape, moved_shapes
from prooflens.problem import Problem
from tests.engines.support import center_of, model_of, walk_of
from tests.models.hf_families import decoder

KINDS = ["bert", "llama", "windows"]


def mixings(kind: str) -> list[Chain]:
    """The chains of a walk on six tokens, of which the second stands still; with windows, a token reads three."""
    model = load(decoder("mistral")) if kind == "windows" else model_of(kind)
    region = Ball([0.01, 0.0, 0.02, 0.01, 0.01, 0.01]).around(center_of(model, 6, 1))
    return [chain for chain in walk_of(Problem(model, region)).chains if chain.mix is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weighed_rows_whether_they_are_kept_or_not(kind: str) -> None:
    for chain in mixings(kind):
        mix = chain.mix
        assert mix is not None
        k, v = mix.scores.k.A, mix.v.A
        kept, again = Grams(mix, 2**30), Grams(mix)
        for t in chain.goes_on:
            seen = slice(t // 2, t + 1)
            squares = mix.weights[[t]][:, kept.first].square()
            rows = [(x[seen] * mix.weights[t]).flatten(0, 2) for x in (k, v)]
            wanted = rows[0] @ rows[0].T, rows[1] @ rows[1].T, rows[1] @ rows[0].T
            for grams in (kept, again):
                found = (getattr(grams, name)(seen, squares)[0] for name in ("keys", "values", "across"))
                for one, other in zip(found, wanted, strict=True):
                    assert torch.allclose(one, other, rtol=1e-10, atol=1e-13 * float(wanted[0].abs().max()))
        assert set(kept._kept) == {"kk", "vv", "vk"}
        assert not again._kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_alone_has_the_shapes_that_it_has_among_others(kind: str) -> None:
    """Alone it leaves out keys and factors that it does not read."""
    for chain in mixings(kind):
        mix, names = chain.mix, chain.segment.attention
        assert mix is not None
        assert names is not None
        q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
        together = MixShape(mix, q, k, v, chain.goes_on, Grams(mix))
        second, rest = together.parts()
        for place, t in enumerate(chain.goes_on):
            alone = MixShape(mix, q, k, v, [t], Grams(mix))
            own_second, own_rest = alone.parts()
            for one, other in zip([own_second, *own_rest], [second, *rest], strict=True):
                size = float(torch.linalg.matrix_norm(other[place]))
                if alone.seen == together.seen:
                    assert float(torch.linalg.matrix_norm(one[0] - other[place])) <= 1e-9 * size
                # Keys that are not read have no share in any sum; the floors of weights differ a little.
                assert float(one[0].trace()) <= 1.001 * float(other[place].trace())


@pytest.mark.parametrize("kind", KINDS)
def test_forms_of_scores_by_all_keys(kind: str) -> None:
    """What moving covectors read is the same whether tokens are worked on one at a time or together."""
    for chain in mixings(kind):
        mix, names = chain.mix, chain.segment.attention
        assert mix is not None
        assert names is not None
        q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
        whole = moved_shapes(chain)
        for place, t in enumerate(chain.goes_on):
            alone = MovedMixShape(mix, q, k, v, [t], Grams(mix)).moved()
            read = mix.mask[t].repeat(mix.z.shape[1])
            for one, other in ((alone.squares, whole.squares), (alone.products, whole.products)):
                gap = (one[0] - other[place])[read][:, read]
                assert float(gap.abs().max()) <= 1e-9 * float(other.abs().max())
                assert not one[0][~read].any()
