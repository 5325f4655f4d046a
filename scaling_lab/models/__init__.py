"""What is computed: parameters and FLOPs, in pure Python. One module per model family, reached by `Model.family`."""
