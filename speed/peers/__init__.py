"""Peers of ``bert``: common alternatives, measured in the same table."""

from __future__ import annotations

# Each runs in its own process, like a backend.
PEERS = {
    "hf": "concord.speed.peers.hf:HuggingFacePeer",
    "ort": "concord.speed.peers.ort:OnnxRuntimePeer",
    "openvino": "concord.speed.peers.openvino:OpenVinoPeer",
}

PEER_EXECUTIONS = {"hf": ("eager", "compiled"), "ort": ("compiled",), "openvino": ("compiled",)}
