"""Names that nothing in these tests may call."""


def absent(module):
    """Return a module's `__getattr__`: every name is a function that raises when called."""

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def raising(*args, **options):
            raise NotImplementedError(f"{module}.{name} has no stand-in")

        return raising

    return get
