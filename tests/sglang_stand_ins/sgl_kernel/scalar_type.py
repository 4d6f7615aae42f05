"""Names of quantised types, which modules compare and nothing here uses."""


class ScalarType:
    def __init__(self, name):
        self.name = name


class _Types:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, ScalarType(name))
        return getattr(self, name)


scalar_types = _Types()
