"""triton's interpreter without work that it repeats, which took a third of the time of the tests.

At every call of a function in a kernel it patches its language again, for which it looks at every name of
`triton.language`. Here it does so once per launch.
"""

from functools import cache

import triton.language as tl
from triton.runtime import interpreter

#: the modules of the language that are patched for the launch at work
_patched = set()


def install():
    """Patch a module of the language again only after the launch that patched it has ended."""
    patch = interpreter._patch_lang

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            _patched.clear()

    def patch_once(fn):
        modules = _language_seen_by(fn)
        if _patched and modules <= _patched:
            return None  # a call within a launch, which has no use for the scope
        scope = patch(fn)
        _patched.update(modules)
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_once


@cache
def _language_seen_by(fn):
    seen = list(fn.__globals__.values())
    return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in seen))
