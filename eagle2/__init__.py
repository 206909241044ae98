"""EAGLE-2: speculative decoding with dynamic draft trees, recorded step by step."""

__version__ = "0.1.0"
