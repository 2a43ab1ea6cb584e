"""The gateway over the scripted engine, as its own tests have it."""

from tests.gateway.conftest import make_stack, socket_path, stack

__all__ = ["make_stack", "socket_path", "stack"]
