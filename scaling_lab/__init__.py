"""A laboratory for sharding experiments: one description, two frameworks, three kinds of evidence."""

__version__ = "0.1.0"
