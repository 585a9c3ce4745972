"""sfctl: look into a running superfluidd and steer it. A blocking socket and msgspec, so that it starts fast."""
