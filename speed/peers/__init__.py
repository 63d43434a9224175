"""What a reader would use instead, in the same table.

The ``bert`` family by Hugging Face, by ONNX Runtime and by OpenVINO.
"""

from __future__ import annotations

PEERS = {
    "hf": "concord.speed.peers.hf:HuggingFacePeer",
    "ort": "concord.speed.peers.ort:OnnxRuntimePeer",
    "openvino": "concord.speed.peers.openvino:OpenVinoPeer",
}
"""Name to class; each takes its place beside the backends, in a process of its own."""

PEER_EXECUTIONS = {"hf": ("eager", "compiled"), "ort": ("compiled",), "openvino": ("compiled",)}
"""The executions that each has."""
