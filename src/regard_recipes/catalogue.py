"""Import every recipe, which registers itself: each module of a folder but `lib` and `demo` without a leading `_`."""

from importlib import import_module
from pkgutil import iter_modules

import regard_recipes
from regard.errors import extra_imports

with extra_imports():
    for folder in iter_modules(regard_recipes.__path__, "regard_recipes."):
        if folder.ispkg and folder.name.rpartition(".")[2] not in ("lib", "demo"):
            package = import_module(folder.name)
            for module in iter_modules(package.__path__, f"{folder.name}."):
                if not module.name.rpartition(".")[2].startswith("_"):
                    import_module(module.name)
