"""Import every recipe, which registers itself: each module in a folder of `regard_recipes`, except `lib`, `demo` and
modules whose name starts with `_`."""

from importlib import import_module
from pkgutil import iter_modules

import regard_recipes

LEFT_OUT = ("lib", "demo")
OLD_HELPERS = (
    "_output",
    "_figures",
    "_measure",
)  # of recipes that are not yet on `lib.recipe`; gone with the last of them

for folder in iter_modules(regard_recipes.__path__, "regard_recipes."):
    if folder.ispkg and folder.name.rpartition(".")[2] not in LEFT_OUT:
        package = import_module(folder.name)
        for module in iter_modules(package.__path__, f"{folder.name}."):
            own = module.name.rpartition(".")[2]
            if not own.startswith("_") and not own.endswith(OLD_HELPERS):
                import_module(module.name)
