"""Judge the classifier of mine.py with weights of each profile: ``python verdict.py [PROFILE …]``."""

import sys

import torch
from mine import Classifier
from torch.nn import functional as F

from concord import conformance, spec
from concord.backends import Run

config = spec.variant(
    "bert",  # erf GELU, epsilon 1e-12 inside the root, norms after the residuals, learned positions
    vocab_size=101,
    max_positions=16,
    d_model=24,
    num_heads=3,
    d_ff=40,
    num_layers=2,
    num_classes=5,
    num_segments=0,  # no segment ids
    embedding_norm=False,  # no norm after the embeddings
    pooler="none",  # the classifier takes the first token as it is
    token_padding_row=None,  # the row of the padding token is trained like any other
    mask_fill="replace",
    mask_value=-1e9,  # masked_fill(..., -1e9)
)


def named(model, of):
    """Return views of the model's tensors by canonical name; `of` gives a parameter's values or gradient."""
    tensors = {
        "embeddings.token.weight": of(model.words.weight),
        "embeddings.position.weight": of(model.places.weight),
    }
    for i, block in enumerate(model.blocks):
        for name, weight, bias in zip(
            ("query", "key", "value"), of(block.qkv.weight).chunk(3), of(block.qkv.bias).chunk(3), strict=True
        ):
            tensors |= {
                f"layers.{i}.attention.{name}.weight": weight.T,
                f"layers.{i}.attention.{name}.bias": bias,
            }
        for name, layer in {
            "attention.output": block.proj,
            "feed_forward.inner": block.up,
            "feed_forward.outer": block.down,
        }.items():
            tensors |= {
                f"layers.{i}.{name}.weight": of(layer.weight).T,
                f"layers.{i}.{name}.bias": of(layer.bias),
            }
        for name, norm in {"norm1": block.ln1, "norm2": block.ln2}.items():
            tensors |= {
                f"layers.{i}.{name}.weight": of(norm.weight),
                f"layers.{i}.{name}.bias": of(norm.bias),
            }
    return tensors | {"classifier.weight": of(model.head.weight).T, "classifier.bias": of(model.head.bias)}


def run(weights, batch):
    """Run the model on weights by canonical name; return all tensors that hooks see."""
    model, taps = Classifier(), {}
    for name, tensor in named(model, lambda parameter: parameter.data).items():
        tensor.copy_(torch.from_numpy(weights[name]))

    def keep(name, module):
        module.register_forward_hook(
            lambda module, given, result: taps.update({name: result.detach().numpy()})
        )

    for i, block in enumerate(model.blocks):
        keep(f"layers.{i}.attention.output", block.proj)
        keep(f"layers.{i}.norm1", block.ln1)
        keep(f"layers.{i}.feed_forward.inner", block.up)
        keep(f"layers.{i}.feed_forward.outer", block.down)
        keep(f"layers.{i}.norm2", block.ln2)
    logits = model(torch.from_numpy(batch.input_ids))
    loss = F.cross_entropy(logits, torch.from_numpy(batch.labels))
    loss.backward()
    gradients = {
        name: tensor.numpy() for name, tensor in named(model, lambda parameter: parameter.grad).items()
    }
    taps |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    return Run(taps["logits"], taps["loss"], taps, gradients, backend="mine", dtype="float32")


if __name__ == "__main__":
    for profile in sys.argv[1:] or ["generic"]:
        weights = spec.initialize(config, seed=0, profile=profile)
        batch = spec.example_batch(config, batch=7, tokens=13, seed=0, padding="ragged")
        verdict = conformance.judge(config, weights, batch, run(weights, batch))
        print(f"{profile}: {verdict}")
