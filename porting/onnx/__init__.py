"""A checkpoint as an ONNX graph: the model itself, for whoever runs graphs. Written alone.

Every tap can be an output.
"""
