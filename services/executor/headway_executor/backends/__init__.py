"""The built-in backends, one module each; ``registry`` imports only the one that is asked for."""
