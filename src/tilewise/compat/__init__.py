"""The functions that users already call, with their exact signatures, computed by tilewise."""
