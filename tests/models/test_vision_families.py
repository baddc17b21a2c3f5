"""Vision encoders against transformers in float64, from the embedded patches on, under old and new names."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models import Transformer, load, pattern_name
from prooflens.models.huggingface import convert
from tests.models.hf_families import IMAGE, randomised, true_double

OLD_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
OLD_NETWORK = {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
MODELS = ("ViTModel", "ViTForImageClassification", "Dinov2Model")


def made(name: str) -> Any:
    """A tiny random vision model."""
    fields: dict[str, object] = {"mlp_ratio": 2} if "Dino" in name else {"intermediate_size": 24}
    config = getattr(transformers, "Dinov2Config" if "Dino" in name else "ViTConfig")
    return randomised(
        getattr(transformers, name)(config(**IMAGE, **fields, attn_implementation="eager", num_labels=3))
    )


def run(module: Any) -> tuple[Tensor, Tensor, Any]:
    """Embedded patches, output, and the weights of attention of a random image."""
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trunk, seen = getattr(module, "vit", module), []
    trunk.embeddings.register_forward_hook(lambda _module, _given, out: seen.append(out))
    with torch.no_grad(), true_double():
        found = module(image, output_attentions=True)
    output = found.logits if "logits" in found else found.last_hidden_state
    return seen[0][0], output[0], found.attentions


def old_state(module: Any) -> dict[str, Tensor]:
    """The state under the names that transformers 4 gave it, as folders have it."""
    vit = "dino" not in module.config.model_type
    state = {}
    for name, tensor in module.state_dict().items():
        for new, old in (OLD_NAMES | (OLD_NETWORK if vit else {})).items():
            name = name.replace(new, old)
        state[name.replace("layers.", "encoder.layer.") if vit else name] = tensor
    return state


@pytest.mark.parametrize("name", MODELS)
def test_vision_encoders_equal_transformers(name: str) -> None:
    module = made(name)
    x, expected, attentions = run(module)
    model = load(module)
    output, cache = model.run_with_cache(x)
    assert torch.allclose(output, expected, rtol=1e-9, atol=1e-9)
    for layer, pattern in enumerate(attentions):
        assert torch.allclose(cache[pattern_name(layer)], pattern[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_older_names_are_the_same_model(name: str) -> None:
    module = made(name)
    architecture, weights = convert(module.config.to_dict(), old_state(module))
    held = {key: tensor.double().contiguous() for key, tensor in weights.items()}
    assert Transformer(architecture, held).sha256 == load(module).sha256


def test_dinov2s_classifier_is_refused() -> None:
    with pytest.raises(ModelError, match=r"classifier.*load the encoder \(Dinov2Model\)"):
        load(made("Dinov2ForImageClassification"))
