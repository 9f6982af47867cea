"A real JupyterLab with real kernels and headless Chromium, for tests and screenshots."
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
ARTEFACTS = ROOT / "tests" / "artefacts"
OLDEST = ROOT / ".venv" / "ipykernel-oldest"  # pip install --no-deps --target .venv/ipykernel-oldest ipykernel==6.29.5 nest-asyncio
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage"]


def chromium():
    "Path of a Chromium, or None."
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((path for n in names if n and (path := shutil.which(n))), None)


def missing() -> str:
    "What a browser test lacks here; '' if nothing."
    if not chromium():
        return "no Chromium: install Debian's package chromium, or name one in CHROMIUM"
    for name in ("jupyterlab", "playwright", "ipywidgets"):
        try:
            __import__(name)
        except ImportError:
            return f"{name} is not installed: pip install -c constraints.txt jupyterlab playwright ipywidgets"
    return ""


def kernelspec(folder: Path, name: str, path: list):
    "A kernel of this Python with `path` in front."
    spec = folder / "kernels" / name
    spec.mkdir(parents=True)
    env = dict(PYTHONPATH=os.pathsep.join(map(str, [*path, ROOT])), OMP_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps(dict(argv=argv, display_name=name, language="python", env=env)))


@contextlib.contextmanager
def lab(folder: Path, theme: str = "JupyterLab Light"):
    "Start JupyterLab on a free port with `folder` as its root and its own settings; gives its address."
    home = folder / ".jupyter-test"
    kernelspec(home / "data", "newest", [])
    kernelspec(home / "data", "oldest", [OLDEST])
    (home / "config" / "labconfig").mkdir(parents=True)
    off = {"@jupyterlab/apputils-extension:announcements": True, "@jupyterlab/extensionmanager-extension": True}
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(dict(disabledExtensions=off, exposeAppInBrowser=True)))
    for name, value in {"apputils-extension/themes": dict(theme=theme), "notebook-extension/tracker": dict(windowingMode="none")}.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(value))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, JUPYTER_PATH=str(home / "data"), JUPYTER_CONFIG_DIR=str(home / "config"),
               JUPYTERLAB_SETTINGS_DIR=str(home / "settings"),
               JUPYTER_RUNTIME_DIR=str(home / "runtime"), JUPYTER_ALLOW_INSECURE_WRITES="1")
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
            "--ServerApp.port_retries=0",
            "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={folder}",
            "--LabApp.expose_app_in_browser=True"]
    with open(home / "lab.log", "w") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError("JupyterLab did not start:\n" + (home / "lab.log").read_text()[-2000:])
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api/status", timeout=1).read()
                break
            time.sleep(.1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def browser():
    "A headless Chromium with a fresh profile."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield b
        finally:
            b.close()


class Notebook:
    "One notebook in one page: run cells, read outputs, press what is in them. Cells count from `base`, see `add`."
    def __init__(self, page, address: str, folder: Path, name: str, cells: list, kernel: str):
        self.page, self.address, self.folder, self.name, self.base, self.kernel = page, address, folder, name, 0, kernel
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nb.metadata["kernelspec"] = dict(name=kernel, display_name=kernel, language="python")
        nbformat.write(nb, folder / name)
        self.open()

    def open(self):
        "Open (or reload) the page and wait for the notebook and its kernel."
        self.page.goto(f"{self.address}/lab/workspaces/auto-{self.name.split('.')[0]}/tree/{self.name}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        self.ready()

    def ready(self, seconds: float = 90):
        "Wait for a kernel that answers."
        self.page.wait_for_function("""() => {
            const kernel = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel;
            return kernel && kernel.connectionStatus === 'connected' && ['idle', 'busy'].includes(kernel.status)
        }""", timeout=seconds * 1000)

    def add(self, *cells: str):
        "Append cells; from now on number 1 is the first of them."
        self.base = self.page.evaluate("""cells => {
            const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel, before = model.cells.length;
            cells.forEach(source => model.addCell({ cell_type: 'code', source }));
            return before - 1 }""", list(cells))
        return self

    def prompt(self, i: int) -> str:
        return self.cell(i).locator(".jp-InputPrompt").inner_text()

    def start(self, i: int):
        "Run cell `i`; does not wait."
        self.before = self.prompt(i)
        self.page.evaluate("""async i => { const w = window.jupyterapp.shell.currentWidget; w.content.activeCellIndex = i;
            window.started = performance.now(); window.jupyterapp.commands.execute('notebook:run-cell'); }""", self.base + i)

    def run(self, i: int, seconds: float = 120):
        "Run cell `i` and wait for its end; gives the text that it shows."
        self.start(i)
        self.done(i, seconds)
        return self.text(i)

    def done(self, i: int, seconds: float = 120):
        "Wait until the cell that was started has a new number."
        end = time.monotonic() + seconds
        while not re.fullmatch(r"\[\d+\]:?", now := self.prompt(i).strip()) or now == self.before.strip():
            if time.monotonic() > end:
                raise TimeoutError(f"cell {i} did not end in {seconds} s: {self.text(i)[-2000:]}")
            self.page.wait_for_timeout(50)

    def cell(self, i: int):
        return self.page.locator(".jp-Notebook .jp-Cell").nth(self.base + i)

    def outputs(self, i: int):
        return self.cell(i).locator(".jp-OutputArea-output")

    def text(self, i: int) -> str:
        return "\n".join(self.outputs(i).all_inner_texts())

    def command(self, name: str):
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def save(self) -> dict:
        "Save the notebook; gives the file's content."
        self.page.evaluate("async () => await window.jupyterapp.shell.currentWidget.context.save()")
        return json.loads((self.folder / self.name).read_text())

    def shot(self, name: str, i: int | None = None):
        "Picture of the page, or of what cell `i` shows."
        ARTEFACTS.mkdir(exist_ok=True)
        what = self.page if i is None else self.cell(i).locator(".jp-Cell-outputArea")
        what.screenshot(path=ARTEFACTS / f"{name}.png")
