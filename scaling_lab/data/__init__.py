"""Which tokens: sources of rows with random access by step. NumPy only; must not know meshes, devices or frameworks."""

from scaling_lab.data.opening import open_source
from scaling_lab.data.requests import check_request, no_validation
from scaling_lab.data.source import IGNORED, Rows, Source

__all__ = ["IGNORED", "Rows", "Source", "check_request", "no_validation", "open_source"]
