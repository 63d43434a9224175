"""What a reader would use instead, in the same table.

The ``bert`` family by Hugging Face, and by ONNX Runtime.
"""

PEERS = {"hf": "concord.speed.peers.hf:HuggingFacePeer", "ort": "concord.speed.peers.ort:OnnxRuntimePeer"}
"""Name to class; each takes its place beside the backends, in a process of its own."""

PEER_EXECUTIONS = {"hf": ("eager", "compiled"), "ort": ("compiled",)}
"""The executions that each has."""
