"""What the heads of a model attend to: computed by backends, judged, and shown as a page and as figures."""

from concord.training.attention.maps import Maps, Reading, Side, example, look, of_texts

__all__ = ["Maps", "Reading", "Side", "example", "look", "of_texts"]
