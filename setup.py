"Build dflash_nb from settings.ini; `data/` travels in the wheel as the package `dflash_nb.assets`."
from configparser import ConfigParser

from setuptools import find_packages, setup

cfg = ConfigParser(delimiters=["="])
cfg.read("settings.ini", encoding="utf-8")
s = cfg["DEFAULT"]

setup(
    name=s["lib_name"],
    version=s["version"],
    description=s["description"],
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    author=s["author"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=f">={s['min_python']}",
    packages=[*find_packages(include=["dflash_nb", "dflash_nb.*"]), "dflash_nb.assets", "dflash_nb.assets.nano"],
    package_dir={"dflash_nb.assets": "data", "dflash_nb.assets.nano": "data/nano"},
    package_data={"dflash_nb.assets": ["*.jsonl"], "dflash_nb.assets.nano": ["*"]},
    install_requires=s["requirements"].split(),
    extras_require={"dev": s["dev_requirements"].split(), "gguf": ["gguf", "accelerate"], "parquet": ["pyarrow"], "hub": ["datasets"],
                    "terminal": ["rich"], "browser": ["jupyterlab", "playwright"], "ray": ["ray"]},
    entry_points={
        "console_scripts": s["console_scripts"].split(),
        "nbdev": [f"{s['lib_name']} = {s['lib_name']}._modidx:d"],
    },
)
