"""The code of an exported folder: `memory` and `layers` as they are, flat, beside the classes for transformers."""

from __future__ import annotations

from pathlib import Path

import miras_megatron.layers
import miras_megatron.memory

CLASSES = Path(__file__).parent / "hf"
MODELING = "modeling_miras.py"

FOUND = """

if TYPE_CHECKING:
    # Never run. transformers copies the files that it finds by imports of this form; it looks over no others,
    # and some of its versions not into the files so found.
"""


def write_code(folder: Path) -> None:
    """Write every module that the exported model needs, and none of ours besides."""
    flat = flat_sources()
    for path in sorted(CLASSES.glob("*_miras.py")):
        assert path.name not in flat, f"two files are called {path.name}"
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(_with_siblings(text, flat) if path.name == MODELING else text, encoding="utf-8")
    for name, text in flat.items():
        (folder / name).write_text(text, encoding="utf-8")


def flat_sources() -> dict[str, str]:
    """File name -> text of every module of memory and layers, as siblings that import each other by one dot."""
    flat: dict[str, str] = {}
    for package in (miras_megatron.memory, miras_megatron.layers):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for path in sorted(folder.glob("*.py")):
            name = f"{folder.name}.py" if path.stem == "__init__" else path.name
            assert name not in flat, f"two files are called {name}"
            text = path.read_text(encoding="utf-8")
            flat[name] = text.replace("from ..memory.", "from .").replace("from ..memory", "from .memory")
    return flat


def _with_siblings(text: str, flat: dict[str, str]) -> str:
    """The modeling file, naming every sibling for transformers to find."""
    lines = [f"    from .{Path(name).stem} import __name__ as _" for name in sorted(flat)]
    return "".join([text, "\n\nfrom typing import TYPE_CHECKING", FOUND, "\n".join(lines), "\n"])
