"""Fourth orders of a form: what e makes of itself, walked back to the remainders that e is made of, as squares.

Of a form's remainder `taylor.third_order` leaves ½ eᵀQe at every norm and network, e_q·e_k at the scores, and what
squares of a move have beside those of Aα. Bounded on the ellipsoid of e these are constants, and at depth most of the
bound. But e is Σ_s J_s r_s over the remainders r_s of the sites before, and these are quadratic in the moves there. So

    ½ |eᵀQe|  ≤  ½ eᵀXe  ≤  Σ_s c_s ½ r_sᵀ(J_sᵀXJ_s) r_s,          X ⪰ ±Q,   Σ 1/c_s ≤ 1,

and each term is at most a square of the move u_s of the input of s (`taylor.source_squares`), u_s = A_sα + e_s:

    ½ uᵀRu  ≤  (1 + δ) ½ (Aα)ᵀR(Aα) + (1 + 1/δ) ½ eᵀRe.

The first joins the matrix of all squares. The second is of the kind that we began with, at an earlier site: it is
walked back like the rest, and so on, through the mixings in front of the chain, as far as it counts.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.ellipsoids import raised, trace, weights_of_sum
from prooflens.engines.relaxations.norms import frobenius, grow, identity, product_error
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.form_sums import FormSum
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.layernorm import NormSite
from prooflens.engines.taylor.mixing_squares import MixSquares
from prooflens.engines.taylor.network import WIDEST_ON_CPU, NetworkSite
from prooflens.engines.taylor.next_root import tangent
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.source_squares import (
    SPARE,
    network_square,
    norm_square,
    price,
    scaled,
    shares,
)
from prooflens.engines.taylor.squares import Squares, half_form, remainder_form
from prooflens.engines.taylor.values import Value
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.models.sites import Norm, Solu
from prooflens.numerics import gamma

Key = TypeVar("Key", str, int)

Piece = tuple[int, str, Tensor, Tensor]
"""A token, the source of its remainder, a Jacobian by it, and its shape."""

ROOT = ""
"""The name of a chain's root among the sources of e."""
LEAST_PIECE = 0.005
"""What a remainder has of all at a root, at least, to be walked further back."""
SHORT = 1e-4
"""The shortest axis that a change of coordinates evens out, as a share of the mean of their squares."""
GRAM_ROOM = 2**30
"""Bytes that inner products of keys and of values may take, for one mixing."""


