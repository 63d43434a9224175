"""What the heads of a model attend to: computed by backends, judged, and shown as a page and as figures."""
