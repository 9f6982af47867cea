"Shared marks: `slow` needs --slow, `cuda` needs a GPU."
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the long tests instead of the quick ones")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; run with --slow")
    config.addinivalue_line("markers", "cuda: needs a GPU")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
        elif config.getoption("--slow") != ("slow" in item.keywords) and "cuda" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="a quick test" if config.getoption("--slow") else "slow: run with --slow"))
