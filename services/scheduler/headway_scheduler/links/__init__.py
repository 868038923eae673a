"""The protocols with executors and gateways, and the sockets that carry them."""
