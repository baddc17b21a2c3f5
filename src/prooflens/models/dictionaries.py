"""Dictionaries of features (sparse autoencoders, transcoders): what makes a feature active is a readout of one hook.

A feature i of a dictionary with encoder W, b and a decoder's bias c is active at a token where

    w_i·(h − c) + b_i > θ_i,

θ = 0 for ReLU (`standard`) and for the gate of a `gated` one, the learnt threshold for `jumprelu`, and the one kept for
inference for `batchtopk`. In a `topk` one it must also be among the k largest of all features: a comparison with the
others, which `queries.sites.TopFeature` claims.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.reads import find_hook
from prooflens.models.transformer import Transformer

KINDS = ("standard", "gated", "jumprelu", "batchtopk", "topk")
"""Kinds of dictionaries. In all but `topk` features are active or not each by itself."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """The encoder of a sparse autoencoder or transcoder.

    Attributes:
        hook: the value that it reads, by TransformerLens' name.
        weight: the encoder's directions, one row for each feature, shape [F, n].
        bias: what decides whether a feature is active (of the gate, in a gated one), shape [F].
        center: what is subtracted from the value first, shape [n].
        threshold: a feature is active above it, shape [F].
        kind: `standard`, `gated`, `jumprelu`, `batchtopk` or `topk`.
        decoder: what each feature adds to the value, one column for each, shape [n, F]; None if it is not known.
        decoder_bias: what is added to that, shape [n]; None for 0.
        k: of a `topk` one, how many features are active at most; None for all others.

    Raises:
        ModelError: if shapes do not fit, a number is not finite, or the kind is not known.

    Example:
        >>> import prooflens as pl
        >>> eye = torch.eye(16).double()
        >>> sae = pl.Dictionary.of("blocks.0.hook_resid_post", eye, bias=torch.full((16,), -0.5).double())
        >>> sae.size
        16
    """

    hook: str
    weight: Float[Tensor, "F n"]
    bias: Float[Tensor, " F"]
    center: Float[Tensor, " n"]
    threshold: Float[Tensor, " F"]
    kind: str = "standard"
    decoder: Float[Tensor, "n F"] | None = None
    decoder_bias: Float[Tensor, " n"] | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"a dictionary of kind {self.kind!r} is not known: known are {', '.join(KINDS)}")
        if self.weight.ndim != 2:
            raise ModelError(f"a dictionary's encoder has shape [F, n], got {list(self.weight.shape)}")
        F, n = self.weight.shape
        if (self.kind == "topk") != (self.k is not None):
            raise ModelError(
                "a 'topk' dictionary has its k, and no other kind has one: give k=32 with kind='topk'"
            )
        if self.k is not None and not (type(self.k) is int and 1 <= self.k <= F):
            raise ModelError(f"k is how many of the {F} features are active, got {self.k!r}")
        if self.kind == "topk" and bool(self.threshold.any()):
            raise ModelError("features of a 'topk' dictionary are active above 0: give no threshold")
        shapes = {"bias": (F,), "center": (n,), "threshold": (F,), "decoder": (n, F), "decoder_bias": (n,)}
        given = [name for name in ("weight", *shapes) if getattr(self, name) is not None]
        for name, shape in shapes.items():
            if name in given and tuple(getattr(self, name).shape) != shape:
                raise ModelError(
                    f"a dictionary's {name} has shape {list(shape)}, got {list(getattr(self, name).shape)}"
                )
        for name in given:
            if not bool(torch.isfinite(getattr(self, name)).all()):
                raise ModelError(
                    f"the dictionary's {name} holds values that are NaN or infinite: it is broken"
                )

    @property
    def size(self) -> int:
        """The number of features, F."""
        return len(self.weight)

    @classmethod
    def of(
        cls,
        hook: str,
        weight: Float[Tensor, "F n"],
        bias: Float[Tensor, " F"] | None = None,
        center: Float[Tensor, " n"] | None = None,
        threshold: Float[Tensor, " F"] | float = 0.0,
        kind: str = "standard",
        decoder: Float[Tensor, "n F"] | None = None,
        decoder_bias: Float[Tensor, " n"] | None = None,
        k: int | None = None,
    ) -> Dictionary:
        """Make a dictionary from arrays; they are kept in float64.

        Args:
            hook: the value that it reads.
            weight: one row for each feature, shape [F, n].
            bias: shape [F]; None for 0.
            center: shape [n]; None for 0.
            threshold: shape [F], or one number for all.
            kind: `standard`, `gated`, `jumprelu`, `batchtopk` or `topk`.
            decoder: one column for each feature, shape [n, F]; None if it is not known.
            decoder_bias: shape [n]; None for 0.
            k: of a `topk` one, how many features are active at most.
        """
        W = torch.as_tensor(weight, dtype=torch.float64)
        if W.ndim != 2:
            raise ModelError(f"a dictionary's encoder has shape [F, n], got {list(W.shape)}")
        zero_F, zero_n = W.new_zeros(len(W)), W.new_zeros(W.shape[1])
        theta = torch.as_tensor(threshold, dtype=torch.float64)
        return cls(
            hook,
            W,
            zero_F if bias is None else torch.as_tensor(bias, dtype=torch.float64),
            zero_n if center is None else torch.as_tensor(center, dtype=torch.float64),
            theta.expand(len(W)).clone() if theta.ndim == 0 else theta,
            kind,
            None if decoder is None else torch.as_tensor(decoder, dtype=torch.float64),
            None if decoder_bias is None else torch.as_tensor(decoder_bias, dtype=torch.float64),
            k,
        )

    @classmethod
    def load(cls, folder: Path | str) -> Dictionary:
        """Read a dictionary as SAELens keeps it: `cfg.json` and `sae_weights.safetensors`.

        Args:
            folder: the folder that holds both.

        Raises:
            ModelError: if a file is missing or damaged, or the configuration asks for what is not known here.
        """
        folder = Path(folder).expanduser()
        try:
            config = json.loads((folder / "cfg.json").read_text(encoding="utf-8"))
            state = load_file(folder / "sae_weights.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"{folder} holds no dictionary: cfg.json and sae_weights.safetensors are needed ({error})"
            ) from error
        return cls.from_state(config, state)

    @classmethod
    def from_state(cls, config: dict[str, Any], state: dict[str, Tensor]) -> Dictionary:
        """Make a dictionary from SAELens' configuration and tensors.

        Args:
            config: what `cfg.json` holds.
            state: tensors by SAELens' names: `W_enc` [n, F], `b_enc`, `b_dec`, `threshold`, `b_gate`.
        """
        kind = config.get("architecture", "standard")
        if config.get("activation_fn_str", config.get("activation_fn")) == "topk":
            kind = "topk"
        k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k")) if kind == "topk" else None
        if kind == "topk" and type(k) is not int:
            raise ModelError("the configuration of a 'topk' dictionary has no k: say how many are active")
        if kind in ("topk", "batchtopk") and config.get("rescale_acts_by_decoder_norm"):
            raise ModelError(
                "rescale_acts_by_decoder_norm is not known: fold it into the weights first, as SAELens' "
                "fold_W_dec_norm does"
            )
        scaled = config.get("normalize_activations", "none")
        if scaled not in ("none", None):
            raise ModelError(f"normalize_activations {scaled!r} is not known: fold it into the weights first")
        hook = config.get("hook_name") or config.get("metadata", {}).get("hook_name")
        if not isinstance(hook, str):
            raise ModelError("the dictionary's configuration has no hook_name: say what it reads")
        needed = ["W_enc", "b_gate" if kind == "gated" else "b_enc"]
        needed += ["threshold"] if kind in ("jumprelu", "batchtopk") else []
        if missing := [name for name in needed if name not in state]:
            raise ModelError(f"the dictionary's weights lack {missing[0]!r}")
        center = state.get("b_dec") if config.get("apply_b_dec_to_input", True) else None
        threshold = state["threshold"] if kind in ("jumprelu", "batchtopk") else 0.0
        made = cls.of(hook, state["W_enc"].T, state[needed[1]], center, threshold, kind, k=k)
        back = state.get("W_dec")
        if back is None or tuple(back.T.shape) != (made.weight.shape[1], made.size) or "transcoder" in kind:
            return made
        return replace(
            made,
            decoder=back.T.double().contiguous(),
            decoder_bias=None if (bias := state.get("b_dec")) is None else bias.double(),
        )

    @classmethod
    def adopt(cls, held: object) -> Dictionary:
        """Return a dictionary from a `Dictionary`, a folder, or an object of SAELens (`cfg`, `state_dict`).

        Args:
            held: any of these.
        """
        if isinstance(held, Dictionary):
            return held
        if isinstance(held, str | Path):
            return cls.load(held)
        config, state = getattr(held, "cfg", None), getattr(held, "state_dict", None)
        if config is None or state is None:
            raise ModelError(
                f"a {type(held).__name__} is no dictionary: give a folder or an object of SAELens"
            )
        written = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        return cls.from_state(written, {name: t.detach().cpu().double() for name, t in state().items()})

    def offset(self, index: int) -> tuple[float, float]:
        """Return b − w·c − θ of a feature as computed, and the sum of the sizes of its terms.

        Args:
            index: the number of the feature.
        """
        w, b, theta = self.weight[index], self.bias[index], self.threshold[index]
        size = w.abs() @ self.center.abs() + b.abs() + theta.abs()
        return float(b - w @ self.center - theta), float(size)

    def check(self, model: Transformer) -> None:
        """Raise a `ModelError` unless the dictionary reads a hook that the model has, with its width.

        Args:
            model: the model that it is to read.
        """
        width = find_hook(model.architecture, self.hook).width
        if width != self.weight.shape[1]:
            raise ModelError(
                f"the dictionary reads {self.weight.shape[1]} coordinates and {self.hook} of {model.name} has {width}: "
                "it belongs to another model"
            )

    def active(self, h: Float[Tensor, "... n"]) -> Bool[Tensor, "... F"]:
        """Return which features are active at values of the hook.

        Args:
            h: values, shape [..., n].
        """
        return self.distances((h - self.center) @ self.weight.T + self.bias - self.threshold) > 0.0

    def distances(self, y: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        """Return how far every feature is from becoming active or off: y itself, or in a `topk` one min(y, y − rival).

        The rival of a feature is the k-th largest of all others.

        Args:
            y: what the features read, above their thresholds, shape [..., F].
        """
        if self.k is None or self.k == self.size:
            return y
        largest = y.topk(self.k + 1, dim=-1).values
        last, following = largest[..., self.k - 1, None], largest[..., self.k, None]
        return torch.minimum(y, y - torch.where(y >= last, following, last))


def read_vector(path: Path | str) -> Tensor | Dictionary:
    """Read a direction from a file (.npy, or .safetensors with one tensor), or a dictionary from a folder.

    Args:
        path: the file or folder.

    Raises:
        ModelError: if there is none, or it holds something else.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return Dictionary.load(path)
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        (found,) = load_file(path).values()
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{path} holds no direction: give a .npy file, or a .safetensors file with one tensor ({error})"
        ) from error
    return found