class FourthOrder:
    """Squares above what e makes of itself, for several forms.

    Args:
        half_widths: half-widths of the factors, shape [p].
        forms: how many forms there are.
    """

    def __init__(self, half_widths: Float[Tensor, " p"], forms: int) -> None:
        self.half_widths = half_widths
        self.grams: dict[Chain, Grams] = {}
        self.above = FormSum(half_widths, forms)
        """The squares."""
        self.rest = half_widths.new_zeros(forms)
        """What no square holds."""
        self.seen: dict[tuple[Chain, int], dict[str, Tensor]] = defaultdict(dict)
        """X by chain and token, and by the source whose remainder it meets."""
        self.moved: dict[Chain, list[tuple[Value, int, Squares]]] = defaultdict(list)
        """What is to be split."""
        self.mixings: dict[Chain, dict[int, Tensor]] = defaultdict(dict)
        """X of the remainders of mixings, by place."""

    def add_form(
        self, chain: Chain, value: Value, t: int, Q: Float[Tensor, "F n n"], error: Float[Tensor, " F"]
    ) -> None:
        """Take ½ |eᵀQe| of a value.

        Args:
            chain: its chain.
            value: the value.
            t: the token.
            Q: symmetric matrices, shape [F, n, n].
            error: bounds of their error in the 2-norm.
        """
        self.add(chain, value, t, above_both(value.shape_e[t], Q, error))

    def add_squares(self, chain: Chain, value: Value, t: int, squares: Squares) -> None:
        """Take ½uᵀRu + (uᵀBu)^½ + rest for the move u of a value.

        Args:
            chain: its chain.
            value: the value.
            t: the token.
            squares: R, B and the rest.
        """
        self.moved[chain].append((value, t, squares))

    def _squares(self, chain: Chain, value: Value, t: int, squares: Squares) -> None:
        """Make one square of both, as (uᵀBu)^½ ≤ ½ (uᵀBu/far + far)."""
        R, rest = raised(squares.R, squares.error), squares.rest
        if squares.B is not None and squares.missed is not None:
            B = raised(squares.B, squares.missed)
            most = (2.0 * remainder_form(value.shape[t], B, self._nothing)).sqrt()
            there = half_form(B, self._at_corner(value, t))
            far = torch.maximum((2.0 * there).sqrt(), SPARE * most) + 2.0**-300
            R = raised(R + B / far[:, None, None], gamma(8) * (frobenius(R) + frobenius(B) / far))
            rest = rest + 0.5 * far
        self.rest = grow(self.rest + rest)
        self._split(chain, value, t, R)

    def add_products(self, chain: Chain, forms: Forms) -> None:
        """Take scale |e_q·e_k| of the forms' scores in a chain: at most ½ (|Tᵀe_q|² + |T⁻¹e_k|²) for any T.

        Args:
            chain: the chain.
            forms: what is bounded.
        """
        scores = chain.scores
        assert scores is not None
        here = forms.layer == chain.segment.layer
        form, h, i, j = (
            x[here].to(self.rest.device) for x in (forms.index, forms.head, forms.position, forms.key)
        )
        size = grow(forms.weight[here].to(self.rest).abs() * scores.step.scale)
        X, Y, off = balanced(scores.q.B[i, h], scores.k.B[j, h])
        lost = size * off * scores.q.e[i, h] * scores.k.e[j, h]
        self.rest = grow(self.rest + torch.zeros_like(self.rest).index_add(0, form, lost))
        places = (i, h, X), (j, h // scores.k.share, Y)
        for name, (tokens, heads, each) in zip(scores.names, places, strict=True):
            value = chain.values[name]
            c = value.u.shape[1] // value.heads
            made = scaled(size, each)
            for t in tokens.unique().tolist():
                some = tokens == t
                M = made.new_zeros(len(self.rest), value.heads, c, value.heads, c)
                for f, head, one in zip(form[some].tolist(), heads[some].tolist(), made[some], strict=True):
                    M[f, head, :, head] += one
                M = M.flatten(3).flatten(1, 2)
                self.add(chain, value, t, raised(M, gamma(2 * len(form) + 8) * frobenius(M)))

    def _add_rows(self, rows: Float[Tensor, "H n p"], shape: Float[Tensor, "F m m"]) -> None:
        """Add the squares of linear forms of the factors."""
        left = (rows * self.half_widths).flatten(0, 1)
        # Rows and their product with the shape round by units and by sums of their number.
        error = product_error(4 * len(left) + 64, 4.0 * frobenius(left).square() * frobenius(shape))
        self.above.add(left, 0.5 * shape @ left, error)

    def add(self, chain: Chain, value: Value, t: int, X: Float[Tensor, "F n n"]) -> None:
        """Take ½ eᵀXe of a value, and share it out among the sources of e.

        Args:
            chain: its chain.
            value: the value.
            t: the token.
            X: shapes, [F, n, n].
        """
        names = ([] if value.root.blur is not None else [ROOT]) + list(value.sources)
        pulled, sizes = [], [value.slip[t] * frobenius(X).sqrt()]
        for J, shape in value.parts:
            pulled.append(raised_image(J[t].T, X))
            sizes.append(torch.einsum("fij,ij->f", pulled[-1], shape[t]).clamp(min=0.0).sqrt())
        c = weights_of_sum(torch.stack(sizes, -1))
        self.rest = grow(self.rest + 0.5 * c[:, 0] * sizes[0].square())
        for number, name in enumerate(names, 1):
            _put(self.seen[chain, t], name, scaled(c[:, number], pulled[number - 1]))

    def walk_back(self, walk: TaylorWalk, slope: Float[Tensor, "F p"]) -> None:
        """Take everything back to squares of the factors, chain by chain from the last.

        Args:
            walk: the walk forward.
            slope: the linear parts of the forms: at their corners squares should be small.
        """
        chains = walk.chains
        self.corner = torch.where(slope >= 0.0, 1.0, -1.0).to(slope) * self.half_widths
        for number in reversed(range(len(chains))):
            chain = chains[number]
            before = chains[number - 1] if number else None
            for value, t, squares in self.moved.pop(chain, []):
                self._squares(chain, value, t, squares)
            tokens = sorted(t for owner, t in self.seen if owner is chain)
            for t in tokens:
                self._through(chain, t, self.seen[chain, t])
            self.above.arrive(chain.root)
            for t in tokens:
                if ROOT in (at := self.seen.pop((chain, t))):
                    self._before(chain, before, t, at[ROOT])
            if before is not None:
                self._mixings(before)
            walk.progress("fourth orders, chain by chain", 1.0 - number / len(chains))

    def _through(self, chain: Chain, t: int, at: dict[str, Tensor]) -> None:
        """Take X of one token through the sites of a chain."""
        for step in reversed(chain.segment.steps):
            if not isinstance(step, Norm | FeedForward | Solu) or step.out not in at:
                continue
            X, site = at.pop(step.out), chain.sites[step.out]
            if isinstance(site, NormSite):
                found = norm_square(site, X, t, self._at_corner(site.source, t))
            elif isinstance(site, NetworkSite) and self._fits(site):
                found = network_square(site, X, t, self._at_corner(site.source, t))
            else:
                self.rest = grow(self.rest + remainder_form(chain.shapes[step.out][t], X, self._nothing))
                continue
            self.rest = grow(self.rest + found.rest)
            self._split(chain, site.source, t, found.R)

    def _at_corner(self, value: Value, t: int) -> Float[Tensor, "F n"]:
        """Return Aα at the corners of the linear parts; nothing rests on it."""
        return self.corner @ value.root.N[t].T @ value.J[t].T

    @property
    def _nothing(self) -> Float[Tensor, " F"]:
        return torch.zeros_like(self.rest)

    def _fits(self, site: NetworkSite) -> bool:
        """Return whether a network's Gram matrices are worth their time."""
        return site.h.is_cuda or site.h.shape[1] <= WIDEST_ON_CPU

    def _split(self, chain: Chain, value: Value, t: int, R: Float[Tensor, "F n n"]) -> None:
        """Keep a square of Aα for the root, and take the one of e further back."""
        J = value.J[t]
        beside = SPARE * remainder_form(value.shape_e[t], R, self._nothing)
        one, other = shares(price(R, self._at_corner(value, t), value.shape_a[t]), beside)
        size = frobenius(J).square()
        at_root = J.T @ R @ J
        slip = product_error(4 * sum(J.shape), 4.0 * size * frobenius(R))
        made = one[:, None, None] * 0.5 * (at_root + at_root.mT)
        self.above.keep(t, made, grow(one * slip + gamma(16) * frobenius(made)))
        self.add(chain, value, t, scaled(other, R))

    def _before(self, chain: Chain, before: Chain | None, place: int, X: Float[Tensor, "F d d"]) -> None:
        """Take X at a root to the mixing in front of it, and to all remainders that the mixing takes along."""
        if before is None or before.mix is None or before.noise is None or before.mixed is None:
            self.rest = grow(self.rest + remainder_form(chain.root.B[place], X, self._nothing))
            return
        pieces, noise = self._along(before, place)
        pulled = [raised_image(B.T, X) for _, _, B, _ in pieces]
        sizes = [remainder_form(before.mixed[place], X, self._nothing), frobenius(X) * noise.square()]
        sizes += [
            remainder_form(shape, back, self._nothing)
            for (*_, shape), back in zip(pieces, pulled, strict=True)
        ]
        roots_of = torch.stack(sizes, -1).sqrt()
        c = weights_of_sum(roots_of)
        self.rest = grow(self.rest + c[:, 1] * sizes[1])
        _put(self.mixings[before], place, scaled(c[:, 0], X))
        small = (roots_of < LEAST_PIECE * roots_of.sum(-1, keepdim=True)).all(0).tolist()
        for number, ((t, name, _, _), back) in enumerate(zip(pieces, pulled, strict=True), 2):
            if small[number]:
                self.rest = grow(self.rest + c[:, number] * sizes[number])
            else:
                _put(self.seen[before, t], name, scaled(c[:, number], back))

    def _along(self, chain: Chain, place: int) -> tuple[list[Piece], Tensor]:
        """Return the Jacobian of a token of the next root by every remainder of a chain, and what else it misses.

        They are the blocks that `taylor.next_root` moves remainders by, made again.
        """
        mix, t, root = chain.mix, chain.goes_on[place], chain.root
        assert mix is not None
        assert chain.noise is not None
        names = mix.attention
        values = [chain.values[name] for name in (names.q, names.k, names.v, names.stream)]
        live = mix.mask[..., t, :].reshape(-1, mix.mask.shape[-1]).any(0).cpu()
        live[t] = True
        where = live.nonzero()[:, 0].tolist()
        keys = slice(where[0], where[-1] + 1)
        found: list[Piece] = []
        noise = chain.noise[place]
        sources = {name: [value.sources.get(name) for value in values] for v in values for name in v.sources}
        shapes = {name: chain.shapes[name] for name in sources}
        if root.blur is None:
            sources[ROOT], shapes[ROOT] = [value.J for value in values], root.B
        for name, by in sources.items():
            B, error = tangent(mix, by[0], by[1], by[2], by[3], [t], keys)
            noise = noise + error[0] @ trace(shapes[name][keys]).sqrt()
            found += [(j, name, B[0, j - keys.start], shapes[name][j]) for j in where]
        return found, grow(noise)

    def _mixings(self, chain: Chain) -> None:
        """Take X of all remainders of a mixing to squares of its scores and queries."""
        mix = chain.mix
        for place, X in self.mixings.pop(chain, {}).items():
            assert mix is not None
            at, t = self._at_mixing(chain, place), chain.goes_on[place]
            found = at.square(X, self.corner)
            self.rest = grow(self.rest + found.rest)
            self._add_rows(mix.rows[:, t, at.seen], found.Z)
            self._add_rows(mix.scores.q.A[t], found.Y)

    def _at_mixing(self, chain: Chain, place: int) -> MixSquares:
        """Return the squares of a mixing at a token of the next root; the chain keeps them for other forms."""
        if place in chain.squares:
            return chain.squares[place]
        mix, names = chain.mix, chain.segment.attention
        assert mix is not None
        assert names is not None
        q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
        grams = self.grams.setdefault(chain, Grams(mix, GRAM_ROOM))
        made = MixSquares(mix, q, k, v, [chain.goes_on[place]], grams)
        pairs = (len(mix.z) * max(k.u.shape[1], v.u.shape[1])) ** 2
        if 16 * pairs * len(chain.goes_on) <= GRAM_ROOM:
            chain.squares[place] = made
        return made


def _put(at: dict[Key, Tensor], key: Key, X: Float[Tensor, "F n n"]) -> None:
    at[key] = X if key not in at else raised(at[key] + X, gamma(8) * (frobenius(at[key]) + frobenius(X)))


def raised_image(D: Float[Tensor, "m n"], X: Float[Tensor, "F n n"]) -> Float[Tensor, "F m m"]:
    """Return DXDᵀ, raised; two products of inner length n, and 4 and 4 are to spare.

    Args:
        D: the linear map.
        X: shapes.
    """
    return raised(D @ X @ D.T, product_error(4 * D.shape[1], 4.0 * frobenius(D).square() * frobenius(X)))


def above_both(
    M: Float[Tensor, "n n"], Q: Float[Tensor, "F n n"], error: Float[Tensor, " F"]
) -> Float[Tensor, "F n n"]:
    """Return X above Q and above −Q, raised, which on E(M) is hardly more than they are at most.

    With T about M^½ and TQT = VλVᵀ it is T⁻¹V|λ|VᵀT⁻¹. For any W, W|λ|Wᵀ is above both ±WλWᵀ; what that is off Q is
    measured.

    Args:
        M: the shape of what Q is read at.
        Q: symmetric matrices, shape [F, n, n].
        error: bounds of their error in the 2-norm.
    """
    finite = Q.isfinite().all(-1).all(-1) & M.isfinite().all()
    Q = torch.where(finite[:, None, None], Q, 0.0)
    T, back = roots(M)
    turned = T @ Q @ T
    found, V = axes_of(0.5 * (turned + turned.mT))
    W = back @ V
    signed = W * found[:, None]
    made = (W * found.abs()[:, None]) @ W.mT
    off = frobenius(Q - signed @ W.mT) + product_error(4 * len(M), 4.0 * frobenius(W) * frobenius(signed))
    return raised(made, torch.where(finite, grow(error + off), torch.inf))


def roots(M: Float[Tensor, "*b n n"]) -> tuple[Float[Tensor, "*b n n"], Float[Tensor, "*b n n"]]:
    """Return about M^½ and M^-½ of shapes, symmetric, with short axes made longer: nothing rests on them.

    Args:
        M: shapes, [..., n, n]; of what is not finite, the identity is taken.
    """
    finite = M.isfinite().all(-1).all(-1)[..., None, None]
    axes, V = axes_of(torch.where(finite, M, identity(M, M.shape[-1])))
    axes = axes.clamp(min=0.0)
    axes = (axes + SHORT * axes.mean(-1, keepdim=True) + 2.0**-300).sqrt()
    root, back = ((V * x[..., None, :]) @ V.mT for x in (axes, 1.0 / axes))
    return root, back


def axes_of(M: Float[Tensor, "*b n n"]) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n n"]]:
    """Return about the eigenvalues and eigenvectors of symmetric matrices: nothing rests on them.

    Args:
        M: matrices, shape [..., n, n]; where no eigenvectors are found, the coordinates stand for them.
    """
    try:
        values, V = torch.linalg.eigh(M)
    except LinAlgError:
        if M.dim() == 2:
            return M.diagonal(), identity(M, len(M))
        values, V = (torch.stack(part) for part in zip(*(axes_of(one) for one in M), strict=True))
    return values, V


def balanced(
    B: Float[Tensor, "E c c"], K: Float[Tensor, "E c c"]
) -> tuple[Float[Tensor, "E c c"], Float[Tensor, "E c c"], Float[Tensor, " E"]]:
    """Return X, Y and δ with x·y ≤ ½ (xᵀXx + yᵀYy) + δ |x||y|, for x in E(B) and y in E(K) as good as can be.

    For any T, x·y = (Tᵀx)·(T⁻¹y), and best is TTᵀ = B⁻¹ # K, the geometric mean: with it both squares have the same
    largest value as x·y. δ is what the product of T with its inverse is off 1.

    Args:
        B: the shapes of x.
        K: the shapes of y.
    """
    root, back = roots(B)
    middle, _ = roots(root @ K @ root)
    T, inverse = roots(back @ middle @ back)
    eye = identity(B, B.shape[-1])
    off = frobenius(eye - T @ inverse) + product_error(2 * B.shape[-1], frobenius(T) * frobenius(inverse))
    X, Y = (raised(A @ A.mT, product_error(A.shape[-1], frobenius(A).square())) for A in (T, inverse.mT))
    return X, Y, off
