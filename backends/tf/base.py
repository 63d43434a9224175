"""What Keras asks of layers and models beyond the other frameworks: weights made by ``build``, names, and models that it can save."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import keras
from keras import layers
from tensorflow import Tensor

from concord.spec.config import EncoderConfig, from_mapping


class Layer(layers.Layer):
    """A layer that knows its sizes: it builds its sublayers, whatever it is built for.

    Without a ``build`` Keras would trace ``call``, taps and all, to find out what there is to build.
    """

    def build(self, input_shape: Any = None) -> None:
        """Make the weights of all sublayers."""
        for layer in self._flatten_layers(include_self=False, recursive=False):
            layer.build()

    def sub(self, name: str) -> dict[str, Any]:
        """Return what a sublayer of that name is constructed with besides: its variables bear the name, and have this layer's dtype."""
        return {"name": name, "dtype": self.dtype_policy}


class Linear(layers.Dense):
    """A dense layer that knows how many inputs it has: (..., in) to (..., out)."""

    def __init__(self, inputs: int, outputs: int, use_bias: bool, **kwargs: Any) -> None:
        super().__init__(outputs, activation=None, use_bias=use_bias, **kwargs)
        self.inputs = inputs

    def build(self, input_shape: Any = None) -> None:
        """Make the weights."""
        super().build((None, self.inputs))


class Model(Layer, keras.Model):
    """A model that is made of a configuration, and takes its inputs in a mapping, as ``fit`` gives them.

    Attributes:
        config: the member of the model family.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keras.saving.register_keras_serializable(package=cls.__module__)(cls)

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config

    def call(self, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Return what ``forward`` makes of the inputs, by name."""
        return self.forward(**inputs, **options)

    def get_config(self) -> dict[str, Any]:
        """Return what the model is constructed from, as JSON data."""
        return {**super().get_config(), "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return a model from what :meth:`get_config` returned."""
        return cls(
            from_mapping(config["config"]),
            **{name: value for name, value in config.items() if name != "config"},
        )
