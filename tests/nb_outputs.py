"""Run the unflagged cells of notebooks in a real kernel and store their outputs; flagged cells keep what they have.

    .venv/bin/python tests/nb_outputs.py nbs/05_blocks.ipynb ...
"""
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SKIP = re.compile(r"^#\s*\|\s*(slow|cuda|multigpu|eval:\s*false)\b")
ROOT = Path(__file__).resolve().parents[1]
LOCAL = [(re.compile(r" at 0x[0-9a-f]+"), ""), (re.compile(re.escape(str(ROOT)) + "/"), ""), (re.compile(r"/tmp/tmp\w+"), "/tmp/run")]


def runs(cell) -> bool:
    "Does this cell run in the quick suite?"
    return cell.cell_type == "code" and not any(SKIP.match(line) for line in cell.source.splitlines()[:3])


def plain(text: str) -> str:
    "Text without memory addresses and names of this machine's folders."
    for pattern, new in LOCAL:
        text = pattern.sub(new, text)
    return text


def tidy(outputs: list) -> list:
    "Outputs without execution counts, local names and progress bars."
    kept = []
    for out in outputs:
        out.pop("execution_count", None) if out.output_type != "execute_result" else out.update(execution_count=None)
        if out.output_type == "stream":
            if out.name == "stderr":
                continue
            out.text = plain(out.text)
        elif isinstance(out.get("data", {}).get("text/plain"), str):
            out.data["text/plain"] = plain(out.data["text/plain"])
        kept.append(out)
    return kept


def execute(path, timeout: int = 120) -> bool:
    "Execute one notebook, write its outputs back, and print its time; False when a cell failed."
    path = Path(path)
    nb = nbformat.read(path, 4)
    start = time.time()
    client = NotebookClient(nb, timeout=timeout, kernel_name="python3",
                            resources={"metadata": {"path": str(path.parent)}})
    env = dict(os.environ, PYTHONPATH=str(ROOT), DFLASH_SHOW="lines")
    ok = True
    with client.setup_kernel(env=env):
        for i, cell in enumerate(nb.cells):
            if not runs(cell):
                continue
            try:
                client.execute_cell(cell, i)
            except CellExecutionError as e:
                print(f"{path.name}: cell {i} ({cell.id}) failed\n{e}")
                ok = False
                break
            cell.outputs = tidy(cell.outputs)
            cell.execution_count = None
            cell.metadata.pop("execution", None)
    if ok:
        nbformat.write(nb, path)
    print(f"{path.name}: {'ok' if ok else 'FAILED'} in {time.time() - start:.1f} s")
    return ok


if __name__ == "__main__":
    sys.exit(0 if all([execute(p) for p in sys.argv[1:]]) else 1)
