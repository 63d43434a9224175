"""A checkpoint as an ONNX graph: the model itself, for whoever runs graphs. Written alone; every tap can be an output."""
