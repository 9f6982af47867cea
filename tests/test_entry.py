"A Ctrl-C before a command's first line of output, and the table of installed commands."
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_nb.entry as entry

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "settings.ini")
SCRIPTS = dict(x.split("=") for x in SETTINGS["DEFAULT"]["console_scripts"].split())

# Ctrl-C at the moment when the import of `sys.argv[1]` begins
INTERRUPTED = """
import os, signal, sys
class Stop:
    def find_spec(self, name, *_):
        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Stop())
from dflash_nb.entry import {function}
sys.argv[0] = "{name}"
sys.exit({function}())
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_enters_quietly(name):
    module, function = SCRIPTS[name].split(":")
    assert module == "dflash_nb.entry" and callable(getattr(entry, function))
    code = INTERRUPTED.format(function=function, name=name)
    for at in ("dflash_nb.config", "dataclasses" if name == "dflash_status" else "argparse"):
        out = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n" + code, at],
                             cwd=ROOT, capture_output=True, text=True)
        assert (out.returncode, out.stderr) == (1, f"{name}: stopped\n"), out.stderr[-600:]


def test_the_entry_imports_nothing_of_the_package():
    code = "import sys, dflash_nb.entry; print(*[m for m in sys.modules if m.startswith('dflash_nb')])"
    out = subprocess.run([sys.executable, "-c", code],
                         cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.split() == ["dflash_nb", "dflash_nb.entry"]


def test_every_command_has_a_script():
    commands = set(re.findall(r'enter\("(\w+)"', (ROOT / "dflash_nb/entry.py").read_text()))
    assert commands == set(SCRIPTS)
