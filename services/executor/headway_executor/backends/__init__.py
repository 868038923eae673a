"""The built-in backends, one module each."""
