"""Peers of ``bert``: common alternatives, measured in the same table."""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """A program to compare with, in its own process like a backend."""

    plugin: str
    modes: tuple[str, ...]  # names of modes


PEERS = {
    "hf": Peer(
        "concord.speed.peers.hf:HuggingFacePeer",
        ("library eager", "library compiled", "library:max-autotune compiled"),
    ),
    "ort": Peer("concord.speed.peers.ort:OnnxRuntimePeer", ("library compiled",)),
    "openvino": Peer("concord.speed.peers.openvino:OpenVinoPeer", ("library compiled",)),
}
