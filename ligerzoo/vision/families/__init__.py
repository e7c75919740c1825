"""The processor families, one file for each model family, with its classes in `FAMILIES`."""

from importlib import import_module
from pkgutil import iter_modules

from ligerzoo.vision.family import ProcessorFamily

FAMILIES: tuple[type[ProcessorFamily], ...] = tuple(
    family
    for module in sorted(module.name for module in iter_modules(__path__))
    for family in import_module(f"{__name__}.{module}").FAMILIES
)
