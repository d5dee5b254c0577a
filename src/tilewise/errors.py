"""The one exception of tilewise's own."""


class UnsupportedAttention(NotImplementedError):
    """A combination of arguments that no backend, or not the named one, can serve.

    Raised before any kernel is launched. The message names the argument, what was given, what is allowed and the nearest call that works.
    """
