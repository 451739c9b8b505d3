"""jaxsearch: train language models that learn when and how to search, in JAX."""

__version__ = '0.1.0'
