"""Writes what follows from ligerzoo/models/registry.py: the table of architectures, and the types of exports.

python -m tools.architectures            # rewrites both
python -m tools.architectures --check    # exits with 1 if one of them differs
"""

import re
import sys
from pathlib import Path

from ligerzoo import models
from ligerzoo.errors import ConfigError
from ligerzoo.info import architectures
from ligerzoo.models.registry import MODEL_CLASSES, module_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architectures.md"
EXPORTS = ROOT / "ligerzoo" / "models" / "__init__.pyi"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def without_references(checkpoints: str) -> str:
    """Drops references such as "(Yang et al. 2024)"; `ligerzoo info --architectures` shows them."""
    return re.sub(r" \([^()]*\b(19|20)\d\d\b[^()]*\)", "", checkpoints)


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    rows = [
        f"| `{model.class_name}` | {without_references(model.checkpoints)} | {model.distinctive} |"
        for model in architectures()
    ]
    table = "\n".join(["| class | checkpoints | distinctive |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def exports() -> str:
    """What `ligerzoo.models` exports, for type checkers: classes of models also take a device and a dtype.

    `ligerzoo.models.building.ModelMeta` takes these two at run time; type checkers do not read metaclasses.
    """
    modules = sorted(
        ((module, name) for name, module in models._MODULES.items()), key=lambda pair: (pair[0], pair[1].lower())
    )
    imports, classes = [], []
    model_classes = {(module_of(model_type), name) for model_type, name in MODEL_CLASSES.items()}
    for module, name in modules:
        is_model = (module, name) in model_classes
        imports.append(f"from ligerzoo.models.{module} import {name} as {'_' * is_model}{name}")
        if is_model:
            arguments = f"self, config: {name}Config, *, device: _Device = None, dtype: _Dtype = None"
            classes += ["", f"class {name}(_{name}):", f"    def __init__({arguments}) -> None: ..."]
    types = ["_Device = torch.device | str | None", "_Dtype = torch.dtype | None"]
    return "\n".join(
        ["# Written by python -m tools.architectures.", "", "import torch", "", *imports, "", *types, *classes, ""]
    )


if __name__ == "__main__":
    try:
        updated = {PAGE: with_table(PAGE.read_text(encoding="utf-8")), EXPORTS: exports()}
    except ConfigError as error:
        sys.exit(str(error))
    for path, content in updated.items():
        if "--check" not in sys.argv:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or content != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.relative_to(ROOT)} is out of date. Run python -m tools.architectures")
