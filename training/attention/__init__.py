"""What the heads of a model attend to: computed by backends, judged, and shown as a page and as figures."""

from concord.training.attention.maps import BackendMaps, Maps, ReadText, look, of_texts

__all__ = ["BackendMaps", "Maps", "ReadText", "look", "of_texts"]
