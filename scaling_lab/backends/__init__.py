"""One folder per framework, the same file names in each; reached by name inside a worker, never imported together."""
