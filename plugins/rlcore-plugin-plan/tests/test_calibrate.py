"""A calibration of one device, in this process: what it finds is a profile that explains the runs it was made from."""

from rlcore_plugin_plan import calibrate, profile

from rlcore.cli import main


def test_the_measured_profile_is_kept_and_found_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    settings = ["cluster=in_process", "data.prompt_len=8", "rollout.response_len=4"]
    assert main(["plan", "--calibrate", *settings]) == 0
    assert "wrote" in capsys.readouterr().out
    found, shipped = profile.load("here"), profile.load("cpu")
    assert found.cpu
    assert found.per_machine == 1
    measured = {name for name, source in found.sources.items() if source.startswith("measured by rlcore plan")}
    assert {"flops_fp32", "bandwidth", "forward", "training", "decode_layer_seconds"} <= measured
    assert 0 < found.training <= 1
    assert 0 < found.forward <= 1
    assert 1e8 < found.flops_fp32 < 1e13
    # Links cannot be measured with one device.
    assert (found.link, found.sources["link"]) == (shipped.link, shipped.sources["link"])
    assert main(["plan", "algo=grpo", *settings, "data.batch_size=4"]) == 0
    assert "grpo on 1 here" in capsys.readouterr().out
