"""The control plane: JSON-RPC over a Unix socket, for `sfctl` and other local tools."""
