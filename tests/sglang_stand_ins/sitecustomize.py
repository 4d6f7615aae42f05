"""Makes torchvision and torchaudio importable where they are absent; nothing of them works.

SGLang imports both at module level for models that see and hear. Their wheels need the CUDA build of torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

ABSENT = {"torchvision", "torchaudio"}


class _Anything:
    """Whatever a class body or a decorator asks of an absent module while it is defined."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **options):
        is_decorator = len(args) == 1 and not options and callable(args[0])
        return args[0] if is_decorator else _Anything()

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __or__


class _AbsentModule(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that installed packages are found before it."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT or _asked_by_transformers():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def _asked_by_transformers():
    """transformers asks whether they are there, and then for their versions: it must hear that they are not."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("transformers"):
            return True
        frame = frame.f_back
    return False


sys.meta_path.append(_Finder())
