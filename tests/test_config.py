"Config: knobs that move work around leave the hash alone; every knob is checked and travels."
import json

import pytest

from dflash_nb.config import ConfigError, TrainConfig, load_config, save_config


@pytest.mark.parametrize("runner", ["auto", "eager", "compiled", "graph"])
def test_the_runner_is_no_part_of_what_is_trained(runner, tmp_path):
    cfg = TrainConfig(runner=runner)
    assert cfg.runner == runner and cfg.hash() == TrainConfig().hash()
    assert TrainConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg == load_config(save_config(cfg, tmp_path / "c.yaml"))


def test_an_unknown_runner_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="runner='fast'.*auto, eager, compiled, graph"):
        TrainConfig(runner="fast")
