"""Here so that pytest puts this folder on the import path: tests share `experiments.py`."""
