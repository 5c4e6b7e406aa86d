"""Bytes on sockets and HTTP: connections, limits, TLS, streams. Nothing here knows of models."""
