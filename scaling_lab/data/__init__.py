"""Which tokens: sources of rows with random access by step. NumPy only; must not know meshes, devices or frameworks."""

from scaling_lab.data.opening import open_source
from scaling_lab.data.source import IGNORED, Rows, Source

__all__ = ["IGNORED", "Rows", "Source", "open_source"]
