"Write README.md from nbs/index.ipynb: markdown cells as they are, code cells with what they printed."
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]


def text_of(out) -> str:
    "What a cell showed, as text."
    if out.output_type == "stream":
        return out.text
    return out.get("data", {}).get("text/plain", "")


def render(nb) -> str:
    "The notebook as GitHub markdown; cells that start with `#|` stay out."
    parts = ["<!-- made from nbs/index.ipynb by `make readme`: edit there -->"]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](images/", "](nbs/images/"))
        elif cell.source and not re.match(r"#\s*\|\s*(hide|default_exp|export)", cell.source):
            source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))
            parts.append(f"```python\n{source}\n```")
            shown = "\n".join(t.rstrip() for t in map(text_of, cell.outputs) if t)
            if shown:
                parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(render(nbformat.read(ROOT / "nbs/index.ipynb", 4)))
