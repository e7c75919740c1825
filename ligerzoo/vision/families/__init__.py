"""The processor families: every `ProcessorFamily` of the modules in this folder."""

from importlib import import_module
from pkgutil import iter_modules

from ligerzoo.vision.family import ProcessorFamily

FAMILIES: tuple[type[ProcessorFamily], ...] = tuple(
    family
    for module in iter_modules(__path__, f"{__name__}.")
    for family in vars(import_module(module.name)).values()
    if getattr(family, "__module__", None) == module.name and hasattr(family, "model_types")
)
