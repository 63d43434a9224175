"""Locates the parts of the installed package in a checkout; everything else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

PARTS = ("spec", "backends", "conformance", "porting", "speed")

setup(
    packages=[
        "concord",
        "concord.commands",
        *(f"concord.{name}" for name in find_namespace_packages(include=[f"{part}*" for part in PARTS])),
    ],
    package_dir={"concord": "concord", **{f"concord.{part}": part for part in PARTS}},
)
