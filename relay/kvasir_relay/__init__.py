"""A public circuit-relay-v2 server for Kvasir peers."""
